"""``--strategy auto``: measures the network and a step, and chooses the strategy that fits; the same on all ranks.

    rate    all ranks exchange bytes pairwise, increasingly many until an exchange takes 0.1 s; median of three
    step    a copy of the model trains a few steps without communication; the slowest rank counts
    choice  `paceline.tools.plan.compression_or_local_sgd.advise_network`

If gradients are sent uncompressed every step, `paceline.parallel.tuning.tuner` then tunes how while training.

Measuring does not change the training: the copy is dropped, and the training draws its random numbers afterwards. A
resumed run keeps the strategy that it began with, even if the network has changed.
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
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TrainingWindows
from paceline.tools.plan.compression_or_local_sgd import NetworkAdvice, SyncOption, advise_network
from paceline.tools.train.local_sgd_settings import gpt_layers
from paceline.tools.train.resume_checks import original_settings
from paceline.tools.train.train_settings import CHOSEN_BY_AUTO, TrainSettings
from paceline.world import World
from paceline.world.accelerator import synchronize
from paceline.world.control_collectives import barrier, gather_texts

__all__ = ["AutoChoice", "choose_strategy"]

_FIRST_NBYTES, _MAX_NBYTES, _GROWTH = 256 << 10, 16 << 20, 4
_MIN_EXCHANGE_SECONDS = 0.1  # beyond this, latency and a burst that fits into a queue no longer count
_BUDGET_SECONDS = 2.0  # of either measurement, about
_REPEATS = 3
_FEW_ROUNDS = 10


@dataclass(frozen=True)
class AutoChoice:
    """The choice of ``--strategy auto``.

    Attributes:
        settings: with a named strategy.
        sentences: measurements and reasons.
        facts: the same for ``run.json``; empty if a resumed run made the choice before.
    """

    settings: TrainSettings
    sentences: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def sends_full_gradients(self) -> bool:
        """True if gradients are sent uncompressed every step; timing and buckets are then tuned while training."""
        return self.settings.local_sgd is None and self.settings.plan.compression is None


def choose_strategy(
    settings: TrainSettings, size: GptSize, batches: TrainingWindows, world: World
) -> AutoChoice:
    """Return the strategy that fits network and model, or that of the run to be resumed; collective.

    Args:
        settings: with ``strategy="auto"``.
        size: of the model.
        batches: of this rank.
        world: this rank's place.
    """
    original = _original_choice(settings, world)
    if original is not None:
        return AutoChoice(
            original, (f"--strategy auto resumes as the run began: {original.sync_summary}",), {}
        )
    if world.size == 1:
        alone = _apply_option(None, settings)
        return AutoChoice(
            alone, ("--strategy auto: with one rank nothing is sent",), {"chosen": alone.sync_summary}
        )
    device = torch.device(world.device)
    rate = measure_rate(Comm(), device)
    step_seconds = _slowest(measure_step(settings, size, batches, device))
    return _choice(
        advise_network(size.parameters(), world.size, rate, step_seconds, layers=gpt_layers(size.layers)),
        settings,
    )


def _choice(advice: NetworkAdvice, settings: TrainSettings) -> AutoChoice:
    measured = (
        f"--strategy auto measured {format_decimal(advice.bytes_per_second)}/s from each rank to all others, "
        f"and {format_seconds(advice.step_seconds)} for a step without communication"
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
            f"In {settings.steps} steps every parameter is synchronised only {rounds + 1} times: train longer, with "
            "larger batches, or pass --every explicitly"
        )
    return AutoChoice(_apply_option(advice.chosen, settings), tuple(sentences), facts)


def _apply_option(option: SyncOption | None, settings: TrainSettings) -> TrainSettings:
    """Return `settings` with the strategy that `option` describes; None: the default one."""
    if option is None or (option.every == 1 and option.compression == "none"):
        return replace(settings, strategy="bucketed")
    changed: dict[str, Any] = {"strategy": "bucketed", "compression": option.compression}
    if option.every > 1:
        changed |= {"every": option.every, "outer": option.outer}
        changed |= {"fragments": option.fragments, "delay": option.delay}
        changed |= {"outer_warmup_steps": settings.warmup} if option.outer == "diloco" else {}
    return replace(settings, **changed)


def _original_choice(settings: TrainSettings, world: World) -> TrainSettings | None:
    """Return `settings` with the strategy of the run to be resumed, as rank 0 reads it; None: it starts anew."""
    found = original_settings(settings) if world.rank == 0 else None
    saved = json.loads(gather_texts(json.dumps(found) if world.rank == 0 else "")[0])
    if saved is None:
        return None
    return replace(settings, **{name: saved.get(name) for name in ("strategy", *CHOSEN_BY_AUTO)})


# ---------------------------------------------------------------------- measuring


def measure_rate(comm: Comm, device: torch.device) -> float:
    """Return the bytes per second that a rank sends to all others while all do so; collective."""
    device = device if comm.stream_ordered else torch.device("cpu")
    tag = comm.reserve_tags(1)
    _exchange_seconds(comm, 1024, device, tag)  # opens the connections
    began, row_nbytes = time.perf_counter(), max(64, _FIRST_NBYTES // comm.size)
    seconds = _exchange_seconds(comm, row_nbytes, device, tag)
    while seconds < _MIN_EXCHANGE_SECONDS and row_nbytes * comm.size < _MAX_NBYTES:
        row_nbytes *= _GROWTH
        seconds = _exchange_seconds(comm, row_nbytes, device, tag)
    times = [seconds]
    while len(times) < _REPEATS and _slowest(time.perf_counter() - began) < _BUDGET_SECONDS:
        times.append(_exchange_seconds(comm, row_nbytes, device, tag))
    return (comm.size - 1) * row_nbytes / statistics.median(times)


def _exchange_seconds(comm: Comm, nbytes: int, device: torch.device, tag: int) -> float:
    """Exchange `nbytes` with every other rank; return the slowest rank's seconds."""
    rows = torch.zeros(comm.size, nbytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(rows)
    barrier(comm.group)
    started = time.perf_counter()
    comm.all_to_all_rows(rows, into, lambda rank: None, tag).wait()
    synchronize(device)
    return _slowest(time.perf_counter() - started)


def measure_step(
    settings: TrainSettings, size: GptSize, batches: TrainingWindows, device: torch.device
) -> float:
    """Return this rank's seconds of an optimizer step without communication, on a copy that is dropped."""
    net = GPT(size).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=settings.lr, fused=True)
    times: list[float] = []
    while len(times) < 2 or (
        sum(times) < _BUDGET_SECONDS and (len(times) <= _REPEATS or sum(times) < _BUDGET_SECONDS / 4)
    ):
        started = time.perf_counter()
        for micro in range(batches.rounds):
            batch = batches.at(0, micro).to(device)
            loss_of(net(batch.inputs), batch.targets).backward()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first step includes one-time costs


def _slowest(seconds: float) -> float:
    """Return the largest of all ranks' seconds: the same on every rank, so that all take the same branch."""
    return max(float(text) for text in gather_texts(repr(seconds)))
