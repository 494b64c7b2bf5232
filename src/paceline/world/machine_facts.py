"""Hardware, limits and training software of this machine, as plain values; nothing raises if something is absent."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from paceline._core.cpu_cores import usable_cores
from paceline._core.network_interfaces import Interface, host_address, list_interfaces
from paceline.world.mpi_world import find_mpiexec

__all__ = [
    "CompilerFacts",
    "GpuFacts",
    "LoopbackTiming",
    "MachineFacts",
    "MpiFacts",
    "TorchFacts",
    "available_nbytes",
    "find_compiler",
    "find_mpi",
    "memory_limit",
    "memory_used",
    "read_machine_facts",
    "torch_facts",
]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts of this machine that matter to training.

    Attributes:
        host: host name.
        address: its address, where gloo listens; empty if the name does not resolve.
        system: operating system and architecture.
        python: version of this Python.
        cpu: model of the processor.
        cores: physical cores.
        threads: hardware threads.
        usable_cores: hardware threads that this process may use: affinity and container quota.
        load: runnable processes, mean over the last minute.
        thread_variables: the variables in `THREAD_VARIABLES` that are set.
        memory_nbytes: main memory, or the container's limit.
        available_nbytes: memory still available to programs.
        shm_nbytes: size of /dev/shm, 0 without one.
        shm_free_nbytes: free space of /dev/shm.
        open_files: limit of this process; −1: unlimited.
        locked_nbytes: limit of this process; −1: unlimited.
        processes: limit of this process; −1: unlimited.
        infiniband: names of InfiniBand or RoCE devices.
        nvidia: whether an NVIDIA driver is present, usable by torch or not.
        interfaces: network interfaces.
        gloo_interface: value of GLOO_SOCKET_IFNAME, empty if it is not set.
        torch: None if it can't be imported.
        mpi: the installed MPI.
        compiler: None if no C++ compiler runs.
    """

    host: str
    address: str
    system: str
    python: str
    cpu: str
    cores: int
    threads: int
    usable_cores: float
    load: float
    thread_variables: dict[str, str]
    memory_nbytes: int
    available_nbytes: int
    shm_nbytes: int
    shm_free_nbytes: int
    open_files: int
    locked_nbytes: int
    processes: int
    infiniband: tuple[str, ...]
    nvidia: bool
    interfaces: tuple[Interface, ...]
    gloo_interface: str
    torch: TorchFacts | None
    mpi: MpiFacts
    compiler: CompilerFacts | None


@dataclass(frozen=True, kw_only=True)
class LoopbackTiming:
    """Times of an all-reduce between ranks of this machine.

    Attributes:
        ranks: number of ranks.
        right: whether the sum was correct on rank 0.
        shared: whether the ranks share memory (the paceline backend) instead of only sockets (gloo).
        small_seconds: median time to reduce 4 bytes.
        nbytes: size of the large reduction.
        seconds: median time of the large reduction.
        gloo_seconds: median time of the large reduction over gloo.
    """

    ranks: int
    right: bool
    shared: bool
    small_seconds: float
    nbytes: int
    seconds: float
    gloo_seconds: float


def read_machine_facts(env: Mapping[str, str] | None = None) -> MachineFacts:
    """Return the facts of this machine; imports torch, which takes seconds the first time.

    Args:
        env: the environment variables; None: those of this process.
    """
    env = os.environ if env is None else env
    total = psutil.virtual_memory().total
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return MachineFacts(
        host=socket.gethostname(),
        address=host_address(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=_cpu_model(),
        cores=psutil.cpu_count(logical=False) or 1,
        threads=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        load=os.getloadavg()[0],
        thread_variables={name: env[name] for name in THREAD_VARIABLES if name in env},
        memory_nbytes=min(total, memory_limit() or total),
        available_nbytes=available_nbytes(),
        shm_nbytes=shm.total if shm else 0,
        shm_free_nbytes=shm.free if shm else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_nbytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        infiniband=_names_in("/sys/class/infiniband"),
        nvidia=Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None,
        interfaces=list_interfaces(),
        gloo_interface=env.get("GLOO_SOCKET_IFNAME", ""),
        torch=torch_facts(),
        mpi=find_mpi(),
        compiler=find_compiler(env),
    )


def available_nbytes() -> int:
    """Return the bytes of memory still available to programs, here or in this container."""
    memory = psutil.virtual_memory()
    limit = memory_limit() or memory.total
    if limit < memory.total:
        return max(0, min(memory.available, limit - memory_used()))
    return memory.available


def memory_limit(root: str = "/sys/fs/cgroup") -> int | None:
    """Return the memory limit of a container in bytes; None: unlimited (cgroup v2, ``memory.max``)."""
    text = _read(f"{root}/memory.max").strip()
    return int(text) if text.isdecimal() else None


def memory_used(root: str = "/sys/fs/cgroup") -> int:
    """Return the bytes of memory that a container uses and can't reclaim at once (cgroup v2).

    That is ``memory.current`` minus file pages not used recently (``inactive_file`` of ``memory.stat``).
    """
    text = _read(f"{root}/memory.current").strip()
    stat = re.search(r"^inactive_file (\d+)$", _read(f"{root}/memory.stat"), re.MULTILINE)
    return max(0, int(text) - (int(stat[1]) if stat else 0)) if text.isdecimal() else 0


def _cpu_model() -> str:
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _names_in(folder: str) -> tuple[str, ...]:
    return tuple(sorted(os.listdir(folder))) if Path(folder).is_dir() else ()


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that torch can use; memory in bytes, CUDA's compute capability as in "9.0" (else empty)."""

    name: str
    memory_nbytes: int
    capability: str


@dataclass(frozen=True)
class TorchFacts:
    """The installed PyTorch.

    Attributes:
        version: of PyTorch.
        cuda: CUDA version of the build, empty without CUDA.
        threads: default threads of a process.
        backends: communication backends of the build.
        gpus: GPUs that it can use now.
        gpu_type: torch's type of them, such as ``"cuda"``.
    """

    version: str
    cuda: str
    threads: int
    backends: tuple[str, ...]
    gpus: tuple[GpuFacts, ...]
    gpu_type: str = "cuda"


@dataclass(frozen=True)
class MpiFacts:
    """The installed MPI: version of mpi4py and path of mpiexec, empty if absent."""

    mpi4py: str
    mpiexec: str


@dataclass(frozen=True)
class CompilerFacts:
    """The C++ compiler that torch.compile would use."""

    path: str
    version: str


def torch_facts() -> TorchFacts | None:
    """Return the facts of PyTorch; None if it can't be imported."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):  # OSError: a shared library of it is missing
        return None
    checks = {
        "gloo": "is_gloo_available",
        "nccl": "is_nccl_available",
        "xccl": "is_xccl_available",
        "mpi": "is_mpi_available",
        "ucc": "is_ucc_available",
    }
    available = dist.is_available()
    backends = tuple(name for name, check in checks.items() if available and getattr(dist, check, bool)())
    return TorchFacts(
        str(torch.__version__), torch.version.cuda or "", torch.get_num_threads(), backends, *_gpus()
    )


def _gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return the accelerators that torch can use, and their type."""
    import torch

    from paceline.world.accelerator import find_accelerator

    kind = find_accelerator()
    if kind is None:
        return (), ""
    module, gpus = torch.get_device_module(kind), []
    for index in range(module.device_count()):
        found: Any = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        capability = f"{found.major}.{found.minor}" if hasattr(found, "major") else ""
        name = str(getattr(found, "name", kind))
        gpus.append(GpuFacts(name, getattr(found, "total_memory", 0), capability))
    return tuple(gpus), kind


def find_mpi() -> MpiFacts:
    """Return the facts of MPI, without importing or starting it."""
    try:
        version = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        version = ""
    return MpiFacts(version, find_mpiexec() or shutil.which("mpirun") or "")


def find_compiler(env: Mapping[str, str]) -> CompilerFacts | None:
    """Return the C++ compiler: CXX if set, else g++ or clang++; None if none runs."""
    names = [env["CXX"]] if env.get("CXX") else ["g++", "clang++"]
    for path in filter(None, map(shutil.which, names)):
        try:
            ended = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return CompilerFacts(path, ended.stdout.partition("\n")[0])
    return None
