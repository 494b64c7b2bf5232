"""Steps of a collective: what a process group's call returns to the queue that runs it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import torch

__all__ = ["Job", "Stage", "Steps", "run_steps"]


class Stage(enum.IntEnum):
    """How far a call is on this rank: POSTED, the next one may begin; SENT, the others wait for nothing more of it."""

    BEGUN = 0
    POSTED = 1
    SENT = 2


Steps = Iterator[Stage]
"""A call under way: `next` runs its next step, and returns its stage."""

Job = Callable[[], "Steps | None"]
"""Runs a call, or returns its steps."""


def run_steps(job: Job) -> None:
    """Run a whole call."""
    with torch.inference_mode():  # may write into any tensor; builds no graph
        for _ in job() or ():
            pass
