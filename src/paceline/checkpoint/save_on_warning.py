"""Saves when a checkpoint is due, and before the machine goes: after a warning to any rank, all save and leave.

A warning comes as SIGTERM or SIGUSR1, from a notice of a cloud that is polled, or from the program. The ranks agree on
a step (`save_cadence`), save its checkpoint, and leave with exit code 75.
"""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from paceline._core.processes.graceful_shutdown import note_saves_on_sigterm
from paceline._core.processes.process_exit import signal_name
from paceline._core.processes.warning_signals import WARNING_SIGNALS, WarningSignals, act_by_default
from paceline.checkpoint.save_cadence import StepDecisions, save_cadence
from paceline.world.control_collectives import gather_rows, gather_texts, rank_and_size
from paceline.world.live_file import LEFT_EXIT_CODE

__all__ = ["NOTICE_SECONDS", "SaveOnWarning", "SavedRun"]

log = logging.getLogger("paceline.checkpoint")

NOTICE_SECONDS = 5.0
"""Between two looks at a notice."""


class SavedRun(Protocol):
    """The checkpoint of a run, as far as it is needed here; see `paceline.Checkpoint`."""

    step: int

    def save(self, *, wait: bool = False) -> None:
        """Save the present state."""

    def close(self) -> None:
        """Let other runs write."""


class SaveOnWarning:
    """Says when to save, and has all ranks save and leave after a warning to one of them.

    All ranks call its methods at the same places.

    Args:
        every: steps or time between two checkpoints; None: only on request.
        notice: returns whether the machine is about to go; None: nothing says so.
        group: process group of the ranks; None: all.
    """

    def __init__(
        self, every: int | str | None, notice: Callable[[], bool] | None, group: dist.ProcessGroup | None
    ) -> None:
        self._decisions = StepDecisions(save_cadence(every), self._exchange)
        self._listener = WarningListener(notice)
        self._group, self._alone = group, rank_and_size(group)[1] == 1
        self._decided_at = 0  # step

    @property
    def saves(self) -> bool:
        """Whether checkpoints are due without request."""
        return self._decisions.saves

    def listen(self) -> None:
        """Listen for warnings from now on."""
        self._listener.listen()

    def due(self, run: SavedRun) -> bool:
        """Return whether a checkpoint is due after the latest step; after a warning, save and leave."""
        self._listener.listen()
        if run.step == self._decided_at:
            return False
        self._decided_at = run.step
        decision = self._decisions.after(run.step, warned=self._warned, alone=self._alone)
        if decision.leave:
            self._save_and_leave(run)
        return decision.save

    def leave_if_warned(self, run: SavedRun) -> None:
        """Save and leave after a warning, without a step since `due`."""
        if self._decisions.agree(warned=self._warned, alone=self._alone):
            self._save_and_leave(run)

    def request(self) -> None:
        """Warn this rank, in any thread."""
        self._listener.request("a request of the program")

    def saved(self) -> None:
        """Note that a checkpoint was begun."""
        self._decisions.saved()

    def loaded(self, step: int) -> None:
        """Note that the state of a step was loaded."""
        self._decided_at = step

    def rejoin(self) -> None:
        """Continue on the ranks of another world."""
        self._alone, self._decided_at = rank_and_size(self._group)[1] == 1, -1
        self._decisions.rejoin()

    def close(self) -> None:
        """Stop listening for warnings."""
        self._listener.close()

    @property
    def _warned(self) -> bool:
        return bool(self._listener.reason)

    def _exchange(self, row: list[float]) -> list[list[float]]:
        return [each.tolist() for each in gather_rows(torch.tensor(row, dtype=torch.float64), self._group)]

    def _save_and_leave(self, run: SavedRun) -> NoReturn:
        """Save what was trained since the latest checkpoint, and leave."""
        self._listener.leave()
        reasons = gather_texts(self._listener.reason, self._group)
        self._listener.request("another rank")  # for one more try, should this one fail with a rank
        if run.step > 0:
            run.save(wait=True)
        run.close()
        if rank_and_size(self._group)[0] == 0:
            warned = ", ".join(f"rank {rank} was warned by {why}" for rank, why in enumerate(reasons) if why)
            saved = f"after step {run.step}, which is saved" if run.step else "before the first step"
            log.warning("%s: all ranks leave %s", warned, saved)
        raise SystemExit(LEFT_EXIT_CODE)


class WarningListener:
    """Listens for warnings to this rank, for one checkpoint.

    Signals are taken only where they had their default action, so handlers of the program stay.

    Args:
        notice: returns whether the machine is about to go; may block, and is called in a thread. None: there is none.

    Attributes:
        reason: what warned this rank; empty: nothing did.
    """

    def __init__(self, notice: Callable[[], bool] | None = None) -> None:
        self.reason = ""
        self._notice = notice
        self._listens, self._closed = False, threading.Event()

    def listen(self) -> None:
        """Listen from the first call on until `close`."""
        if self._listens or self._closed.is_set():
            return
        self._listens = True
        _listeners.add(self)
        installed = _signals.install()
        if signal.SIGTERM in installed:
            note_saves_on_sigterm()
        if _signals.taken:
            self.request("a signal before")
        for number in WARNING_SIGNALS:
            if number not in installed:
                log.debug("%s keeps its handler; it may call request_leave()", signal_name(number))
        if self._notice is not None:
            poll = threading.Thread(
                target=_poll_notice,
                args=(weakref.ref(self), self._notice, self._closed),
                name="paceline notice",
                daemon=True,
            )
            poll.start()

    def request(self, reason: str) -> None:
        """Take a warning, in any thread; the first one's reason stays."""
        self.reason = self.reason or reason

    def leave(self) -> None:
        """Take the first signal, however late, for the warning by which this process ends anyway."""
        if self._listens:
            _signals.note_warning()
            _signals.ignore_at_exit()

    def close(self) -> None:
        """Stop listening; the handlers before are restored, unless a signal has come, which may come twice."""
        self._closed.set()
        _listeners.discard(self)
        if self._listens and not _listeners and not _signals.taken:
            _signals.restore()
        self._listens = False


_listeners: weakref.WeakSet[WarningListener] = weakref.WeakSet()


def _warn_listeners(number: int) -> None:
    listeners = list(_listeners)
    if not listeners:
        act_by_default(number)
    for listener in listeners:
        listener.request(signal_name(number))


_signals = WarningSignals(_warn_listeners)
"""Of all checkpoints of this process."""


def _poll_notice(
    reference: weakref.ref[WarningListener], notice: Callable[[], bool], closed: threading.Event
) -> None:
    """Look at a notice until it is there; one that raises is logged once, and looked at again."""
    failed = False
    while not closed.is_set():
        try:
            warned = bool(notice())
        except Exception as error:  # noqa: BLE001 — it must not end the training
            warned = False
            if not failed:
                log.warning("notice() raised %s: %s; it is called again", type(error).__name__, error)
            failed = True
        listener = reference()
        if listener is None:
            return
        if warned:
            listener.request("its notice")
            return
        del listener
        closed.wait(NOTICE_SECONDS)
