"""Faults on purpose: a rank that raises, dies, stops, stalls or is slow, a parameter that flips, a disk that is full.

They are armed by calling them in a program, before its loop, or by the environment variable ``PACELINE_FAULTS``, so
that any training on Paceline can be put through a fire drill:

    PACELINE_FAULTS="fail_at(rank=1, step=20, how='kill'); slow(rank=0, seconds=0.1)" paceline train

Steps are those of the engine: rounds of synchronisation, counted from 0 (see `whereabouts`). Ranks are those of the
world. A fault with ``restart=0`` happens in the first life of a job only, not after it was started again. While nothing
is armed, all this costs one look at `armed` a step.
"""

from __future__ import annotations

import ast
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.testing import fault_effects

__all__ = [
    "Fault",
    "arm",
    "arm_from_environment",
    "armed",
    "before_write",
    "begin_step",
    "corrupt",
    "disarm",
    "disk_full",
    "end_step",
    "fail_at",
    "slow",
    "stall_at",
]


@dataclass(eq=False)
class Fault:
    """Something that will go wrong.

    Attributes:
        told: the call that armed it, for messages.
        when: ``"begin"`` or ``"end"`` of a step, or ``"write"``.
        rank: of the world; None: on all.
        step: in which it happens, once; None: in all.
        restart: how often the job has been started again where it happens; None: always.
        act: does it; is handed the named parameters at the end of a step, the bytes of a write, else None.
    """

    told: str
    when: str
    rank: int | None
    step: int | None
    restart: int | None
    act: Callable[[Any], object]

    def happens(self, when: str, step: int | None) -> bool:
        """Return whether this is the time and the place."""
        return (
            self.when == when
            and self.step in (None, step)
            and self.rank in (None, _rank())
            and self.restart in (None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))
        )


armed: list[Fault] = []
"""What may still happen in this process."""

_read = ""  # the environment's faults, once they are armed


# ------------------------------------------------------------------ arming


def fail_at(rank: int, step: int, how: str = "raise", *, restart: int | None = None) -> None:
    """Have a rank fail at the beginning of a step.

    Args:
        rank, step: who and when.
        how: ``"raise"`` a RuntimeError, ``"exit"`` at once with code 3, ``"kill"`` itself by SIGKILL, or run out of
            ``"memory"``: allocate under a limit until a MemoryError comes.
        restart: only where the job was started again so often; 0: only in its first life; None: always.

    Raises:
        UsageError: a value that makes no sense.

    Example:
        >>> fail_at(rank=1, step=20, how="kill", restart=0)
        >>> disarm()
    """
    told = f"fail_at(rank={rank!r}, step={step!r}, how={how!r})"
    if how not in fault_effects.FAILURES:
        raise unknown("way to fail", how, fault_effects.FAILURES)
    _check(told, rank=rank, step=step)
    _arm(Fault(told, "begin", rank, step, restart, lambda _: fault_effects.FAILURES[how](told)))


def stall_at(
    rank: int, step: int, seconds: float | None = None, how: str = "sleep", *, restart: int | None = None
) -> None:
    """Have a rank stand still at the beginning of a step.

    Args:
        rank, step: who and when.
        seconds: for how long; None: for ever.
        how: ``"sleep"``, ``"stop"`` the whole process (SIGSTOP), or sleep holding Python's lock (``"gil"``), so that no
            other thread of the process runs either.
        restart: as for `fail_at`.

    Raises:
        UsageError: a value that makes no sense.

    Example:
        >>> stall_at(rank=0, step=3, seconds=2.5)
        >>> disarm()
    """
    told = f"stall_at(rank={rank!r}, step={step!r}, seconds={seconds!r}, how={how!r})"
    if how not in fault_effects.STALLS:
        raise unknown("way to stall", how, fault_effects.STALLS)
    _check(told, rank=rank, step=step, seconds=seconds)
    _arm(Fault(told, "begin", rank, step, restart, lambda _: fault_effects.STALLS[how](seconds)))


def slow(
    rank: int, seconds: float | None = None, factor: float | None = None, *, restart: int | None = None
) -> None:
    """Have a rank take longer for every step.

    Args:
        rank: who.
        seconds: more for each step.
        factor: how often its own time for a step (without waiting for others); 1.5 is half as long again.
        restart: as for `fail_at`.

    Raises:
        UsageError: a value that makes no sense, or not one of `seconds` and `factor`.

    Example:
        >>> slow(rank=1, factor=1.3)
        >>> disarm()
    """
    told = f"slow(rank={rank!r}, seconds={seconds!r}, factor={factor!r})"
    _check(told, rank=rank, seconds=seconds, factor=factor)
    if (seconds is None) == (factor is None):
        raise UsageError(told, remedy="give either seconds (more for each step) or factor")
    if factor is not None and factor < 1:
        raise UsageError(told, remedy="give a factor of 1 or more")
    _arm(Fault(told, "begin", rank, None, restart, fault_effects.StepDelay(seconds, factor).press))


def corrupt(rank: int, step: int, parameter: str | int = 0, *, restart: int | None = None) -> None:
    """Flip one bit of a parameter after a step: the sign of its largest element.

    Args:
        rank, step: who, and after which step's update.
        parameter: its name, or its number in registration order.
        restart: as for `fail_at`.

    Raises:
        UsageError: a value that makes no sense; when the step has come, also a parameter that is not the model's.

    Example:
        >>> corrupt(rank=2, step=100, parameter="head.weight")
        >>> disarm()
    """
    told = f"corrupt(rank={rank!r}, step={step!r}, parameter={parameter!r})"
    _check(told, rank=rank, step=step)
    if not isinstance(parameter, str | int) or isinstance(parameter, bool):
        raise UsageError(told, remedy="name a parameter, or give its number")
    _arm(
        Fault(told, "end", rank, step, restart, lambda named: fault_effects.flip_sign(named, parameter, told))
    )


def disk_full(after_nbytes: int, *, rank: int | None = None, restart: int | None = None) -> None:
    """Have Paceline's own checkpoint writes fail for want of room once so many bytes were written.

    Args:
        after_nbytes: bytes that still fit.
        rank: on which rank; None: on each of them.
        restart: as for `fail_at`.

    Raises:
        UsageError: a value that makes no sense.

    Example:
        >>> disk_full(after_nbytes=1_000_000)
        >>> disarm()
    """
    told = f"disk_full(after_nbytes={after_nbytes!r})"
    _check(told, rank=rank, after_nbytes=after_nbytes)
    _arm(Fault(told, "write", rank, None, restart, fault_effects.LimitedDisk(after_nbytes).take))


def disarm() -> None:
    """Call off everything that may still happen; the environment's faults too, until it is read again."""
    global _read
    armed.clear()
    _read = ""


def arm(text: str) -> None:
    """Arm the faults that `text` names, in calls separated by semicolons or line ends.

    Raises:
        UsageError: it is anything but calls of this module's faults with plain values; nothing is armed then.

    Example:
        >>> arm("fail_at(rank=1, step=20); slow(rank=0, seconds=0.1)")
        >>> [fault.rank for fault in armed]
        [1, 0]
        >>> disarm()
    """
    before = list(armed)
    try:
        for name, arguments, options in _calls(text):
            try:
                _FAULTS[name](*arguments, **options)
            except TypeError as error:
                raise UsageError(f"{name}: {error}", remedy=_HOW) from None
    except UsageError:
        armed[:] = before
        raise


def arm_from_environment() -> None:
    """Arm what ``PACELINE_FAULTS`` names, once; `paceline.init` and `paceline.DataParallel` call this.

    Raises:
        UsageError: the variable can't be read.
    """
    global _read
    text = os.environ.get("PACELINE_FAULTS", "")
    if text == _read:
        return
    try:
        arm(text)
    except UsageError as error:
        raise UsageError(f"PACELINE_FAULTS={text!r}: {error}") from None
    _read = text


# ------------------------------------------------------------------ what the rest of Paceline calls, where any is armed


def begin_step(step: int) -> None:
    """Let happen what is armed for the beginning of `step`; called for each of its forwards."""
    _happen("begin", step, None)


def end_step(step: int, named_parameters: Iterable[tuple[str, Any]]) -> None:
    """Let happen what is armed for the end of `step`, after the update."""
    _happen("end", step, named_parameters)


def before_write(nbytes: int) -> None:
    """Note that so many bytes of a checkpoint are about to be written.

    Raises:
        OSError: there is no room for them (ENOSPC).
    """
    if armed:
        _happen("write", None, nbytes)


def _happen(when: str, step: int | None, what: Any) -> None:
    for fault in list(armed):
        if fault.happens(when, step):
            if fault.step is not None:
                armed.remove(fault)
            fault.act(what)


# ------------------------------------------------------------------ reading and checking

_FAULTS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (fail_at, stall_at, slow, corrupt, disk_full)
}
_HOW = "write calls such as fail_at(rank=1, step=20, how='kill'); slow(rank=0, seconds=0.1)"


def _calls(text: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Return (fault, arguments, keyword arguments) of each call in `text`; nothing in it is carried out."""
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"can't be read: {error}", remedy=_HOW) from None
    found = []
    for statement in statements:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise UsageError(f"{ast.unparse(statement)!r} is no fault", remedy=_HOW)
        if call.func.id not in _FAULTS:
            raise unknown("fault", call.func.id, _FAULTS)
        try:
            arguments = [ast.literal_eval(each) for each in call.args]
            options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        except (ValueError, TypeError):  # TypeError: a dictionary with a list as a key, for example
            raise UsageError(
                f"{ast.unparse(call)!r} has arguments that are no plain values", remedy=_HOW
            ) from None
        if "None" in options:
            raise UsageError(f"{ast.unparse(call)!r} can't be read", remedy=_HOW)
        found.append((call.func.id, arguments, options))
    return found


def _check(told: str, **values: object) -> None:
    """Raise unless ranks, steps and bytes are whole numbers of 0 or more, and seconds and factors numbers."""
    for name, value in values.items():
        if (
            value is None
            and name in ("rank", "seconds", "factor")
            and not (name == "rank" and "step" in values)
        ):
            continue
        whole = name in ("rank", "step", "after_nbytes")
        good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not good or not (0 <= value < math.inf):  # pyright: ignore[reportOperatorIssue]
            kind = "a whole number of 0 or more" if whole else "a number of 0 or more"
            raise UsageError(f"{told}: {name}={value!r}", remedy=f"give {kind}")


def _arm(fault: Fault) -> None:
    if fault.restart is not None and (not isinstance(fault.restart, int) or fault.restart < 0):
        raise UsageError(
            f"{fault.told}: restart={fault.restart!r}",
            remedy="give how often the job has been started again: 0 is its first life",
        )
    armed.append(fault)


def _rank() -> int:
    """Return this process's rank in the world."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK") or 0)
