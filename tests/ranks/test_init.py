"""Entering and leaving worlds with real processes: every way to meet, and every way to fail to."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pool import RankError

from paceline.errors import MissingRanks, WorldError


def free_port():
    """Return a port below those that the system hands out by itself, so that nobody is given it meanwhile."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def enter(rank, size, arguments=None):
    """Enter a world, add up the ranks in it, and leave it."""
    import torch

    import paceline

    world = paceline.init(**(arguments or {}))
    value = torch.tensor([world.rank + 1.0])
    torch.distributed.all_reduce(value)
    paceline.shutdown()
    assert not torch.distributed.is_initialized()
    return world, value.item()


def enter_as(rank, size, arguments_of_rank):
    return enter(rank, size, arguments_of_rank[rank])


def enter_repeatedly(rank, size, arguments, times):
    import random
    import time

    late = random.Random(rank)  # some rank or other always leaves, or comes, after the others
    totals = []
    for _ in range(times):
        time.sleep(late.choice([0.0, 0.0, 0.02, 0.2]))
        totals.append(enter(rank, size, arguments | {"rank": rank})[1])
    return totals


def fail_to_enter(rank, size, arguments_of_rank):
    import paceline

    try:
        paceline.init(**arguments_of_rank[rank])
    except paceline.PacelineError as error:
        return type(error).__name__, str(error)
    return "entered", ""


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


def ways_to_meet(kind, tmp_path):
    return f"file://{tmp_path}/meet" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("kind", ["file", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_meet_at_an_address(pool, tmp_path, kind, size):
    address = ways_to_meet(kind, tmp_path)
    arguments = [{"init_method": address, "rank": rank, "size": size} for rank in range(size)]
    for rank, (world, total) in enumerate(pool(size).run(enter_as, arguments, world=False)):
        assert total == size * (size + 1) / 2
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, size, rank, size)
        assert (world.node, world.nodes, world.backend, world.device) == (0, 1, "paceline", "cpu")


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_worlds_follow_each_other_at_the_same_address(pool, tmp_path, kind):
    arguments = {"init_method": ways_to_meet(kind, tmp_path), "size": 3}
    assert pool(3).run(enter_repeatedly, arguments, 8, world=False) == [[6.0] * 8] * 3


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_that_gave_up_may_try_again(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    outcome = pool(2).run(give_up_then_enter, address, world=False)
    assert outcome == [("MissingRanks", 3.0), ("NoneType", 3.0)]


def lead(tell, address):
    import torch

    import paceline

    paceline.init(init_method=address, rank=0, size=2, device="cpu")
    torch.distributed.barrier()
    paceline.shutdown()


def follow_two_leaders(tell, address, ended):
    """Enter a world twice at one address, each time with another process as rank 0."""
    import time

    import torch

    import paceline

    for _ in range(2):
        paceline.init(init_method=address, rank=1, size=2, device="cpu", timeout=40.0)
        torch.distributed.barrier()
        paceline.shutdown()
        tell("left")
        while not ended.exists():
            time.sleep(0.01)


def leaders_in_turn(fork, folder, address):
    ended = Path(folder) / "the first leader ended"
    follower, codes = fork(follow_two_leaders, address, ended), []
    for _ in range(2):
        leader = fork(lead, address)
        assert follower.hear() == "left"
        codes.append(leader.wait())
        ended.touch()
    return [*codes, follower.wait()]


def test_a_new_process_may_take_the_place_of_rank_0(nursery):
    assert nursery.play(leaders_in_turn, f"tcp://127.0.0.1:{free_port()}") == [0, 0, 0]


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
    told = {name: str(value) for name, value in zip(names, (rank, size, rank, size), strict=True) if name}
    return told | ({"SLURM_STEP_ID": "0"} if launcher == "Slurm" else {})


@pytest.mark.parametrize("launcher", ["torchrun", "Slurm", "Open MPI", "MPICH"])
def test_launchers_variables_are_enough(pool, launcher):
    meet = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}
    env = [variables_of(launcher, rank, 2) | meet for rank in range(2)]
    outcome = pool(2).run(enter, world=False, env=env)
    assert [(world.rank, world.local_rank, total) for world, total in outcome] == [(0, 0, 3.0), (1, 1, 3.0)]


def test_a_slurm_step_on_one_node_needs_no_master(pool):
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    env = [variables_of("Slurm", rank, 2) | job for rank in range(2)]
    assert [total for _, total in pool(2).run(enter, world=False, env=env)] == [3.0, 3.0]


def test_the_init_method_variable_needs_no_port(pool, tmp_path):
    meet = {"PACELINE_INIT_METHOD": f"file://{tmp_path}/meet"}
    env = [variables_of("torchrun", rank, 2) | meet for rank in range(2)]
    assert [total for _, total in pool(2).run(enter, world=False, env=env)] == [3.0, 3.0]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_world_that_never_completes_names_who_is_missing(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    arguments = [{"init_method": address, "rank": rank, "size": 4, "timeout": 1.0} for rank in (0, 2)]
    for kind_of_error, text in pool(2).run(fail_to_enter, arguments, world=False):
        assert kind_of_error == "MissingRanks"
        assert re.search(
            r"2 of 4 ranks did not come within 1 s: missing ranks 1, 3; present: 0 \(.*\), 2 \(", text
        )


def test_a_rank_0_that_never_comes_is_named_with_its_address(pool):
    port = free_port()
    arguments = [{"init_method": f"tcp://127.0.0.1:{port}", "rank": 1, "size": 2, "timeout": 0.5}]
    [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "MissingRanks"
    assert f"rank 0's store at 127.0.0.1:{port} could not be reached within 0.5 s" in text
    assert "refused" in text


def test_a_host_without_an_address_is_told(pool):
    arguments = [{"init_method": "tcp://no-such-host.invalid:4000", "rank": 1, "size": 2, "timeout": 0.5}]
    [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "MissingRanks"
    assert "no-such-host.invalid:4000" in text


def test_a_port_in_use_is_told(pool):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = [{"init_method": f"tcp://127.0.0.1:{port}", "rank": 0, "size": 2, "timeout": 1.0}]
        [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "WorldError"
    assert f"127.0.0.1:{port}: the port is in use" in text


def test_a_file_that_cannot_be_written_is_told(pool, tmp_path):
    arguments = [{"init_method": f"file://{tmp_path}/absent/meet", "rank": 0, "size": 2}]
    [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "WorldError"
    assert f"the file {tmp_path}/absent/meet: No such file or directory" in text


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_claimed_twice_is_named_to_all(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    arguments = [{"init_method": address, "rank": rank, "size": 3, "timeout": 30.0} for rank in (0, 1, 1)]
    outcomes = pool(3).run(fail_to_enter, arguments, world=False)
    assert {kind for kind, _ in outcomes} == {"WorldError"}
    for _, text in outcomes:
        assert re.search(r"rank 1 is claimed twice: by process .*:\d+ and by process .*:\d+", text)
        assert "a rank of its own" in text


def give_up(tell, address, rank):
    import paceline

    try:
        paceline.init(init_method=address, rank=rank, size=2, timeout=0.1)
    except paceline.PacelineError:
        os._exit(0)


def ranks_that_gave_up(fork, folder, address):
    return [fork(give_up, address, rank).wait() for rank in range(2)]


def test_a_file_left_by_an_earlier_run_does_no_harm(pool, nursery, tmp_path):
    address = f"file://{tmp_path}/meet"
    assert nursery.play(ranks_that_gave_up, address) == [0, 0]
    arguments = [{"init_method": address, "rank": rank, "size": 2} for rank in range(2)]
    assert [total for _, total in pool(2).run(enter_as, arguments, world=False)] == [3.0, 3.0]


@pytest.mark.parametrize(("kind", "sizes"), [("file", (2, 3)), ("tcp", (3, 2))])
def test_ranks_that_disagree_about_the_size_are_told(pool, tmp_path, kind, sizes):
    address = ways_to_meet(kind, tmp_path)
    arguments = [
        {"init_method": address, "rank": rank, "size": sizes[rank], "timeout": 3.0} for rank in range(2)
    ]
    for kind_of_error, text in pool(2).run(fail_to_enter, arguments, world=False):
        assert kind_of_error == "WorldError"
        assert f"a world size of {sizes[0]}, rank 1" in text
        assert f"one of {sizes[1]}" in text


def test_a_second_init_gives_the_same_world_or_says_why_not(pool):
    for text in pool(2).run(second_init):
        assert "size=3 (now 2)" in text
        assert "shutdown" in text


def test_a_group_that_somebody_else_made_is_not_taken_over(pool, tmp_path):
    with pytest.raises(RankError, match="has a process group already") as caught:
        pool(1).run(foreign_group, str(tmp_path / "meet"), world=False)
    assert isinstance(caught.value.cause, WorldError)


def test_a_world_of_one_makes_a_group_only_when_asked(pool):
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


def test_missing_ranks_is_a_timeout_and_a_world_error():
    assert issubclass(MissingRanks, WorldError)
    assert issubclass(MissingRanks, TimeoutError)


def fail_to_enter_with_facts(rank, size, arguments_of_rank, facts_of_rank):
    from paceline.world import session

    before, session.facts_of_this_process = session.facts_of_this_process, lambda: facts_of_rank[rank]
    try:
        return fail_to_enter(rank, size, arguments_of_rank)
    finally:
        session.facts_of_this_process = before


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_with_other_versions_are_named_to_all_unless_it_is_meant(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    facts = [{"torch": "2.13.0", "numpy": "2.4.6"} for _ in range(3)]
    facts[1]["torch"] = "2.12.1"
    arguments = [{"init_method": address, "rank": rank, "size": 3, "timeout": 30.0} for rank in range(3)]
    outcomes = pool(3).run(fail_to_enter_with_facts, arguments, facts, world=False)
    assert {kind for kind, _ in outcomes} == {"MismatchError"}
    assert len({text for _, text in outcomes}) == 1
    assert "[rank 1] torch differs between ranks: 2.13.0 on ranks 0, 2; 2.12.1 on rank 1" in outcomes[0][1]
    arguments[1]["alike"] = False
    outcomes = pool(3).run(fail_to_enter_with_facts, arguments, facts, world=False)
    assert outcomes == [("entered", "")] * 3


PROGRAM = """
import sys, paceline
paceline.init(init_method=sys.argv[1], rank=int(sys.argv[2]), size=2, timeout=60.0, device="cpu")
"""


def run_a_program(tell, script, address, rank):
    import runpy

    sys.argv = [script, address, str(rank)]
    sys.stderr = open(f"{script}.told", "w")  # noqa: SIM115 — for the rest of this process
    runpy.run_path(script, run_name="__main__")


def programs_that_differ(fork, folder, address):
    """Run one program on rank 0 and a later one on rank 1; return their exit codes and what they wrote."""
    scripts = [Path(folder) / name for name in ("train.py", "train-later.py")]
    for number, script in enumerate(scripts):
        script.write_text(PROGRAM + "# a change\n" * number)
    ranks = [fork(run_a_program, str(script), address, rank) for rank, script in enumerate(scripts)]
    codes = [rank.wait() for rank in ranks]
    return codes, [Path(f"{script}.told").read_text() for script in scripts]


def test_another_text_of_the_program_on_one_rank_ends_both(nursery, tmp_path):
    codes, told = nursery.play(programs_that_differ, f"file://{tmp_path}/meet")
    assert codes == [1, 1]
    for text in told:
        assert re.search(
            r"the program differs between ranks: train\.py .* rank 0; train-later\.py .* rank 1", text
        )
