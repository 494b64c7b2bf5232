"""Rank, size and rendezvous from launchers and arguments; contradictions. No processes, no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import MissingRanks, UsageError, WorldError
from paceline.world import ProcessPlace, World, init, read_environment, shutdown
from paceline.world.device_selection import choose_device
from paceline.world.key_value_store import first_host, path_of, split_tcp
from paceline.world.rendezvous import RankClaim, RankRoster, Refusal, format_ranks
from paceline.world.session import _local_place

MASTER = {"MASTER_ADDR": "pc1", "MASTER_PORT": "4000"}
PLAIN = {"RANK": "1", "WORLD_SIZE": "4"} | MASTER
AGENT = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
} | MASTER
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def place(*values):
    """Return a `ProcessPlace` from the values of its fields, in their order."""
    return ProcessPlace(**dict(zip([field.name for field in fields(ProcessPlace)], values, strict=True)))


ALONE = place(0, 1, None, None, None, None, None, "arguments")


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ALONE),
        ({"MASTER_ADDR": "pc1"}, ALONE),
        (MASTER, ALONE),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ALONE),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, ALONE),
        (SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, ALONE),
        (SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, ALONE),
        (SLURM | {"SLURM_STEP_ID": "-5"}, ALONE),
        (SLURM | {"SLURM_STEP_ID": "-6"}, ALONE),
        (without(SLURM, "SLURM_STEP_ID"), ALONE),
        (PLAIN, place(1, 4, None, None, None, None, "tcp://pc1:4000", "torchrun")),
        (PLAIN | {"MASTER_ADDR": "fe80::1"}, place(1, 4, *[None] * 4, "tcp://[fe80::1]:4000", "torchrun")),
        (PLAIN | {"PACELINE_INIT_METHOD": "file:///s/x"}, place(1, 4, *[None] * 4, "file:///s/x", "torchrun")),
        (PLAIN | {"PACELINE_INIT_METHOD": "env://"}, place(1, 4, *[None] * 4, "tcp://pc1:4000", "torchrun")),
        (PLAIN | {"PACELINE_INIT_METHOD": ""}, place(1, 4, *[None] * 4, "tcp://pc1:4000", "torchrun")),
        (PLAIN | {"RANK": "0", "WORLD_SIZE": "1"}, place(0, 1, *[None] * 4, "tcp://pc1:4000", "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, replace(ALONE, source="torchrun")),
        (AGENT, place(3, 4, 1, 2, 1, 2, "env://", "torchrun")),
        (AGENT | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, place(3, 4, 1, 2, 1, 2, "tcp://pc1:4000", "torchrun")),
        (AGENT | SLURM, place(3, 4, 1, 2, 1, 2, "env://", "torchrun")),
        (AGENT | OPEN_MPI, place(3, 4, 1, 2, 1, 2, "env://", "torchrun")),
        (SLURM, place(2, 4, 0, None, 1, 2, f"tcp://gpu07:{20000 + 1234 * 31 % 12000}", "Slurm")),
        (SLURM | MASTER, place(2, 4, 0, None, 1, 2, "tcp://pc1:4000", "Slurm")),
        (SLURM | MASTER | {"WORLD_SIZE": "4"}, place(2, 4, 0, None, 1, 2, "tcp://pc1:4000", "Slurm")),
        (SLURM | PLAIN | {"RANK": "2"}, place(2, 4, None, None, None, None, "tcp://pc1:4000", "torchrun")),
        (SLURM | {"MASTER_PORT": "4000"}, place(2, 4, 0, None, 1, 2, "tcp://gpu07:4000", "Slurm")),
        (SLURM | {"MASTER_PORT": "4000", "SLURM_NNODES": "1", "SLURM_NODEID": "0"},
         place(2, 4, 0, None, 0, 1, "tcp://127.0.0.1:4000", "Slurm")),
        (without(SLURM, "SLURM_STEP_NODELIST") | {"MASTER_PORT": "4000"},
         place(2, 4, 0, None, 1, 2, "tcp://10.0.0.1:4000", "Slurm")),
        (without(SLURM, "SLURM_STEP_NODELIST") | {"MASTER_PORT": "4000", "SLURM_JOB_NODELIST": "b2,b3"},
         place(2, 4, 0, None, 1, 2, "tcp://b2:4000", "Slurm")),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, replace(ALONE, source="Slurm")),
        (SLURM | MASTER | {"PMI_RANK": "2", "PMI_SIZE": "4"}, place(2, 4, 0, None, 1, 2, "tcp://pc1:4000", "Slurm")),
        (OPEN_MPI, place(1, 2, 1, 2, None, None, "tcp://127.0.0.1:29500", "Open MPI")),
        (OPEN_MPI | MASTER, place(1, 2, 1, 2, None, None, "tcp://pc1:4000", "Open MPI")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"} | MASTER,
         place(1, 2, 0, 1, None, None, "tcp://pc1:4000", "Open MPI")),
        (OPEN_MPI | SLURM, place(1, 2, 1, 2, None, None, "tcp://127.0.0.1:29500", "Open MPI")),
        (MPICH, place(0, 2, 0, 2, None, None, "tcp://127.0.0.1:29500", "MPICH")),
        (MPICH | {"MASTER_PORT": "5000"}, place(0, 2, 0, 2, None, None, "tcp://127.0.0.1:5000", "MPICH")),
    ],
)  # fmt: skip
def test_launchers_are_read(env, expected):
    assert read_environment(env) == expected


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (without(PLAIN, "WORLD_SIZE"), ["RANK='1'", "WORLD_SIZE is not set"]),
        (without(PLAIN, "RANK"), ["WORLD_SIZE='4'", "RANK is not set"]),
        (PLAIN | {"RANK": "4"}, ["RANK is 4", "WORLD_SIZE is 4", "0 to 3"]),
        (PLAIN | {"RANK": "-1"}, ["RANK is -1", "0 to 3"]),
        (PLAIN | {"RANK": "two"}, ["RANK='two'", "integer"]),
        (PLAIN | {"RANK": ""}, ["RANK=''", "integer"]),
        (PLAIN | {"RANK": "1.0"}, ["RANK='1.0'"]),
        (PLAIN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0", "at least one"]),
        (PLAIN | {"WORLD_SIZE": "-2"}, ["WORLD_SIZE is -2"]),
        (without(PLAIN, "MASTER_ADDR"), ["MASTER_ADDR not set", "PACELINE_INIT_METHOD"]),
        (without(PLAIN, "MASTER_PORT"), ["MASTER_PORT not set"]),
        (
            without(PLAIN, "MASTER_PORT", "MASTER_ADDR"),
            ["MASTER_ADDR and MASTER_PORT not set", "rank 1 of 4"],
        ),
        (PLAIN | {"MASTER_PORT": "http"}, ["MASTER_PORT='http'", "65535"]),
        (PLAIN | {"MASTER_PORT": "70000"}, ["MASTER_PORT='70000'"]),
        (PLAIN | {"MASTER_PORT": "0"}, ["MASTER_PORT='0'"]),
        (without(AGENT, "MASTER_ADDR"), ["MASTER_ADDR", "env://"]),
        (AGENT | {"LOCAL_RANK": "2"}, ["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"]),
        (AGENT | {"LOCAL_RANK": "x"}, ["LOCAL_RANK='x'"]),
        (AGENT | {"GROUP_RANK": "2"}, ["GROUP_RANK is 2", "GROUP_WORLD_SIZE is 2"]),
        (AGENT | {"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE='8'", "WORLD_SIZE='4'"]),
        (PLAIN | SLURM, ["torchrun and Slurm disagree", "RANK='1'", "SLURM_PROCID='2'"]),
        (PLAIN | SLURM | {"RANK": "2", "WORLD_SIZE": "8"}, ["WORLD_SIZE='8'", "SLURM_NTASKS='4'"]),
        (PLAIN | OPEN_MPI, ["torchrun and Open MPI disagree", "WORLD_SIZE='4'", "OMPI_COMM_WORLD_SIZE='2'"]),
        (OPEN_MPI | MPICH, ["Open MPI and MPICH disagree", "OMPI_COMM_WORLD_RANK='1'", "PMI_RANK='0'"]),
        (SLURM | MASTER | {"WORLD_SIZE": "8"}, ["Slurm and torchrun disagree", "WORLD_SIZE='8'"]),
        (SLURM | {"SLURM_PROCID": "4"}, ["SLURM_PROCID is 4", "SLURM_NTASKS is 4"]),
        (SLURM | {"SLURM_NTASKS": "4(x2)"}, ["SLURM_NTASKS='4(x2)'"]),
        (SLURM | {"SLURM_NODEID": "2"}, ["SLURM_NODEID is 2", "SLURM_NNODES is 2"]),
        (without(SLURM, "SLURM_JOB_ID"), ["MASTER_ADDR and MASTER_PORT not set"]),
        (
            without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
            ["OMPI_COMM_WORLD_RANK='1'", "OMPI_COMM_WORLD_SIZE is not set"],
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ["MASTER_ADDR"]),
        (without(MPICH, "PMI_RANK"), ["PMI_SIZE='2'", "PMI_RANK is not set"]),
        (
            {"PACELINE_INIT_METHOD": "file:///shared/x"},
            ["file:///shared/x", "this process has no rank"],
        ),
        (PLAIN | {"PACELINE_INIT_METHOD": "file://shared/x"}, ["PACELINE_INIT_METHOD", "three slashes"]),
        (PLAIN | {"PACELINE_INIT_METHOD": "/shared/x"}, ["'/shared/x'", "valid: file:///"]),
    ],
)
def test_wrong_variables_are_named(env, named):
    with pytest.raises(WorldError) as caught:
        read_environment(env)
    for part in [*named, "→"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ({"rank": 0, "size": 1}, {}, ALONE),
        ({"rank": 0, "size": 1}, PLAIN, ALONE),
        ({"rank": 1, "size": 2, "init_method": "tcp://h:1"}, {}, place(1, 2, *[None] * 4, "tcp://h:1", "arguments")),
        ({"rank": 1, "size": 2, "init_method": "tcp://h:1"}, {"RANK": "x"},
         place(1, 2, *[None] * 4, "tcp://h:1", "arguments")),
        ({"rank": 1, "size": 2, "init_method": "env://"}, MASTER,
         place(1, 2, *[None] * 4, "tcp://pc1:4000", "arguments")),
        ({"rank": 1, "size": 2}, MASTER, place(1, 2, *[None] * 4, "tcp://pc1:4000", "arguments")),
        ({"rank": 3}, PLAIN, place(3, 4, *[None] * 4, "tcp://pc1:4000", "torchrun")),
        ({"size": 2}, PLAIN, place(1, 2, *[None] * 4, "tcp://pc1:4000", "torchrun")),
        ({"rank": 2}, AGENT, place(2, 4, *[None] * 4, "env://", "torchrun")),
        ({"local_rank": 0}, AGENT, place(3, 4, 0, 2, 1, 2, "env://", "torchrun")),
        ({"init_method": "file:///s/x"}, AGENT, place(3, 4, 1, 2, 1, 2, "file:///s/x", "torchrun")),
        ({"init_method": "tcp://h:1"}, PLAIN | {"PACELINE_INIT_METHOD": "nonsense"},
         place(1, 4, *[None] * 4, "tcp://h:1", "torchrun")),
    ],
)  # fmt: skip
def test_arguments_beat_variables(arguments, env, expected):
    assert read_environment(env, **arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rank": 1}, ["rank=1", "no size"]),
        ({"size": 2}, ["size=2", "no rank"]),
        ({"rank": 2, "size": 2}, ["rank (argument) is 2", "size (argument) is 2", "0 to 1"]),
        ({"rank": -1, "size": 2}, ["rank (argument) is -1"]),
        ({"rank": 0, "size": 0}, ["size (argument) is 0"]),
        ({"rank": 0, "size": 2}, ["rank 0 of 2", "MASTER_ADDR and MASTER_PORT"]),
        ({"init_method": "tcp://h:1"}, ["'tcp://h:1'", "this process has no rank"]),
        ({"rank": 0, "size": 2, "init_method": "env://"}, ["MASTER_ADDR", "env://"]),
        ({"rank": 0, "size": 2, "init_method": "tcp://h"}, ["'tcp://h'", "no port"]),
        ({"rank": 0, "size": 2, "init_method": "tcp://h:0"}, ["'tcp://h:0'", "no port"]),
        ({"rank": 0, "size": 2, "init_method": "tcp://:1"}, ["'tcp://:1'", "no host"]),
        ({"rank": 0, "size": 2, "init_method": "tcp://h:99999"}, ["99999", "valid:"]),
        ({"rank": 0, "size": 2, "init_method": "tcp://h:1?rank=0"}, ["nothing may follow the port"]),
        ({"rank": 0, "size": 2, "init_method": "file:///"}, ["no absolute path"]),
        ({"rank": 0, "size": 2, "init_method": "mpi://"}, ["'mpi://'", "valid: file:///"]),
        ({"rank": 0, "size": 1, "local_rank": -1}, ["local_rank (argument) is -1"]),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(WorldError) as caught:
        read_environment({}, **arguments)
    for part in [*named, "→"]:
        assert part in str(caught.value)


def test_a_local_rank_beyond_the_node_is_refused():
    with pytest.raises(
        WorldError, match=r"local_rank \(argument\) is 2, but the number of ranks on this node is 2"
    ):
        read_environment(AGENT, local_rank=2)


@given(st.integers(1, 64), st.data())
def test_every_rank_of_a_world_reads_its_own_number(size, data):
    rank = data.draw(st.integers(0, size - 1))
    place = read_environment({"RANK": str(rank), "WORLD_SIZE": str(size)} | MASTER)
    assert (place.rank, place.size) == (rank, size)
    with pytest.raises(WorldError):
        read_environment({"RANK": str(rank + size), "WORLD_SIZE": str(size)} | MASTER)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("pc1", "pc1"),
        ("pc1,pc2", "pc1"),
        ("gpu[007-009,12],cpu3", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[08-16]", "r1n08"),
        ("a-b[2-3]-ib", "a-b2-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_addresses_are_taken_apart():
    assert split_tcp("tcp://[fe80::1]:4000") == ("fe80::1", 4000)
    assert path_of("file:///tmp/a%20b") == "/tmp/a b"


@given(st.sets(st.integers(0, 40), min_size=1).map(sorted))
def test_ranks_in_short_form_lose_none(ranks):
    spans = [part.split("–") for part in format_ranks(ranks).split(", ")]
    assert [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)] == ranks


def test_only_claims_that_surely_are_of_the_past_are_replaced():
    mine = RankClaim.of_this_process(1, 2)
    assert mine.may_replace(RankClaim.of_this_process(1, 2))
    assert not mine.may_replace(replace(mine, pid=1))
    assert mine.may_replace(replace(mine, pid=2**22 + 1))
    assert not mine.may_replace(replace(mine, pid=2**22 + 1, host="elsewhere"))
    assert not mine.may_replace(replace(mine, pid=2**22 + 1, boot="another"))


def test_a_roster_holds_only_the_very_claims_on_it():
    claims = [RankClaim.of_this_process(rank, 2) for rank in range(2)]
    roster = RankRoster("one", tuple(claims))
    assert all(roster.holds(claim) for claim in claims)
    assert not roster.holds(RankClaim.of_this_process(1, 2))
    assert not roster.holds(replace(claims[1], size=3))


def test_a_refusal_is_missing_ranks_or_a_world_error():
    assert type(Refusal(0, "", True, "t", "r").error(1)) is MissingRanks
    assert type(Refusal(0, "", False, "t", "r").error(1)) is WorldError
    assert str(Refusal(0, "", False, "what", "do").error(1)) == "[rank 1] what\n  → do"


def test_local_ranks_are_derived_from_the_hosts_and_given_ones_are_kept():
    claims = [
        RankClaim(rank=rank, size=4, host=host, boot="", pid=rank, nonce="")
        for rank, host in enumerate(["a", "b", "a", "b"])
    ]
    own = place(2, 4, None, None, None, None, "tcp://a:1", "arguments")
    assert _local_place(own, claims) == (1, 2, 0, 2)
    assert _local_place(replace(own, local_rank=0, nodes=4), claims) == (0, 2, 0, 4)


def test_a_world_of_one_needs_nothing(monkeypatch):
    for name in PLAIN:
        monkeypatch.delenv(name, raising=False)
    try:
        world = init(device="cpu")
        assert world == World()
        assert init() is world
        assert init(rank=0, size=1) is world
        with pytest.raises(WorldError, match=r"another world already: rank=1 \(now 0\), size=2 \(now 1\)"):
            init(rank=1, size=2)
        with pytest.raises(WorldError, match="init_method='tcp://h:1'"):
            init(init_method="tcp://h:1")
    finally:
        shutdown()
        shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "glo"}, "did you mean 'gloo'"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "cpu:1"}, "unknown device 'cpu:1'"),
        ({"device": "cuda:x"}, "unknown device 'cuda:x'"),
        ({"device": "cuda:"}, "unknown device 'cuda:'"),
        ({"device": ":0"}, "unknown device ':0'"),
        ({"device": 0}, "unknown device 0"),
        ({"backend": "nccl", "device": "cpu", "rank": 0, "size": 1}, "needs GPUs"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        init(**arguments)
    shutdown()


@pytest.mark.parametrize("arguments", [{"device": "cuda"}, {"device": "cuda:0"}, {"backend": "nccl"}])
def test_cuda_without_a_gpu_is_one_clear_error(monkeypatch, arguments):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorldError, match="requires CUDA, but"):
        init(**arguments)
    shutdown()


@pytest.mark.parametrize(
    ("gpus", "visible", "arguments", "expected"),
    [
        (4, None, (None, None, 2, 4), ("cuda:2", "nccl")),
        (4, None, ("cuda", None, 3, 4), ("cuda:3", "nccl")),
        (4, None, ("cuda:1", None, 3, 4), ("cuda:1", "nccl")),
        (4, None, ("cpu", None, 3, 4), ("cpu", "paceline")),
        (4, None, (None, "gloo", 3, 4), ("cpu", "gloo")),
        (4, None, ("cuda", "gloo", 3, 4), ("cuda:3", "gloo")),
        (4, None, (None, "nccl", 0, 4), ("cuda:0", "nccl")),
        (1, "5", (None, None, 3, 4), ("cuda:0", "nccl")),
        (1, None, (None, None, 3, 4), "GPU 3, but the node has 1"),
        (2, "0,1", (None, None, 2, 4), "GPU 2, but the node has 2"),
        (2, None, ("cuda:7", None, 0, 1), "GPU 7, but the node has 2"),
    ],
)
def test_each_rank_gets_the_gpu_of_its_local_rank(monkeypatch, gpus, visible, arguments, expected):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(expected, tuple):
        assert choose_device(*arguments) == expected
    else:
        with pytest.raises(WorldError, match=expected):
            choose_device(*arguments)


@pytest.mark.parametrize(
    ("visible", "arguments", "expected"),
    [
        (None, (None, None, 2, 4), ("xpu:2", "xccl")),
        (None, ("xpu", None, 1, 4), ("xpu:1", "xccl")),
        (None, ("xpu:3", None, 1, 4), ("xpu:3", "xccl")),
        (None, (None, "xccl", 1, 4), ("xpu:1", "xccl")),
        (None, (None, "gloo", 1, 4), ("cpu", "gloo")),
        (None, ("xpu", "paceline", 1, 4), ("xpu:1", "paceline")),
        ("0", ("xpu", None, 3, 4), ("xpu:0", "xccl")),  # the launcher shows each rank one
        (None, ("xpu:4", None, 0, 1), "should use XPU 4, but the node has 4"),
        (None, ("xpu", "gloo", 1, 4), "(?s)'gloo' does not serve device 'xpu'.*backend='xccl'"),
        (None, ("xpu", "nccl", 1, 4), "(?s)'nccl' does not serve device 'xpu'.*backend='xccl'"),
        (None, ("cpu", "xccl", 1, 4), "backend 'xccl' needs XPU devices, but device is 'cpu'"),
    ],
)
def test_other_accelerators_are_chosen_likewise(monkeypatch, visible, arguments, expected):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 4 if visible is None else 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    if visible is not None:
        monkeypatch.setenv("ZE_AFFINITY_MASK", visible)
    if isinstance(expected, tuple):
        assert choose_device(*arguments) == expected
    else:
        with pytest.raises((UsageError, WorldError), match=expected):
            choose_device(*arguments)


def test_cuda_comes_first(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert choose_device(None, None, 0, 1) == ("cuda:0", "nccl")


def test_an_accelerator_without_a_backend_serves_a_world_of_one(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert choose_device("mps", None, 0, 1) == ("mps:0", "none")
    # not by itself: several ranks could not use it
    assert choose_device(None, None, 0, 1) == ("cpu", "paceline")
    with pytest.raises(UsageError, match=r"(?s)'gloo' does not serve device 'mps'.*no backend for it"):
        choose_device("mps", "gloo", 0, 1)
    with pytest.raises(UsageError, match="no backend for device 'mps:0'"):
        init(device="mps", rank=0, size=1, init_method=f"file://{tmp_path}/meeting")
    shutdown()


@pytest.mark.parametrize("arguments", [{"device": "xpu"}, {"device": "xpu:1"}, {"backend": "xccl"}])
def test_an_absent_accelerator_is_one_clear_error(monkeypatch, arguments):
    import torch

    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "xpu", None)
    with pytest.raises(WorldError, match="requires XPU, but this PyTorch is built without XPU"):
        init(**arguments)
    shutdown()


def test_importing_the_world_imports_no_torch():
    code = "import sys, paceline.world as w; w.read_environment({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
