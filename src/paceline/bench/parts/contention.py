"""How much computing slows while exchanges are under way, and the other way round.

So many exchanges are launched that they outlast some steps of computing; then come these steps; then the rest is waited
for. The steps' time beside exchanges, over that without, is how much computing slows. Of the exchanges, which alone
take as many seconds as `alone`, the share (computing / slowed) passed while the rank computed and the rest afterwards:

    alone = computing / calls_slow + rest        ⇒        calls_slow = computing / (alone − rest)

Launching counts as computing here: exchanges are under way meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from paceline.bench.parts.clock import now, slowest
from paceline.bench.parts.computing import Wrapped
from paceline.bench.parts.exchanges import Exchanger
from paceline.plan.entries import Source
from paceline.plan.step_entries import Contention, ModelStep

__all__ = ["measure_contention"]

_NBYTES = 1 << 20
_OUTLAST = 1.6  # exchanges take so many times as long as the computing beside them
_MOST_CALLS = 4000
_BUFFERS = 8
_LEAST_PASSED = 0.01  # of the exchanges; less can't be told from nothing


def measure_contention(
    exchanger: Exchanger,
    op: str,
    wrapped: Wrapped,
    step: ModelStep,
    network: str,
    rounds: int,
    source: Source,
) -> Contention:
    """Return what an exchange and the computing of a step do to each other; all ranks call it.

    Args:
        exchanger: who makes the exchanges. op: which one. wrapped: what computes. step: what that takes by itself.
        network: what carries the exchanges. rounds: repetitions. source: how it was asked for.
    """
    buffers = exchanger.buffers(_NBYTES, _BUFFERS)
    (each,) = slowest([_alone(exchanger, op, buffers, 4 * _BUFFERS) / (4 * _BUFFERS)], exchanger.device)
    calls = max(_BUFFERS, min(_MOST_CALLS, math.ceil(_OUTLAST * (step.forward + step.buffered) / each)))
    found = [_together(exchanger, op, buffers, calls, wrapped) for _ in range(rounds + 1)][1:]
    launch, bare, beside, busy, alone, rest = zip(*found, strict=True)
    passed = [max(0.0, each - left) / during for each, left, during in zip(alone, rest, busy, strict=True)]
    return Contention(
        caller=exchanger.caller,
        backend=exchanger.backend,
        network=network,
        op=op,
        device=step.device,
        ranks=step.ranks,
        threads=step.threads,
        nbytes=buffers[0].nbytes,
        launch_seconds=median(launch),
        computing_slows=max(1.0, median(beside) / median(bare)),
        calls_slow=max(1.0, 1.0 / max(median(passed), _LEAST_PASSED)),
        source=source,
    )


def _alone(exchanger: Exchanger, op: str, buffers: Sequence[torch.Tensor], calls: int) -> float:
    """Return the seconds of so many exchanges in a row on this rank."""
    dist.barrier()
    began = now(exchanger.device)
    for pending in [exchanger.launch(op, buffers[call % len(buffers)]) for call in range(calls)]:
        pending.wait()
    return now(exchanger.device) - began


def _together(
    exchanger: Exchanger, op: str, buffers: Sequence[torch.Tensor], calls: int, wrapped: Wrapped
) -> list[float]:
    """Return seconds of the slowest rank.

    Of a launch; of computing alone; of computing beside exchanges, and the same with launching them; of the exchanges
    alone; of what was left of them after computing.
    """
    device = exchanger.device
    dist.barrier()
    bare = sum(wrapped.step()[:2])
    alone = _alone(exchanger, op, buffers, calls)
    dist.barrier()
    started = now(device)
    under_way = [exchanger.launch(op, buffers[call % len(buffers)]) for call in range(calls)]
    launched = now(device)
    beside = sum(wrapped.step()[:2])
    computed = now(device)
    for pending in under_way:
        pending.wait()
    rest = now(device) - computed
    own = [(launched - started) / calls, bare, beside, computed - started, alone, rest]
    return slowest(own, device)
