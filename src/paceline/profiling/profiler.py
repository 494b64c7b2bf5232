"""`Profiler`: what a training of one's own leaves for `paceline report`."""

from __future__ import annotations

import json
import math
import os
import time
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.profiling.rank_timeline import RankTimeline, RecordedModel
from paceline.profiling.run_facts import command_line, machine_facts, started_now, versions
from paceline.profiling.step_metrics import StepMetrics
from paceline.world.environment import host_label
from paceline.world.object_collectives import gather_texts, rank_and_size, sum_over_ranks

__all__ = ["Profiler"]

_OWN = frozenset({"step", "samples", "step_seconds", "samples_per_second", "tokens_per_second"})


class Profiler:
    """Records a training while the block runs: its timeline, its numbers, what ran. All ranks make one.

    Afterwards ``paceline report FOLDER`` makes a page of it: where the time went, which rank the others waited for,
    what limits, what to do. A folder that holds a record already is gone on with: of steps that are done again, as
    after a restart, the report shows what was written last.

    Args:
        folder: where to; seen by all ranks, or each host has its own part.
        model: whose steps these are; what other models of this process do is part of them.
        every: of so many steps one is written by `log`.
        tensorboard: write scalars for TensorBoard too; None: where it is installed.

    Raises:
        UsageError: `model` is not wrapped, the folder can't be written on some rank, `every` is below 1, or another
            one is at work in this process.

    Example:
        >>> import tempfile
        >>> model = paceline.DataParallel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder, Profiler(folder, model, tensorboard=False) as record:
        ...     loss = model(torch.ones(4, 2)).mean()
        ...     model.backward(loss, samples=4)
        ...     record.log(loss=loss, samples=4)
        ...     sorted(os.listdir(folder))
        ['run.json', 'steps.jsonl', 'trace']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: RecordedModel,
        *,
        every: int = 10,
        tensorboard: bool | None = None,
    ) -> None:
        if not isinstance(model, RecordedModel):
            raise UsageError(
                f"Record of a {type(model).__name__}",
                remedy="give it the model that paceline.DataParallel returned",
            )
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r}", remedy="give 1 to write every step, 10 for each tenth")
        self.folder, self._model, self._every = Path(folder), model, every
        self._rank = rank_and_size(model.comm.group)[0]
        _make(self.folder, model)
        self._nodes = len(set(gather_texts(host_label(os.environ, *rank_and_size()), model.comm.group)))
        self._timeline = RankTimeline(self.folder, model)
        self._scalars = StepMetrics(self.folder, tensorboard)
        self._samples = self._tokens = 0.0
        self._steps, self._since = 0, time.perf_counter()

    def __enter__(self) -> Self:
        if self._rank == 0:
            self._describe()
        self._timeline.__enter__()
        self._since = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._timeline.__exit__(kind, error, trace)
        finally:
            self._scalars.close()

    def log(
        self, *, samples: float = 1.0, tokens: float = 0.0, **numbers: float | torch.Tensor | None
    ) -> None:
        """Take note of a step's numbers; every rank calls this once a step, after backward.

        Every so many steps their means over all ranks, weighted by `samples`, are written, with the speed since the
        time before.

        Args:
            samples: of this rank in this step; 0 where it had none.
            tokens: the same of tokens, where they are what counts.
            numbers: such as ``loss``, means over this rank's samples; None where it has none.

        Raises:
            UsageError: a number has a name that this writes itself, is no single number, or is None on a rank that has
                samples; or `samples` is negative.
        """
        if not _OWN.isdisjoint(numbers):
            taken = ", ".join(sorted(_OWN & numbers.keys()))
            raise UsageError(f"log(): {taken} is written by Record itself", remedy="use another name")
        if not 0 <= samples < math.inf:
            raise UsageError(f"log(samples={samples!r})", remedy="pass the number of samples, 0 or more")
        for name, value in numbers.items():
            if not (value is None or isinstance(value, Real) or _is_scalar(value)):
                raise UsageError(
                    f"log(): {name} is {_told(value)}, not one number",
                    remedy="pass its mean over this rank's samples",
                )
        if samples and any(value is None for value in numbers.values()):
            raise UsageError(
                f"log(): None with samples={samples!r}", remedy="a rank without numbers passes samples=0"
            )
        self._samples, self._tokens = self._samples + samples, self._tokens + tokens
        self._steps += 1
        step = self._model.engine.step
        if step % self._every and step != 1:
            return
        known = {name: _number(value) for name, value in numbers.items()}
        sums = (value * samples if samples else 0.0 for value in known.values())  # 0 × NaN would be NaN
        mine = [samples, self._samples, self._tokens, *sums]
        row = torch.tensor(mine, dtype=torch.float64)
        weight, done, tokens_done, *totals = sum_over_ranks(row, self._model.comm.group).tolist()
        now = time.perf_counter()
        if self._rank == 0:
            seconds = now - self._since
            line: dict[str, Any] = {
                name: total / weight if weight else None for name, total in zip(known, totals, strict=True)
            }
            line |= {"samples": weight, "step_seconds": seconds / self._steps}
            line["samples_per_second"] = done / seconds
            if tokens_done:
                line["tokens_per_second"] = tokens_done / seconds
            self._scalars.add(step, line)
        self._samples = self._tokens = 0.0
        self._steps, self._since = 0, now

    def _describe(self) -> None:
        """Write ``run.json``."""
        model = self._model
        write_json(
            self.folder / "run.json",
            _known(self.folder / "run.json")
            | {
                "command": command_line(),
                "started": started_now(),
                "synchronised": _how(model),
                "parameters": sum(param.numel() for param in model.module.parameters()),
                "world": {"size": model.comm.size, "nodes": self._nodes, "backend": model.comm.backend},
                "machine": machine_facts(),
                "versions": versions(),
            },
            indent=2,
        )


def _how(model: RecordedModel) -> str:
    """Return how a model is synchronised, in a few words."""
    plan = "auto" if model.engine.tuner is not None else model.plan.words
    squeezed = model.plan.compression_config
    return plan if squeezed is None else f"{plan}, {squeezed.name}"


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _told(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _number(value: float | torch.Tensor | None) -> float:
    return 0.0 if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)


def _make(folder: Path, model: RecordedModel) -> None:
    """Make the folder; where a rank can't, all are told.

    Raises:
        UsageError: some rank can't.
    """
    told = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            told = "it may not be written"
    except OSError as error:
        told = str(error.strerror)
    refused = {rank: why for rank, why in enumerate(gather_texts(told, model.comm.group)) if why}
    if refused:
        rank, why = next(iter(refused.items()))
        raise UsageError(
            f"can't record into {str(folder)!r}: {why}",
            rank=rank,
            remedy="name a folder that you may write to",
        )


def _known(path: Path) -> dict[str, object]:
    """Return what a run before has written; nothing where that can't be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
