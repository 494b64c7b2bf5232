"""`RankTimeline`: records what this rank does in each step, on a clock that all ranks share."""

from __future__ import annotations

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
        self._file = Path(folder, "trace", f"rank{self.rank}.jsonl")

    @property
    def waited_seconds(self) -> float:
        """Seconds in which this rank only waited for others, since recording began; NaN where that is not seen."""
        recorder = step_state.recorder
        if step_state.sees_waiting and isinstance(recorder, StepRecorder):
            return recorder.waited_seconds
        return math.nan

    def __enter__(self) -> Self:
        trace_file.open(self._file, self.rank, append=True)
        trace_file.mark("session", step=self._engine.step)
        self._compare()
        step_state.recorder = StepRecorder(self._engine)
        self._engine.on_round_end = self._after_round
        return self

    def rejoin(self, model: RecordedModel) -> None:
        """Continue with a model that continues on other ranks."""
        self._engine, self._group, self.rank = model.engine, model.comm.group, model.comm.rank
        trace_file.mark("world", place=self.rank, ranks=model.comm.size, step=self._engine.step)
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
