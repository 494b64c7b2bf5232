"""Measures how far the clocks of a group's hosts are from rank 0's, by round trips of messages.

Ranks of one kernel share its clock, so one rank per kernel is measured. Rank 0 sends it a message and receives its
time. Of several round trips the shortest counts, and its middle is taken as the moment of the answer (Cristian,
Distributed Computing 3, 1989). An offset is therefore off by at most half of that round trip.

Clocks drift by some millionths, which is milliseconds after an hour. So this is repeated; a reader of the timeline
interpolates between two measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.world.control_collectives import gather_texts
from paceline.world.environment import boot_id

__all__ = ["ClockOffset", "compare_clocks", "is_due"]

_ROUND_TRIPS = 8
_EVERY = 1024
"""Steps between two measurements in a long run."""


@dataclass(frozen=True)
class ClockOffset:
    """This rank's clock minus rank 0's, and its largest error, in seconds."""

    seconds: float = 0.0
    error: float = 0.0


def is_due(step: int) -> bool:
    """Return whether clocks are compared after `step`: at powers of two, and every 1024 steps.

    Example:
        >>> [step for step in range(20) if is_due(step)]
        [1, 2, 4, 8, 16]
    """
    return step > 0 and (step % _EVERY == 0 if step > _EVERY else step & (step - 1) == 0)


def compare_clocks(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    key: str | None = None,
    clock: Callable[[], float] = time.time,
) -> ClockOffset:
    """Return the offset of this rank's clock from rank 0's; all ranks of `group` call this.

    Args:
        group: the ranks; None: a world of one.
        device: of tensors that the group can send.
        key: the same on ranks that share a clock; None: this boot of this kernel.
        clock: returns seconds since the epoch.
    """
    if group is None:
        return ClockOffset()
    keys = gather_texts(boot_id() if key is None else key, group)
    rank, leaders = dist.get_rank(group), _leaders(keys)
    table = torch.zeros(len(keys), 2, dtype=torch.float64)
    for leader in leaders:
        if rank == 0:
            found = _measure(leader, group, device, clock)
            table[leader] = torch.tensor([found.seconds, found.error], dtype=torch.float64)
        elif rank == leader:
            _answer(group, device, clock)
    if leaders:
        table = table.to(device)
        dist.broadcast(table, group=group, group_src=0)
    seconds, error = table[keys.index(keys[rank]) if keys[rank] else rank].tolist()
    return ClockOffset(seconds, error)


def _leaders(keys: Sequence[str]) -> list[int]:
    """Return the first rank of each clock but rank 0's; a rank without a key counts as having its own clock."""
    seen, leaders = {keys[0]} - {""}, []
    for rank, key in enumerate(keys):
        if rank and (not key or key not in seen):
            leaders.append(rank)
            seen.add(key)
    return leaders


def _measure(
    peer: int, group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float]
) -> ClockOffset:
    """Return how far the clock of `peer` is ahead, by the shortest round trip."""
    message = torch.zeros(1, dtype=torch.float64, device=device)
    trips = []
    for _ in range(_ROUND_TRIPS):
        sent = clock()
        dist.send(message, group=group, group_dst=peer)
        dist.recv(message, group=group, group_src=peer)
        answer = message.item()
        received = clock()
        trips.append((received - sent, answer - (sent + received) / 2))
    length, seconds = min(trips)
    return ClockOffset(seconds, length / 2)


def _answer(group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_ROUND_TRIPS):
        dist.recv(message, group=group, group_src=0)
        message.fill_(clock())
        dist.send(message, group=group, group_dst=0)
