"""Creation of paceline groups: hosts, connections, and the groups that calls fall back to."""

from __future__ import annotations

import hashlib
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from paceline._core.cpu_cores import usable_cores
from paceline.backends.hierarchical import HierarchicalCollectives
from paceline.backends.inter_host import InterHostCollectives
from paceline.backends.op_signature import CollectiveOps
from paceline.backends.process_group import PacelineProcessGroup
from paceline.backends.process_group_base import GroupBase
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import ControlBlock
from paceline.backends.shm.peer_sockets import (
    HostPeers,
    PeerInfo,
    PeerListener,
    SharedMemoryUnavailable,
    exchange_peer_info,
)
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.backends.shm.shm_p2p import ShmPointToPoint
from paceline.world.accelerator import find_accelerator
from paceline.world.device_selection import accelerator_backend
from paceline.world.environment import host_label

__all__ = ["create_paceline_group", "register_fallbacks"]


def create_paceline_group(options: Any) -> PacelineProcessGroup:
    """Create the group that torch's ``_DistributedBackendOptions`` describe: store, rank, ranks, time-out."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    world_ranks = list(options.global_ranks_in_group) or list(range(size))
    # torch counts groups on each rank separately: groups of different ranks may share a name and a part of the store.
    key = hashlib.sha256(repr(world_ranks).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"paceline/{key}", options.store)
    listener, problem = _listen()
    me = _peer_info(rank, world_ranks, listener, problem)
    peers = exchange_peer_info(store, me, size, timeout.total_seconds())
    collectives, p2p = None, None
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    try:
        collectives, p2p = _connect(
            me, peers, listener, store=store, gloo=gloo, timeout=timeout.total_seconds()
        )
    except SharedMemoryUnavailable as reason:
        if rank == 0:
            warnings.warn(f"paceline backend: no shared memory, using gloo instead ({reason})", stacklevel=2)
    group = PacelineProcessGroup(rank, size, collectives, p2p)
    register_fallbacks(group, options, store, gloo)
    return group


def _listen() -> tuple[PeerListener | None, str]:
    """Return where the other ranks of the host connect to, or why there is no shared memory."""
    if not futex.SUPPORTED:
        return None, "this platform has no futex"
    if os.environ.get("PACELINE_SHARED_MEMORY", "1") == "0":
        return None, "PACELINE_SHARED_MEMORY=0"
    try:
        return PeerListener(), ""
    except OSError as error:
        return None, f"no Unix socket: {error}"


def _peer_info(
    rank: int, world_ranks: Sequence[int], listener: PeerListener | None, problem: str
) -> PeerInfo:
    world_rank = world_ranks[rank]
    world_size = dist.get_world_size() if dist.is_initialized() else len(world_ranks)
    return PeerInfo(
        rank=rank,
        world_rank=world_rank,
        host=host_label(os.environ, world_rank, world_size),
        name=socket.gethostname(),
        pid=os.getpid(),
        address=listener.address if listener else "",
        token=listener.token if listener else "",
        problem=problem,
    )


def _connect(
    me: PeerInfo,
    peers: Sequence[PeerInfo],
    listener: PeerListener | None,
    *,
    store: dist.Store,
    gloo: dist.ProcessGroupGloo,
    timeout: float,
) -> tuple[CollectiveOps, ShmPointToPoint | None]:
    """Return the collectives and the point-to-point messages of the group (None: gloo's).

    Raises:
        SharedMemoryUnavailable: the ranks of some host share no memory.
    """
    by_host: dict[str, list[PeerInfo]] = {}
    for peer in peers:
        by_host.setdefault(peer.host, []).append(peer)
    local = by_host[me.host]
    host_peers = HostPeers(
        me,
        local,
        peers,
        listener=listener,
        store=store,
        timeout=timeout,
        nbytes=ControlBlock.nbytes(len(local)),
    )
    control = ControlBlock(host_peers.segment, local.index(me), len(local))
    intra = ShmCollectives(host_peers, control, timeout, cores=usable_cores())
    if len(by_host) == 1:
        return intra, ShmPointToPoint(intra) if len(local) > 1 else None
    hosts = list(by_host.values())
    column = min(control.index, min(map(len, hosts)) - 1)
    counterparts = [host[column].rank for host in hosts]
    inter = InterHostCollectives(gloo, counterparts, hosts.index(local), timeout)
    return HierarchicalCollectives(intra, inter, hosts, store), None


def register_fallbacks(
    group: GroupBase, options: Any, store: dist.Store, gloo: dist.ProcessGroupGloo
) -> None:
    """Register the groups that calls fall back to: gloo for the CPU, and an accelerator's own backend for it (NCCL).

    Args:
        group: the group that calls fall back from.
        options: torch's options of the group.
        store: of the group.
        gloo: the group for the CPU.
    """
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    kind = find_accelerator() or "cpu"
    backend = accelerator_backend(kind)
    made = _accelerator_group(backend, options, store) if backend else None
    if made is not None:
        backend_type = dist.Backend.backend_type_map[backend]
        group._register_backend(torch.device(kind), backend_type, made)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def _accelerator_group(backend: str, options: Any, store: dist.Store) -> Any:
    """Return a group of an accelerator's backend; None if torch lacks it, or it can't be inside another group."""
    place = dist.PrefixStore(backend, store), options.group_rank, options.group_size
    own: Any
    if backend == "nccl":
        if not dist.is_nccl_available():
            return None
        own = dist.ProcessGroupNCCL.Options()
        own._timeout = options.timeout
        made = dist.ProcessGroupNCCL(*place, own)
        made._set_sequence_number_for_group()
        return made
    if backend == "xccl":
        if not dist.is_xccl_available():
            return None
        xccl: Any = dist.distributed_c10d.ProcessGroupXCCL
        own = xccl.Options()
        own._timeout = options.timeout
        return xccl(*place, own)
    plugin = dist.Backend._plugins[backend.upper()]
    if plugin.extended_api:
        own = type(options)()
        own.store, own.group_rank, own.group_size = place
        own.timeout, own.group_id = options.timeout, options.group_id
        own.global_ranks_in_group = options.global_ranks_in_group
        made = plugin.creator_fn(own, None)
    else:
        made = plugin.creator_fn(*place, options.timeout)
    return made if isinstance(made, Backend) else None
