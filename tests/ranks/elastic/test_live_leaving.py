"""Ranks that leave a live world after warnings: the last ones save the very step that they have done."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict

import pytest

from live_run import STEPS, LiveRun, run_alone

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of a run of one process."""
    return run_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a run that saves every ten steps, and resumes."""
    monkeypatch.setenv("LIVE_CHECKPOINT", str(tmp_path / "saves"))

    def begin(ranks, **options):
        run = LiveRun(tmp_path, ranks, **options)
        run.wait_for(lambda: run.step() >= 23)
        return run

    return begin


def newest(folder):
    """Return the step of the newest complete checkpoint."""
    return max(int(path.name[5:]) for path in (folder / "saves").glob("step-????????"))


def steps_done(run):
    """Return the steps that each process has done, by pid."""
    found = defaultdict(list)
    for rows in run.lines().values():
        for pid, step, _ in rows:
            found[pid].append(step)
    return found


def last_step(run):
    """Return the newest step that any process has done."""
    return max(step for steps in steps_done(run).values() for step in steps)


def check_every_step_once(run, lives=2):
    """Check that each step was done in one life of the run only, and once by each of its processes."""
    done = steps_done(run)
    starts = sorted({steps[0] for steps in done.values()})
    assert len(starts) == lives
    for pid, steps in done.items():
        assert steps == sorted(steps), pid  # an attempt that was undone is there twice
        assert not any(steps[0] < start <= steps[-1] for start in starts), "a later life repeats nothing"
    assert {step for steps in done.values() for step in steps} == set(range(1, STEPS + 1))


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
@pytest.mark.parametrize("pause", [0.0, 0.4])
def test_if_all_ranks_leave_the_last_ones_save(tmp_path, start, undisturbed, monkeypatch, sync, pause):
    """The command was not warned, so it starts them again, from that step."""
    monkeypatch.setenv("LIVE_SYNC", sync)
    run = start(3)
    for pid in run.training().values():
        os.kill(pid, TERM)
        time.sleep(pause)
    assert run.end() == {undisturbed}
    assert "the last ranks leave after step" in run.text()
    assert len(run.records("restart")) == 1
    assert "Traceback" not in run.text()
    check_every_step_once(run)


@pytest.mark.parametrize("victim", [0, 2])
def test_sigusr1_on_one_rank_has_all_save_and_leave(tmp_path, start, undisturbed, victim):
    run = start(3)
    os.kill(run.pid(victim), USR1)
    assert run.end() == {undisturbed}
    assert f"rank {victim} was warned by SIGUSR1: all ranks leave after step" in run.text()
    assert run.records("restart")[0]["first"]["exit_code"] == 75
    check_every_step_once(run)


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_warning_to_the_command_ends_it_with_75_and_the_next_one_continues(
    tmp_path, start, undisturbed, number
):
    run = start(3)
    run.process.send_signal(number)
    try:
        assert run.process.wait(60) == 75, run.text()
    finally:
        run.kill()
    assert not run.records("restart")
    assert newest(tmp_path) == last_step(run)
    assert "Traceback" not in run.text()
    again = LiveRun(tmp_path, 2)
    assert again.end() == {undisturbed}
    check_every_step_once(again)


def test_the_last_rank_of_a_world_that_shrank_saves(tmp_path, start, undisturbed):
    run = start(3)
    for local_rank in (0, 1):
        os.kill(run.pid(local_rank), TERM)
        run.wait_for(lambda count=local_rank: len(run.records("recovery")) > count)
    run.process.send_signal(TERM)
    try:
        assert run.process.wait(60) == 75, run.text()
    finally:
        run.kill()
    assert newest(tmp_path) == last_step(run)
    assert LiveRun(tmp_path, 3).end() == {undisturbed}
