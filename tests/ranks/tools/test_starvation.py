"""Starvation with real ranks: what torch does is what is told of it, Paceline is exact, and nobody is left."""

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
from paceline.tools.bench.starvation.scene_setup import EXAMPLE, Setup
from paceline.tools.bench.starvation.starvation_scenes import SCENES, scenes_named
from paceline.tools.plan.balance_report import BatchBalance

SOURCE = str(Path(paceline.__file__).parents[1])
SHARES = BatchBalance(dispatch_blocks(300, 4, shares=[0.25, 0.25, 0.10, 0.40]), 20)
PATIENT, HASTY = 60.0, 4.0  # seconds of the group's time-out: never to be reached, and to be waited for


def played(fork, folder, names, *settings):
    import paceline.tools.bench.starvation.scene_program  # noqa: F401 — in the warm process, so that each child need not

    children = [fork(play_one, name, *settings) for name in names]  # who waits, waits beside others
    return [child.hear(timeout=150) for child in children]


def play_one(tell, name, *settings):
    from paceline.tools.bench.starvation.scene_program import show

    (scene,) = scenes_named([name])
    found = show(scene, Setup(*settings)).to_json()
    with pytest.raises(ChildProcessError):  # nobody is left
        os.waitpid(-1, os.WNOHANG)
    tell(found)


def play(nursery, *names, balance=EXAMPLE, timeout=PATIENT, backend="gloo"):
    return nursery.play(played, names, balance, timeout, backend, timeout=200)


def kinds(told):
    return [(one["kind"], one["error"]) for one in told["ranks"]]


def test_who_waits_for_a_rank_that_is_gone_gets_an_error(nursery):
    (told,) = play(nursery, "exits")
    assert kinds(told) == [("error", "RuntimeError"), ("finished", "")]
    assert "onnection" in told["ranks"][0]["message"]  # closed, or reset, by peer
    assert [one["steps"] for one in told["ranks"]] == [8, 8]
    assert told["samples_lost"] == 88


def test_the_paceline_backend_names_who_is_gone_and_who_called_what(nursery):
    gone, other = play(nursery, "exits", "metric", backend="paceline")
    assert [one["kind"] for one in gone["ranks"]] == ["error", "finished"]
    assert "PeerLost" in gone["ranks"][0]["message"]
    assert "rank 1" in gone["ranks"][0]["message"]
    assert [one["kind"] for one in other["ranks"]] == ["error", "error"]
    for one, theirs in zip(other["ranks"], ("float64[1]", "float64[161]"), strict=True):
        assert "MismatchError" in (one["error"] + one["message"])
        assert f"rank {1 - one['rank']} calls all_reduce({theirs}" in one["message"]


def test_who_waits_for_a_rank_that_does_something_else_hangs(nursery):
    found = play(nursery, "idles", "barrier", "fsdp2", timeout=HASTY)
    waits, goes_on = ("time-out", "RuntimeError"), ("finished", "")
    assert {told["scene"]: kinds(told) for told in found} == {
        "idles": [waits, goes_on],
        "barrier": [waits, waits],
        "fsdp2": [waits, goes_on],
    }


def test_collectives_of_other_sizes_end_a_process_without_an_exception(nursery):
    for told in play(nursery, "metric", "larger"):
        receiver = {"metric": 1, "larger": 0}[told["scene"]]  # who has less room than it is sent
        assert told["ranks"][receiver]["error"] == "SIGABRT", told
        assert "gloo::EnforceNotMet" in told["ranks"][receiver]["message"]
        assert kinds(told)[1 - receiver] == ("error", "RuntimeError")


@pytest.mark.parametrize("balance", [EXAMPLE, SHARES], ids=["2 ranks", "4 ranks"])
def test_who_finishes_and_how_wrong(nursery, balance):
    names = ["next-epoch", "join", "join-active", "truncated", "bucketed", "sharded", "full-shard"]
    found = {told["scene"]: told for told in play(nursery, *names, balance=balance)}
    for told in found.values():
        assert told["finished"], told
        assert told["replicas_apart"] <= 1e-12  # nobody can see it
        assert told["gradient_error_with_equal_batches"] <= 1e-12
    for name in ("next-epoch", "join"):
        assert found[name]["gradient_error_with_a_dry_rank"] > 0.01
        assert found[name]["parameter_error"] > 0.01
    assert found["join-active"]["gradient_error"] > 0.01
    lost = balance.outcome("truncate").dropped
    assert found["truncated"]["samples_lost"] == lost > 0
    for name in ("bucketed", "sharded", "full-shard"):
        told = found[name]
        assert told["gradient_error"] <= 1e-12, told
        assert told["parameter_error"] <= 1e-12
        assert told["samples_lost"] == 0
        assert [one["samples"] for one in told["ranks"]] == list(balance.dispatch.counts)


def stuck(fork, folder):
    import paceline.tools.bench.starvation.scene_program  # noqa: F401

    return fork(play_stuck).hear()


def play_stuck(tell):
    from paceline.tools.bench.starvation import scene_program

    def sleep_for_ever(scene, setup, rank, folder, notes):
        notes.write("began", step=0)
        time.sleep(1000)

    scene_program.play, scene_program._PATIENCE_SECONDS = sleep_for_ever, 0.5
    told = scene_program.show(SCENES[0], Setup(EXAMPLE, 1.0)).to_json()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    tell(told)


def test_a_rank_that_no_time_out_ends_is_killed_and_told(nursery):
    assert kinds(nursery.play(stuck)) == [("hung", "")] * 2


# ---------------------------------------------------------------------- the command's own path

CALL = "from paceline.tools.cli.plan.dispatch_command import starve; starve(scenes={}, timeout=60.0, json_file={})"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts `starve` in a process, whose temporary files have a folder of their own."""
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


def test_what_is_shown_and_written(start, tmp_path):
    out, err = start(["exits", "sharded"], tmp_path / "new" / "result.json").communicate(timeout=120)
    assert "1/2 torch DDP, its process ends → the others: RuntimeError" in err
    assert "Paceline, sharded" in out
    written = json.loads((tmp_path / "new" / "result.json").read_text())
    assert (written["kind"], written["schema"]) == ("starvation", 1)
    assert written["settings"]["batches_of_rank"] == [10, 8]
    assert [told["scene"] for told in written["scenes"]] == ["exits", "sharded"]
    assert [told["finished"] for told in written["scenes"]] == [False, True]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_nothing_outlives_the_command(start):
    process = start(["idles"])
    everyone, deadline = [], time.monotonic() + 100
    while len(everyone) < 3:  # the program that plays the scene, and two ranks
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        everyone = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.kill()
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not alive


def test_nothing_is_started_for_nothing(tmp_path, monkeypatch):
    from paceline.tools.cli.plan.dispatch_command import starve

    monkeypatch.setattr(
        "paceline.launch.process.local_ranks.run_ranks", lambda *_, **__: pytest.fail("started")
    )
    with pytest.raises(UsageError, match="nobody starves"):
        starve(BatchBalance(dispatch_blocks(1000, 2), 64))
    with pytest.raises(UsageError, match="unknown scene 'exit'"):
        starve(scenes=["exit"])
    with pytest.raises(UsageError, match="it is a folder"):
        starve(json_file=tmp_path)
