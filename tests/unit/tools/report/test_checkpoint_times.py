"""What saves, restarts and failures of a run cost, from the files of a run with round times."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from paceline.checkpoint.format.manifest import MANIFEST
from paceline.tools.report.run.checkpoint_times import CheckpointTimes, measure_checkpoints
from paceline.tools.report.run.run_records import read_run
from recorded_run import write_run
from saved_run import BEGIN, COMPLETE, EVERY, STALL, STEP, SavedRun


def measured(run):
    return measure_checkpoints(read_run(run.folder))


@pytest.fixture
def run(tmp_path):
    """35 steps, a failure, a restart from step 30, 25 more."""
    run = SavedRun(tmp_path / "run")
    run.start(0, 35, slow_first=4.0)
    run.restart(noticed=1.0, seconds=12.0)
    run.start(30, 55, slow_first=3.0)
    run.keep()
    return run


def test_a_run_with_a_restart(run):
    found = measured(run)
    assert (found.saves, found.stall) == (3, pytest.approx(STALL)), "without the first save of each start"
    assert (found.completed, found.complete) == (2, pytest.approx(COMPLETE))
    assert (found.interval, found.interval_steps) == (pytest.approx(EVERY * STEP), EVERY)
    assert found.step == pytest.approx(STEP)
    assert found.failures == found.restarted == 1
    # From the middle of the step that failed, taken to be its begin, to the end of a first step that took 3 s longer.
    assert found.restart == pytest.approx(12.0 + 3.0 + STEP / 2)
    assert found.seconds == pytest.approx(run.now - BEGIN - STEP / 2)


def test_a_run_without_saves_and_failures(tmp_path):
    found = measure_checkpoints(read_run(write_run(tmp_path / "run", steps=30)))
    assert found == CheckpointTimes(step=found.step, seconds=found.seconds)
    assert 0.1 < found.step < 0.2
    assert found.seconds == pytest.approx(30 * found.step, rel=0.5)


def test_a_run_without_a_trace(run):
    shutil.rmtree(run.folder / "trace")
    assert measured(run) == CheckpointTimes(failures=1)


def test_the_first_save_counts_if_there_is_no_other(tmp_path):
    run = SavedRun(tmp_path / "run")
    run.start(0, 12)
    run.keep()
    found = measured(run)
    assert (found.saves, found.stall) == (1, pytest.approx(2.0))
    assert (found.interval, found.interval_steps, found.complete) == (None, None, None)


def test_a_failure_that_is_noticed_late_makes_the_restart_longer(tmp_path):
    run = SavedRun(tmp_path / "run")
    run.start(0, 20)
    run.restart(noticed=600.0, seconds=610.0)
    run.start(20, 30)
    assert measured(run).restart == pytest.approx(610.0 + STEP / 2)


def test_a_restart_that_fails_is_a_failure_and_no_measurement(tmp_path):
    run = SavedRun(tmp_path / "run")
    run.start(0, 20)
    run.restart(noticed=0.0, seconds=10.0)
    run.restart(noticed=0.0, seconds=8.0, number=2)
    run.start(20, 30)
    found = measured(run)
    assert (found.failures, found.restarted) == (2, 1)
    assert found.restart == pytest.approx(8.0)


def test_the_end_of_a_run_by_a_failure_counts_and_has_no_restart(run):
    run.log(
        {
            "event": "end",
            "restart": 2,
            "time": "2026-07-25T18:00:00+00:00",
            "ranks_before": 2,
            "ranks_after": 2,
        }
    )
    found = measured(run)
    assert (found.failures, found.restarted) == (2, 1)


def test_time_in_which_nothing_ran_does_not_count(tmp_path):
    """Resumed by hand a day later: no restart was logged in between."""
    run = SavedRun(tmp_path / "run")
    run.start(0, 20)
    run.now += 86_400.0
    run.start(20, 40)
    found = measured(run)
    assert found.seconds < 60.0
    assert found.failures == 0
    assert found.restart is None


def test_ranks_that_others_replaced_are_no_failures(run):
    departure = {
        "event": "departure",
        "restart": 0,
        "time": "2026-07-25T18:00:00+00:00",
        "host": "pc1",
        "rank": 1,
    }
    run.log(departure | {"how": "was ended by SIGKILL", "replaced": True})
    found = measured(run)
    assert (found.failures, found.departures) == (1, 1)


@pytest.mark.parametrize("scale", [0.03, 0.3, 30.0])
def test_saves_that_follow_each_other_faster_or_slower(tmp_path, scale):
    """Manifests have the time in whole seconds, which several saves may share."""
    run = SavedRun(tmp_path / "run", scale=scale)
    run.start(0, 57)
    run.keep(4)
    found = measured(run)
    assert (found.completed, found.complete) == (4, pytest.approx(scale * COMPLETE, rel=1e-4))
    assert (found.stall, found.step) == pytest.approx((scale * STALL, scale * STEP), rel=1e-4)


@pytest.mark.parametrize("seconds", [86_400.0, -86_400.0, 12.0])
def test_dates_of_files_do_not_matter(run, seconds):
    """Copies have others, and object stores none."""
    for path in (run.folder / "checkpoint").glob(f"*/{MANIFEST}"):
        at = path.stat().st_mtime + seconds
        os.utime(path, (at, at))
    assert measured(run).complete == pytest.approx(COMPLETE)


def test_damaged_manifests_and_traces_are_passed_over(run):
    newest = max((run.folder / "checkpoint").iterdir())
    (newest / MANIFEST).write_text("{}")
    with (run.folder / "trace" / "rank0.jsonl").open("a") as file:
        for fields in (
            {"tasks": [["checkpoint", "a", "b"], "checkpoint", [], ["checkpoint"]], "phases": "backward"},
            {"tasks": 5, "phases": [[], 7, ["forward", 0]], "step": "six"},
            {},
        ):
            file.write(
                json.dumps({"name": "step", "start": run.now, "seconds": 1.0, "rank": 0} | fields) + "\n"
            )
    found = measured(run)
    assert (found.saves, found.completed) == (3, 1)
    assert found.complete == pytest.approx(COMPLETE)
