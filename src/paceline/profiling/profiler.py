"""`Profiler`: records a training run for `paceline report`."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from paceline._core import __version__
from paceline._core.files import write_json
from paceline._core.format import format_bytes
from paceline.errors import UsageError
from paceline.profiling.metrics_writer import StepMetrics
from paceline.profiling.rank_timeline import RankTimeline, RecordedModel
from paceline.profiling.run_loggers import Logger, LoggerGroup, new_run_id
from paceline.world.accelerator import find_accelerator
from paceline.world.control_collectives import gather_rows, gather_texts, rank_and_size
from paceline.world.environment import host_label
from paceline.world.live_file import JOINER_VARIABLE
from paceline.world.machine_facts import read_machine_facts

__all__ = ["Profiler", "machine_facts", "time_metrics", "versions"]

_OWN = frozenset(
    ("step", "samples", "step_seconds", "samples_per_second", "tokens_per_second")
    + ("exposed_seconds", "waiting_seconds", "restarts")
)


def machine_facts() -> dict[str, object]:
    """Return this machine's facts for ``run.json``; no address, so that the file can be shared."""
    here, kind = read_machine_facts(), find_accelerator()
    return {
        "system": here.system,
        "cpu": here.cpu,
        "usable cores": here.usable_cores,
        "memory": format_bytes(here.memory_nbytes),
        "GPUs": 0 if kind is None else torch.get_device_module(kind).device_count(),
    }


def time_metrics(seconds: torch.Tensor, exposed: torch.Tensor) -> dict[str, float]:
    """Return the metrics of a run that are times, and how often its ranks were restarted.

    Args:
        seconds: per step, of each rank.
        exposed: seconds per step in which each rank only waited for others; NaN where that is not known.

    Example:
        >>> time_metrics(torch.tensor([0.5, 0.4]), torch.tensor([0.125, 0.25]))
        {'step_seconds': 0.5, 'exposed_seconds': 0.25, 'waiting_seconds': 0.125, 'restarts': 0}
    """
    metrics = {"step_seconds": seconds.max().item()}
    longest, shortest = exposed.max().item(), exposed.min().item()
    if math.isfinite(longest):
        metrics |= {"exposed_seconds": longest, "waiting_seconds": longest - shortest}
    return metrics | {"restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)}


def versions() -> dict[str, str]:
    """Return the versions of Paceline, torch and Python for ``run.json``."""
    return {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


class Profiler:
    """Records a training run during its block: timeline, losses, machine and versions. All ranks create one.

    Afterwards ``paceline report FOLDER`` makes a page of it: where the time went, which rank the others waited for, the
    bottleneck and remedies. A folder that holds a record is continued: of steps that are repeated, as after a restart,
    the report shows the last record. With `Elastic`, which changes the ranks, call ``elastic.on_world(record.rejoin)``
    before it begins.

    Args:
        folder: written to; visible to all ranks, or each host has its own part.
        model: the model whose steps are recorded; work of other models in this process is part of its steps.
        every: steps between two lines written by `log`.
        loggers: receive what `log` writes, on rank 0: see `paceline.integrations.loggers`. One that fails or is slow is
            reported, and the training goes on.

    Raises:
        UsageError: `model` is not wrapped, the folder can't be written on some rank, `every` is below 1, a logger is
            none or can't start with its arguments, or this process has another active Profiler.

    Example:
        >>> import tempfile
        >>> model = paceline.DataParallel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder, Profiler(folder, model) as record:
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
        loggers: Sequence[Logger] = (),
    ) -> None:
        if not isinstance(model, RecordedModel):
            raise UsageError(
                f"Profiler of a {type(model).__name__}",
                remedy="give it the model that paceline.DataParallel returned",
            )
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r}", remedy="give 1 to write every step, 10 for each tenth")
        self._loggers = LoggerGroup(loggers)
        self.folder, self._model, self._every = Path(folder).absolute(), model, every
        self._rank, ranks = rank_and_size(model.comm.group)
        if ranks == 1 and os.environ.get(JOINER_VARIABLE):
            self._rank = -1  # in no world yet
        _make_folder(self.folder, model)
        self._nodes = len(set(gather_texts(host_label(os.environ, *rank_and_size()), model.comm.group)))
        self._timeline = RankTimeline(self.folder, model)
        self._metrics = StepMetrics(self.folder)
        self._samples = self._tokens = 0.0
        self._steps, self._since, self._waited = 0, time.perf_counter(), 0.0

    def __enter__(self) -> Self:
        self._start_loggers(self._write_facts() if self._rank == 0 else {})
        self._timeline.__enter__()
        self._since, self._waited = time.perf_counter(), 0.0
        return self

    def _start_loggers(self, facts: Mapping[str, Any]) -> None:
        """Start the loggers on rank 0; if one can't work with its arguments, all ranks raise."""
        error = None
        if self._rank == 0:
            try:
                self._loggers.start({"folder": str(self.folder), **facts})
            except UsageError as refused:
                error = refused
        reason = gather_texts("" if error is None else str(error), self._model.comm.group)[0]
        if reason:
            raise error or UsageError(f"rank 0 can't start a logger: {reason}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._timeline.__exit__(kind, error, trace)
        finally:
            if self._rank == 0:
                self._loggers.finish(failed=kind is not None)

    def rejoin(self, world: object = None) -> None:
        """Continue on the ranks of the model's new process group; all of them call this: pass it to `Elastic.on_world`.

        Args:
            world: what `on_world` passes; not used.

        Raises:
            UsageError: on a new rank 0, a logger can't start with its arguments there.
        """
        before, self._rank = self._rank, rank_and_size(self._model.comm.group)[0]
        self._timeline.rejoin(self._model)
        if self._rank == 0 and before != 0:
            self._loggers.start({"folder": str(self.folder)})
        self._samples = self._tokens = 0.0
        self._steps, self._since, self._waited = 0, time.perf_counter(), self._timeline.waited_seconds

    def log(
        self, *, samples: float = 1.0, tokens: float = 0.0, **numbers: float | torch.Tensor | None
    ) -> None:
        """Record a step's numbers; every rank calls this once a step, after backward.

        Every so many steps their means over all ranks, weighted by `samples`, are written and passed to the loggers.
        With them go, of the steps since the previous line: throughput of all ranks, and seconds per step of the slowest
        rank (``step_seconds``), spent waiting for other ranks by the one that waited longest (``exposed_seconds``), and
        by how much that one waited longer than the one that waited least (``waiting_seconds``): the exposed
        communication, and the part of it that a slow rank causes. The last two are missing where the host can't see
        waiting: on a GPU, and inside FSDP2.

        Args:
            samples: of this rank in this step; 0 if it had none.
            tokens: of this rank in this step, where tokens are counted.
            numbers: such as ``loss``, means over this rank's samples; None if it has none.

        Raises:
            UsageError: a number has a name that this writes itself, is no single number, or is None on a rank that has
                samples; or `samples` is negative.
        """
        _check_numbers(samples, numbers)
        self._samples, self._tokens = self._samples + samples, self._tokens + tokens
        self._steps += 1
        step = self._model.engine.step
        if step % self._every and step != 1:
            return
        known = {name: _number(value) for name, value in numbers.items()}
        now, waited = time.perf_counter(), self._timeline.waited_seconds
        sums = (value * samples if samples else 0.0 for value in known.values())  # 0 × NaN would be NaN
        times = ((now - self._since) / self._steps, (waited - self._waited) / self._steps)
        mine = [*times, samples, self._samples, self._tokens, *sums]
        rows = torch.stack(gather_rows(torch.tensor(mine, dtype=torch.float64), self._model.comm.group))
        if self._rank == 0:
            weight, done, tokens, *totals = rows[:, 2:].sum(0).tolist()
            line: dict[str, Any] = {
                name: total / weight if weight else None for name, total in zip(known, totals, strict=True)
            }
            line |= {"samples": weight, **time_metrics(rows[:, 0], rows[:, 1])}
            for name, count in (("samples", done), ("tokens", tokens)):
                if count or name == "samples":
                    line[f"{name}_per_second"] = count / (line["step_seconds"] * self._steps)
            self._metrics.add(step, line)
            self._loggers.log(line, step)
        self._samples = self._tokens = 0.0
        self._steps, self._since, self._waited = 0, now, waited

    def _write_facts(self) -> dict[str, Any]:
        """Write ``run.json``, keeping its id and what other programs have added to it; return it."""
        path, model = self.folder / "run.json", self._model
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        strategy = "auto" if model.engine.tuner is not None else model.plan.label
        compression = model.plan.compression_config
        program = Path(sys.argv[0]).name if sys.argv[0] else "python"
        known = found if isinstance(found, dict) else {}
        facts = {
            "run_id": known.get("run_id") or new_run_id(),
            "command": shlex.join([program, *sys.argv[1:]]),
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "synchronised": strategy if compression is None else f"{strategy}, {compression.name}",
            "parameters": sum(param.numel() for param in model.module.parameters()),
            "world": {"size": model.comm.size, "nodes": self._nodes, "backend": model.comm.backend},
            "machine": machine_facts(),
            "versions": versions(),
        }
        write_json(path, known | facts, indent=2)
        return known | facts


def _check_numbers(samples: float, numbers: dict[str, Any]) -> None:
    if not _OWN.isdisjoint(numbers):
        taken = ", ".join(sorted(_OWN & numbers.keys()))
        raise UsageError(f"log(): {taken} is written by Profiler itself", remedy="use another name")
    if not 0 <= samples < math.inf:
        raise UsageError(f"log(samples={samples!r})", remedy="pass the number of samples, 0 or more")
    for name, value in numbers.items():
        tensor = isinstance(value, torch.Tensor)
        if value is None or isinstance(value, Real) or (tensor and value.numel() == 1):
            continue
        kind = f"tensor of shape {list(value.shape)}" if tensor else type(value).__name__
        raise UsageError(
            f"log(): {name} is a {kind}, not one number", remedy="pass its mean over this rank's samples"
        )
    if samples and any(value is None for value in numbers.values()):
        raise UsageError(
            f"log(): None with samples={samples!r}", remedy="a rank without numbers passes samples=0"
        )


def _number(value: float | torch.Tensor | None) -> float:
    return 0.0 if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)


def _make_folder(folder: Path, model: RecordedModel) -> None:
    """Create the folder; if a rank can't, all raise.

    Raises:
        UsageError: some rank can't.
    """
    reason = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            reason = "it may not be written"
    except OSError as error:
        reason = str(error.strerror)
    for rank, refused in enumerate(gather_texts(reason, model.comm.group)):
        if refused:
            raise UsageError(
                f"can't record into {str(folder)!r}: {refused}",
                rank=rank,
                remedy="name a folder that you may write to",
            )
