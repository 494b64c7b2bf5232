"""Ranks that die, leave or join: the others train on in the same processes, to the bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time

import pytest

from live_run import STEPS, LiveRun, is_running, run_alone


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of a run of one process."""
    return run_alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_killed_rank_is_replaced_while_the_others_train_on(tmp_path, undisturbed, backend):
    run = LiveRun(tmp_path, 3, backend, forked=backend == "paceline")  # else each rank starts Python
    run.wait_for(lambda: run.step() >= 20)
    before = run.training()
    os.kill(run.pid(0), signal.SIGKILL)
    assert run.end() == {undisturbed}
    assert not run.records("restart")
    (departure,) = run.records("departure")
    assert (departure["rank"], departure["exit_code"], departure["replaced"]) == (0, -9, True)
    first = run.records("recovery")[0]
    assert first["ranks"] == 2
    assert first["step"] >= 20
    for member, pid in before.items():
        rows = run.lines()[member]
        assert {row[0] for row in rows} == {pid}, "survivors keep their processes"
        if member.split("-")[1] != "0":
            assert rows[-1][1] == STEPS
            assert sorted({row[1] for row in rows}) == list(range(rows[0][1], STEPS + 1)), "every step, once"


def test_a_profiler_goes_on_with_the_new_ranks(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setenv("LIVE_RECORD", str(tmp_path / "record"))
    run = LiveRun(tmp_path, 3)
    run.wait_for(lambda: run.step() >= 20)
    os.kill(run.pid(0), signal.SIGKILL)
    assert run.end() == {undisturbed}
    facts = json.loads((tmp_path / "record" / "run.json").read_text())
    assert facts["world"]["size"] == 3, "a newcomer writes none"
    lines = [json.loads(line) for line in (tmp_path / "record" / "steps.jsonl").read_text().splitlines()]
    missing = set(range(1, STEPS + 1)) - {line["step"] for line in lines}
    assert len(missing) <= 1, "that in which rank 0 died, if its update was applied"
    assert all(line["loss"] == line["step"] - 1 for line in lines)
    joined = 3 in [record["ranks"] for record in run.records("recovery")]  # it may come too late
    assert (tmp_path / "record" / "trace" / "rank2.1.jsonl").exists() == joined


def test_a_rank_that_is_requested_to_leave_leaves_between_two_steps(tmp_path, undisturbed):
    run = LiveRun(tmp_path, 3)
    run.wait_for(lambda: run.step() >= 20)
    os.kill(run.pid(1), signal.SIGTERM)
    assert run.end() == {undisturbed}
    (departure,) = run.records("departure")
    assert (departure["rank"], departure["exit_code"], departure["replaced"]) == (1, 75, False)
    assert [record["ranks"] for record in run.records("recovery")] == [2]


def test_all_ranks_leave_at_once_without_an_error(tmp_path, undisturbed):
    run = LiveRun(tmp_path, 2)
    run.wait_for(lambda: run.step() >= 20)
    for pid in [run.pid(0), run.pid(1)]:
        os.kill(pid, signal.SIGTERM)
    assert run.end() == {undisturbed}
    (restart,) = run.records("restart")
    assert restart["first"]["exit_code"] == 75
    assert "Traceback" not in run.text()


def test_rank_0_leaves_a_run_that_saves_checkpoints(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setenv("LIVE_CHECKPOINT", str(tmp_path / "saves"))
    run = LiveRun(tmp_path, 3)
    run.wait_for(lambda: run.step() >= 20)
    os.kill(run.pid(0), signal.SIGTERM)
    assert run.end() == {undisturbed}
    assert not run.records("restart")
    assert [record["ranks"] for record in run.records("recovery")] == [2]
    assert run.logged("left") == [(0,)], "the others need not wait for the folder's lock until it ends"
    newest = max(path.name for path in (tmp_path / "saves").glob("step-????????"))
    assert newest == f"step-{STEPS - 10:08d}"


def test_two_deaths_at_once_and_during_recovery(tmp_path, undisturbed):
    run = LiveRun(tmp_path, 4)
    run.wait_for(lambda: run.step() >= 20)
    for local_rank, pause in ((1, 0), (3, 0.15), (0, 0)):
        os.kill(run.pid(local_rank), signal.SIGKILL)
        time.sleep(pause)
    assert run.end() == {undisturbed}
    assert not run.records("restart")


# ------------------------------------------------------------------ with a loader


def check_samples(run):
    """Check that all ranks agree on the samples of each step, and that every epoch uses each sample once."""
    steps, epochs = {}, {}
    for epoch, step, *samples in run.logged("used"):
        assert steps.setdefault(step, (epoch, samples)) == (epoch, samples)
    assert sorted(steps) == list(range(len(steps)))
    for epoch, samples in steps.values():
        epochs.setdefault(epoch, []).extend(samples)
    assert sorted(epochs) == list(range(STEPS // 10))
    assert all(sorted(samples) == list(range(120)) for samples in epochs.values())


@pytest.fixture(scope="module")
def undisturbed_with_loader(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("alone"), "virtual")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_loader_goes_on_with_the_other_ranks(tmp_path, undisturbed_with_loader, workers):
    run = LiveRun(tmp_path, 3, data=("virtual", workers))
    run.wait_for(lambda: run.step() >= 20)
    os.kill(run.pid(0), signal.SIGKILL)
    assert run.end() == {undisturbed_with_loader}
    assert not run.records("restart")
    assert run.records("recovery")
    check_samples(run)
    processes = run.logged("workers")
    assert max(map(len, processes)) == int(workers), "old workers end before new ones start"
    end = time.monotonic() + 20  # the killed rank's worker looks for its parent every few seconds
    while any(is_running(pid) for each in processes for pid in each):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_loader_without_virtual_ranks_uses_every_sample_once(tmp_path):
    run = LiveRun(tmp_path, 3, data=("plain",))
    run.wait_for(lambda: run.step() >= 20)
    os.kill(run.pid(1), signal.SIGKILL)
    run.wait_for(lambda: run.records("recovery"))
    os.kill(run.pid(2), signal.SIGTERM)
    run.end()
    assert not run.records("restart")
    assert len(run.records("departure")) == 2
    check_samples(run)


# ------------------------------------------------------------------ storms


def storm(run, rng):
    """Kill, stop and end ranks at random until the run is nearly over; one at least trains on."""
    events, leaving = 0, set()
    while run.process.poll() is None and run.step() < STEPS - 50:
        time.sleep(rng.random())
        training = {member: pid for member, pid in run.training().items() if pid not in leaving}
        if len(training) < 2 or run.step() >= STEPS - 50:
            continue
        pid, events = rng.choice(list(training.values())), events + 1
        with contextlib.suppress(ProcessLookupError):
            match rng.choice(["kill", "kill", "leave", "stop", "kill two"]):
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "leave":
                    leaving.add(pid)
                    os.kill(pid, signal.SIGTERM)
                case "stop":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(rng.choice([0.2, 1]))
                    os.kill(pid, signal.SIGCONT)
                case _ if len(training) > 2:
                    for each in rng.sample(list(training.values()), 2):
                        os.kill(each, signal.SIGKILL)
                        time.sleep(rng.choice([0, 0.1, 0.4]))
    return events


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_storms_end_with_the_bits_of_an_undisturbed_run(tmp_path, undisturbed, seed):
    rng = random.Random(seed)
    run = LiveRun(tmp_path, rng.choice([2, 3, 4]), rng.choice(["paceline", "gloo"]))
    run.wait_for(lambda: run.step() >= 3)
    assert storm(run, rng)
    assert run.end(150) == {undisturbed}
    assert not run.records("restart")


@pytest.mark.thorough
@pytest.mark.parametrize("data", ["virtual", "plain"])
@pytest.mark.parametrize("seed", range(2))
def test_storms_with_a_loader_use_every_sample_once(tmp_path, undisturbed_with_loader, seed, data):
    rng = random.Random(seed)
    run = LiveRun(tmp_path, rng.choice([3, 4]), rng.choice(["paceline", "gloo"]), data=(data,))
    run.wait_for(lambda: run.step() >= 3)
    assert storm(run, rng)
    found = run.end(150)
    assert found == {undisturbed_with_loader} or data == "plain"
    assert not run.records("restart")
    check_samples(run)
