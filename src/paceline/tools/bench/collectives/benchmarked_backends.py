"""What carries a collective, by the name on the command line, and what each needs (no torch until asked).

| name             | what runs                                                                            |
|------------------|--------------------------------------------------------------------------------------|
| `gloo`           | torch's backend for the CPU, over TCP                                                |
| `paceline`       | ours, on ordinary tensors: shared memory inside a host, the network between hosts    |
| `paceline:arena` | ours, on tensors of `allocate_tensor`, which it reduces where they lie               |
| `nccl`           | NVIDIA's, on GPUs, one per rank                                                      |
| `mpi4py`         | MPI, under mpiexec (MPICH from its wheel, or another one)                            |
| `schedule:NAME`  | our schedule of that name (`paceline collective`) over gloo's send and recv          |
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.collectives.algorithms import ALGORITHMS
from paceline.errors import UsageError, unknown
from paceline.tools.bench.collectives.bus_bandwidth import OPERATIONS
from paceline.world.machine_facts import GpuFacts, torch_facts
from paceline.world.mpi_world import INSTALL_MPI

__all__ = ["BACKENDS", "MPI", "RANKS", "Backend", "backend_of", "check_backends", "default_backends", "gpus"]

RANKS = "ranks"
"""Starts ranks as Python processes, which meet in a file or over TCP."""

MPI = "mpiexec"
"""Starts ranks as MPI wants it; they meet in a file or over TCP too."""


@dataclass(frozen=True)
class Backend:
    """One way to carry collectives.

    Attributes:
        name: as on the command line.
        torch: torch's name for it.
        device: ``"cpu"`` or ``"cuda"``.
        starter: what starts its processes; those of one starter share processes and take turns.
        missing: tells why it can't be had here, with what to do; None: it can.
        arena: its buffers come from the backend's own memory.
        algorithm: the schedule that is run over it; empty: its own collectives are. A schedule works in place: what a
            rank gives to an all-gather, and gets from a reduce-scatter, is a part of one buffer.
        ops: the operations that it has.
        scratch: bytes that its library allocates beyond what others do, in units of S; measured as theirs.
        usual: it takes part where nobody names backends.
    """

    name: str
    torch: str
    device: str
    starter: str
    missing: Callable[[], UsageError | None]
    arena: bool = False
    algorithm: str = ""
    ops: tuple[str, ...] = tuple(OPERATIONS)
    scratch: float = 0.0
    usual: bool = True

    def buffers_for(self, op: str) -> tuple[str, bool, bool]:
        """Return what kind of buffers it needs for an operation: backends that take turns share those of a kind."""
        return self.device, self.arena, bool(self.algorithm) and op in ("all-gather", "reduce-scatter")


def gpus() -> tuple[GpuFacts, ...]:
    """Return the GPUs that torch can use here."""
    facts = torch_facts()
    return facts.gpus if facts else ()


def _built_in(name: str, remedy: str) -> UsageError | None:
    facts = torch_facts()
    if facts and name in facts.backends:
        return None
    return UsageError(f"backend {name!r}: the installed PyTorch is built without it", remedy=remedy)


def _gloo_missing() -> UsageError | None:
    return _built_in("gloo", "install a PyTorch from pytorch.org, which has it")


def _nccl_missing() -> UsageError | None:
    if not gpus():
        return UsageError(
            "backend 'nccl' needs GPUs, and torch can use none here",
            remedy="see `paceline doctor`, or leave it out",
        )
    return _built_in("nccl", "install a PyTorch for CUDA, or leave nccl out")


def _mpi_missing() -> UsageError | None:
    if find_spec("mpi4py") is None:
        return UsageError("backend 'mpi4py': mpi4py is not installed", remedy=INSTALL_MPI)
    return _gloo_missing()


BACKENDS = {
    each.name: each
    for each in (
        Backend("gloo", "gloo", "cpu", RANKS, _gloo_missing),
        Backend("paceline", "paceline", "cpu", RANKS, _gloo_missing),
        Backend("paceline:arena", "paceline", "cpu", RANKS, _gloo_missing, arena=True, usual=False),
        Backend("nccl", "nccl", "cuda", RANKS, _nccl_missing),
        Backend("mpi4py", "mpi4py", "cpu", MPI, _mpi_missing, scratch=0.6),
    )
}


_SCHEDULE = "schedule:"


def backend_of(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        UsageError: there is none; the nearest name is suggested.

    Example:
        >>> backend_of("schedule:ring").ops
        ('all-reduce', 'reduce-scatter', 'all-gather')
    """
    if name in BACKENDS:
        return BACKENDS[name]
    schedules = {f"{_SCHEDULE}{algorithm}": algorithm for op in OPERATIONS for algorithm in ALGORITHMS[op]}
    if name not in schedules:
        raise unknown("backend", name, [*BACKENDS, *schedules])
    algorithm = schedules[name]
    ops = tuple(op for op in OPERATIONS if algorithm in ALGORITHMS[op])
    return Backend(name, "gloo", "cpu", RANKS, _gloo_missing, algorithm=algorithm, ops=ops, usual=False)


def check_backends(names: tuple[str, ...], most_ranks_on_host: int) -> None:
    """Refuse backends that can't run here.

    Args:
        names: which ones.
        most_ranks_on_host: the most ranks that one host gets.

    Raises:
        UsageError: one is unknown or not installed, or there are fewer GPUs than ranks.
    """
    for name in names:
        problem = backend_of(name).missing()
        if problem is not None:
            raise problem
        there = len(gpus()) if backend_of(name).device == "cuda" else most_ranks_on_host
        if most_ranks_on_host > there:
            raise UsageError(
                f"backend {name!r}: {most_ranks_on_host} ranks need a GPU each, and there are {there}",
                remedy=f"give at most {there} with --ranks" if there > 1 else f"leave {name} out",
            )


def default_backends(starters: Collection[str]) -> tuple[str, ...]:
    """Return those that take part where nobody names any: all usual ones that can be had, NCCL from two GPUs on.

    Args:
        starters: what can start ranks here.
    """
    there = [each for each in BACKENDS.values() if each.usual and each.starter in starters]
    return tuple(
        each.name for each in there if each.missing() is None and (each.device == "cpu" or len(gpus()) > 1)
    )
