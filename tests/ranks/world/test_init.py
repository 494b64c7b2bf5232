"""Entering and leaving worlds with real processes, by every kind of rendezvous."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import WorldError
from rank_pool import RankError
from world_entry import enter, enter_as, free_port, slurm_job, ways_to_meet


def enter_repeatedly(rank, size, arguments, times):
    import time

    late = random.Random(rank)  # some rank always leaves, or joins, after the others
    totals = []
    for _ in range(times):
        time.sleep(late.choice([0.0, 0.0, 0.02, 0.2]))
        totals.append(enter(rank, size, arguments | {"rank": rank})[1])
    return totals


def give_up_then_enter(rank, size, address):
    import time

    import paceline

    if rank == 1:
        time.sleep(1.5)
    error = None
    if rank == 0:
        try:
            paceline.init(init_method=address, rank=0, size=2, timeout=0.5)
        except paceline.PacelineError as caught:
            error = caught
    return type(error).__name__, enter(rank, size, {"init_method": address, "rank": rank, "size": 2})[1]


def second_init(rank, size):
    import paceline

    world = paceline.init()
    assert paceline.init(rank=rank, size=size) is world
    try:
        paceline.init(size=size + 1)
    except paceline.PacelineError as error:
        return str(error)
    return None


def foreign_group(rank, size, path):
    import torch

    import paceline

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    paceline.init(init_method=f"file://{path}", rank=rank, size=size)


def group_of_one(rank, size):
    import torch

    import paceline

    world = paceline.init("gloo")
    value = torch.ones(2)
    torch.distributed.all_reduce(value)
    paceline.shutdown()
    return world.backend, value.sum().item()


def alone(rank, size):
    import torch

    import paceline

    world = paceline.init(device="cpu")
    return world, torch.distributed.is_initialized()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["file", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_join_at_an_address(pool, tmp_path, kind, size):
    address = ways_to_meet(kind, tmp_path)
    arguments = [{"init_method": address, "rank": rank, "size": size} for rank in range(size)]
    for rank, (world, total) in enumerate(pool(size).run(enter_as, arguments, world=False)):
        assert total == size * (size + 1) / 2
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, size, rank, size)
        assert (world.node, world.nodes, world.backend, world.device) == (0, 1, "paceline", "cpu")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_worlds_follow_each_other_at_the_same_address(pool, tmp_path, kind):
    arguments = {"init_method": ways_to_meet(kind, tmp_path), "size": 3}
    assert pool(3).run(enter_repeatedly, arguments, 8, world=False) == [[6.0] * 8] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_that_gave_up_may_try_again(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    outcome = pool(2).run(give_up_then_enter, address, world=False)
    assert outcome == [("MissingRanks", 3.0), ("NoneType", 3.0)]


def lead(send, address):
    import torch

    import paceline

    paceline.init(init_method=address, rank=0, size=2, device="cpu")
    torch.distributed.barrier()
    paceline.shutdown()


def follow_two_leaders(send, address, ended):
    """Enter a world twice at one address, each time with another process as rank 0."""
    import time

    import torch

    import paceline

    for _ in range(2):
        paceline.init(init_method=address, rank=1, size=2, device="cpu", timeout=40.0)
        torch.distributed.barrier()
        paceline.shutdown()
        send("left")
        while not ended.exists():
            time.sleep(0.01)


def leaders_in_turn(fork, folder, address):
    ended = Path(folder) / "the first leader ended"
    follower, codes = fork(follow_two_leaders, address, ended), []
    for _ in range(2):
        leader = fork(lead, address)
        assert follower.receive() == "left"
        codes.append(leader.wait())
        ended.touch()
    return [*codes, follower.wait()]


def test_a_new_process_may_take_the_place_of_rank_0(killable):
    assert killable.run_ranks(leaders_in_turn, f"tcp://127.0.0.1:{free_port()}") == [0, 0, 0]


def test_a_world_of_one_keeps_the_local_rank_it_was_given(pool):
    assert pool(1).run(alone_as, 1, world=False) == [1]


def alone_as(rank, size, local_rank):
    import paceline

    paceline.init(local_rank=local_rank, device="cpu")
    return paceline.init(local_rank=local_rank, device="cpu").local_rank


def variables_of(launcher, rank, size):
    names = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None),
        "Open MPI": (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }[launcher]
    variables = {
        name: str(value) for name, value in zip(names, (rank, size, rank, size), strict=True) if name
    }
    return variables | ({"SLURM_STEP_ID": "0"} if launcher == "Slurm" else {})


@pytest.mark.parametrize("launcher", ["torchrun", "Slurm", "Open MPI", "MPICH"])
def test_launchers_variables_are_enough(pool, launcher):
    meet = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}
    env = [variables_of(launcher, rank, 2) | meet for rank in range(2)]
    outcome = pool(2).run(enter, world=False, env=env)
    assert [(world.rank, world.local_rank, total) for world, total in outcome] == [(0, 0, 3.0), (1, 1, 3.0)]


def test_a_slurm_step_on_one_node_needs_no_master(pool):
    job = {"SLURM_JOB_ID": str(slurm_job()), "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    env = [variables_of("Slurm", rank, 2) | job for rank in range(2)]
    assert [total for _, total in pool(2).run(enter, world=False, env=env)] == [3.0, 3.0]


def test_the_init_method_variable_needs_no_port(pool, tmp_path):
    meet = {"PACELINE_INIT_METHOD": f"file://{tmp_path}/meet"}
    env = [variables_of("torchrun", rank, 2) | meet for rank in range(2)]
    assert [total for _, total in pool(2).run(enter, world=False, env=env)] == [3.0, 3.0]


def test_a_second_init_returns_the_same_world_or_raises(pool):
    for text in pool(2).run(second_init):
        assert "size=3 (now 2)" in text
        assert "shutdown" in text


def test_a_foreign_group_is_not_taken_over(pool, tmp_path):
    with pytest.raises(RankError, match="has a process group already") as caught:
        pool(1).run(foreign_group, str(tmp_path / "meet"), world=False)
    assert isinstance(caught.value.cause, WorldError)


def test_a_world_of_one_creates_a_group_only_on_request(pool):
    [(world, initialized)] = pool(1).run(alone, world=False)
    assert (world.size, world.backend, initialized) == (1, "none", False)
    assert pool(1).run(group_of_one, world=False) == [("gloo", 2.0)]


SCRIPT = """
import os, sys, torch, paceline
world = paceline.init(timeout=60.0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    torch.distributed.barrier()
    sys.exit(3)
value = torch.tensor([world.rank + 1.0])
torch.distributed.all_reduce(value)
paceline.shutdown()
again = paceline.init()
torch.distributed.all_reduce(value)
with open(f"result-{world.rank}", "x") as file:
    print(world.rank, world.local_rank, world.local_size, int(value), again == world, file=file)
paceline.shutdown()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rendezvous", [["--standalone"], ["--master-addr=127.0.0.1", "--master-port={port}"]]
)
def test_torchrun_starts_and_restarts_a_world(tmp_path, rendezvous):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = [option.format(port=free_port()) for option in rendezvous]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    source = str(Path(sys.modules["paceline"].__file__).parents[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    ended = subprocess.run(
        [*launch, str(script)], capture_output=True, text=True, timeout=200, env=env, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    results = [(tmp_path / f"result-{rank}").read_text().split() for rank in range(2)]
    assert results == [["0", "0", "2", "6", "True"], ["1", "1", "2", "6", "True"]]
