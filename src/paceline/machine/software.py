"""Software for training: torch and what it can use, MPI, a compiler. Nothing here raises if something is absent."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from paceline.machine.mpiexec import find_mpiexec

__all__ = ["Compiler", "Gpu", "Mpi", "Torch", "compiler", "mpi", "torch_facts"]


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use; memory in bytes, compute capability as in "9.0"."""

    name: str
    memory_nbytes: int
    capability: str


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch.

    Attributes:
        version: of PyTorch.
        cuda: CUDA version that it was built with, empty for a build without.
        threads: threads that one process uses by default.
        backends: communication backends that it was built with.
        gpus: GPUs that it can use now.
    """

    version: str
    cuda: str
    threads: int
    backends: tuple[str, ...]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Mpi:
    """The installed MPI: version of mpi4py and path of mpiexec, each empty if absent."""

    mpi4py: str
    mpiexec: str


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler that torch.compile would use."""

    path: str
    version: str


def torch_facts() -> Torch | None:
    """Return the facts of PyTorch, None if it can't be imported."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):  # OSError: a shared library of it is missing
        return None
    checks = {
        "gloo": "is_gloo_available",
        "nccl": "is_nccl_available",
        "mpi": "is_mpi_available",
        "ucc": "is_ucc_available",
    }
    there = dist.is_available()
    backends = tuple(name for name, check in checks.items() if there and getattr(dist, check, bool)())
    gpus = (
        tuple(_gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    )
    return Torch(torch.__version__, torch.version.cuda or "", torch.get_num_threads(), backends, gpus)


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.name, properties.total_memory, f"{properties.major}.{properties.minor}")


def mpi() -> Mpi:
    """Return what there is of MPI; nothing of it is imported or started."""
    try:
        version = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        version = ""
    return Mpi(version, find_mpiexec() or shutil.which("mpirun") or "")


def compiler(env: Mapping[str, str]) -> Compiler | None:
    """Return the C++ compiler: CXX if set, else g++ or clang++; None if there is none that runs."""
    names = [env["CXX"]] if env.get("CXX") else ["g++", "clang++"]
    for path in filter(None, map(shutil.which, names)):
        try:
            told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(path, told.stdout.partition("\n")[0])
    return None
