"""``--sync auto``: the network and a step are measured, and what fits them is chosen; on all ranks the same.

    rate    every rank swaps some bytes with every other, more of them until that takes long enough; median of three
    step    a copy of the model trains some steps by itself; the slowest rank counts
    choice  `paceline.tools.plan.slow_network.advise_network`

Where gradients are sent whole in every step, the training then tunes how, see `paceline.parallel.tuning.tuner`.

Neither touches the training: the copy is dropped, and the training draws its random numbers afterwards. A run that is
resumed goes on as it began, whatever the network is like now.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline._core.format import format_decimal, format_seconds
from paceline.parallel.engine.comm import Comm
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt import loss as loss_of
from paceline.tools.models.gpt_sizes import Size
from paceline.tools.models.token_windows import Batches
from paceline.tools.plan.slow_network import NetworkAdvice, SyncOption, advise_network
from paceline.tools.train.local_sgd_settings import layers_of_gpt
from paceline.tools.train.resume_check import begun_with
from paceline.tools.train.train_settings import CHOSEN_BY_AUTO, Settings
from paceline.world import World
from paceline.world.object_collectives import barrier, gather_texts

__all__ = ["Choice", "choose", "settings_for"]

_FIRST_NBYTES, _MOST_NBYTES, _FACTOR = 256 << 10, 16 << 20, 4
_LONG_ENOUGH = 0.1  # seconds of a swap: the start of a message and a queue's burst no longer count
_PATIENCE = 2.0  # seconds for either measurement, about
_TURNS = 3
_FEW_ROUNDS = 10


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        settings: with a strategy that has a name. sentences: what was measured, and why this one.
        facts: the same for ``run.json``; none where it was chosen before.
    """

    settings: Settings
    sentences: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def sends_all(self) -> bool:
        """Whether gradients are sent whole in every step; when and in which pieces is found while it trains."""
        return self.settings.apart is None and self.settings.plan.compression is None


def choose(settings: Settings, size: Size, batches: Batches, world: World) -> Choice:
    """Return what fits the network and the model, or what the run that is resumed began with; all ranks call this.

    Args:
        settings: with ``sync="auto"``. size: of the model. batches: of this rank. world: its place.
    """
    begun = _as_begun(settings, world)
    if begun is not None:
        return Choice(begun, (f"--sync auto goes on as the run began: {begun.told}",), {})
    if world.size == 1:
        alone = settings_for(None, settings)
        return Choice(alone, ("--sync auto: there is one rank, nothing is sent",), {"chosen": alone.told})
    rate = measure_rate(Comm(), torch.device(world.device))
    step = max(_everybodys(measure_step(settings, size, batches, torch.device(world.device))))
    advice = advise_network(size.parameters(), world.size, rate, step, layers=layers_of_gpt(size.layers))
    return _choice(advice, settings)


def _choice(advice: NetworkAdvice, settings: Settings) -> Choice:
    chosen = settings_for(advice.chosen, settings)
    measured = (
        f"--sync auto measured {format_decimal(advice.bytes_per_second)}/s from each rank to the others together, "
        f"and {format_seconds(advice.step_seconds)} for a step by itself"
    )
    facts = {
        "bytes per second": advice.bytes_per_second,
        "step by itself, seconds": advice.step_seconds,
        "chosen": advice.chosen.name,
        "options": advice.chosen.flags or "none",
        "step predicted, seconds": advice.chosen.step_seconds,
        "why": " ".join(advice.sentences),
    }
    sentences = [measured, *advice.sentences]
    rounds = settings.steps // advice.chosen.every
    if rounds < _FEW_ROUNDS:
        sentences.append(
            f"In {settings.steps} steps every parameter is synchronised {rounds + 1} times, which is little: train "
            "longer, with larger batches, or name an --every of your own"
        )
    return Choice(chosen, tuple(sentences), facts)


def settings_for(option: SyncOption | None, settings: Settings) -> Settings:
    """Return `settings` with the strategy that `option` describes; None: the usual one."""
    if option is None or (option.every == 1 and option.compression == "none"):
        return replace(settings, sync="sharded")
    changed: dict[str, Any] = {"sync": "bucketed", "compression": option.compression}
    if option.every > 1:
        changed |= {"every": option.every, "outer": option.outer}
        changed |= {"fragments": option.fragments, "delay": option.delay}
        changed |= {"warmup_outer": settings.warmup} if option.outer == "diloco" else {}
    return replace(settings, **changed)


def _as_begun(settings: Settings, world: World) -> Settings | None:
    """Return the settings that a run to be resumed began with, as rank 0 reads them; None: it starts anew."""
    found = begun_with(settings) if world.rank == 0 else None
    told = json.loads(gather_texts(json.dumps(found) if world.rank == 0 else "")[0])
    if told is None:
        return None
    return replace(settings, **{name: told.get(name) for name in ("sync", *CHOSEN_BY_AUTO)})


# ---------------------------------------------------------------------- measuring


def measure_rate(comm: Comm, device: torch.device) -> float:
    """Return how many bytes a second a rank sends to the others together, while all do; all ranks call this."""
    device = device if comm.orders_itself else torch.device("cpu")
    tag = comm.reserve_tags(1)
    _swap(comm, 1024, device, tag)  # connections are made
    began, row = time.perf_counter(), max(64, _FIRST_NBYTES // comm.size)
    seconds = _swap(comm, row, device, tag)
    while seconds < _LONG_ENOUGH and row * comm.size < _MOST_NBYTES:
        row *= _FACTOR
        seconds = _swap(comm, row, device, tag)
    times = [seconds]
    while len(times) < _TURNS and _slowest(time.perf_counter() - began) < _PATIENCE:
        times.append(_swap(comm, row, device, tag))
    return (comm.size - 1) * row / statistics.median(times)


def _swap(comm: Comm, nbytes: int, device: torch.device, tag: int) -> float:
    """Send `nbytes` to every other rank, and receive as many; return the slowest rank's seconds."""
    rows = torch.zeros(comm.size, nbytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(rows)
    barrier(comm.group)
    started = time.perf_counter()
    comm.swap_rows(rows, into, lambda rank: None, tag).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _slowest(time.perf_counter() - started)


def measure_step(settings: Settings, size: Size, batches: Batches, device: torch.device) -> float:
    """Return the seconds of an optimizer step of this rank by itself, on a copy that is dropped."""
    net = GPT(size).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=settings.lr, fused=True)
    times: list[float] = []
    while len(times) < 2 or (sum(times) < _PATIENCE and (len(times) <= _TURNS or sum(times) < _PATIENCE / 4)):
        started = time.perf_counter()
        for micro in range(batches.rounds):
            batch = batches.at(0, micro).to(device)
            loss_of(net(batch.inputs), batch.targets).backward()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first one pays for what happens once


def _slowest(seconds: float) -> float:
    return max(_everybodys(seconds))


def _everybodys(number: float) -> list[float]:
    """Return every rank's number: the same on all ranks, so that all go the same way."""
    return [float(text) for text in gather_texts(repr(number))]
