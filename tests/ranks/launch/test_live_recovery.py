"""Ranks of one host that end while the others go on: replacement, its limits, and when all restart after all."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

import paceline
from live_job import LiveJob, wait_until
from paceline.errors import RankFailed


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Start jobs that are ended with the test."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
    monkeypatch.setenv("PACELINE_JOINER", "of an outer launcher")
    jobs = []

    def start(ranks, **options):
        jobs.append(LiveJob(tmp_path / "job", ranks, **options))
        return jobs[-1]

    yield start
    for one in jobs:
        one.abandon()
    assert list((tmp_path / "tmp").iterdir()) == []


def last_restart(job):
    [record] = job.records("restart")
    return record["first"]


def test_a_killed_rank_is_replaced_and_the_others_stay(job, capfd):
    run = job(3)
    names = ["0.0-0", "1.0-0", "2.0-0"]
    run.order("live a", *names)
    survivors = [run.process(name) for name in ("0.0-0", "2.0-0")]
    run.kill("1.0-0")
    old, new = run.facts("1.0-0"), run.facts("1.1-0")
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"]) for one in (old, new)] == [
        ("1", "3", "1")
    ] * 2
    assert (old["JOINER"], new["JOINER"], old["STORE"]) == ("", "1", new["STORE"])
    agent = old["MEMBER"].partition("/")[0]
    assert (len(agent), old["MEMBER"], new["MEMBER"]) == (8, f"{agent}/1/0", f"{agent}/1/1")
    [private] = (run.notes.parents[1] / "tmp").iterdir()
    assert (private / f"{agent}-1-0.dead").exists()
    run.order("live a", "1.1-0")
    assert all(psutil.pid_exists(pid) for pid in survivors)
    run.end("0.0-0", "1.1-0", "2.0-0")
    assert run.error is None
    assert (run.logs / "rank1.log").read_text() == "rank 1.0-0 is there\n"
    assert (run.logs / "rank1.1.log").read_text().startswith("rank 1.1-0 is there\n")
    [record] = run.records("departure")
    assert (record["rank"], record["local_rank"], record["member"]) == (1, 1, old["MEMBER"])
    assert (record["exit_code"], record["how"], record["lines"]) == (
        -9,
        "was ended by SIGKILL",
        ["rank 1.0-0 is there"],
    )
    assert (record["left"], record["replaced"], record["restart"], record["seconds"] > 0) == (
        2,
        True,
        0,
        True,
    )
    assert run.records("restart") == []
    host = os.uname().nodename
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline:")]
    assert len(shown) == 1
    assert shown[0].startswith(f"paceline: rank 1 on {host} was ended by SIGKILL after")
    assert shown[0].endswith(" s; it is replaced, the others train on")


@pytest.mark.parametrize("why", ["not live", "not live any more", "recovery"])
def test_all_restart_if_one_cannot_recover(job, why):
    run = job(2, **({"recovery": "restart"} if why == "recovery" else {}))
    if why == "recovery":
        assert [run.facts(f"{rank}.none-0")["MEMBER"] for rank in range(2)] == ["", ""]
        run.kill("1.none-0")
        run.order("exit 0", "0.none-1")
        run.end("1.none-1")
    else:
        run.order("live a", "1.0-0")
        if why == "not live any more":
            run.order("live a", "0.0-0")
            run.order("dull", "0.0-0")
        run.process("0.0-0")
        run.kill("1.0-0")
        run.end("0.0-1", "1.0-1")
    assert run.error is None
    assert (last_restart(run)["rank"], run.records("departure")) == (1, [])


def test_replacements_count_as_restarts_and_without_one_the_others_go_on(job):
    run = job(3, max_restarts=2)
    run.order("live a", "0.0-0", "1.0-0", "2.0-0")
    run.kill("1.0-0")
    run.order("live a", "1.1-0")
    run.kill("2.0-0")
    run.order("live a", "2.1-0")
    run.kill("1.1-0")
    wait_until(lambda: len(run.records("departure")) == 3)
    assert [one["replaced"] for one in run.records("departure")] == [True, True, False]
    assert not run.is_there("1.2-0")
    run.order("dull", "0.0-0")
    run.order("exit 3 KeyError: 1", "2.1-0")
    run.wait()
    assert isinstance(run.error, RankFailed)
    assert (run.error.rank, run.error.exit_code) == (2, 3)
    assert "replaced 2 ranks already" in str(run.error)


def test_a_rank_that_leaves_is_not_replaced_and_the_job_ends_well(job, capfd):
    run = job(2)
    run.order("live a", "0.0-0", "1.0-0")
    os.kill(run.process("1.0-0"), 15)
    wait_until(lambda: run.records("departure"))
    run.end("0.0-0")
    assert run.error is None
    [record] = run.records("departure")
    assert (record["exit_code"], record["replaced"], record["left"]) == (75, False, 1)
    assert not run.is_there("1.1-0")
    assert "; the others train on\n" in capfd.readouterr().err


def test_a_rank_that_left_may_end_after_the_others_have_trained_all_steps(job):
    run = job(2)
    run.order("live a", "0.0-0", "1.0-0")
    run.order("dull", "0.0-0")
    os.kill(run.process("1.0-0"), 15)
    wait_until(lambda: run.records("departure"))
    run.end("0.0-0")
    assert (run.error, run.records("restart")) == (None, [])


def test_survivors_that_fail_are_restarted_and_the_first_failure_is_named(job):
    run = job(3)
    members = [run.facts(f"{rank}.0-0")["MEMBER"] for rank in range(3)]
    run.order("live " + " ".join(members), "0.0-0", "1.0-0", "2.0-0")
    run.kill("2.0-0")
    run.process("2.1-0")
    run.order("exit 1 PeerLost: rank 2 ended", "0.0-0")
    wait_until(lambda: len(run.records("departure")) == 2)
    run.order("exit 1 PeerLost: rank 2 ended", "1.0-0")
    run.process("0.0-1")
    record = run.records("restart")[0]
    assert (record["first"]["rank"], record["first"]["exit_code"], record["restart"]) == (2, -9, 1)
    assert [one["rank"] for one in record["after"]] == [0, 1]
    run.end("0.0-1", "1.0-1", "2.0-1")
    assert run.error is None
    assert (run.logs / "restart1" / "rank2.log").exists()


def test_a_failure_that_the_others_have_recovered_from_causes_no_restart(job, capfd):
    run = job(2)
    members = [run.facts(f"{rank}.0-0")["MEMBER"] for rank in range(2)]
    run.order("live " + " ".join(members), "0.0-0", "1.0-0")
    run.kill("1.0-0")
    run.process("1.1-0")
    run.order("live " + members[0], "0.0-0")
    run.order("exit 1 ImportError: x", "1.1-0")
    run.process("1.2-0")
    run.order("exit 1 KeyError: 7", "0.0-0")
    run.end("0.0-1", "1.0-1")
    assert run.error is None
    assert last_restart(run)["lines"][-1] == "KeyError: 7"
    [record] = run.records("recovery")
    assert (record["epoch"], record["members"], record["repeated"]) == (1, members[:1], True)
    assert "paceline: 1 rank trains on after 0.25 s, step 7 repeated\n" in capfd.readouterr().err


def test_the_terminal_shows_what_a_new_rank_0_writes(job, capfd):
    run = job(2, max_restarts=0)
    members = [run.facts(f"{rank}.0-0")["MEMBER"] for rank in range(2)]
    run.order("live " + " ".join(members), "0.0-0", "1.0-0")
    wait_until(lambda: "rank 0.0-0 is there" in capfd.readouterr().out)
    run.kill("0.0-0")
    wait_until(lambda: run.records("departure"))
    run.order("live " + members[1], "1.0-0")
    wait_until(lambda: run.records("recovery"))
    run.order("exit 0 the last words", "1.0-0")
    run.wait()
    assert run.error is None
    assert capfd.readouterr().out == "the last words\n"
    assert (run.logs / "rank1.log").read_text() == "rank 1.0-0 is there\nthe last words\n"


def test_a_place_whose_processes_never_join_is_given_up(job):
    run = job(2, max_restarts=9)
    run.order("live a", "0.0-0", "1.0-0")
    run.kill("1.0-0")
    run.process("1.1-0")
    run.order("dull", "0.0-0")  # whatever the others do: who has not joined disturbs nobody
    run.order("exit 1 ImportError: x", "1.1-0", "1.2-0")
    wait_until(lambda: len(run.records("departure")) == 3)
    assert [one["replaced"] for one in run.records("departure")] == [True, True, False]
    run.end("0.0-0")
    assert (run.error, run.is_there("1.3-0")) == (None, False)


def test_a_process_that_has_not_joined_yet_does_not_keep_the_job(job):
    run = job(2)
    run.order("live a", "0.0-0", "1.0-0")
    run.kill("1.0-0")
    run.process("1.1-0")
    run.end("0.0-0")
    assert run.error is None


@pytest.mark.parametrize("last", ["exit 2", "exit 1 UsageError: lr=0"])
def test_a_program_that_is_called_wrongly_ends_the_job(job, last):
    run = job(2)
    run.order("live a", "0.0-0", "1.0-0")
    run.order(last, "1.0-0")
    run.wait()
    assert isinstance(run.error, RankFailed)
    assert "it was called wrongly" in str(run.error)
    assert run.records("departure") == []


def test_nobody_survives(job):
    run = job(2, max_restarts=1)
    run.order("live a", "0.0-0", "1.0-0")
    run.order("exit 0", "1.0-0")
    wait_until(lambda: not psutil.pid_exists(run.process("1.0-0")) or _is_zombie(run.process("1.0-0")))
    run.kill("0.0-0")  # the other one has ended well, which saves nobody's work
    run.end("0.0-1", "1.0-1")
    assert run.error is None
    assert last_restart(run)["rank"] == 0


def _is_zombie(pid):
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
