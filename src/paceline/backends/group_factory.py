"""Building a paceline group: who shares a host with whom, and what can be had between them.

The group inside a group: what makes the calls that ours does not make.
"""

from __future__ import annotations

import hashlib
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline._core.cpu_cores import usable_cores
from paceline.backends.group_base import GroupBase
from paceline.backends.hierarchical import HierarchicalCollectives
from paceline.backends.inter_host import InterHostCollectives
from paceline.backends.op_signature import CollectiveOps
from paceline.backends.process_group import PacelineProcessGroup
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import ControlBlock
from paceline.backends.shm.host_peers import (
    HostPeers,
    MemoryNotShared,
    PeerCard,
    PeerListener,
    exchange_cards,
)
from paceline.backends.shm.shared_arena import arena
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.backends.shm.shm_p2p import ShmPointToPoint
from paceline.world.host_identity import host_of

__all__ = ["create", "register_inner"]

_PATIENCE_SECONDS = 100e-6
"""How long a rank with a core of its own looks for the others before it sleeps: about what waking costs."""


def create(options: Any, backend_options: Any = None) -> PacelineProcessGroup:
    """Build the group that torch asked for; what ``Backend.register_backend`` calls.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, place, ranks, time-out.
        backend_options: none are known.
    """
    del backend_options
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    world_ranks = list(options.global_ranks_in_group) or list(range(size))
    store = dist.PrefixStore(f"paceline/{_key(world_ranks)}", options.store)
    listener, problem = _listen()
    card = _card(rank, world_ranks, listener, problem)
    cards = exchange_cards(store, card, size, timeout.total_seconds())
    route, mailbox = None, None
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    try:
        route, mailbox = _route(card, cards, listener, store, gloo, timeout.total_seconds())
    except MemoryNotShared as reason:
        if rank == 0:
            warnings.warn(f"paceline backend: no shared memory, using gloo instead ({reason})", stacklevel=2)
    group = PacelineProcessGroup(rank, size, route, mailbox)
    register_inner(group, options, store, gloo)
    return group


def _key(world_ranks: Sequence[int]) -> str:
    """Return what tells groups of different ranks apart.

    torch counts groups on each rank for itself, so two groups may have one name, and one part of the store.
    """
    return hashlib.sha256(repr(list(world_ranks)).encode()).hexdigest()[:16]


def _listen() -> tuple[PeerListener | None, str]:
    """Open the place where neighbours dial, or say why there is no shared memory."""
    if not futex.SUPPORTED:
        return None, "this platform has no futex"
    if os.environ.get("PACELINE_SHARED_MEMORY", "1") == "0":
        return None, "PACELINE_SHARED_MEMORY=0"
    try:
        return PeerListener(), ""
    except OSError as error:
        return None, f"no Unix socket: {error}"


def _card(rank: int, world_ranks: Sequence[int], listener: PeerListener | None, problem: str) -> PeerCard:
    world_rank = world_ranks[rank]
    world_size = dist.get_world_size() if dist.is_initialized() else len(world_ranks)
    return PeerCard(
        rank=rank,
        world_rank=world_rank,
        host=host_of(os.environ, world_rank, world_size),
        name=socket.gethostname(),
        pid=os.getpid(),
        address=listener.address if listener else "",
        token=listener.token if listener else "",
        problem=problem,
    )


def _route(
    me: PeerCard,
    cards: Sequence[PeerCard],
    listener: PeerListener | None,
    store: dist.Store,
    gloo: dist.ProcessGroupGloo,
    timeout: float,
) -> tuple[CollectiveOps, ShmPointToPoint | None]:
    """Return how calls are made, and what carries messages between two ranks.

    Raises:
        NotShared: the ranks of some host share no memory.
    """
    hosts: dict[str, list[PeerCard]] = {}
    for card in cards:
        hosts.setdefault(card.host, []).append(card)
    here = hosts[me.host]
    neighbours = HostPeers(me, cards, here, listener, store, timeout, ControlBlock.nbytes(len(here)))
    board = ControlBlock(neighbours.common, here.index(me), len(here))
    inside = ShmCollectives(
        neighbours, board, arena, timeout, _PATIENCE_SECONDS if len(here) <= usable_cores() else 0.0
    )
    if len(hosts) == 1:
        return inside, ShmPointToPoint(inside) if len(here) > 1 else None
    by_host = list(hosts.values())
    at = by_host.index(here)
    column = min(board.index, min(map(len, by_host)) - 1)
    between = InterHostCollectives(gloo, [each[column].rank for each in by_host], at, timeout)
    return HierarchicalCollectives(inside, between, by_host, me, store), None


def register_inner(group: GroupBase, options: Any, store: dist.Store, gloo: dist.ProcessGroupGloo) -> None:
    """Register what calls fall through to: gloo for the CPU, NCCL for CUDA where it is there.

    Args:
        group: the group that calls fall through.
        options: what torch asked for: place, ranks, time-out.
        store: where the ranks of the group meet.
        gloo: the group for the CPU.
    """
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl = dist.ProcessGroupNCCL(
            dist.PrefixStore("nccl", store), options.group_rank, options.group_size, nccl_options
        )
        nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
