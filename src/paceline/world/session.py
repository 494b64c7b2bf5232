"""The world of this process: `init` enters it, `shutdown` leaves it."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from paceline.errors import UsageError, WorldError
from paceline.testing import fault_injection
from paceline.world.consistency_check import facts_of_this_process, find_mismatch
from paceline.world.device_selection import check_backend, choose_device
from paceline.world.environment import ProcessPlace, read_environment
from paceline.world.key_value_store import open_store
from paceline.world.live_file import JOINER_VARIABLE
from paceline.world.mpi_world import broadcast_job_key, load_mpi
from paceline.world.rendezvous import RankClaim, join_rendezvous, leave_rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["World", "form_world", "init", "leave_group", "shutdown"]


_FORM_SECONDS = 10.0
"""For ranks that have met already to connect; a connection to one that has ended since may block for so long."""

_GROUP_REGISTRIES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""Of `torch.distributed`, by process group."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among all processes of a training.

    Attributes:
        rank: number of this process, 0 ≤ rank < size.
        size: the world size, processes in all.
        local_rank: number of this process on its node.
        local_size: processes on this node.
        node: number of this node.
        nodes: nodes in all.
        backend: ``"paceline"``, ``"gloo"``, ``"mpi4py"``, ``"nccl"``, that of another accelerator, or ``"none"`` for a
            world of one without a process group.
        device: ``"cpu"``, ``"cuda:<index>"``, or of another accelerator, such as ``"xpu:<index>"``.

    Example:
        >>> World(rank=3, size=8, local_rank=1, local_size=2, node=1, nodes=4).node
        1
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    backend: str = "none"
    device: str = "cpu"


@dataclass
class _Session:
    """State of this process between init and shutdown, and what outlives shutdown.

    `servers` keeps the TCP stores that this process serves open for its lifetime: rank 0 may leave a world and enter
    the next one at the same address while others still leave the first.
    """

    world: World | None = None
    init_method: str | None = None
    owns_group: bool = False
    servers: dict[str, Store] = field(default_factory=dict)


_session = _Session()


def init(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    device: str | None = None,
    timeout: float = 300.0,
    alike: bool = True,
) -> World:
    """Enter the world of ranks that this process was started in, and return its place there.

    torchrun, Slurm, Open MPI and MPICH give the place in environment variables; arguments override them. With nothing
    set this is a world of one, which needs no process group. A second call returns the same world.

    Args:
        backend: ``"paceline"`` (shared memory inside a host; the default on the CPU), ``"gloo"``, ``"mpi4py"`` (for
            ranks under mpiexec), ``"nccl"`` (the default on CUDA), or torch's backend of another accelerator, such as
            ``"xccl"`` (its default).
        init_method: where the ranks meet: ``"file:///path"``, ``"tcp://host:port"`` or ``"env://"``.
        rank: number of this process.
        size: world size.
        local_rank: number of this process on its node; by default the launcher's, or derived from the hosts.
        device: ``"cpu"``, ``"cuda"`` (this node's GPU number `local_rank`) or ``"cuda:<index>"``, and likewise for
            torch's other accelerators (``"xpu"``); by default CUDA or else another accelerator, if there is one.
        timeout: seconds to wait for the other ranks, here and in every collective.
        alike: reject a world in which this rank has other versions (of Paceline, torch, Python, NumPy) or another
            text of the main script than the rest; False: this rank is not compared.

    Raises:
        MismatchError: versions or programs differ; on every rank, naming the ranks and their values.
        WorldError: arguments or variables are missing, wrong or contradict each other.
        MissingRanks: the world did not complete in time; names the missing ranks.
        UsageError: an unknown backend, device or time-out.

    Example:
        >>> init(device="cpu").size
        1
        >>> shutdown()
    """
    if backend is not None:
        check_backend(backend)
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise UsageError(f"timeout={timeout!r}", remedy="give seconds above 0, for example 300")
    fault_injection.arm_from_environment()
    if _session.world is not None:
        _check_same(
            _session.world,
            {"backend": backend, "rank": rank, "size": size, "local_rank": local_rank},
            init_method,
            device,
        )
        return _session.world
    if os.environ.get(JOINER_VARIABLE):
        return _wait_outside(device)
    place = read_environment(os.environ, init_method=init_method, rank=rank, size=size, local_rank=local_rank)
    if place.init_method is None and backend is None:
        chosen, _ = choose_device(device, backend, place.local_rank or 0, 1)
        world = World(local_rank=place.local_rank or 0, device=chosen)
    else:
        world = _join(place, backend, device, timeout, alike)
    _session.world, _session.init_method = world, place.init_method
    return world


def _wait_outside(device: str | None) -> World:
    """Return the place of a newcomer, which is in no world until a running one admits it."""
    place = read_environment(os.environ)
    chosen, _ = choose_device(device, None, place.local_rank or 0, 1)
    _session.world = World(rank=place.rank, size=place.size, local_rank=place.local_rank or 0, device=chosen)
    return _session.world


def shutdown() -> None:
    """Leave the world; without one, do nothing. A later `init` enters a new one.

    Example:
        >>> init(device="cpu").rank
        0
        >>> shutdown()
    """
    if _session.owns_group:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # a group that FSDP2's cycles keep alive can end the process by SIGABRT at its exit
    _session.world, _session.init_method, _session.owns_group = None, None, False


def form_world(store: Store, rank: int, size: int, backend: str, timeout: float) -> World:
    """Leave the process group of the present world, which may be broken, and form one of other ranks.

    Args:
        store: where exactly these ranks meet.
        rank, size: of the new world.
        backend: of its process group, as in the world before.
        timeout: seconds that collectives wait for a rank.

    Raises:
        RuntimeError: the others did not come, or the wait was ended.
    """
    import torch
    import torch.distributed as dist

    from paceline.world.group_devices import queues_on_streams

    before = _session.world
    assert before is not None, "init has been called"
    leave_group()
    device = torch.device(before.device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=min(timeout, _FORM_SECONDS)),
        device_id=device if queues_on_streams(backend) else None,
    )
    _set_timeout(timedelta(seconds=timeout))
    _session.owns_group = True
    _session.world = world = replace(before, rank=rank, size=size, backend=backend)
    return world


def _set_timeout(timeout: timedelta) -> None:
    """Let the collectives of the default group wait for `timeout`."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None, "it has just been formed"
    set_own = getattr(group, "set_timeout", None)  # of Paceline's groups
    if set_own is not None:
        set_own(timeout)
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            group._get_backend(device)._set_default_timeout(timeout)


def leave_group() -> None:
    """Leave the process group at once, whatever is pending.

    Torch forgets all groups. The objects stay in memory: the destructor of a broken gloo group joins threads that wait
    for Python's lock, which the thread that destroys it holds.
    """
    import ctypes

    import torch.distributed as dist

    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        with contextlib.suppress(Exception):  # of a broken group
            group.abort()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    # what that skips if it fails, or after an init that failed; ranks must count their groups alike, for the names
    for name in _GROUP_REGISTRIES:
        getattr(c10d._world, name).clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    c10d._world.group_count = 0


def _join(place: ProcessPlace, backend: str | None, device: str | None, timeout: float, alike: bool) -> World:
    """Meet the other ranks, derive which share a node, and create the process group."""
    import torch
    import torch.distributed as dist

    from paceline.world.accelerator import set_current_device
    from paceline.world.group_devices import queues_on_streams

    if dist.is_initialized():
        raise WorldError(
            "torch.distributed has a process group already, which Paceline did not create",
            remedy="call paceline.init() first and leave the group to it; or go without: paceline.DataParallel, Loader "
            "and the rest use the existing group",
        )
    if backend == "mpi4py" and (place.init_method or "").startswith("tcp://"):
        os.environ |= broadcast_job_key(load_mpi(place.size)).environment()
    store = _open(place, timeout)
    roster = join_rendezvous(
        store,
        place.rank,
        place.size,
        timeout,
        restarted=place.init_method == "env://",
        facts=facts_of_this_process() if alike else None,
    )
    error = find_mismatch([claim.facts for claim in roster.claims])
    if error is not None:
        leave_rendezvous(store, roster, place.rank)
        raise error
    local_rank, local_size, node, nodes = _local_place(place, roster.claims)
    chosen, backend = choose_device(device, backend, local_rank, local_size)
    if backend == "none":
        raise UsageError(
            f"torch.distributed has no backend for device {chosen!r}",
            remedy="use device='cpu', or train in a world of one",
        )
    set_current_device(torch.device(chosen))
    if backend in ("paceline", "mpi4py") and not hasattr(dist.Backend, backend.upper()):
        for entry in entry_points(group="torch.backends", name="paceline"):
            entry.load()()  # torch was configured not to load such extensions itself
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"paceline/group/{roster.name}", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device(chosen) if queues_on_streams(backend) else None,
    )
    _session.owns_group = True
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        backend=backend,
        device=chosen,
    )


def _open(place: ProcessPlace, timeout: float) -> Store:
    """Return the store where this world meets."""
    import torch.distributed as dist

    method = place.init_method
    if method is None:
        return dist.HashStore()
    store = _session.servers.get(method) or open_store(method, place.rank, place.size, timeout)
    if method.startswith("tcp://") and place.rank == 0:
        _session.servers[method] = store
    return store


def _local_place(place: ProcessPlace, claims: Sequence[RankClaim]) -> tuple[int, ...]:
    """Return local_rank, local_size, node and nodes: as given, and otherwise from the ranks that share a host.

    Nodes are numbered by their lowest rank, and ranks of a node by rank.
    """
    hosts = [(claim.host, claim.boot) for claim in claims]
    mine = hosts[place.rank]
    order = list(dict.fromkeys(hosts))
    given = place.local_rank, place.local_size, place.node, place.nodes
    found = hosts[: place.rank].count(mine), hosts.count(mine), order.index(mine), len(order)
    return tuple(seen if known is None else known for known, seen in zip(given, found, strict=True))


def _check_same(world: World, given: dict[str, object], init_method: str | None, device: str | None) -> None:
    """Raise if the arguments of a second init describe another world than the present one."""
    differing = [
        f"{name}={value!r} (now {getattr(world, name)!r})"
        for name, value in given.items()
        if value is not None and value != getattr(world, name)
    ]
    if device is not None and device not in (world.device, world.device.partition(":")[0]):
        differing.append(f"device={device!r} (now {world.device!r})")
    if init_method is not None and init_method not in (_session.init_method, "env://"):
        differing.append(f"init_method={init_method!r} (now {_session.init_method!r})")
    if differing:
        raise WorldError(
            f"this process is in another world already: {', '.join(differing)}",
            remedy="call paceline.shutdown() first, or paceline.init() without arguments for this world",
        )
