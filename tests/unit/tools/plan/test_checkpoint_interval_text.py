"""Sentences about how often to save: what is said, and what is left out where it does not matter."""

from __future__ import annotations

import pytest

from paceline.tools.plan.checkpoint_interval import FailureRate, SaveCosts, observed_rate, plan_checkpoints
from paceline.tools.plan.checkpoint_interval_text import checkpoint_findings

HOUR = 3600.0


def said(costs, rate, present=None):
    return " ".join(checkpoint_findings(plan_checkpoints(costs, rate, present)))


def certain(mtbf):
    return FailureRate(mtbf, mtbf, mtbf)


USUAL = SaveCosts(stall=0.2, complete=20.0, restart=30.0, step=0.4)


def test_what_to_pass_and_what_is_lost():
    text = said(USUAL, certain(45 * HOUR))
    assert text.startswith(
        'Save every 4 min 0 s of training: pass every="4min" to paceline.Checkpoint, or every=600, in steps '
        "(paceline train: --checkpoint-every 600). 0.19 % of all time is then lost: 0.083 % waiting for saves, 0.086 % "
        "in work that failures undo, 0.019 % in restarts."
    )
    assert (
        "from 2 min 41 s to 6 min 43 s, waiting for saves and lost work add up to at most a tenth more"
        in text
    )
    for words in ("Now it is", "Failures suggest", "confidence", "hardly advances"):
        assert words not in text


@pytest.mark.parametrize(
    ("present", "words"),
    [(250.0, "between two saves: no change is needed."), (3600.0, "between two saves, 0.95 points more.")],
)
def test_the_present_interval_needs_a_change_only_if_it_costs_a_tenth_of_a_point(present, words):
    text = said(USUAL, certain(45 * HOUR), present)
    assert text.count("Now it is") == 1
    assert words in text


def test_what_limits_the_interval_is_named():
    slow = SaveCosts(stall=0.2, complete=600.0, restart=30.0)
    assert "but a checkpoint is complete only after 10 min 0 s, and the next save waits for that" in said(
        slow, certain(45 * HOUR)
    )
    long_steps = SaveCosts(stall=1e-3, complete=1e-3, step=60.0)
    assert "but a step takes 1 min 0 s." in said(long_steps, certain(HOUR))


def test_a_job_that_loses_half_of_its_time_is_said_to_hardly_advance():
    assert "The job hardly advances" in said(
        SaveCosts(stall=60.0, complete=60.0, restart=600.0), certain(600.0)
    )


def test_what_few_failures_leave_open():
    text = said(USUAL, observed_rate(2, 10 * HOUR))
    assert (
        "2 failures in 10 h 0 min: with 95 % confidence, one in 1 h 23 min to 41 h 17 min on average" in text
    )
    assert "and the best interval is 44.5 s to 4 min 4 s" in text
    assert 'every="80s" loses at most 0.16 points more than the best for either.' in text
    bound = said(SaveCosts(stall=0.2, complete=HOUR), observed_rate(2, 10 * HOUR))
    assert "; the best interval is the same for both." in bound
