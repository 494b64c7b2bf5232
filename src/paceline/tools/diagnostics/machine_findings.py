"""What the facts of a machine mean for training, and what to mend: pure functions over plain facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline._core.format import format_bytes, format_seconds
from paceline._core.network_interfaces import is_loopback
from paceline.world.machine_facts import LoopbackTiming, MachineFacts

__all__ = ["Finding", "findings"]

OLDEST_TORCH = (2, 9)
_GIB = 2**30
_MIN_SHM_NBYTES = _GIB
_MIN_AVAILABLE_NBYTES = 2 * _GIB
_MIN_OPEN_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        subject: what it is about.
        status: ``"ok"``; ``"note"``: absent, and only some need it; ``"warn"``: works, but costs time or will fail
            later; ``"broken"``: training can't work.
        value: what was found.
        remedy: what to do, empty if nothing.
    """

    subject: str
    status: Literal["ok", "note", "warn", "broken"]
    value: str
    remedy: str = ""


def findings(facts: MachineFacts, loopback: LoopbackTiming | str | None) -> list[Finding]:
    """Return what `facts` mean, one finding for each subject.

    Args:
        facts: of the machine.
        loopback: the measured all-reduce, or what went wrong with it; None if it was not tried.
    """
    found = [_system(facts), _cores(facts), _thread_variables(facts), _memory(facts), _shared_memory(facts)]
    found += [_open_files(facts), _locked_memory(facts), _torch(facts), _backends(facts), _gpus(facts)]
    found += [_loopback(loopback), _host_address(facts), *_interfaces(facts), _mpi(facts), _compiler(facts)]
    return found


def _system(facts: MachineFacts) -> Finding:
    return Finding("system", "ok", f"{facts.host}: {facts.system}, Python {facts.python}")


def _cores(facts: MachineFacts) -> Finding:
    value = f"{facts.usable_cores:g} of {facts.threads} hardware threads, {facts.cores} cores; {facts.cpu}"
    if facts.load > facts.usable_cores:
        busy = f"{value}; busy: {facts.load:.1f} processes want to run"
        return Finding("cores", "warn", busy, "stop other programs before you measure, or read ratios only")
    return Finding("cores", "ok", value)


def _thread_variables(facts: MachineFacts) -> Finding:
    value = ", ".join(f"{name}={count}" for name, count in facts.thread_variables.items()) or "none set"
    too_many = [
        name
        for name, count in facts.thread_variables.items()
        if count.isdecimal() and int(count) > facts.usable_cores
    ]
    if too_many:
        return Finding(
            "thread variables", "warn", value, f"unset {', '.join(too_many)}: more threads than cores"
        )
    return Finding("thread variables", "ok", value)


def _memory(facts: MachineFacts) -> Finding:
    value = f"{format_bytes(facts.memory_nbytes)}, {format_bytes(facts.available_nbytes)} available"
    if facts.available_nbytes < _MIN_AVAILABLE_NBYTES:
        return Finding(
            "memory", "warn", value, "end other programs: each rank takes some 0.5 GiB before its model"
        )
    return Finding("memory", "ok", value)


def _shared_memory(facts: MachineFacts) -> Finding:
    value = f"/dev/shm: {format_bytes(facts.shm_nbytes)}, {format_bytes(facts.shm_free_nbytes)} free"
    if not facts.shm_nbytes:
        return Finding(
            "shared memory",
            "warn",
            "no /dev/shm",
            "mount a tmpfs there: data loaders hand batches over in it (Paceline's ranks don't need it)",
        )
    if facts.shm_free_nbytes < _MIN_SHM_NBYTES:
        remedy = "in a container: --shm-size=8g or --ipc=host; else: mount -o remount,size=8G /dev/shm"
        return Finding("shared memory", "warn", value, remedy)
    return Finding("shared memory", "ok", value)


def _open_files(facts: MachineFacts) -> Finding:
    if 0 <= facts.open_files < _MIN_OPEN_FILES:
        remedy = "ulimit -n 65536: each rank holds connections to all others"
        return Finding("open files", "warn", f"at most {facts.open_files}", remedy)
    return Finding("open files", "ok", "no limit" if facts.open_files < 0 else f"at most {facts.open_files}")


def _locked_memory(facts: MachineFacts) -> Finding:
    limit = "no limit" if facts.locked_nbytes < 0 else f"at most {format_bytes(facts.locked_nbytes)}"
    if facts.infiniband and facts.locked_nbytes >= 0:
        value = f"{limit}; InfiniBand: {', '.join(facts.infiniband)}"
        return Finding("locked memory", "warn", value, "ulimit -l unlimited: InfiniBand needs locked memory")
    return Finding("locked memory", "ok", limit)


def _torch(facts: MachineFacts) -> Finding:
    torch = facts.torch
    wanted = ".".join(map(str, OLDEST_TORCH))
    if torch is None:
        return Finding("torch", "broken", "can't be imported", f"pip install 'torch>={wanted}'")
    built = f"CUDA {torch.cuda}" if torch.cuda else "CPU"
    value = f"{torch.version}, built for {built}, {torch.threads} threads"
    numbers = tuple(int(part) for part in torch.version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_TORCH:
        return Finding("torch", "broken", value, f"pip install 'torch>={wanted}'")
    return Finding("torch", "ok", value)


def _backends(facts: MachineFacts) -> Finding:
    there = facts.torch.backends if facts.torch else ()
    value = ", ".join(there) or "none"
    if "gloo" not in there:
        return Finding("backends", "broken", value, "install a torch build with torch.distributed and gloo")
    if facts.torch and facts.torch.gpus and "nccl" not in there:
        return Finding("backends", "warn", value, "install a torch build with NCCL: GPUs need it")
    return Finding("backends", "ok", value)


def _gpus(facts: MachineFacts) -> Finding:
    gpus = facts.torch.gpus if facts.torch else ()
    if gpus:
        value = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_nbytes)})" for gpu in gpus)
        return Finding("GPUs", "ok", value)
    if facts.nvidia and facts.torch:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        if not facts.torch.cuda:
            remedy = "install a torch build with CUDA (see pytorch.org/get-started)"
        return Finding("GPUs", "warn", "an NVIDIA driver, but no GPU that torch can use", remedy)
    return Finding("GPUs", "note", "none: ranks train on the CPU")


def _loopback(loopback: LoopbackTiming | str | None) -> Finding:
    if loopback is None:
        return Finding("all-reduce here", "note", "not tried")
    if isinstance(loopback, str):
        return Finding(
            "all-reduce here", "broken", loopback, "see the message; a firewall on loopback is one cause"
        )
    rate = format_bytes(loopback.nbytes / loopback.seconds)
    value = (
        f"{loopback.ranks} ranks: 4 B in {format_seconds(loopback.small_seconds)}, "
        f"{format_bytes(loopback.nbytes)} in {format_seconds(loopback.seconds)} ({rate}/s; "
        f"over gloo {format_seconds(loopback.gloo_seconds)})"
    )
    if not loopback.right:
        return Finding(
            "all-reduce here", "broken", f"{value}; the sum is wrong", "reinstall torch; test the memory"
        )
    if not loopback.shared:
        return Finding(
            "all-reduce here", "warn", f"{value}; the ranks share no memory", "the warning above says why"
        )
    return Finding("all-reduce here", "ok", value)


def _host_address(facts: MachineFacts) -> Finding:
    outer = [one.name for one in facts.interfaces if one.up and not one.loopback]
    if facts.gloo_interface:
        value = f"GLOO_SOCKET_IFNAME={facts.gloo_interface}"
        if facts.gloo_interface in (one.name for one in facts.interfaces if one.up):
            return Finding("host name", "ok", f"not used by gloo: {value}")
        names = ", ".join(one.name for one in facts.interfaces if one.up)
        return Finding(
            "host name", "broken", f"{value}, which is no interface in use", f"name one of: {names}"
        )
    which = outer[0] if len(outer) == 1 else f"(the one of {', '.join(outer)} that reaches the other hosts)"
    remedy = f"for training on several hosts: export GLOO_SOCKET_IFNAME={which}" if outer else ""
    if not facts.address:
        value = f"the name {facts.host} resolves to nothing"
        return Finding("host name", "warn" if outer else "note", value, remedy or "add it to /etc/hosts")
    value = f"{facts.host} is {facts.address}"
    if is_loopback(facts.address) and outer:
        return Finding("host name", "warn", f"{value}, which other hosts can't reach", remedy)
    return Finding("host name", "ok", value)


def _interfaces(facts: MachineFacts) -> Iterator[Finding]:
    for one in facts.interfaces:
        gbit = one.bytes_per_second * 8 / 1e9
        speed = f"{gbit:g} Gbit/s" if gbit else "speed unknown"
        state = "" if one.up else ", down"
        yield Finding(
            f"network {one.name}", "ok", f"{', '.join(one.addresses)}; {speed}, MTU {one.mtu}{state}"
        )


def _mpi(facts: MachineFacts) -> Finding:
    parts = [f"mpi4py {facts.mpi.mpi4py}"] if facts.mpi.mpi4py else []
    parts += [facts.mpi.mpiexec] if facts.mpi.mpiexec else []
    if len(parts) == 2:
        return Finding("MPI", "ok", ", ".join(parts))
    absent = [
        name for name, there in (("mpi4py", facts.mpi.mpi4py), ("mpiexec", facts.mpi.mpiexec)) if not there
    ]
    value = ", ".join([*parts, f"no {' and no '.join(absent)}"])
    return Finding(
        "MPI", "note", value, "only starting ranks with mpirun needs it: install mpich or openmpi-bin"
    )


def _compiler(facts: MachineFacts) -> Finding:
    if facts.compiler:
        return Finding("C++ compiler", "ok", f"{facts.compiler.path}: {facts.compiler.version}")
    return Finding(
        "C++ compiler", "note", "none", "only torch.compile on CPU needs it: install g++ or clang++"
    )
