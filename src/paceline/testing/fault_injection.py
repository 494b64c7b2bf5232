"""Fault injection: ranks that raise, die, stop, stall or are slow, a flipped parameter bit, a full disk.

Faults are armed by calls in a program, before its training loop, or by the environment variable ``PACELINE_FAULTS``,
which works with any training on Paceline:

    PACELINE_FAULTS="fail_at(rank=1, step=20, how='kill'); slow(rank=0, seconds=0.1)" paceline train

Steps are those of the engine: rounds of synchronisation, counted from 0 (see `paceline._core.step_state`). Ranks are
global. A fault with ``restart=0`` happens only before the first restart of a job. While nothing is armed, a step costs
one test of `armed`.
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


@dataclass(eq=False, kw_only=True)
class Fault:
    """An armed fault.

    Attributes:
        call: that armed it, for messages.
        when: ``"begin"`` or ``"end"`` of a step, or ``"write"``.
        rank: global rank; None: all.
        step: at which it happens, once; None: at all.
        restart: number of restarts at which it happens; None: any.
        effect: receives the named parameters at the end of a step, the number of bytes of a write, else None.
    """

    call: str
    when: str
    rank: int | None
    step: int | None
    restart: int | None
    effect: Callable[[Any], object]

    def matches(self, when: str, step: int | None) -> bool:
        """Return whether it happens now, on this rank."""
        return (
            self.when == when
            and self.step in (None, step)
            and self.rank in (None, _rank())
            and self.restart in (None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))
        )


armed: list[Fault] = []
"""Faults that may still happen in this process."""

_armed_text = ""  # value of PACELINE_FAULTS that is armed


# ------------------------------------------------------------------ arming


def fail_at(rank: int, step: int, how: str = "raise", *, restart: int | None = None) -> None:
    """Make a rank fail at the beginning of a step.

    Args:
        rank: global rank.
        step: at whose beginning it fails.
        how: ``"raise"`` a RuntimeError, ``"exit"`` at once with code 3, ``"kill"`` itself by SIGKILL, or run out of
            ``"memory"``: allocate under a limit until a MemoryError is raised.
        restart: only after this number of restarts; 0: only before the first one; None: always.

    Raises:
        UsageError: an invalid value.

    Example:
        >>> fail_at(rank=1, step=20, how="kill", restart=0)
        >>> disarm()
    """
    call = f"fail_at(rank={rank!r}, step={step!r}, how={how!r})"
    if how not in fault_effects.FAILURES:
        raise unknown("way to fail", how, fault_effects.FAILURES)
    _check(call, rank=rank, step=step)
    _arm(call, "begin", lambda _: fault_effects.FAILURES[how](call), rank=rank, step=step, restart=restart)


def stall_at(
    rank: int, step: int, seconds: float | None = None, how: str = "sleep", *, restart: int | None = None
) -> None:
    """Make a rank stall at the beginning of a step.

    Args:
        rank: global rank.
        step: at whose beginning it stalls.
        seconds: duration; None: for ever.
        how: ``"sleep"``, ``"stop"`` the whole process (SIGSTOP), or sleep holding the GIL (``"gil"``), so that no other
            thread of the process runs either.
        restart: as for `fail_at`.

    Raises:
        UsageError: an invalid value.

    Example:
        >>> stall_at(rank=0, step=3, seconds=2.5)
        >>> disarm()
    """
    call = f"stall_at(rank={rank!r}, step={step!r}, seconds={seconds!r}, how={how!r})"
    if how not in fault_effects.STALLS:
        raise unknown("way to stall", how, fault_effects.STALLS)
    _check(call, rank=rank, step=step, seconds=seconds)
    _arm(call, "begin", lambda _: fault_effects.STALLS[how](seconds), rank=rank, step=step, restart=restart)


def slow(
    rank: int, seconds: float | None = None, factor: float | None = None, *, restart: int | None = None
) -> None:
    """Make a rank slow in every step.

    Args:
        rank: global rank.
        seconds: added to each step.
        factor: multiplies the rank's own time per step (without waiting for others); 1.5 is 50 % slower.
        restart: as for `fail_at`.

    Raises:
        UsageError: an invalid value, or not exactly one of `seconds` and `factor`.

    Example:
        >>> slow(rank=1, factor=1.3)
        >>> disarm()
    """
    call = f"slow(rank={rank!r}, seconds={seconds!r}, factor={factor!r})"
    _check(call, rank=rank, seconds=seconds, factor=factor)
    if (seconds is None) == (factor is None):
        raise UsageError(call, remedy="give either seconds (added to each step) or factor")
    if factor is not None and factor < 1:
        raise UsageError(call, remedy="give a factor of 1 or more")
    _arm(call, "begin", fault_effects.StepDelay(seconds, factor).apply, rank=rank, restart=restart)


def corrupt(rank: int, step: int, parameter: str | int = 0, *, restart: int | None = None) -> None:
    """Flip one bit of a parameter after a step: the sign of its largest element.

    Args:
        rank: global rank.
        step: after whose update it flips.
        parameter: its name, or its number in registration order.
        restart: as for `fail_at`.

    Raises:
        UsageError: an invalid value; at the step itself also if the model has no such parameter.

    Example:
        >>> corrupt(rank=2, step=100, parameter="head.weight")
        >>> disarm()
    """
    call = f"corrupt(rank={rank!r}, step={step!r}, parameter={parameter!r})"
    _check(call, rank=rank, step=step)
    if not isinstance(parameter, str | int) or isinstance(parameter, bool):
        raise UsageError(call, remedy="name a parameter, or give its number")

    def flip(named: Iterable[tuple[str, Any]]) -> None:
        fault_effects.flip_sign(named, parameter, call)

    _arm(call, "end", flip, rank=rank, step=step, restart=restart)


def disk_full(after_nbytes: int, *, rank: int | None = None, restart: int | None = None) -> None:
    """Make Paceline's own checkpoint writes fail with ENOSPC after a number of bytes.

    Args:
        after_nbytes: bytes that still fit.
        rank: global rank; None: all.
        restart: as for `fail_at`.

    Raises:
        UsageError: an invalid value.

    Example:
        >>> disk_full(after_nbytes=1_000_000)
        >>> disarm()
    """
    call = f"disk_full(after_nbytes={after_nbytes!r})"
    _check(call, rank=rank, after_nbytes=after_nbytes)
    _arm(call, "write", fault_effects.LimitedDisk(after_nbytes).write, rank=rank, restart=restart)


def disarm() -> None:
    """Disarm all faults; those of the environment until it is read again."""
    global _armed_text
    armed.clear()
    _armed_text = ""


def arm(text: str) -> None:
    """Arm the faults in `text`: calls separated by semicolons or line breaks.

    Raises:
        UsageError: it contains anything but calls of this module's faults with plain values; nothing is armed then.

    Example:
        >>> arm("fail_at(rank=1, step=20); slow(rank=0, seconds=0.1)")
        >>> [fault.rank for fault in armed]
        [1, 0]
        >>> disarm()
    """
    before = list(armed)
    try:
        for name, arguments, options in _parse_calls(text):
            try:
                _FAULTS[name](*arguments, **options)
            except TypeError as error:
                raise UsageError(f"{name}: {error}", remedy=_HOW) from None
    except UsageError:
        armed[:] = before
        raise


def arm_from_environment() -> None:
    """Arm the faults in ``PACELINE_FAULTS``, once; called by `paceline.init` and `paceline.DataParallel`.

    Raises:
        UsageError: the variable is invalid.
    """
    global _armed_text
    text = os.environ.get("PACELINE_FAULTS", "")
    if text == _armed_text:
        return
    try:
        arm(text)
    except UsageError as error:
        raise UsageError(f"PACELINE_FAULTS={text!r}: {error}") from None
    _armed_text = text


# ------------------------------------------------------------------ called by the rest of Paceline


def begin_step(step: int) -> None:
    """Trigger the faults armed for the beginning of `step`; called for each of its forward passes."""
    _trigger("begin", step, None)


def end_step(step: int, named_parameters: Iterable[tuple[str, Any]]) -> None:
    """Trigger the faults armed for the end of `step`, after the update."""
    _trigger("end", step, named_parameters)


def before_write(nbytes: int) -> None:
    """Trigger the faults armed for a write of `nbytes` of a checkpoint.

    Raises:
        OSError: no space is left for them (ENOSPC).
    """
    if armed:
        _trigger("write", None, nbytes)


def _trigger(when: str, step: int | None, argument: Any) -> None:
    for fault in list(armed):
        if fault.matches(when, step):
            if fault.step is not None:
                armed.remove(fault)
            fault.effect(argument)


# ------------------------------------------------------------------ parsing and checks

_FAULTS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (fail_at, stall_at, slow, corrupt, disk_full)
}
_HOW = "write calls such as fail_at(rank=1, step=20, how='kill'); slow(rank=0, seconds=0.1)"


def _parse_calls(text: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Return (fault, arguments, keyword arguments) of each call in `text`; nothing in it is executed."""
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"invalid syntax: {error}", remedy=_HOW) from None
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
            raise UsageError(f"{ast.unparse(call)!r} uses **, which is not supported", remedy=_HOW)
        found.append((call.func.id, arguments, options))
    return found


def _check(call: str, **values: object) -> None:
    """Raise UsageError unless ranks, steps and bytes are integers ≥ 0, and seconds and factors numbers ≥ 0."""
    optional = ("seconds", "factor") if "step" in values else ("rank", "seconds", "factor")
    for name, value in values.items():
        if value is None and name in optional:
            continue
        whole = name in ("rank", "step", "after_nbytes")
        good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not good or not (0 <= value < math.inf):  # pyright: ignore[reportOperatorIssue]
            kind = "an integer of 0 or more" if whole else "a number of 0 or more"
            raise UsageError(f"{call}: {name}={value!r}", remedy=f"give {kind}")


def _arm(
    call: str,
    when: str,
    effect: Callable[[Any], object],
    *,
    rank: int | None,
    step: int | None = None,
    restart: int | None,
) -> None:
    if restart is not None and (not isinstance(restart, int) or restart < 0):
        raise UsageError(
            f"{call}: restart={restart!r}", remedy="give a number of restarts; 0: before the first one"
        )
    armed.append(Fault(call=call, when=when, rank=rank, step=step, restart=restart, effect=effect))


def _rank() -> int:
    """Return this process's global rank."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK") or 0)
