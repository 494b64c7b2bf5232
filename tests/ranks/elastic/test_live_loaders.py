"""Loaders that know one rank's samples only: a live run would not train on those of a rank that leaves."""

from __future__ import annotations

import os
import signal

from live_run import LiveRun


def check_refused(run):
    """Check that a run ends with an error, and does not start again, as it would be refused again."""
    try:
        assert run.process.wait(60) == 1, run.text()
    finally:
        run.kill()
    assert not run.records("restart")


def test_a_loader_that_cannot_be_dealt_anew_is_refused_before_the_first_step(tmp_path):
    run = LiveRun(tmp_path, 2, data=("foreign",))
    check_refused(run)
    assert "live recovery with the loader 'loader', a Countdown, which has no rejoin()" in run.text()
    assert "use a paceline.Loader; or start with --recovery restart" in run.text()
    assert run.step() == 0
    assert run.logged("used") == []


def test_ranks_that_restart_together_may_use_it(tmp_path):
    run = LiveRun(tmp_path, 2, steps=8, data=("foreign",), options=("--recovery", "restart"))
    assert len(run.end()) == 1
    served = [tuple(row[2:]) for row in run.logged("used")]
    assert len(served) == 16, "all ranks log what all of them have used"
    assert {sample for row in served for sample in row} == {*range(16), *range(100, 116)}


def test_a_loader_that_elastic_does_not_get_serves_no_batch_in_another_world(tmp_path):
    """Not even to the end of the epoch."""
    run = LiveRun(tmp_path, 3, data=("forgotten",))
    run.wait_for(lambda: run.step() >= 24)
    os.kill(run.pid(1), signal.SIGTERM)
    check_refused(run)
    assert "this loader was made for rank" in run.text()
    assert "with paceline.Elastic, pass the loader to that" in run.text()
    assert {len(row) - 2 for row in run.logged("used")} == {12}, "three ranks' samples in every step"
