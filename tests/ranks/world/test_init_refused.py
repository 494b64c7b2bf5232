"""Worlds that can not form: every way to fail to enter one, and the error on each rank."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from paceline.errors import MissingRanks, WorldError
from world_entry import enter_as, fail_to_enter, free_port, ways_to_meet


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_world_that_never_completes_names_the_missing_ranks(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    arguments = [{"init_method": address, "rank": rank, "size": 4, "timeout": 1.0} for rank in (0, 2)]
    for kind_of_error, text in pool(2).run(fail_to_enter, arguments, world=False):
        assert kind_of_error == "MissingRanks"
        assert re.search(
            r"2 of 4 ranks did not arrive within 1 s: missing ranks 1, 3; present: 0 \(.*\), 2 \(", text
        )


def test_a_rank_0_that_never_joins_is_named_with_its_address(pool):
    port = free_port()
    arguments = [{"init_method": f"tcp://127.0.0.1:{port}", "rank": 1, "size": 2, "timeout": 0.5}]
    [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "MissingRanks"
    assert f"rank 0's store at 127.0.0.1:{port} could not be reached within 0.5 s" in text
    assert "refused" in text


def test_a_host_without_an_address_is_reported(pool):
    arguments = [{"init_method": "tcp://no-such-host.invalid:4000", "rank": 1, "size": 2, "timeout": 0.5}]
    [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "MissingRanks"
    assert "no-such-host.invalid:4000" in text


def test_a_port_in_use_is_reported(pool):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = [{"init_method": f"tcp://127.0.0.1:{port}", "rank": 0, "size": 2, "timeout": 1.0}]
        [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "WorldError"
    assert f"127.0.0.1:{port}: the port is in use" in text


def test_an_unwritable_file_is_reported(pool, tmp_path):
    arguments = [{"init_method": f"file://{tmp_path}/absent/meet", "rank": 0, "size": 2}]
    [(kind, text)] = pool(1).run(fail_to_enter, arguments, world=False)
    assert kind == "WorldError"
    assert f"the file {tmp_path}/absent/meet: No such file or directory" in text


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_claimed_twice_is_named_to_all(pool, tmp_path, kind):
    address = ways_to_meet(kind, tmp_path)
    arguments = [{"init_method": address, "rank": rank, "size": 3, "timeout": 30.0} for rank in (0, 1, 1)]
    outcomes = pool(3).run(fail_to_enter, arguments, world=False)
    assert {kind for kind, _ in outcomes} == {"WorldError"}
    for _, text in outcomes:
        assert re.search(r"rank 1 is claimed twice: by process .*:\d+ and by process .*:\d+", text)
        assert "a rank of its own" in text


def give_up(send, address, rank):
    import paceline

    try:
        paceline.init(init_method=address, rank=rank, size=2, timeout=0.1)
    except paceline.PacelineError:
        os._exit(0)


def ranks_that_gave_up(fork, folder, address):
    return [fork(give_up, address, rank).wait() for rank in range(2)]


@pytest.mark.thorough
def test_a_file_left_by_an_earlier_run_does_no_harm(pool, killable, tmp_path):
    address = f"file://{tmp_path}/meet"
    assert killable.run_ranks(ranks_that_gave_up, address) == [0, 0]
    arguments = [{"init_method": address, "rank": rank, "size": 2} for rank in range(2)]
    assert [total for _, total in pool(2).run(enter_as, arguments, world=False)] == [3.0, 3.0]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "sizes"), [("file", (2, 3)), ("tcp", (3, 2))])
def test_ranks_that_disagree_about_the_size_get_an_error(pool, tmp_path, kind, sizes):
    address = ways_to_meet(kind, tmp_path)
    arguments = [
        {"init_method": address, "rank": rank, "size": sizes[rank], "timeout": 3.0} for rank in range(2)
    ]
    for kind_of_error, text in pool(2).run(fail_to_enter, arguments, world=False):
        assert kind_of_error == "WorldError"
        assert f"a world size of {sizes[0]}, rank 1" in text
        assert f"one of {sizes[1]}" in text


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


def run_a_program(send, script, address, rank):
    import runpy

    sys.argv = [script, address, str(rank)]
    sys.stderr = open(f"{script}.stderr", "w")  # noqa: SIM115 — for the rest of this process
    runpy.run_path(script, run_name="__main__")


def programs_that_differ(fork, folder, address):
    """Run one program on rank 0 and a later one on rank 1; return their exit codes and output."""
    scripts = [Path(folder) / name for name in ("train.py", "train-later.py")]
    for number, script in enumerate(scripts):
        script.write_text(PROGRAM + "# a change\n" * number)
    ranks = [fork(run_a_program, str(script), address, rank) for rank, script in enumerate(scripts)]
    codes = [rank.wait() for rank in ranks]
    return codes, [Path(f"{script}.stderr").read_text() for script in scripts]


def test_another_text_of_the_program_on_one_rank_ends_both(killable, tmp_path):
    codes, texts = killable.run_ranks(programs_that_differ, f"file://{tmp_path}/meet")
    assert codes == [1, 1]
    for text in texts:
        assert re.search(
            r"the program differs between ranks: train\.py .* rank 0; train-later\.py .* rank 1", text
        )
