"""Reads this process's place in the world from arguments and environment variables.

The environment is an argument of every function. Arguments take precedence over variables, and an inner launcher over
an outer one (torchrun started by srun, say). Two sources that should agree and don't are an error that names both.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import WorldError
from paceline.world.key_value_store import resolve_init_method

__all__ = ["ProcessPlace", "boot_id", "host_label", "read_environment"]


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """This process's place in the world, as far as arguments and variables give it.

    Attributes:
        rank: number of this process.
        size: the world size.
        local_rank: number of this process on its node; None: not given.
        local_size: processes on the node; None: not given.
        node: number of the node; None: not given.
        nodes: number of nodes; None: not given.
        init_method: where the ranks meet: ``file:///path``, ``tcp://host:port``, or ``env://`` for the store of a
            torchrun agent. None: a world of one, without a rendezvous.
        source: the launcher, or ``"arguments"``, for messages.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    nodes: int | None
    init_method: str | None
    source: str


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Names of the variables in which a launcher gives a process its place; empty: it has none."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    node: str = ""
    nodes: str = ""


TORCHRUN = Launcher(
    name="torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
    nodes="GROUP_WORLD_SIZE",
)
OPEN_MPI = Launcher(
    name="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = Launcher(
    name="MPICH", rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS"
)
SLURM = Launcher(
    name="Slurm",
    rank="SLURM_PROCID",
    size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    node="SLURM_NODEID",
    nodes="SLURM_NNODES",
)

# Slurm's batch scripts and interactive shells have no step id, or one numbered from the top: negative if it is printed
# as signed (slurm.h, src/common/env.c). They are not tasks, though they have SLURM_PROCID=0.
_FIRST_SHELL_STEP = 0xFFFFFFF0


def read_environment(
    env: Mapping[str, str],
    *,
    init_method: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
) -> ProcessPlace:
    """Return this process's place in the world.

    Args:
        env: the environment variables.
        init_method: where the ranks meet; overrides ``PACELINE_INIT_METHOD`` and ``MASTER_ADDR``/``MASTER_PORT``.
        rank: overrides the launcher's rank.
        size: overrides the launcher's world size.
        local_rank: overrides the launcher's rank on this node.

    Raises:
        WorldError: variables or arguments are missing, malformed or contradict each other.

    Example:
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pc1", "MASTER_PORT": "29500"}
        >>> place = read_environment(env)
        >>> place.rank, place.size, place.init_method, place.source
        (1, 2, 'tcp://pc1:29500', 'torchrun')
        >>> read_environment({}).size
        1
    """
    launcher = None if rank is not None and size is not None else find_launcher(env)
    given = init_method or env.get("PACELINE_INIT_METHOD")
    if given and launcher is None and rank is None and size is None:
        raise WorldError(
            f"the init method is {given!r}, but this process has no rank",
            remedy="pass rank= and size= too, set RANK and WORLD_SIZE, or use torchrun, srun or mpirun",
        )
    rank, size = _rank_and_size(env, launcher, rank, size)
    local = _local_place(env, launcher, rank, size)
    if local_rank is not None:
        limit = local["local_size"]
        _check_index("local_rank (argument)", local_rank, "the number of ranks on this node", limit)
        local["local_rank"] = local_rank
    name = launcher.name if launcher else ""
    method = resolve_init_method(
        env, init_method, name, rank=rank, size=size, local_size=local["local_size"], nodes=local["nodes"]
    )
    return ProcessPlace(rank=rank, size=size, init_method=method, source=name or "arguments", **local)


def host_label(env: Mapping[str, str], rank: int, size: int) -> str:
    """Return a text that is the same for all ranks of a host, and differs between hosts.

    If a launcher gives the node number of this very rank, that is used, so several hosts can be simulated on one
    machine; otherwise the host name and its boot id.

    Args:
        env: the environment variables.
        rank: of this process.
        size: the world size.
    """
    node = _local_place(env, find_launcher(env), rank, size)["node"]
    return f"node {node}" if node is not None else f"{socket.gethostname()} {boot_id()}"


def boot_id() -> str:
    """Return an id that distinguishes hosts of the same name; empty if the system has none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process; None: there is none.

    Raises:
        WorldError: two launchers that don't run inside each other give different places.
    """
    found = [launcher for launcher in (TORCHRUN, OPEN_MPI, MPICH, SLURM) if _is_present(env, launcher)]
    if SLURM in found and MPICH in found and MPICH.local_rank not in env:
        found.remove(MPICH)  # srun --mpi=pmi2 sets MPICH's variables, but fewer than its own
    if not found:
        return None
    if found[0] is TORCHRUN and ("TORCHELASTIC_RUN_ID" in env or "PACELINE_INIT_METHOD" in env):
        return TORCHRUN  # it started this process itself; any other launcher started torchrun
    chosen = next((launcher for launcher in found if launcher.rank in env and launcher.size in env), found[0])
    for other in found:
        if chosen in (OPEN_MPI, MPICH) and other is SLURM:
            continue  # mpirun inside a Slurm job: Slurm's tasks are its daemons, not its ranks
        for mine, theirs in ((chosen.rank, other.rank), (chosen.size, other.size)):
            if mine in env and theirs in env and env[mine] != env[theirs]:
                raise WorldError(
                    f"{chosen.name} and {other.name} disagree: {_shown(env, mine)}, {_shown(env, theirs)}",
                    remedy=f"unset the variables of {chosen.name} or those of {other.name}",
                )
    return chosen


def _is_present(env: Mapping[str, str], launcher: Launcher) -> bool:
    if launcher is SLURM:
        step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
        is_task = step.isdecimal() and int(step) < _FIRST_SHELL_STEP
        return is_task and launcher.rank in env and launcher.size in env
    return launcher.rank in env or launcher.size in env


def _rank_and_size(
    env: Mapping[str, str], launcher: Launcher | None, rank: int | None, size: int | None
) -> tuple[int, int]:
    """Return rank and size: from arguments, else from the launcher, else a world of one."""
    if launcher is None and rank is None and size is None:
        return 0, 1
    rank_source, size_source = "rank (argument)", "size (argument)"
    if launcher is None and (rank is None or size is None):
        given, missing = (f"size={size}", "rank") if rank is None else (f"rank={rank}", "size")
        raise WorldError(
            f"{given} was given, but no {missing}", remedy=f"pass {missing}= too, or start with torchrun"
        )
    if launcher is not None and rank is None:
        rank, rank_source = _required(env, launcher.rank, launcher.size, launcher), launcher.rank
    if launcher is not None and size is None:
        size, size_source = _required(env, launcher.size, launcher.rank, launcher), launcher.size
    assert rank is not None, "given, or read"
    assert size is not None, "given, or read"
    if size < 1:
        raise WorldError(
            f"{size_source} is {size}; a world has at least one rank", remedy=f"set {size_source} ≥ 1"
        )
    _check_index(rank_source, rank, size_source, size)
    return rank, size


def _local_place(
    env: Mapping[str, str], launcher: Launcher | None, rank: int, size: int
) -> dict[str, int | None]:
    """Return local_rank, local_size, node and nodes, if the launcher gives them for this very rank."""
    local: dict[str, int | None] = dict.fromkeys(("local_rank", "local_size", "node", "nodes"))
    if launcher is None or (_integer(env, launcher.rank), _integer(env, launcher.size)) != (rank, size):
        return local  # the arguments describe another world than the launcher's
    for field in local:
        local[field] = _integer(env, getattr(launcher, field))
    local_size, nodes = local["local_size"], local["nodes"]
    _check_index(launcher.local_rank, local["local_rank"], launcher.local_size, local_size)
    _check_index(launcher.node, local["node"], launcher.nodes, nodes)
    if local_size is not None and local_size > size:
        raise WorldError(
            f"{_shown(env, launcher.local_size)}, more than {_shown(env, launcher.size)}",
            remedy=f"{launcher.local_size} counts the ranks of one node, {launcher.size} those of all",
        )
    return local


def _integer(env: Mapping[str, str], name: str) -> int | None:
    if not name or name not in env:
        return None
    try:
        return int(env[name])
    except ValueError:
        raise WorldError(
            f"{_shown(env, name)} is not an integer", remedy=f"set {name} to an integer, or unset it"
        ) from None


def _required(env: Mapping[str, str], name: str, other: str, launcher: Launcher) -> int:
    value = _integer(env, name)
    if value is None:
        raise WorldError(
            f"{_shown(env, other)}, but {name} is not set",
            remedy=f"set {name} too (as {launcher.name} does), or unset {other} for a world of one",
        )
    return value


def _check_index(name: str, index: int | None, limit_name: str, limit: int | None) -> None:
    if index is None or (index >= 0 and (limit is None or index < limit)):
        return
    most = f"{limit_name} is {limit}" if limit is not None else "it is negative"
    valid = f"valid: 0 to {limit - 1}" if limit is not None and limit > 0 else "valid: 0 or more"
    raise WorldError(f"{name} is {index}, but {most}", remedy=f"{valid}; ranks are counted from 0")


def _shown(env: Mapping[str, str], name: str) -> str:
    return f"{name}={env[name]!r}" if name in env else f"{name} is not set"
