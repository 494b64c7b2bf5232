"""The ``"mpi4py"`` backend of ``torch.distributed``: collectives and messages over MPI, for ranks under mpiexec.

    mpiexec -n 4 python train.py        # paceline.init("mpi4py"), or init_process_group("mpi4py", …)

A group of some ranks has its own communicator (``MPI_Comm_create_group``), so other ranks take no part in creating
it. Calls that MPI does not support (CUDA or sparse tensors) fall back to gloo or NCCL, as in a paceline group.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from paceline.backends.group_factory import register_fallbacks
from paceline.backends.mpi_collectives import MpiCollectives
from paceline.backends.mpi_p2p import MpiPointToPoint
from paceline.backends.process_group import PacelineProcessGroup
from paceline.errors import PacelineError, WorldError
from paceline.world.mpi_world import load_mpi, unlink_mpich_shared_memory

__all__ = ["create_mpi_group"]

_OK = "ok"
_FLUSH_SECONDS = 0.3
"""Time for mpiexec to forward the output of this rank before it ends all ranks."""


def create_mpi_group(options: Any) -> PacelineProcessGroup:
    """Create the group that torch's ``_DistributedBackendOptions`` describe: store, rank, ranks, time-out.

    Raises:
        UsageError: MPI is not available on some rank; all ranks raise an error.
        WorldError: on some rank, MPI's world differs from torch's; all ranks raise an error.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    world_ranks = list(options.global_ranks_in_group) or list(range(size))
    store = dist.PrefixStore(f"paceline-mpi/{'-'.join(map(str, world_ranks))}", options.store)
    mpi = _load_on_all_ranks(store, rank, size, world_ranks)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    collectives_comm, p2p_comm = _communicators(mpi, world_ranks)
    collectives = MpiCollectives(mpi, collectives_comm, world_ranks, timeout.total_seconds())
    p2p = MpiPointToPoint(mpi, p2p_comm, timeout.total_seconds())
    group = PacelineProcessGroup(rank, size, collectives, p2p, "mpi4py")
    register_fallbacks(group, options, store, gloo)
    if mpi.COMM_WORLD.size > 1:
        _exit_guard.watch(mpi, collectives, p2p)
    return group


def _load_on_all_ranks(store: dist.Store, rank: int, size: int, world_ranks: Sequence[int]) -> Any:
    """Return ``mpi4py.MPI`` once all ranks have loaded it and have the same ranks in MPI as in torch."""
    own: PacelineError | None = None
    try:
        mpi = load_mpi(max(world_ranks) + 1)
        if size > 1 and mpi.COMM_WORLD.rank != world_ranks[rank]:
            own = WorldError(
                f"torch's rank {world_ranks[rank]} is rank {mpi.COMM_WORLD.rank} in MPI's world",
                remedy="give torch the ranks that mpiexec gave: paceline.init() reads them",
            )
    except PacelineError as error:
        mpi, own = None, error
    store.set(f"seen/{rank}", str(own) if own else _OK)
    if own is not None:
        raise own
    for other in range(size):
        found = store.get(f"seen/{other}").decode()
        if found != _OK:
            raise WorldError(f"on rank {world_ranks[other]}: {found}")
    return mpi


def _communicators(mpi: Any, world_ranks: Sequence[int]) -> tuple[Any, Any]:
    """Return two communicators of these ranks, in this order: for collectives, and for messages."""
    if len(world_ranks) == 1:
        return mpi.COMM_SELF.Dup(), mpi.COMM_SELF.Dup()
    group = mpi.COMM_WORLD.group.Incl(world_ranks)
    try:
        collectives = mpi.COMM_WORLD.Create_group(group)
        if len(world_ranks) == mpi.COMM_WORLD.size:
            unlink_mpich_shared_memory(collectives)
        return collectives, collectives.Dup()
    finally:
        group.Free()


class _ExitGuard:
    """Aborts all ranks if this one fails: MPI is finalised by all ranks together, so the others would wait for ever."""

    def __init__(self) -> None:
        self._mpi: Any = None
        self._watched: list[tuple[MpiCollectives, MpiPointToPoint]] = []

    def watch(self, mpi: Any, collectives: MpiCollectives, p2p: MpiPointToPoint) -> None:
        """Check at the end of this process whether a group was left in order."""
        self._watched.append((collectives, p2p))
        if self._mpi is None:
            self._mpi, self._hook = mpi, sys.excepthook
            sys.excepthook = self._on_exception
            atexit.register(self._on_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with contextlib.redirect_stderr(sys.__stderr__):  # torch's own hook, around this one, would buffer it
            self._hook(kind, error, trace)
        self._abort()

    def _on_exit(self) -> None:
        rank = self._mpi.COMM_WORLD.rank
        for collectives, p2p in self._watched:
            if collectives.broken or p2p.stuck:
                reason = "a message that it sent was never received" if p2p.stuck else "a collective failed"
                print(f"paceline: rank {rank} ends all ranks of MPI: {reason}", file=sys.stderr)
                self._abort()

    def _abort(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FLUSH_SECONDS)
        self._mpi.COMM_WORLD.Abort(1)


_exit_guard = _ExitGuard()
