"""Loaders that know one rank's samples only: a live run would not train on those of a rank that leaves."""

from __future__ import annotations

from live_run import LiveRun


def test_a_loader_that_cannot_be_dealt_anew_is_refused_before_the_first_step(tmp_path):
    run = LiveRun(tmp_path, 2, data=("foreign",))
    try:
        assert run.process.wait(60) == 1, run.text()
    finally:
        run.kill()
    assert "live recovery with the loader 'loader', a Countdown, which has no rejoin()" in run.text()
    assert "use a paceline.Loader; or start with --recovery restart" in run.text()
    assert run.step() == 0
    assert run.logged("used") == []
    assert not run.records("restart"), "it would be refused again"


def test_ranks_that_restart_together_may_use_it(tmp_path):
    run = LiveRun(tmp_path, 2, steps=8, data=("foreign",), options=("--recovery", "restart"))
    assert len(run.end()) == 1
    served = [tuple(row[2:]) for row in run.logged("used")]
    assert len(served) == 16, "all ranks log what all of them have used"
    assert {sample for row in served for sample in row} == {*range(16), *range(100, 116)}
