"""Starvation with real ranks: documented outcomes of torch, exact results of Paceline, no process left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.errors import UsageError
from paceline.tools.bench.starvation.starvation_cases import STARVATION_CASES, find_cases
from paceline.tools.bench.starvation.starvation_settings import EXAMPLE_BALANCE, StarvationSettings
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance

SOURCE = str(Path(paceline.__file__).parents[1])
SHARES = BatchBalance(dispatch_blocks(300, 4, shares=[0.25, 0.25, 0.10, 0.40]), 20)
LONG_TIMEOUT, SHORT_TIMEOUT = 60.0, 4.0  # seconds: never reached, and waited for


def run_all(fork, folder, names, *settings):
    import paceline.tools.bench.starvation.starvation_worker  # noqa: F401 — in the warm process, so that each child need not

    children = [fork(run_one, name, *settings) for name in names]  # waiting overlaps
    return [child.receive(timeout=150) for child in children]


def run_one(report, name, *settings):
    from paceline.tools.bench.starvation.starvation_worker import run_case

    (case,) = find_cases([name])
    found = run_case(case, StarvationSettings(*settings)).to_json()
    with pytest.raises(ChildProcessError):  # no process is left
        os.waitpid(-1, os.WNOHANG)
    report(found)


def run_cases(killable, *names, balance=EXAMPLE_BALANCE, timeout=LONG_TIMEOUT, backend="gloo"):
    return killable.run_ranks(run_all, names, balance, timeout, backend, timeout=200)


def kinds(outcome):
    return [(one["kind"], one["error"]) for one in outcome["ranks"]]


def test_waiting_for_a_rank_that_has_ended_is_an_error(killable):
    (outcome,) = run_cases(killable, "exits")
    assert kinds(outcome) == [("error", "RuntimeError"), ("finished", "")]
    assert "onnection" in outcome["ranks"][0]["message"]  # closed, or reset, by peer
    assert [one["steps"] for one in outcome["ranks"]] == [8, 8]
    assert outcome["samples_lost"] == 88


def test_the_paceline_backend_names_the_lost_rank_and_the_calls(killable):
    exited, other = run_cases(killable, "exits", "metric", backend="paceline")
    assert [one["kind"] for one in exited["ranks"]] == ["error", "finished"]
    assert "PeerLost" in exited["ranks"][0]["message"]
    assert "rank 1" in exited["ranks"][0]["message"]
    assert [one["kind"] for one in other["ranks"]] == ["error", "error"]
    for one, theirs in zip(other["ranks"], ("float64[1]", "float64[161]"), strict=True):
        assert "MismatchError" in (one["error"] + one["message"])
        assert f"rank {1 - one['rank']} calls all_reduce({theirs}" in one["message"]


@pytest.mark.thorough
def test_a_receive_that_no_rank_sends_hangs(killable):
    found = run_cases(killable, "idles", "barrier", "fsdp2", timeout=SHORT_TIMEOUT)
    waits, continues = ("time-out", "RuntimeError"), ("finished", "")
    assert {outcome["scene"]: kinds(outcome) for outcome in found} == {
        "idles": [waits, continues],
        "barrier": [waits, waits],
        "fsdp2": [waits, continues],
    }


def test_collectives_of_other_sizes_end_a_process_without_an_exception(killable):
    for outcome in run_cases(killable, "metric", "larger"):
        receiver = {"metric": 1, "larger": 0}[outcome["scene"]]  # its buffer is smaller than the message
        assert outcome["ranks"][receiver]["error"] == "SIGABRT", outcome
        assert "gloo::EnforceNotMet" in outcome["ranks"][receiver]["message"]
        assert kinds(outcome)[1 - receiver] == ("error", "RuntimeError")


@pytest.mark.thorough
@pytest.mark.parametrize("balance", [EXAMPLE_BALANCE, SHARES], ids=["2 ranks", "4 ranks"])
def test_finished_cases_have_these_errors(killable, balance):
    names = ["next-epoch", "join", "join-active", "truncated", "bucketed", "sharded", "full-shard"]
    found = {outcome["scene"]: outcome for outcome in run_cases(killable, *names, balance=balance)}
    for outcome in found.values():
        assert outcome["finished"], outcome
        assert outcome["replicas_apart"] <= 1e-12  # it goes unnoticed
        assert outcome["gradient_error_with_equal_batches"] <= 1e-12
    for name in ("next-epoch", "join"):
        assert found[name]["gradient_error_with_a_dry_rank"] > 0.01
        assert found[name]["parameter_error"] > 0.01
    assert found["join-active"]["gradient_error"] > 0.01
    lost = balance.outcome("truncate").dropped
    assert found["truncated"]["samples_lost"] == lost > 0
    for name in ("bucketed", "sharded", "full-shard"):
        outcome = found[name]
        assert outcome["gradient_error"] <= 1e-12, outcome
        assert outcome["parameter_error"] <= 1e-12
        assert outcome["samples_lost"] == 0
        assert [one["samples"] for one in outcome["ranks"]] == list(balance.dispatch.counts)


def stuck(fork, folder):
    import paceline.tools.bench.starvation.starvation_worker  # noqa: F401

    return fork(run_stuck).receive()


def run_stuck(report):
    from paceline.tools.bench.starvation import starvation_worker

    def sleep_for_ever(case, settings, rank, folder, log):
        log.write("started", step=0)
        time.sleep(1000)

    starvation_worker.train_as_rank, starvation_worker._GRACE_SECONDS = sleep_for_ever, 0.5
    outcome = starvation_worker.run_case(
        STARVATION_CASES[0], StarvationSettings(EXAMPLE_BALANCE, 1.0)
    ).to_json()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    report(outcome)


def test_a_rank_that_no_time_out_ends_is_killed_and_reported(killable):
    assert kinds(killable.run_ranks(stuck)) == [("hung", "")] * 2


# ---------------------------------------------------------------------- the command's own path

CALL = "from paceline.tools.cli.data_command import starve; starve(scenes={}, timeout=60.0, json_file={})"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts `starve` in a process with its own temporary folder."""
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path / "tmp")}
    started = []

    def begin(scenes, json_file=None):
        path = f"__import__('pathlib').Path({str(json_file)!r})" if json_file else None
        call = [sys.executable, "-c", CALL.format(scenes, path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(call, env=environment, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_the_command_prints_and_writes_outcomes(start, tmp_path):
    out, err = start(["exits", "sharded"], tmp_path / "new" / "result.json").communicate(timeout=120)
    assert "1/2 torch DDP, its process ends → the others: RuntimeError" in err
    assert "Paceline, sharded" in out
    written = json.loads((tmp_path / "new" / "result.json").read_text())
    assert (written["kind"], written["schema"]) == ("starvation", 1)
    assert written["settings"]["batches_of_rank"] == [10, 8]
    assert [outcome["scene"] for outcome in written["scenes"]] == ["exits", "sharded"]
    assert [outcome["finished"] for outcome in written["scenes"]] == [False, True]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.thorough
def test_nothing_outlives_the_command(start):
    process = start(["idles"])
    everyone, deadline = [], time.monotonic() + 100
    while len(everyone) < 3:  # the worker, and two ranks
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        everyone = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.kill()
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not alive


def test_invalid_requests_are_refused_before_anything_starts(tmp_path, monkeypatch):
    from paceline.tools.cli.data_command import starve

    monkeypatch.setattr(
        "paceline.launch.process.local_ranks.run_ranks", lambda *_, **__: pytest.fail("started")
    )
    with pytest.raises(UsageError, match="none starves"):
        starve(BatchBalance(dispatch_blocks(1000, 2), 64))
    with pytest.raises(UsageError, match="unknown case 'exit'"):
        starve(scenes=["exit"])
    with pytest.raises(UsageError, match="it is a folder"):
        starve(json_file=tmp_path)
