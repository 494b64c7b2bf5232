"""Hardware and limits of this machine, as plain numbers: :func:`machine`."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.machine.network import Interface, host_address, interfaces
from paceline.machine.software import Compiler, Mpi, Torch, compiler, mpi, torch_facts

__all__ = ["Loopback", "Machine", "cpu_quota", "machine", "memory_limit"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS")


@dataclass(frozen=True)
class Machine:
    """Facts of this machine that matter to training.

    Attributes:
        host: its name.
        address: what its name resolves to, empty if to nothing; gloo listens there.
        system: operating system and architecture.
        python: version of this Python.
        cpu: model of the processor.
        cores: physical cores.
        threads: hardware threads.
        usable_cores: hardware threads that this process may use: affinity and container quota.
        load: processes that wanted to run, mean over the last minute.
        thread_variables: those set of OMP_NUM_THREADS and the like.
        memory_nbytes: main memory, or the container's limit.
        available_nbytes: what of it programs can still get.
        shm_nbytes, shm_free_nbytes: size and free space of /dev/shm, 0 if there is none.
        open_files, locked_nbytes, processes: limits of this process; −1: unlimited.
        infiniband: names of InfiniBand or RoCE devices.
        nvidia: whether the driver of an NVIDIA GPU is there, whatever torch can use.
        interfaces: network interfaces.
        gloo_interface: what GLOO_SOCKET_IFNAME names, empty if it is not set.
        torch, mpi, compiler: software; `torch` is None if it can't be imported.
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
    torch: Torch | None
    mpi: Mpi
    compiler: Compiler | None


@dataclass(frozen=True)
class Loopback:
    """Times of an all-reduce between ranks of this machine.

    Attributes:
        ranks: how many took part.
        right: whether the sum was right on rank 0.
        small_seconds: median time to reduce 4 bytes.
        nbytes: size of the large reduction.
        seconds: median time to reduce it.
    """

    ranks: int
    right: bool
    small_seconds: float
    nbytes: int
    seconds: float


def machine(env: Mapping[str, str] | None = None) -> Machine:
    """Return the facts of this machine; imports torch, which takes seconds the first time.

    Args:
        env: the environment variables, by default those of this process.
    """
    env = os.environ if env is None else env
    memory = psutil.virtual_memory()
    total = min(memory.total, memory_limit() or memory.total)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Machine(
        host=socket.gethostname(),
        address=host_address(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=_cpu_model(),
        cores=psutil.cpu_count(logical=False) or 1,
        threads=os.cpu_count() or 1,
        usable_cores=min(float(_affinity()), cpu_quota() or float("inf")),
        load=os.getloadavg()[0],
        thread_variables={name: env[name] for name in THREAD_VARIABLES if name in env},
        memory_nbytes=total,
        available_nbytes=min(memory.available, total),
        shm_nbytes=shm.total if shm else 0,
        shm_free_nbytes=shm.free if shm else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_nbytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        infiniband=_names_in("/sys/class/infiniband"),
        nvidia=Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None,
        interfaces=interfaces(),
        gloo_interface=env.get("GLOO_SOCKET_IFNAME", ""),
        torch=torch_facts(),
        mpi=mpi(),
        compiler=compiler(env),
    )


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """Return the cores that a container may use at once, None without a limit.

    Source: Linux, cgroup-v2.rst, ``cpu.max``: "$QUOTA $PERIOD" in microseconds.
    """
    words = _read(f"{root}/cpu.max").split()
    if len(words) != 2 or not words[0].isdecimal():
        return None
    return int(words[0]) / int(words[1])


def memory_limit(root: str = "/sys/fs/cgroup") -> int | None:
    """Return the memory that a container may use in bytes, None without a limit (cgroup v2, ``memory.max``)."""
    text = _read(f"{root}/memory.max").strip()
    return int(text) if text.isdecimal() else None


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
