"""Checks of machine facts: decisions on plain values, and values read from files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest

from paceline._core.cpu_cores import cpu_quota
from paceline._core.network_interfaces import Interface, is_loopback, list_interfaces
from paceline.tools.diagnostics.machine_findings import diagnose_machine
from paceline.world.machine_facts import (
    CompilerFacts,
    GpuFacts,
    LoopbackTiming,
    MachineFacts,
    MpiFacts,
    TorchFacts,
    find_compiler,
    find_mpi,
    memory_limit,
    memory_used,
    read_machine_facts,
)

GIB = 2**30
LO = Interface("lo", ("127.0.0.1", "::1"), True, 0.0, 65536)
ETH = Interface("eth0", ("10.0.0.5",), True, 125e6, 1500)
TORCH = TorchFacts("2.13.0+cpu", "", 8, ("gloo",), ())
GPU = GpuFacts("H100", 80 * GIB, "9.0")
GOOD = MachineFacts(
    host="pc1",
    address="10.0.0.5",
    system="Linux 6.1 x86_64",
    python="3.11.7",
    cpu="some CPU",
    cores=8,
    threads=16,
    usable_cores=16.0,
    load=0.5,
    thread_variables={},
    memory_nbytes=64 * GIB,
    available_nbytes=50 * GIB,
    shm_nbytes=32 * GIB,
    shm_free_nbytes=32 * GIB,
    open_files=65536,
    locked_nbytes=-1,
    processes=-1,
    infiniband=(),
    nvidia=False,
    interfaces=(ETH, LO),
    gloo_interface="",
    torch=TORCH,
    mpi=MpiFacts("4.0", "/usr/bin/mpiexec"),
    compiler=CompilerFacts("/usr/bin/g++", "g++ 12.2.0"),
)
MEASURED = LoopbackTiming(
    ranks=2, right=True, shared=True, small_seconds=60e-6, nbytes=25 * 2**20, seconds=0.003, gloo_seconds=0.02
)


def found(facts, subject, loopback=MEASURED):
    [finding] = [finding for finding in diagnose_machine(facts, loopback) if finding.subject == subject]
    return finding


def test_a_good_machine_has_no_remedies():
    assert {finding.status for finding in diagnose_machine(GOOD, MEASURED)} == {"ok", "note"}
    assert [finding.subject for finding in diagnose_machine(GOOD, MEASURED) if finding.status == "note"] == [
        "GPUs"
    ]


@pytest.mark.parametrize(
    ("changes", "subject", "status", "message"),
    [
        ({"system": "Darwin 25.1 arm64"}, "system", "warn", "Darwin 25.1 arm64"),
        (
            {"system": "Darwin 25.1 arm64", "shm_nbytes": 0, "shm_free_nbytes": 0},
            "shared memory",
            "note",
            "no /dev/shm",
        ),
        ({"load": 20.0}, "cores", "warn", "20.0 processes"),
        ({"usable_cores": 1.5}, "cores", "ok", "1.5 of 16"),
        ({"thread_variables": {"OMP_NUM_THREADS": "64"}}, "thread variables", "warn", "OMP_NUM_THREADS=64"),
        ({"thread_variables": {"OMP_NUM_THREADS": "1"}}, "thread variables", "ok", "OMP_NUM_THREADS=1"),
        ({"available_nbytes": GIB}, "memory", "warn", "1 GiB available"),
        ({"shm_nbytes": 64 * 2**20, "shm_free_nbytes": 64 * 2**20}, "shared memory", "warn", "64 MiB"),
        ({"shm_nbytes": 0, "shm_free_nbytes": 0}, "shared memory", "warn", "no /dev/shm"),
        ({"open_files": 1024}, "open files", "warn", "at most 1024"),
        ({"open_files": -1}, "open files", "ok", "no limit"),
        ({"locked_nbytes": 65536}, "locked memory", "ok", "64 KiB"),
        ({"locked_nbytes": 65536, "infiniband": ("mlx5_0",)}, "locked memory", "warn", "mlx5_0"),
        ({"locked_nbytes": -1, "infiniband": ("mlx5_0",)}, "locked memory", "ok", "no limit"),
        ({"torch": None}, "torch", "broken", "can't be imported"),
        ({"torch": replace(TORCH, version="2.8.1")}, "torch", "broken", "2.8.1"),
        ({"torch": replace(TORCH, version="2.9.0a0+git")}, "torch", "ok", "built for CPU"),
        ({"torch": replace(TORCH, version="3.0", cuda="13.0")}, "torch", "ok", "CUDA 13.0"),
        ({"torch": None}, "backends", "broken", "none"),
        ({"torch": replace(TORCH, backends=())}, "backends", "broken", "none"),
        ({"torch": replace(TORCH, gpus=(GPU,))}, "backends", "warn", "gloo"),
        ({"torch": replace(TORCH, gpus=(GPU,), backends=("gloo", "nccl"))}, "backends", "ok", "nccl"),
        ({"torch": replace(TORCH, gpus=(GPU, GPU))}, "GPUs", "ok", "H100 (80 GiB), H100 (80 GiB)"),
        ({"nvidia": True}, "GPUs", "warn", "an NVIDIA driver"),
        ({"address": ""}, "host name", "warn", "resolves to nothing"),
        ({"address": "127.0.1.1"}, "host name", "warn", "127.0.1.1, which other hosts can't reach"),
        ({"address": "127.0.1.1", "interfaces": (LO,)}, "host name", "ok", "127.0.1.1"),
        ({"address": "127.0.1.1", "gloo_interface": "eth0"}, "host name", "ok", "GLOO_SOCKET_IFNAME=eth0"),
        ({"gloo_interface": "eth7"}, "host name", "broken", "eth7"),
        ({"mpi": MpiFacts("", "")}, "MPI", "note", "no mpi4py and no mpiexec"),
        ({"mpi": MpiFacts("4.0", "")}, "MPI", "note", "mpi4py 4.0, no mpiexec"),
        ({"compiler": None}, "C++ compiler", "note", "none"),
    ],
)
def test_facts_are_judged(changes, subject, status, message):
    finding = found(replace(GOOD, **changes), subject)
    assert finding.status == status
    assert message in finding.value
    if status in ("warn", "broken"):
        assert finding.remedy


def test_the_remedy_fits_the_torch_build():
    assert "build with CUDA" in found(replace(GOOD, nvidia=True), "GPUs").remedy
    with_cuda = replace(GOOD, nvidia=True, torch=replace(TORCH, cuda="13.0"))
    assert "CUDA_VISIBLE_DEVICES" in found(with_cuda, "GPUs").remedy


def test_the_remedy_for_an_address_names_an_interface():
    assert "GLOO_SOCKET_IFNAME=eth0" in found(replace(GOOD, address="127.0.0.1"), "host name").remedy


@pytest.mark.parametrize(
    ("loopback", "status", "message"),
    [
        (MEASURED, "ok", "4 B in 60 µs, 25 MiB in 3 ms (8.14 GiB/s; over gloo 20 ms)"),
        (replace(MEASURED, shared=False), "warn", "share no memory"),
        (replace(MEASURED, right=False), "broken", "the sum is wrong"),
        ("rank 1 ended", "broken", "rank 1 ended"),
        (None, "note", "not tried"),
    ],
)
def test_the_all_reduce_is_judged(loopback, status, message):
    finding = found(GOOD, "all-reduce here", loopback)
    assert finding.status == status
    assert message in finding.value


def test_interfaces_are_listed_with_their_speed():
    assert found(GOOD, "network eth0").value == "10.0.0.5; 1 Gbit/s, MTU 1500"
    assert found(replace(GOOD, interfaces=(replace(ETH, up=False),)), "network eth0").value.endswith(", down")
    assert "speed unknown" in found(GOOD, "network lo").value


@pytest.mark.parametrize(
    ("mbit", "bytes_per_second"), [(0, 0.0), (65535, 0.0), (1000, 125e6), (100_000, 12.5e9), (400_000, 50e9)]
)
def test_the_speed_of_a_link_is_read(monkeypatch, mbit, bytes_per_second):
    address = SimpleNamespace(family=socket.AF_INET, address="10.0.0.5")
    state = SimpleNamespace(isup=True, speed=mbit, mtu=1500)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [address]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": state})
    assert list_interfaces() == (replace(ETH, bytes_per_second=bytes_per_second),)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("pc1", False), ("", False)],
)
def test_loopback_addresses_are_recognised(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), (None, None)]
)
def test_the_quota_of_a_container_is_read(tmp_path, text, cores):
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(str(tmp_path)) == cores


@pytest.mark.parametrize(("text", "nbytes"), [("max\n", None), ("1073741824\n", GIB), (None, None)])
def test_the_memory_limit_of_a_container_is_read(tmp_path, text, nbytes):
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert memory_limit(str(tmp_path)) == nbytes


def test_the_memory_that_a_container_uses_leaves_out_old_file_pages(tmp_path):
    assert memory_used(str(tmp_path)) == 0
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory_used(str(tmp_path)) == 1000
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 300\nactive_file 100\n")
    assert memory_used(str(tmp_path)) == 700


def test_several_outer_interfaces_are_all_named():
    docker = replace(ETH, name="docker0")
    facts = replace(GOOD, address="127.0.0.1", interfaces=(docker, *GOOD.interfaces))
    assert "the one of docker0, eth0" in found(facts, "host name").remedy


def test_this_machine_is_read():
    facts = read_machine_facts({"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth9"})
    assert facts.thread_variables == {"OMP_NUM_THREADS": "3"}
    assert facts.gloo_interface == "eth9"
    assert facts.threads == os.cpu_count()
    assert 0 < facts.usable_cores <= facts.threads
    assert 0 < facts.available_nbytes <= facts.memory_nbytes <= psutil.virtual_memory().total
    assert {one.name for one in facts.interfaces} <= set(psutil.net_if_addrs())
    assert facts.torch is not None
    assert "gloo" in facts.torch.backends
    assert asdict(facts)["torch"]["version"] == facts.torch.version


def test_a_compiler_that_does_not_run_is_ignored(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert find_compiler({"CXX": str(broken)}) is None
    broken.write_text("#!/bin/sh\necho my compiler 1.0\necho more\n")
    assert find_compiler({"CXX": str(broken)}) == CompilerFacts(str(broken), "my compiler 1.0")


def test_mpiexec_is_found_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mpi().mpiexec == ""
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert find_mpi().mpiexec == str(tmp_path / "mpirun")


def test_importing_the_facts_imports_no_torch():
    code = "import sys, paceline.tools.diagnostics.machine_findings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
