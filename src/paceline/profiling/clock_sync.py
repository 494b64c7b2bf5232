"""How far the clocks of a group's hosts are apart from rank 0's, by messages that go and come back.

Ranks of one kernel share its clock: only one rank of each other one is asked. Rank 0 sends it a message and hears its
time; of some such rounds the shortest counts, and its middle is taken for the moment in which the answer was given
(Cristian, Distributed Computing 3, 1989). So an offset is off by at most half of that round.

Clocks drift, by some millionths: an hour apart they differ by milliseconds. So this is done again and again; who reads
the timeline draws a line between two measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.world.environment import boot_id
from paceline.world.object_collectives import gather_texts

__all__ = ["ClockOffset", "compare_clocks", "due"]

_ROUNDS = 8
_EVERY = 1024
"""Steps between two measurements, once a run is under way."""


@dataclass(frozen=True)
class ClockOffset:
    """What this rank's clock shows more than rank 0's, in seconds, and by how much that may be off."""

    seconds: float = 0.0
    error: float = 0.0


def due(step: int) -> bool:
    """Return whether clocks are compared after `step`: at powers of two, and then every so often.

    Example:
        >>> [step for step in range(20) if due(step)]
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
    """Return how far this rank's clock is from rank 0's; all ranks of `group` call this.

    Args:
        group: the ranks; None: a world of one.
        device: where the group wants tensors.
        key: what ranks that share a clock have in common; None: this boot of this kernel.
        clock: seconds since the epoch.
    """
    if group is None:
        return ClockOffset()
    keys = gather_texts(boot_id() if key is None else key, group)
    rank, leaders = dist.get_rank(group), _leaders(keys)
    table = torch.zeros(len(keys), 2, dtype=torch.float64)
    for leader in leaders:
        if rank == 0:
            found = _ask(leader, group, device, clock)
            table[leader] = torch.tensor([found.seconds, found.error], dtype=torch.float64)
        elif rank == leader:
            _answer(group, device, clock)
    if leaders:
        table = table.to(device)
        dist.broadcast(table, group=group, group_src=0)
    seconds, error = table[keys.index(keys[rank]) if keys[rank] else rank].tolist()
    return ClockOffset(seconds, error)


def _leaders(keys: Sequence[str]) -> list[int]:
    """Return the first rank of each clock but rank 0's; ranks that can't tell their clock have one each."""
    seen, leaders = {keys[0]} - {""}, []
    for rank, key in enumerate(keys):
        if rank and (not key or key not in seen):
            leaders.append(rank)
            seen.add(key)
    return leaders


def _ask(
    peer: int, group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float]
) -> ClockOffset:
    """Return how far the clock of `peer` is ahead, by the shortest of some rounds."""
    message = torch.zeros(1, dtype=torch.float64, device=device)
    rounds = []
    for _ in range(_ROUNDS):
        asked = clock()
        dist.send(message, group=group, group_dst=peer)
        dist.recv(message, group=group, group_src=peer)
        told = message.item()
        heard = clock()
        rounds.append((heard - asked, told - (asked + heard) / 2))
    length, seconds = min(rounds)
    return ClockOffset(seconds, length / 2)


def _answer(group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_ROUNDS):
        dist.recv(message, group=group, group_src=0)
        message.fill_(clock())
        dist.send(message, group=group, group_dst=0)
