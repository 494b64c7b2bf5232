"""Runs the simulations of ``paceline simulate async`` with a progress bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.parallel.compression.compression_config import Compression
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.simulate.simulate_async_request import POINTS, AsyncRequest
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.simulate.async_results import AsyncRow, with_times_to_target
from paceline.tools.simulate.async_sweep import sweep_schedules
from paceline.tools.simulate.learning_tasks import GPTTask, LearningTask, LinearTask

__all__ = ["simulate_rows"]

_GPT = GptSize("tiny two", 64, 256, 2, 4, vocabulary=256, context=64)
_LINEAR = {"width": 64, "steepness": 100.0, "noise": 0.5}


def simulate_rows(request: AsyncRequest) -> list[AsyncRow]:
    """Simulate all rows, DDP first, with a progress bar on standard error.

    Raises:
        UsageError: the model can't be split into so many fragments; nothing was computed.
    """
    task = _task(request)
    module = task.learner(0, len(request.plan.machines)).module
    for fragments in {each.fragments for each in request.schedules}:
        ParameterLayout.of(module, fragments, Compression.of(request.plan.compression))
    rows: list[AsyncRow] = []
    total = POINTS * (len(request.schedules) + request.with_ddp)
    with _quiet_single_thread(), ProgressBar("simulated", total) as tick:
        progress = _RowProgress(tick)
        for row in sweep_schedules(
            request.plan,
            request.schedules,
            task,
            with_ddp=request.with_ddp,
            fault_share=request.fault_share,
            tick=progress.point,
        ):
            progress.end_row()
            rows.append(row)
    target = request.target
    if target is None and request.with_ddp and not rows[0].diverged:
        target = rows[0].loss
    return with_times_to_target(rows, target)


def _task(request: AsyncRequest) -> LearningTask:
    if request.task == "gpt":
        return GPTTask(_GPT, lr=request.lr or 3e-3, seed=request.seed)
    return LinearTask(lr=request.lr or 0.05, seed=request.seed, **_LINEAR)


@contextmanager
def _quiet_single_thread() -> Iterator[None]:
    """Use one thread, which suits small models, and hide workers' warnings, which the findings summarise."""
    log, threads = logging.getLogger("paceline.async_dp"), torch.get_num_threads()
    level = log.level
    log.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)


class _RowProgress:
    """Advances a progress bar by `POINTS` per row, however many points its curve has."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick, self._shown = tick, 0

    def point(self, _: object) -> None:
        if self._shown < POINTS:
            self._shown += 1
            self._tick()

    def end_row(self) -> None:
        while self._shown < POINTS:
            self.point(None)
        self._shown = 0
