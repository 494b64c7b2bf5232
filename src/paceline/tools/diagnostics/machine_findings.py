"""Findings of ``paceline doctor``: the facts of a machine judged for training, with remedies; pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline._core.format import format_bytes, format_seconds
from paceline._core.native import why_not_native
from paceline._core.network_interfaces import is_loopback
from paceline.world.machine_facts import LoopbackTiming, MachineFacts

__all__ = ["MachineFinding", "diagnose_machine"]

OLDEST_TORCH = (2, 9)
_GIB = 2**30
_MIN_SHM_NBYTES = _GIB
_MIN_AVAILABLE_NBYTES = 2 * _GIB
_MIN_OPEN_FILES = 4096


@dataclass(frozen=True)
class MachineFinding:
    """One row of the doctor's table.

    Attributes:
        subject: the judged hardware, limit or software.
        status: ``"ok"``; ``"note"``: absent, and only some need it; ``"warn"``: works, but costs time or will fail
            later; ``"broken"``: training can't work.
        value: the facts, as text.
        remedy: to apply; empty if none is needed.
    """

    subject: str
    status: Literal["ok", "note", "warn", "broken"]
    value: str
    remedy: str = ""


def diagnose_machine(facts: MachineFacts, loopback: LoopbackTiming | str | None) -> list[MachineFinding]:
    """Return one finding per subject.

    Args:
        facts: of the machine.
        loopback: the measured all-reduce, or the error message; None if it was not tried.
    """
    found = [_system(facts), _cores(facts), _thread_variables(facts), _memory(facts), _shared_memory(facts)]
    found += [
        _compiled_part(facts),
        _open_files(facts),
        _locked_memory(facts),
        _torch(facts),
        _backends(facts),
        _gpus(facts),
    ]
    found += [_loopback(loopback), _host_address(facts), *_interfaces(facts), _mpi(facts), _compiler(facts)]
    return found


def _on_linux(facts: MachineFacts) -> bool:
    return facts.system.startswith("Linux ")


def _system(facts: MachineFacts) -> MachineFinding:
    value = f"{facts.host}: {facts.system}, Python {facts.python}"
    if not _on_linux(facts):
        remedy = "Paceline is tried on Linux only; here ranks exchange over gloo, not in shared memory"
        return MachineFinding("system", "warn", value, remedy)
    return MachineFinding("system", "ok", value)


def _cores(facts: MachineFacts) -> MachineFinding:
    value = f"{facts.usable_cores:g} of {facts.threads} hardware threads, {facts.cores} cores; {facts.cpu}"
    if facts.load > facts.usable_cores:
        busy = f"{value}; busy: {facts.load:.1f} processes want to run"
        return MachineFinding(
            "cores", "warn", busy, "stop other programs before you measure, or read ratios only"
        )
    return MachineFinding("cores", "ok", value)


def _thread_variables(facts: MachineFacts) -> MachineFinding:
    value = ", ".join(f"{name}={count}" for name, count in facts.thread_variables.items()) or "none set"
    too_many = [
        name
        for name, count in facts.thread_variables.items()
        if count.isdecimal() and int(count) > facts.usable_cores
    ]
    if too_many:
        return MachineFinding(
            "thread variables", "warn", value, f"unset {', '.join(too_many)}: more threads than cores"
        )
    return MachineFinding("thread variables", "ok", value)


def _memory(facts: MachineFacts) -> MachineFinding:
    value = f"{format_bytes(facts.memory_nbytes)}, {format_bytes(facts.available_nbytes)} available"
    if facts.available_nbytes < _MIN_AVAILABLE_NBYTES:
        return MachineFinding(
            "memory", "warn", value, "end other programs: each rank takes some 0.5 GiB before its model"
        )
    return MachineFinding("memory", "ok", value)


def _shared_memory(facts: MachineFacts) -> MachineFinding:
    value = f"/dev/shm: {format_bytes(facts.shm_nbytes)}, {format_bytes(facts.shm_free_nbytes)} free"
    if not facts.shm_nbytes and not _on_linux(facts):
        return MachineFinding("shared memory", "note", "no /dev/shm: a folder of Linux only")
    if not facts.shm_nbytes:
        return MachineFinding(
            "shared memory",
            "warn",
            "no /dev/shm",
            "mount a tmpfs there: data loaders hand batches over in it (Paceline's ranks don't need it)",
        )
    if facts.shm_free_nbytes < _MIN_SHM_NBYTES:
        remedy = "in a container: --shm-size=8g or --ipc=host; else: mount -o remount,size=8G /dev/shm"
        return MachineFinding("shared memory", "warn", value, remedy)
    return MachineFinding("shared memory", "ok", value)


def _compiled_part(facts: MachineFacts) -> MachineFinding:
    problem = why_not_native()
    if not problem:
        return MachineFinding("compiled part", "ok", "calls between ranks of a host run in compiled code")
    if not _on_linux(facts):
        return MachineFinding("compiled part", "note", "none: Linux only")
    return MachineFinding("compiled part", "note", f"none, small messages take longer: {problem}")


def _open_files(facts: MachineFacts) -> MachineFinding:
    if 0 <= facts.open_files < _MIN_OPEN_FILES:
        remedy = "ulimit -n 65536: each rank holds connections to all others"
        return MachineFinding("open files", "warn", f"at most {facts.open_files}", remedy)
    return MachineFinding(
        "open files", "ok", "no limit" if facts.open_files < 0 else f"at most {facts.open_files}"
    )


def _locked_memory(facts: MachineFacts) -> MachineFinding:
    limit = "no limit" if facts.locked_nbytes < 0 else f"at most {format_bytes(facts.locked_nbytes)}"
    if facts.infiniband and facts.locked_nbytes >= 0:
        value = f"{limit}; InfiniBand: {', '.join(facts.infiniband)}"
        return MachineFinding(
            "locked memory", "warn", value, "ulimit -l unlimited: InfiniBand needs locked memory"
        )
    return MachineFinding("locked memory", "ok", limit)


def _torch(facts: MachineFacts) -> MachineFinding:
    torch = facts.torch
    wanted = ".".join(map(str, OLDEST_TORCH))
    if torch is None:
        return MachineFinding("torch", "broken", "can't be imported", f"pip install 'torch>={wanted}'")
    built = f"CUDA {torch.cuda}" if torch.cuda else "CPU"
    value = f"{torch.version}, built for {built}, {torch.threads} threads"
    numbers = tuple(int(part) for part in torch.version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_TORCH:
        return MachineFinding("torch", "broken", value, f"pip install 'torch>={wanted}'")
    return MachineFinding("torch", "ok", value)


def _backends(facts: MachineFacts) -> MachineFinding:
    built_in = facts.torch.backends if facts.torch else ()
    value = ", ".join(built_in) or "none"
    if "gloo" not in built_in:
        return MachineFinding(
            "backends", "broken", value, "install a torch build with torch.distributed and gloo"
        )
    needed = {"cuda": "nccl", "xpu": "xccl"}.get(facts.torch.gpu_type, "") if facts.torch else ""
    if facts.torch and facts.torch.gpus and needed and needed not in built_in:
        remedy = f"install a torch build with {needed.upper()}: GPUs need it"
        return MachineFinding("backends", "warn", value, remedy)
    return MachineFinding("backends", "ok", value)


def _gpus(facts: MachineFacts) -> MachineFinding:
    gpus = facts.torch.gpus if facts.torch else ()
    if gpus:
        value = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_nbytes)})" for gpu in gpus)
        return MachineFinding("GPUs", "ok", value)
    if facts.nvidia and facts.torch:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        if not facts.torch.cuda:
            remedy = "install a torch build with CUDA (see pytorch.org/get-started)"
        return MachineFinding("GPUs", "warn", "an NVIDIA driver, but no GPU that torch can use", remedy)
    return MachineFinding("GPUs", "note", "none: ranks train on the CPU")


def _loopback(loopback: LoopbackTiming | str | None) -> MachineFinding:
    if loopback is None:
        return MachineFinding("all-reduce here", "note", "not tried")
    if isinstance(loopback, str):
        return MachineFinding(
            "all-reduce here", "broken", loopback, "see the message; a firewall on loopback is one cause"
        )
    rate = format_bytes(loopback.nbytes / loopback.seconds)
    value = (
        f"{loopback.ranks} ranks: 4 B in {format_seconds(loopback.small_seconds)}, "
        f"{format_bytes(loopback.nbytes)} in {format_seconds(loopback.seconds)} ({rate}/s; "
        f"over gloo {format_seconds(loopback.gloo_seconds)})"
    )
    if not loopback.right:
        return MachineFinding(
            "all-reduce here", "broken", f"{value}; the sum is wrong", "reinstall torch; test the memory"
        )
    if not loopback.shared:
        return MachineFinding(
            "all-reduce here", "warn", f"{value}; the ranks share no memory", "the warning above says why"
        )
    return MachineFinding("all-reduce here", "ok", value)


def _host_address(facts: MachineFacts) -> MachineFinding:
    outer = [one.name for one in facts.interfaces if one.up and not one.loopback]
    if facts.gloo_interface:
        value = f"GLOO_SOCKET_IFNAME={facts.gloo_interface}"
        if facts.gloo_interface in (one.name for one in facts.interfaces if one.up):
            return MachineFinding("host name", "ok", f"not used by gloo: {value}")
        names = ", ".join(one.name for one in facts.interfaces if one.up)
        return MachineFinding(
            "host name", "broken", f"{value}, which is no interface in use", f"name one of: {names}"
        )
    which = outer[0] if len(outer) == 1 else f"(the one of {', '.join(outer)} that reaches the other hosts)"
    remedy = f"for training on several hosts: export GLOO_SOCKET_IFNAME={which}" if outer else ""
    if not facts.address:
        value = f"the name {facts.host} resolves to nothing"
        return MachineFinding(
            "host name", "warn" if outer else "note", value, remedy or "add it to /etc/hosts"
        )
    value = f"{facts.host} is {facts.address}"
    if is_loopback(facts.address) and outer:
        return MachineFinding("host name", "warn", f"{value}, which other hosts can't reach", remedy)
    return MachineFinding("host name", "ok", value)


def _interfaces(facts: MachineFacts) -> Iterator[MachineFinding]:
    for one in facts.interfaces:
        gbit = one.bytes_per_second * 8 / 1e9
        speed = f"{gbit:g} Gbit/s" if gbit else "speed unknown"
        state = "" if one.up else ", down"
        yield MachineFinding(
            f"network {one.name}", "ok", f"{', '.join(one.addresses)}; {speed}, MTU {one.mtu}{state}"
        )


def _mpi(facts: MachineFacts) -> MachineFinding:
    parts = [f"mpi4py {facts.mpi.mpi4py}"] if facts.mpi.mpi4py else []
    parts += [facts.mpi.mpiexec] if facts.mpi.mpiexec else []
    if len(parts) == 2:
        return MachineFinding("MPI", "ok", ", ".join(parts))
    absent = [
        name for name, found in (("mpi4py", facts.mpi.mpi4py), ("mpiexec", facts.mpi.mpiexec)) if not found
    ]
    value = ", ".join([*parts, f"no {' and no '.join(absent)}"])
    return MachineFinding(
        "MPI", "note", value, "only starting ranks with mpirun needs it: install mpich or openmpi-bin"
    )


def _compiler(facts: MachineFacts) -> MachineFinding:
    if facts.compiler:
        return MachineFinding("C++ compiler", "ok", f"{facts.compiler.path}: {facts.compiler.version}")
    return MachineFinding(
        "C++ compiler", "note", "none", "only torch.compile on CPU needs it: install g++ or clang++"
    )
