"""Request of ``paceline simulate async``: settings parsed from option values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline._core.format import format_seconds
from paceline._core.units import parse_count, parse_list, parse_rate, parse_seconds, parse_share
from paceline.errors import UsageError, unknown
from paceline.tools.cli.simulate.simulate_options import parse_named, parse_positive, parse_share_below_1

if TYPE_CHECKING:
    from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
    from paceline.tools.simulate.async_settings import AsyncPlan
    from paceline.tools.simulate.simulated_machines import ChurnEvent, SimulatedMachine

__all__ = [
    "POINTS",
    "AsyncRequest",
    "check_choices",
    "check_numbers",
    "make_notes",
    "parse_churn",
    "parse_hub_link",
    "parse_latency",
    "parse_length",
    "parse_machines",
    "parse_message_parameters",
    "parse_schedules",
]

POINTS = 100
"""Points of a loss curve."""

_DEFAULT_STEPS = 300
_CHURN_REMEDY = (
    "write a share (5%), or TIME:-WORKER and TIME:+WORKER by commas, such as 30s:-3,60s:+3,90s:-hub,95s:+hub"
)


@dataclass(frozen=True, kw_only=True)
class AsyncRequest:
    """Simulations to run.

    Attributes:
        plan: settings except the schedule.
        schedules: schedules of the rows.
        left_out: invalid combinations of `--every` and `--delay`, with the reason.
        task: name of the task.
        lr: learning rate; None: the task's own.
        seed: seed of the task.
        with_ddp: whether DDP is the first row.
        fault_share: share of messages with faults.
        target: target loss; None: DDP's final loss.
        notes: remarks for the user.
        settings: all options as given, for JSON.
    """

    plan: AsyncPlan
    schedules: Sequence[SyncSchedule]
    left_out: Sequence[str]
    task: str
    lr: float | None
    seed: int
    with_ddp: bool
    fault_share: float
    target: float | None
    notes: Sequence[str]
    settings: Mapping[str, Any]


def check_choices(**choices: tuple[str, Sequence[str]]) -> None:
    """Raise a `UsageError` unless each value is one of its valid ones."""
    for kind, (value, valid) in choices.items():
        if value not in valid:
            raise unknown(kind, value, valid)


def check_numbers(
    *, workers: int, steps: int | None, warmup: int, seed: int, lr: float | None, target: float | None
) -> None:
    """Raise a `UsageError` if one of these options is out of range."""
    for option, value, least in (
        ("--workers", workers, 1),
        ("--steps", steps, 1),
        ("--warmup-steps", warmup, 0),
        ("--seed", seed, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{option} {value}", remedy=f"pass {least} or more")
    for option, number in (("--lr", lr), ("--target", target)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{option} {number}", remedy="pass a number above 0")


def parse_length(text: str | None, steps: int | None, slowest: float) -> tuple[float, float]:
    """Return the limit of virtual time, and the expected virtual time.

    Args:
        text: ``--for``.
        steps: ``--steps``.
        slowest: step time of the slowest machine.

    Raises:
        UsageError: the text is not valid.
    """
    seconds = math.inf
    if text is not None:
        seconds = parse_positive("--for", text, parse_seconds, "10min")
    elif steps is None:
        seconds = _DEFAULT_STEPS * slowest
    return seconds, min(seconds, math.inf if steps is None else steps * slowest)


def parse_hub_link(text: str | None, default: float) -> float:
    """Return ``--hub-link`` in bytes per second; the default if it is not given."""
    return default if text is None else parse_positive("--hub-link", text, parse_rate, "1Gbit/s")


def parse_latency(text: str) -> float:
    """Return ``--latency`` in seconds."""
    return parse_named("--latency", text, parse_seconds)


def parse_message_parameters(text: str | None) -> int | None:
    """Return ``--parameters``, by which messages are sized; None: those of the task's model."""
    return None if text is None else int(parse_positive("--parameters", text, parse_count, "20M"))


def make_notes(
    workers: int, length: float, *, steps: int | None, without_churn: bool, without_bad_lr: bool
) -> list[str]:
    """Return remarks on the simulation.

    Args:
        workers: number of workers.
        length: virtual time.
        steps: steps of each worker, if they alone limit the simulation.
        without_churn: whether DDP is simulated without the churn and faults of other rows.
        without_bad_lr: whether DDP is simulated without the learning rates of ``--bad-lr``.
    """
    notes = [f"{workers} workers for {format_seconds(length)} of virtual time"]
    if steps is not None:
        notes = [f"{workers} workers, {steps} steps each: fast ones end early"]
    if without_churn:
        notes.append("DDP is simulated without churn and faults: either would end it")
    if without_bad_lr:
        notes.append("DDP has one learning rate for all: --bad-lr does not affect it")
    return notes


def parse_machines(
    workers: int, *, speeds: str, spread: str, step: str, jitter: str, link: str, bad_lr: str | None
) -> list[SimulatedMachine]:
    """Return the machines described by the options.

    Raises:
        UsageError: an option is not valid.
    """
    from paceline.tools.simulate.simulated_machines import SimulatedMachine, relative_step_times

    relative = parse_list("--speeds", speeds, float, example="1:1:2:4", separator=":")
    if not all(0 < each < math.inf for each in relative):
        raise UsageError(f"--speeds {speeds}", remedy="pass numbers above 0, such as 1:1:2:4")
    deviation = parse_named("--spread", spread, parse_share)
    if not 0 <= deviation < math.inf:
        raise UsageError(f"--spread {spread}", remedy="pass 0% or more, such as 50%")
    seconds = parse_positive("--step", step, parse_seconds, "100ms")
    rate = parse_positive("--link", link, parse_rate, "200Mbit/s")
    jitter_share = parse_share_below_1("--jitter", jitter, "10%")
    lr_of_worker = _parse_bad_lr(bad_lr, workers)
    return [
        SimulatedMachine(seconds * factor, jitter_share, rate, rate, lr_of_worker.get(worker + 1))
        for worker, factor in enumerate(relative_step_times(workers, relative, deviation))
    ]


def _parse_bad_lr(text: str | None, workers: int) -> dict[int, float]:
    """Return learning rates by number of the worker, from 1."""
    lr_of_worker: dict[int, float] = {}
    for part in [] if text is None else text.split(","):
        worker, _, rate = part.strip().partition(":")
        try:
            number, lr = int(worker), float(rate)
        except ValueError as error:
            raise UsageError(f"--bad-lr {text}", remedy="pass worker:rate, such as 4:10") from error
        if not 1 <= number <= workers:
            raise UsageError(
                f"--bad-lr {text}: there is no worker {number}", remedy=f"workers are 1 to {workers}"
            )
        if not 0 < lr < math.inf:
            raise UsageError(f"--bad-lr {text}: a learning rate of {lr:g}", remedy="pass a number above 0")
        lr_of_worker[number] = lr
    return lr_of_worker


def parse_schedules(every: str, delay: str, fragments: int) -> tuple[list[SyncSchedule], list[str]]:
    """Return the valid combinations of the options, and the invalid ones with the reason.

    Raises:
        UsageError: an option is not valid, or no combination is.
    """
    from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

    found, left_out = [], []
    for k in parse_list("--every", every, int, example="4,10,25"):
        for d in parse_list("--delay", delay, int, example="0,5"):
            try:
                found.append(SyncSchedule(k, fragments, d))
            except UsageError as error:
                if k < 1 or d < 0 or fragments < 1:
                    raise
                reason = "d must be below k" if d >= k else str(error).splitlines()[0]
                left_out.append(f"k {k}, d {d}: {reason}")
    if not found:
        raise UsageError(
            f"--every {every} with --delay {delay} leaves no setting: {left_out[0]}",
            remedy="pass a delay below k, and at most k fragments",
        )
    return list(dict.fromkeys(found)), left_out


def parse_churn(text: str | None, workers: int, seconds: float, seed: int) -> list[ChurnEvent]:
    """Return the churn described by ``--churn``: a share of the workers, or single events.

    Raises:
        UsageError: the text is not valid.
    """
    from paceline.tools.simulate.simulated_machines import ChurnEvent, draw_churn

    if text is None:
        return []
    if ":" not in text:
        return draw_churn(parse_share_below_1("--churn", text, "5%"), workers, seconds, seed)
    events = []
    for part in text.split(","):
        time, _, event = part.strip().partition(":")
        sign, name = event[:1], event[1:]
        if sign not in ("-", "+") or not (name == "hub" or name.isdecimal()):
            raise UsageError(f"--churn {text}: {part.strip()!r} is no event", remedy=_CHURN_REMEDY)
        if name != "hub" and not 1 <= int(name) <= workers:
            raise UsageError(
                f"--churn {text}: there is no worker {name}", remedy=f"workers are 1 to {workers}"
            )
        worker = -1 if name == "hub" else int(name) - 1
        events.append(ChurnEvent(parse_named("--churn", time, parse_seconds), worker, sign == "+"))
    return events
