"""Progress of a training on rank 0: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline._core.format import format_count, format_seconds
from paceline.health.straggler import Straggler

__all__ = ["TrainingProgress"]

PLAIN_LINES = 30
_STRAGGLER_FACTOR = 1.03  # a rank that is slower than the others by less is not shown
_STRAGGLER_WIDTH, _BAR_WIDTH = 104, 132  # least terminal columns for the slowest rank, and for a progress bar


class TrainingProgress:
    """Shows the progress of a training.

    On a terminal a line at the bottom is updated every step: step, loss, held-out loss, tokens per second of all ranks,
    share of the step in which ranks were blocked on communication, the slowest rank if the others wait for it, and time
    left. Where standard output is no terminal, about 30 lines are printed in all.

    Args:
        steps: total number of optimizer steps.
        first_step: steps that were done before.
        shown: False on the ranks that print nothing.
        console: where to print; default standard output.
    """

    def __init__(
        self, steps: int, *, first_step: int = 0, shown: bool = True, console: Console | None = None
    ) -> None:
        self.steps = steps
        self.console = console or Console(quiet=not shown, highlight=False)
        self.live = shown and self.console.is_terminal
        self._print_every = max(1, steps // PLAIN_LINES)
        self._latest: dict[str, Any] = {}
        self._printed_step = first_step
        self._started, self._first_step = time.perf_counter(), first_step
        bar = [BarColumn(bar_width=24)] if self.console.width >= _BAR_WIDTH else []
        numbers = [TextColumn("{task.description}"), TimeRemainingColumn()]
        columns = [TextColumn("step"), MofNCompleteColumn(), *bar, *numbers]
        self._bar = Progress(*columns, console=self.console, disable=not self.live)
        self._task = self._bar.add_task("", total=steps, completed=first_step)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, shown: bool) -> None:
        """Print from now on, or no more, as another rank does."""
        self.console.quiet = not shown

    def log(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def held_out(self, step: int, val_loss: float) -> None:
        """Print a held-out loss, measured after `step` updates."""
        self._latest["val_loss"] = val_loss
        self.log(
            f"step {step:>6}  held-out loss {val_loss:.4f} ({val_loss / math.log(2):.3f} bits per token)"
        )

    def step(self, record: Mapping[str, Any], slowest: Straggler | None = None) -> None:
        """Show a completed step.

        Args:
            record: at least ``"step"``; for a logged step its measurements too.
            slowest: the slowest rank, if known; shown on a terminal that is wide enough.
        """
        self._latest |= record
        self._latest["slowest"] = slowest if self.console.width >= _STRAGGLER_WIDTH else None
        text = format_step(self._latest)
        if self.live:
            self._bar.update(self._task, completed=record["step"], description=text)
        elif "loss" in record and record["step"] - self._printed_step >= self._print_every:
            self._printed_step = record["step"]
            self.log(f"step {record['step']:>6}/{self.steps}  {text}{self._time_left(record['step'])}")

    def _time_left(self, step: int) -> str:
        if step >= self.steps:
            return ""
        seconds_per_step = (time.perf_counter() - self._started) / (step - self._first_step)
        return f"  {format_seconds(max(1, round(seconds_per_step * (self.steps - step))))} left"


def format_step(record: Mapping[str, Any]) -> str:
    """Return the measurements of a step in one line, without those that are missing.

    Example:
        >>> format_step({"loss": 2.5, "val_loss": 2.6, "tokens_per_second": 12_345, "exposed_share": 0.071})
        'loss 2.500 · held-out 2.600 · 12.3 k tokens/s · 7 % exposed'
    """
    parts = []
    if "loss" in record:
        parts.append(f"loss {record['loss']:.3f}")
    if "val_loss" in record:
        parts.append(f"held-out {record['val_loss']:.3f}")
    if "tokens_per_second" in record:
        parts.append(f"{format_count(record['tokens_per_second'])} tokens/s")
    if "exposed_share" in record:
        parts.append(f"{100 * record['exposed_share']:.0f} % exposed")
    slowest = record.get("slowest")
    if slowest is not None and slowest.factor >= _STRAGGLER_FACTOR:
        parts.append(f"slowest rank {slowest.rank}: {slowest.factor:.2f}×")
    return " · ".join(parts)
