"""The ``"mpi4py"`` backend of ``torch.distributed``: collectives and messages over MPI, for ranks under mpiexec.

    mpiexec -n 4 python train.py        # paceline.init("mpi4py"), or init_process_group("mpi4py", …)

A group of some ranks is a communicator of theirs (``MPI_Comm_create_group``), so ranks outside it take no part in
making it. What MPI does not serve (CUDA tensors, sparse ones) falls through to gloo or NCCL, as in a paceline group.
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

from paceline.backends.group_factory import register_inner
from paceline.backends.mpi_collectives import MpiCollectives
from paceline.backends.mpi_p2p import MpiPointToPoint
from paceline.backends.process_group import PacelineProcessGroup
from paceline.errors import PacelineError, WorldError
from paceline.world.mpi_world import load_mpi, release_mpi_names

__all__ = ["create"]

NAME = "mpi4py"
_WELL = "well"
_TELL_SECONDS = 0.3
"""For mpiexec to pass on what this rank wrote, before it ends them all."""


def create(options: Any, backend_options: Any = None) -> PacelineProcessGroup:
    """Build the group that torch asked for; what ``Backend.register_backend`` calls.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, place, ranks, time-out.
        backend_options: none are known.

    Raises:
        UsageError, WorldError: MPI is not there, or on some rank its world is another one than torch's; raised by
            all ranks.
    """
    del backend_options
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    world_ranks = list(options.global_ranks_in_group) or list(range(size))
    store = dist.PrefixStore(f"paceline-mpi/{'-'.join(map(str, world_ranks))}", options.store)
    mpi = _agreed(store, rank, size, world_ranks)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    calls, messages = _communicators(mpi, world_ranks)
    seconds = timeout.total_seconds()
    route, mail = MpiCollectives(mpi, calls, world_ranks, seconds), MpiPointToPoint(mpi, messages, seconds)
    group = PacelineProcessGroup(rank, size, route, mail, NAME)
    register_inner(group, options, store, gloo)
    if mpi.COMM_WORLD.size > 1:
        _ends.watch(mpi, route, mail)
    return group


def _agreed(store: dist.Store, rank: int, size: int, world_ranks: Sequence[int]) -> Any:
    """Return ``mpi4py.MPI``, once all ranks have it and are who torch says they are."""
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
    store.set(f"seen/{rank}", str(own) if own else _WELL)
    if own is not None:
        raise own
    for other in range(size):
        found = store.get(f"seen/{other}").decode()
        if found != _WELL:
            raise WorldError(f"on rank {world_ranks[other]}: {found}")
    return mpi


def _communicators(mpi: Any, world_ranks: Sequence[int]) -> tuple[Any, Any]:
    """Return two communicators of these ranks, in this order: for collectives, and for messages."""
    if len(world_ranks) == 1:
        return mpi.COMM_SELF.Dup(), mpi.COMM_SELF.Dup()
    group = mpi.COMM_WORLD.group.Incl(world_ranks)
    try:
        calls = mpi.COMM_WORLD.Create_group(group)
        if len(world_ranks) == mpi.COMM_WORLD.size:
            release_mpi_names(calls)
        return calls, calls.Dup()
    finally:
        group.Free()


class _Ends:
    """Ends all ranks where this one fails: MPI is left by all ranks together, so the others would wait for ever."""

    def __init__(self) -> None:
        self._mpi: Any = None
        self._watched: list[tuple[MpiCollectives, MpiPointToPoint]] = []

    def watch(self, mpi: Any, route: MpiCollectives, mail: MpiPointToPoint) -> None:
        """Look at the end of this process whether a group was left in order."""
        self._watched.append((route, mail))
        if self._mpi is None:
            self._mpi, self._hook = mpi, sys.excepthook
            sys.excepthook = self._raised
            atexit.register(self._at_exit)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.redirect_stderr(sys.__stderr__):  # torch's own hook, around this one, holds it back
            self._hook(kind, error, trace)
        self._abort()

    def _at_exit(self) -> None:
        rank = self._mpi.COMM_WORLD.rank
        for route, mail in self._watched:
            if route.broken or mail.stuck:
                what = "a message that it sent was never taken" if mail.stuck else "a collective was given up"
                print(f"paceline: rank {rank} ends all ranks of MPI: {what}", file=sys.stderr)
                self._abort()

    def _abort(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_TELL_SECONDS)
        self._mpi.COMM_WORLD.Abort(1)


_ends = _Ends()
