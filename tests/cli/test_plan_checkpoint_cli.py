"""`paceline plan checkpoint`: from options, and from a run with round times."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest

from saved_run import SavedRun

GIVEN = ("--checkpoint-time", "5min", "--mtbf", "24h", "--restart-time", "10min")
"""The first example that Daly published: FGCS 22(3), 2006, figure 3."""


@pytest.fixture
def call(command):
    return partial(command, "plan", "checkpoint")


@pytest.fixture
def run(tmp_path):
    """A run of two hosts that saves every 10 steps of 1 s, and was restarted once in about a minute."""
    run = SavedRun(tmp_path / "run", nodes=2)
    run.start(0, 35)
    run.restart(noticed=1.0, seconds=12.0)
    run.start(30, 55)
    run.keep()
    return run


def test_the_published_interval_and_what_is_lost(call, tmp_path):
    code, output, error = call(*GIVEN, "--json", tmp_path / "plan.json")
    assert (code, error) == (0, "")
    assert 'Save every 2 h 0 min of training: pass every="120min" to paceline.Checkpoint.' in output
    (advised,) = (line for line in output.splitlines() if line.startswith("→"))
    assert advised.split()[1:6] == ["2", "h", "0", "min", "3.8"]
    assert "steps" not in output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert round(plan["best_seconds"] / 60) == 117
    assert plan["every"] == "120min"
    assert plan["every_seconds"] == 7200.0
    assert plan["every_steps"] is plan["present"] is plan["run"] is None
    assert plan["rate"] == {
        "mtbf": 86400.0,
        "low": 86400.0,
        "high": 86400.0,
        "failures": None,
        "seconds": 0.0,
    }
    assert plan["recommended"]["total"] == pytest.approx(
        sum(plan["recommended"][part] for part in ("saves", "work", "restarts"))
    )
    assert plan["recommended"]["total"] == pytest.approx(0.0874, abs=1e-4)
    assert (plan["kind"], plan["schema"]) == ("plan-checkpoint", 1)
    assert plan["command"].startswith("paceline plan checkpoint --checkpoint-time 5min")
    assert set(plan["sentences"]) <= set(output.splitlines())


def test_a_failure_of_any_host_is_one_of_the_job(call, tmp_path):
    call(*GIVEN, "--json", tmp_path / "one.json")
    call("--checkpoint-time", "5min", "--mtbf", "10d", "--nnodes", "10", "--json", tmp_path / "ten.json")
    one, ten = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "ten.json"))
    assert one["best_seconds"] == ten["best_seconds"]
    assert ten["sources"]["mtbf"] == "--mtbf 10d, 10 hosts"


def test_what_is_unknown_is_said(call):
    output = call("--checkpoint-time", "1s", "--mtbf", "30d")[1]
    assert "until it is complete       unknown" in output
    assert "pass --complete-time" in output
    assert "Restarts are not counted" in output
    output = call(*GIVEN, "--complete-time", "5min")[1]
    assert "unknown" not in output
    assert "Restarts are not counted" not in output


def test_a_save_that_is_complete_late_is_the_limit(call):
    output = call("--checkpoint-time", "1s", "--complete-time", "1h", "--mtbf", "10h", "--step-time", "2s")[1]
    assert (
        'pass every="60min" to paceline.Checkpoint, or every=1800, in steps (paceline train: --checkpoint-every 1800).'
        in output
    )
    assert "Failures suggest 4 min 28 s, but a checkpoint is complete only after 1 h 0 min" in output


def test_the_present_interval_is_compared(call):
    output = call(*GIVEN, "--checkpoint-interval", "10min")[1]
    assert "Now it is 34 %, with 10 min 0 s of training between two saves, 25 points more." in output
    assert sum(line.startswith("now ") for line in output.splitlines()) == 1
    assert "no change is needed" in call(*GIVEN, "--checkpoint-interval", "119min")[1]


# ---------------------------------------------------------------------- from a run


def test_a_run_that_failed_has_all_that_is_needed(call, run, tmp_path):
    code, output, error = call(run.folder, "--json", tmp_path / "plan.json")
    assert (code, error) == (0, "")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["costs"] == pytest.approx({"stall": 0.25, "complete": 3.0, "restart": 12.5, "step": 1.0})
    assert plan["present"]["interval"] == pytest.approx(10.0)
    assert (plan["rate"]["failures"], plan["rate"]["mtbf"]) == (1, plan["rate"]["seconds"])
    assert plan["every"] == f"{plan['every_seconds']:g}s"
    assert plan["every_steps"] == plan["every_seconds"] / 1.0
    assert 4 < plan["every_seconds"] < 8
    for words in ("3 saves", "2 checkpoints", "1 restart", "1 failure in 1 min", "95 %", "now "):
        assert words in output
    assert "with 95 % confidence, one in" in output


def test_options_take_precedence_over_the_run(call, run, tmp_path):
    options = (
        "--checkpoint-time",
        "2s",
        "--complete-time",
        "9s",
        "--restart-time",
        "1min",
        "--step-time",
        "3s",
    )
    code, output, _ = call(
        run.folder, *options, "--checkpoint-interval", "5min", "--json", tmp_path / "plan.json"
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert code == 0
    assert plan["costs"] == {"stall": 2.0, "complete": 9.0, "restart": 60.0, "step": 3.0}
    assert plan["present"]["interval"] == 300.0
    assert plan["sources"]["stall"] == "--checkpoint-time"
    assert "3 saves" not in output


def test_a_given_rate_counts_the_hosts_of_the_run(call, run, tmp_path):
    call(run.folder, "--mtbf", "20h", "--json", tmp_path / "plan.json")
    call(run.folder, "--mtbf", "20h", "--nnodes", "5", "--json", tmp_path / "five.json")
    rates = [json.loads((tmp_path / name).read_text())["rate"]["mtbf"] for name in ("plan.json", "five.json")]
    assert rates == [36_000.0, 14_400.0]


def test_a_measured_completion_is_at_least_the_wait_that_was_given(call, run, tmp_path):
    call(run.folder, "--checkpoint-time", "4s", "--json", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["costs"]["complete"] == 4.0


def test_ranks_that_were_replaced_are_named_as_no_failures(call, run):
    record = {
        "event": "departure",
        "restart": 0,
        "time": "2026-07-25T18:00:00+00:00",
        "host": "pc1",
        "rank": 1,
    }
    run.log(record | {"how": "was ended by SIGKILL", "replaced": True})
    assert "1 rank ended while the others trained on" in call(run.folder)[1]


def test_damage_in_the_run_is_reported(call, run):
    with (run.folder / "trace" / "rank0.jsonl").open("a") as file:
        file.write('{"name": "step", "sta')
    code, output, _ = call(run.folder)
    assert code == 0
    assert "The last line of trace/rank0.jsonl is truncated" in output.splitlines()[-1]


def test_charts_are_written(call, run, tmp_path):
    out = tmp_path / "charts"
    code, output, _ = call(run.folder, "--out", out)
    assert code == 0
    assert output.splitlines()[-2:] == [
        str(out / f"checkpoint-interval.{suffix}") for suffix in ("png", "svg")
    ]
    assert (out / "checkpoint-interval.png").stat().st_size > 10_000
    drawn = (out / "checkpoint-interval.svg").read_text()
    for words in ("lost work", "restarts", "in all", "saves", ">now<", ">every 6s<", "% of all time lost"):
        assert words in drawn


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        ((), "how long training waits for a checkpoint is unknown", "pass --checkpoint-time"),
        (("--checkpoint-time", "1s"), "how often the job fails is unknown", "pass --mtbf"),
        (("--checkpoint-time", "0s", "--mtbf", "1d"), "--checkpoint-time 0s", "more than 0"),
        (("--checkpoint-time", "1s", "--mtbf", "0h"), "--mtbf 0h", "more than 0"),
        (("--checkpoint-time", "1s", "--mtbf", "1d", "--step-time", "0s"), "--step-time 0s", "more than 0"),
        (("--checkpoint-time", "1s", "--mtbf", "one day"), "--mtbf: 'one day' is no time", "for example"),
        ((*GIVEN[:4], "--restart-time", "5"), "--restart-time: '5' is no time", "valid:"),
        (("--checkpoint-time", "1s", "--mtbf", "1d", "--nnodes", "0"), "--nnodes 0", "1 or more"),
        (("--checkpoint-time", "1s", "--nnodes", "4"), "--nnodes 4 without --mtbf", "pass the mean time"),
        ((*GIVEN, "--complete-time", "1min"), "--complete-time 1 min 0 s is less than the 5 min 0 s", "whole time"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_by_name(call, words, message, remedy):
    code, output, error = call(*words)
    assert (code, output) == (2, "")
    assert message in error
    assert remedy in error


def test_a_run_without_failures_says_what_that_shows(call, tmp_path):
    run = SavedRun(tmp_path / "run")
    run.start(0, 60)
    code, _, error = call(run.folder)
    assert code == 2
    assert "had no failure in 1 min 3 s" in error
    assert "above 21" in error
    assert "pass --mtbf" in error
    assert call(run.folder, "--mtbf", "10d")[0] == 0


def test_a_run_that_did_not_save_or_has_no_trace_is_refused_by_name(call, run, tmp_path):
    unsaved = SavedRun(tmp_path / "unsaved")
    unsaved.start(0, 5)
    assert "no save is in the trace of" in call(unsaved.folder, "--mtbf", "1d")[2]
    shutil.rmtree(run.folder / "trace")
    code, _, error = call(run.folder, "--checkpoint-time", "1s")
    assert code == 2
    assert "has no trace" in error
    assert "is no run" in call(tmp_path, "--mtbf", "1d")[2]


def test_nothing_is_computed_for_a_file_that_can_not_be_written(call, tmp_path):
    code, output, error = call(*GIVEN, "--json", tmp_path / "missing" / "plan.json")
    assert (code, output) == (2, "")
    assert "no such folder" in error
