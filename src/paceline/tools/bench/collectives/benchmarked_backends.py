"""Backends of the collectives benchmark, by their name on the command line, and their requirements.

| name             | implementation                                                                       |
|------------------|--------------------------------------------------------------------------------------|
| `gloo`           | torch's backend for the CPU, over TCP                                                |
| `paceline`       | Paceline's, on ordinary tensors: shared memory inside a host, the network between    |
| `paceline:arena` | Paceline's, on tensors of `allocate_tensor`, which it reduces in place               |
| `nccl`           | NVIDIA's, on GPUs, one per rank                                                      |
| `mpi4py`         | MPI, under mpiexec (MPICH from its wheel, or another one)                            |
| `schedule:NAME`  | the schedule of that name (`paceline collective`) over gloo's send and recv          |

Torch is imported only to look for GPUs and built-in backends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec

from paceline.collectives.algorithms import ALGORITHMS
from paceline.errors import UsageError, unknown
from paceline.tools.bench.collectives.bus_bandwidth import OPERATIONS
from paceline.world.machine_facts import GpuFacts, torch_facts
from paceline.world.mpi_world import INSTALL_MPI

__all__ = [
    "BACKENDS",
    "LOCAL_RANKS",
    "MPIEXEC",
    "BenchmarkedBackend",
    "check_backends",
    "default_backends",
    "find_backend",
    "usable_gpus",
]

LOCAL_RANKS = "ranks"
"""Launcher of ranks as Python processes, with a rendezvous over a file or TCP."""

MPIEXEC = "mpiexec"
"""Launcher of ranks under MPI, with a rendezvous over a file or TCP too."""

_SCHEDULE = "schedule:"


@dataclass(frozen=True)
class BenchmarkedBackend:
    """One implementation of collectives.

    Attributes:
        name: as on the command line.
        torch: torch's name for it.
        device: ``"cpu"`` or ``"cuda"``.
        launcher: starts its processes, `LOCAL_RANKS` or `MPIEXEC`; backends with the same one share processes.
        problem: returns the error, with a remedy, if it can't be used here, else None.
        arena: its buffers come from the backend's own memory.
        algorithm: the schedule that is run over it; empty: its own collectives. A schedule works in place: a rank's
            input of an all-gather, and its output of a reduce-scatter, is a part of one buffer.
        ops: its operations.
        scratch: bytes that its library allocates beyond the others' ÷ S, as measured.
        default: it is benchmarked if no backends are named.
    """

    name: str
    torch: str
    device: str
    launcher: str
    problem: Callable[[], UsageError | None]
    _: KW_ONLY
    arena: bool = False
    algorithm: str = ""
    ops: tuple[str, ...] = tuple(OPERATIONS)
    scratch: float = 0.0
    default: bool = True

    def buffer_kind(self, op: str) -> tuple[str, bool, bool]:
        """Return the kind of its buffers for an operation; backends in the same processes share equal kinds."""
        return self.device, self.arena, bool(self.algorithm) and op in ("all-gather", "reduce-scatter")


def usable_gpus() -> tuple[GpuFacts, ...]:
    """Return the CUDA GPUs that torch can use here."""
    facts = torch_facts()
    return facts.gpus if facts and facts.gpu_type == "cuda" else ()


def _built_in(name: str, remedy: str) -> UsageError | None:
    facts = torch_facts()
    if facts and name in facts.backends:
        return None
    return UsageError(f"backend {name!r}: the installed PyTorch is built without it", remedy=remedy)


def _gloo_problem() -> UsageError | None:
    return _built_in("gloo", "install a PyTorch from pytorch.org, which has it")


def _nccl_problem() -> UsageError | None:
    if not usable_gpus():
        return UsageError(
            "backend 'nccl' needs GPUs, and torch can use none here",
            remedy="see `paceline doctor`, or leave it out",
        )
    return _built_in("nccl", "install a PyTorch for CUDA, or leave nccl out")


def _mpi_problem() -> UsageError | None:
    if find_spec("mpi4py") is None:
        return UsageError("backend 'mpi4py': mpi4py is not installed", remedy=INSTALL_MPI)
    return _gloo_problem()


BACKENDS = {
    each.name: each
    for each in (
        BenchmarkedBackend("gloo", "gloo", "cpu", LOCAL_RANKS, _gloo_problem),
        BenchmarkedBackend("paceline", "paceline", "cpu", LOCAL_RANKS, _gloo_problem),
        BenchmarkedBackend(
            "paceline:arena", "paceline", "cpu", LOCAL_RANKS, _gloo_problem, arena=True, default=False
        ),
        BenchmarkedBackend("nccl", "nccl", "cuda", LOCAL_RANKS, _nccl_problem),
        BenchmarkedBackend("mpi4py", "mpi4py", "cpu", MPIEXEC, _mpi_problem, scratch=0.6),
    )
}


def find_backend(name: str) -> BenchmarkedBackend:
    """Return the backend of that name.

    Raises:
        UsageError: the name is unknown; the nearest one is suggested.

    Example:
        >>> find_backend("schedule:ring").ops
        ('all-reduce', 'reduce-scatter', 'all-gather')
    """
    if name in BACKENDS:
        return BACKENDS[name]
    schedules = {f"{_SCHEDULE}{algorithm}": algorithm for op in OPERATIONS for algorithm in ALGORITHMS[op]}
    if name not in schedules:
        raise unknown("backend", name, [*BACKENDS, *schedules])
    algorithm = schedules[name]
    ops = tuple(op for op in OPERATIONS if algorithm in ALGORITHMS[op])
    return BenchmarkedBackend(
        name, "gloo", "cpu", LOCAL_RANKS, _gloo_problem, algorithm=algorithm, ops=ops, default=False
    )


def check_backends(names: tuple[str, ...], most_ranks_on_host: int) -> None:
    """Refuse backends that can't run here.

    Args:
        names: of the backends.
        most_ranks_on_host: largest number of ranks on one host.

    Raises:
        UsageError: one is unknown or not installed, or there are fewer GPUs than ranks.
    """
    for name in names:
        problem = find_backend(name).problem()
        if problem is not None:
            raise problem
        usable = len(usable_gpus()) if find_backend(name).device == "cuda" else most_ranks_on_host
        if most_ranks_on_host > usable:
            raise UsageError(
                f"backend {name!r}: {most_ranks_on_host} ranks need a GPU each, and there are {usable}",
                remedy=f"give at most {usable} with --nproc-per-node" if usable > 1 else f"leave {name} out",
            )


def default_backends(launchers: Collection[str]) -> tuple[str, ...]:
    """Return the names of the default backends that can be used here; NCCL only with two GPUs or more.

    Args:
        launchers: that are available here.
    """
    return tuple(
        each.name
        for each in BACKENDS.values()
        if each.default
        and each.launcher in launchers
        and each.problem() is None
        and (each.device == "cpu" or len(usable_gpus()) > 1)
    )
