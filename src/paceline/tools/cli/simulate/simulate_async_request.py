"""What ``paceline simulate async`` is asked for, read from its options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline._core.format import format_seconds
from paceline._core.units import parse_count, parse_rate, parse_seconds, parse_share
from paceline.errors import UsageError, unknown
from paceline.tools.cli.hub_options import outer_of
from paceline.tools.cli.shared_options import numbers_of

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_rules import HubRules
    from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
    from paceline.tools.simulate.async_settings import AsyncPlan, ChurnEvent, SimulatedMachine

__all__ = ["POINTS", "TASKS", "Asked", "asked_of"]

TASKS = ("linear", "gpt")
POINTS = 100
"""Of a curve."""

_USUAL_STEPS = 300
_COMPRESSIONS = ("int4", "int8", "bf16", "fp16", "none")
_FILES = ("json_file", "out")
_CHURN = (
    "write a share (5%), or TIME:-WORKER and TIME:+WORKER by commas, such as 30s:-3,60s:+3,90s:-hub,95s:+hub"
)


@dataclass(frozen=True)
class Asked:
    """What is simulated.

    Attributes:
        plan: of all but the cadence. cadences: of the rows. left_out: those that make no sense, with the reason.
        task: its name. lr: None: the task's own. seed: of the task.
        beside: whether DDP is the first row. spoilt: share of messages. target: None: what DDP ends with.
        notes: what the user ought to know of it. settings: all options as they were given, for JSON.
    """

    plan: AsyncPlan
    cadences: Sequence[SyncSchedule]
    left_out: Sequence[str]
    task: str
    lr: float | None
    seed: int
    beside: bool
    fault_share: float
    target: float | None
    notes: Sequence[str]
    settings: Mapping[str, Any]


def asked_of(options: Mapping[str, Any]) -> Asked:
    """Return what the options ask for.

    Args:
        options: of the command, by the names of its arguments.

    Raises:
        UsageError: one that makes no sense, or two that don't fit.
    """
    _check_numbers(options)
    machines = _machines(options)
    slowest = max(each.step_seconds for each in machines)
    steps, seconds = options["steps"], math.inf
    if options["for_"] is not None:
        seconds = _positive("--for", options["for_"], parse_seconds, "10min")
    elif steps is None:
        seconds = _USUAL_STEPS * slowest
    about = min(seconds, math.inf if steps is None else steps * slowest)
    cadences, left_out = _cadences(options)
    plan = _plan(options, machines, seconds, about)
    plan.policy.check(True, options["fragments"])
    fault_share = _share("--spoil", options["spoil"], "1%")
    return Asked(
        plan,
        cadences,
        left_out,
        options["task"],
        options["lr"],
        options["seed"],
        options["beside"],
        fault_share,
        options["target"],
        _notes(options, about),
        {
            name: str(value) if isinstance(value, Path) else value
            for name, value in options.items()
            if name not in _FILES
        },
    )


def _check_numbers(options: Mapping[str, Any]) -> None:
    if options["workers"] < 1:
        raise UsageError(f"--workers {options['workers']}", remedy="pass 1 or more")
    if options["task"] not in TASKS:
        raise unknown("task", options["task"], TASKS)
    if options["compression"] not in _COMPRESSIONS:
        raise unknown("compression", options["compression"], _COMPRESSIONS)
    if options["steps"] is not None and options["steps"] < 1:
        raise UsageError(f"--steps {options['steps']}", remedy="pass 1 or more")
    if options["warmup"] < 0:
        raise UsageError(f"--warmup {options['warmup']}", remedy="pass local steps, 0 or more")
    if options["seed"] < 0:
        raise UsageError(f"--seed {options['seed']}", remedy="pass a whole number of 0 or more")
    for name in ("lr", "target"):
        value = options[name]
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} {value}", remedy="pass a number above 0")


def _machines(options: Mapping[str, Any]) -> list[SimulatedMachine]:
    from paceline.tools.simulate.async_settings import SimulatedMachine, relative_step_times

    speeds = numbers_of("--speeds", options["speeds"], float, "1:1:2:4", ":")
    if not all(0 < each < math.inf for each in speeds):
        raise UsageError(f"--speeds {options['speeds']}", remedy="pass numbers above 0, such as 1:1:2:4")
    if not 0 <= options["spread"] < math.inf:
        raise UsageError(f"--spread {options['spread']}", remedy="pass a number from 0 on, such as 0.5")
    step = _positive("--step", options["step"], parse_seconds, "100ms")
    rate = _positive("--link", options["link"], parse_rate, "200Mbit/s")
    jitter = _share("--jitter", options["jitter"], "10%")
    rates = _bad_rates(options["bad_lr"], options["workers"])
    return [
        SimulatedMachine(step * pace, jitter, rate, rate, rates.get(worker + 1))
        for worker, pace in enumerate(relative_step_times(options["workers"], speeds, options["spread"]))
    ]


def _bad_rates(text: str | None, workers: int) -> dict[int, float]:
    """Return learning rates by number of worker, counted from 1."""
    rates: dict[int, float] = {}
    for part in [] if text is None else text.split(","):
        worker, _, told = part.strip().partition(":")
        try:
            number, rate = int(worker), float(told)
        except ValueError as error:
            raise UsageError(f"--bad-lr {text}", remedy="pass worker:rate, such as 4:10") from error
        if not 1 <= number <= workers:
            raise UsageError(
                f"--bad-lr {text}: there is no worker {number}", remedy=f"they are counted 1 to {workers}"
            )
        if not 0 < rate < math.inf:
            raise UsageError(f"--bad-lr {text}: a learning rate of {rate:g}", remedy="pass a number above 0")
        rates[number] = rate
    return rates


def _cadences(options: Mapping[str, Any]) -> tuple[list[SyncSchedule], list[str]]:
    """Return the settings that make sense, and what is left out and why."""
    from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

    found, left_out = [], []
    for every in numbers_of("--every", options["every"], int, "4,10,25"):
        for delay in numbers_of("--delay", options["delay"], int, "0,5"):
            try:
                found.append(SyncSchedule(every, options["fragments"], delay))
            except UsageError as error:
                if every < 1 or delay < 0 or options["fragments"] < 1:
                    raise
                told = "d must be below k" if delay >= every else str(error).splitlines()[0]
                left_out.append(f"k {every}, d {delay}: {told}")
    if not found:
        raise UsageError(
            f"--every {options['every']} with --delay {options['delay']} leaves no setting: {left_out[0]}",
            remedy="pass a delay below k, and at most k fragments",
        )
    return list(dict.fromkeys(found)), left_out


def _plan(
    options: Mapping[str, Any], machines: Sequence[SimulatedMachine], seconds: float, about: float
) -> AsyncPlan:
    from paceline.async_dp.worker.selection_policy import SelectionPolicy
    from paceline.tools.simulate.async_settings import AsyncPlan

    hub = options["hub_link"]
    hub_rate = machines[0].up if hub is None else _positive("--hub-link", hub, parse_rate, "1Gbit/s")
    parameters = options["parameters"]
    return AsyncPlan(
        machines,
        seconds=seconds,
        steps=options["steps"],
        rules=_rules(options),
        policy=SelectionPolicy(options["send"], options["receive"]),
        compression=None if options["compression"] == "none" else options["compression"],
        same_init=not options["different"],
        warmup=options["warmup"],
        hub_up=hub_rate,
        hub_down=hub_rate,
        latency=_told("--latency", options["latency"], parse_seconds),
        score_every=about / POINTS,
        parameters=None
        if parameters is None
        else int(_positive("--parameters", parameters, parse_count, "20M")),
        churn=_churn(options["churn"], len(machines), about, options["seed"]),
        seed=options["seed"],
    )


def _rules(options: Mapping[str, Any]) -> HubRules:
    from paceline.async_dp.hub.hub_rules import HubRules
    from paceline.async_dp.hub.population import PopulationRules
    from paceline.async_dp.hub.update_screening import Staleness

    named = ("outer", "outer_lr", "outer_momentum", "outer_warmup", "unstable")
    population = options["population"]
    return HubRules(
        outer=outer_of(*(options[name] for name in named)),
        staleness=Staleness(options["staleness"], options["bound"]),
        population=None
        if population is None
        else PopulationRules(population, options["margin"], seed=options["seed"]),
        down=options["down"],
    )


def _churn(text: str | None, workers: int, seconds: float, seed: int) -> list[ChurnEvent]:
    from paceline.tools.simulate.async_settings import ChurnEvent, draw_churn

    if text is None:
        return []
    if ":" not in text:
        return draw_churn(_share("--churn", text, "5%"), workers, seconds, seed)
    turns = []
    for part in text.split(","):
        when, _, who = part.strip().partition(":")
        sign, name = who[:1], who[1:]
        if sign not in ("-", "+") or not (name == "hub" or name.isdecimal()):
            raise UsageError(f"--churn {text}: {part.strip()!r} says not who leaves or comes", remedy=_CHURN)
        if name != "hub" and not 1 <= int(name) <= workers:
            raise UsageError(
                f"--churn {text}: there is no worker {name}", remedy=f"they are counted 1 to {workers}"
            )
        worker = -1 if name == "hub" else int(name) - 1
        turns.append(ChurnEvent(_told("--churn", when, parse_seconds), worker, sign == "+"))
    return turns


def _notes(options: Mapping[str, Any], seconds: float) -> list[str]:
    notes = [f"{options['workers']} workers for {format_seconds(seconds)} of virtual time"]
    if options["steps"] is not None and options["for_"] is None:
        notes[0] = (
            f"{options['workers']} workers, {options['steps']} steps each: those that are quick end early"
        )
    if options["beside"] and (options["churn"] or parse_share(options["spoil"])):
        notes.append("DDP is simulated without churn and mishaps: either would end it")
    if options["beside"] and options["bad_lr"]:
        notes.append("DDP has one learning rate for all: --bad-lr does not touch it")
    return notes


def _told(option: str, text: str, parse: Any) -> float:
    """Return a quantity; an error names the option."""
    try:
        return float(parse(text))
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error


def _positive(option: str, text: str, parse: Any, example: str) -> float:
    value = _told(option, text, parse)
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text}", remedy=f"pass more than 0, such as {example}")
    return value


def _share(option: str, text: str, example: str) -> float:
    value = _told(option, text, parse_share)
    if not 0 <= value < 1:
        raise UsageError(f"{option} {text}", remedy=f"pass a share below 100%, such as {example}")
    return value
