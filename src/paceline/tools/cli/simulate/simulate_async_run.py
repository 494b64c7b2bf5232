"""Carries out what ``paceline simulate async`` is asked for, with a bar on standard error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.parallel.compression.compression_config import Compression
from paceline.tools.bench.progress_bar import TurnBar
from paceline.tools.cli.simulate.simulate_async_request import POINTS, Asked
from paceline.tools.models.gpt_sizes import Size
from paceline.tools.simulate.async_results import AsyncRow, with_times_to_target
from paceline.tools.simulate.async_sweep import sweep_schedules
from paceline.tools.simulate.learning_tasks import GPTTask, LearningTask, LinearTask

__all__ = ["run"]

_GPT = Size("tiny two", 64, 256, 2, 4, vocabulary=256, context=64)


_LINEAR = {"width": 64, "steepness": 100.0, "noise": 0.5}


def run(asked: Asked) -> list[AsyncRow]:
    """Return the rows, DDP's first.

    Raises:
        UsageError: the model can't be cut into so many fragments; nothing was computed.
    """
    task = _task(asked)
    rows = _rows(asked, task)
    target = asked.target
    if target is None and asked.beside and not rows[0].diverged:
        target = rows[0].loss
    return with_times_to_target(rows, target)


def _rows(asked: Asked, task: LearningTask) -> list[AsyncRow]:
    module = task.learner(0, len(asked.plan.machines)).module
    for fragments in {each.fragments for each in asked.cadences}:
        ParameterLayout.of(module, fragments, Compression.of(asked.plan.compression))
    settings = len(asked.cadences) + asked.beside
    rows: list[AsyncRow] = []
    with _calmly(), TurnBar("simulated", POINTS * settings) as tick:
        turns = _Turns(tick)
        for row in sweep_schedules(
            asked.plan,
            asked.cadences,
            task,
            beside=asked.beside,
            fault_share=asked.fault_share,
            tick=turns.point,
        ):
            turns.end()
            rows.append(row)
    return rows


def _task(asked: Asked) -> LearningTask:
    if asked.task == "gpt":
        return GPTTask(_GPT, lr=asked.lr or 3e-3, seed=asked.seed)
    return LinearTask(lr=asked.lr or 0.05, seed=asked.seed, **_LINEAR)


@contextmanager
def _calmly() -> Iterator[None]:
    """Compute with one thread, which suits models so small, and keep warnings of workers off the terminal.

    What they warn of, update by update, the table and the sentences tell.
    """
    log, threads = logging.getLogger("paceline.async_dp"), torch.get_num_threads()
    level = log.level
    log.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)


class _Turns:
    """Has a bar go on by as much for every row, however many points its curve has."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick, self._told = tick, 0

    def point(self, _: object) -> None:
        """Go on by a point."""
        if self._told < POINTS:
            self._told += 1
            self._tick()

    def end(self) -> None:
        """Go on to the end of the row."""
        while self._told < POINTS:
            self.point(None)
        self._told = 0
