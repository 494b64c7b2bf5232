"""`RankTimeline`: records what this rank does in each step, on a clock that all ranks share."""

from __future__ import annotations

import itertools
import math
import os
import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch

from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.profiling import trace_file
from paceline.profiling.clock_sync import compare_clocks, is_due
from paceline.profiling.step_recorder import StepRecorder
from paceline.world.accelerator import used_accelerator
from paceline.world.group_devices import group_device
from paceline.world.live_file import JOINER_VARIABLE

__all__ = ["RankTimeline", "RecordedModel"]


@runtime_checkable
class RecordedModel(Protocol):
    """A model as it is recorded; `paceline.parallel.data_parallel.DataParallel` implements it."""

    module: torch.nn.Module
    comm: Any
    engine: Any

    @property
    def plan(self) -> Any: ...


class RankTimeline:
    """Writes ``trace/rank<k>.jsonl`` in a folder during its block; all ranks create one at the same point.

    Every step is one line (`paceline.profiling.step_recorder`). After steps 1, 2, 4, 8 … and then after every 1024th
    the ranks compare their clocks and write the memory that they use.

    Where ranks are renumbered as others die, a process keeps its file, and its lines have its new rank. A process that
    joins the running world begins ``trace/rank<k>.1.jsonl`` (or ``.2``, …) once it is rank k.

    Args:
        folder: of the run.
        model: the model whose steps are recorded.

    Raises:
        UsageError: the folder can't be written, or this process records a timeline already.
    """

    def __init__(self, folder: str | os.PathLike[str], model: RecordedModel) -> None:
        if step_state.recorder is not None:
            raise UsageError(
                "a second timeline in one process",
                remedy="end the first one before; with several models record the one that is trained in every step",
            )
        self._engine, self._group = model.engine, model.comm.group
        self._device = group_device(self._group)
        self.rank = model.comm.rank
        self._folder = Path(folder, "trace")
        self._waits_outside = bool(os.environ.get(JOINER_VARIABLE))

    @property
    def waited_seconds(self) -> float:
        """Seconds in which this rank only waited for others, since recording began; NaN where that is not seen."""
        recorder = step_state.recorder
        if step_state.sees_waiting and isinstance(recorder, StepRecorder):
            return recorder.waited_seconds
        return math.nan

    def __enter__(self) -> Self:
        if not self._waits_outside:
            trace_file.open(self._folder / f"rank{self.rank}.jsonl", self.rank, append=True)
            self._record(step=self._engine.step)
        return self

    def rejoin(self, model: RecordedModel) -> None:
        """Continue with a model that continues on other ranks; all of them call this."""
        self._engine, self._group, self.rank = model.engine, model.comm.group, model.comm.rank
        if self._waits_outside:
            self._waits_outside = False
            names = (self._folder / f"rank{self.rank}.{number}.jsonl" for number in itertools.count(1))
            trace_file.open(next(name for name in names if not name.exists()), self.rank)
        trace_file.renumber(self.rank)
        self._record(step=self._engine.step, ranks=model.comm.size)

    def _record(self, **fields: int) -> None:
        """Begin to record the steps of the engine, on the clock of its rank 0."""
        trace_file.mark("session", **fields)
        self._compare()
        step_state.recorder = StepRecorder(self._engine)
        self._engine.on_round_end = self._after_round

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None
    ) -> None:
        recorder, step_state.recorder = step_state.recorder, None
        self._engine.on_round_end = None
        if recorder is not None:
            recorder.flush()
        if error is None:
            self._compare()
        _write_memory()
        trace_file.close()

    def _after_round(self, step: int) -> None:
        """Compare clocks if it is due; all ranks are here at the same step."""
        if is_due(step):
            with step_state.running_task("clock"):
                self._compare()
            _write_memory()

    def _compare(self) -> None:
        offset = compare_clocks(self._group, self._device)
        trace_file.mark("clock", offset=offset.seconds, error=offset.error)


def _write_memory() -> None:
    """Write this process's peak memory: resident, and allocated on its accelerator."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks: dict[str, object] = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    kind = used_accelerator()
    peak = None if kind is None else getattr(torch.get_device_module(kind), "max_memory_allocated", None)
    if peak is not None:
        peaks["allocated"] = peak()
    trace_file.mark("memory", **peaks)
