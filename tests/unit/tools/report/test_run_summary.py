"""Numbers of a run, and the sentences about them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.tools.report.run.bottleneck import find_bottleneck
from paceline.tools.report.run.run_page import run_headline
from paceline.tools.report.run.run_records import LoggedStep, read_run
from paceline.tools.report.run.run_summary import RankTime, RunSummary, summarise_run
from paceline.tools.report.run.step_breakdown import PHASES
from recorded_run import write_run


def test_shares_of_a_real_folder_add_up(tmp_path):
    summary = summarise_run(read_run(write_run(tmp_path / "r", ranks=2, steps=40)))
    for rank in summary.ranks:
        assert sum(rank.share(phase) for phase in PHASES) == pytest.approx(1.0)
        assert (rank.steps, rank.total) == (39, pytest.approx(summary.step_seconds, rel=0.05))
    assert (summary.steps, summary.calls, summary.nbytes) == (40, 7, 7 * (26_248_000 // 7))
    assert summary.exposed_share == pytest.approx(0.012 / summary.step_seconds, rel=0.05)
    assert summary.loss_first > summary.loss_last
    assert summary.val_loss_first == pytest.approx(5.55)


def test_without_a_trace_the_logged_share_stands_in(tmp_path):
    run = read_run(write_run(tmp_path / "r", steps=20))
    summary = summarise_run(replace(run, spans_of_rank={}))
    assert summary.ranks == ()
    assert summary.exposed_share == pytest.approx(0.012 / summary.step_seconds, rel=0.05)


def test_a_run_without_steps(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    summary = summarise_run(read_run(tmp_path))
    assert summary.steps == 0
    assert summary.step_seconds is None
    assert run_headline(summary) == ("No step was completed.",)


def test_losses_are_the_first_and_the_mean_of_the_last_tenth(tmp_path):
    run = read_run(write_run(tmp_path / "r", steps=3))
    steps = tuple(LoggedStep(step=number, loss=float(number)) for number in range(1, 21))
    summary = summarise_run(replace(run, steps=steps))
    assert (summary.loss_first, summary.loss_last) == (1.0, 19.5)


def summary_of(*shares_of_rank, **changes):
    ranks = tuple(
        RankTime(rank, 10, dict.fromkeys(PHASES, 0.0) | shares) for rank, shares in enumerate(shares_of_rank)
    )
    given = RunSummary(
        steps=600,
        step_seconds=0.152,
        tokens_per_second=12_345.0,
        exposed_share=0.1,
        loss_first=5.55,
        loss_last=2.1,
        val_loss_first=5.6,
        val_loss_last=2.21,
        ranks=ranks,
        calls=3,
        nbytes=26_214_400,
    )
    return replace(given, **changes)


BUSY = {"forward": 0.3, "backward": 0.5, "optimizer": 0.15, "exposed": 0.05}
WAITING = {"forward": 0.2, "backward": 0.3, "optimizer": 0.1, "exposed": 0.4}
STARVED = {"forward": 0.3, "backward": 0.3, "optimizer": 0.1, "data": 0.3}
CHATTY = {"forward": 0.2, "backward": 0.3, "optimizer": 0.1, "other": 0.4}


@pytest.mark.parametrize(
    ("shares", "limit"),
    [
        ((BUSY, BUSY), "Computing limits this run at 12.3 k tokens/s"),
        (
            (WAITING, WAITING),
            "Communication limits this run: ranks wait 40 % of the time for 25 MiB",
        ),
        ((STARVED, STARVED), "Data limits this run: ranks wait 30 % of the time for their next batch."),
        ((CHATTY, CHATTY), "Other work inside the step limits this run: 40 %"),
    ],
)
def test_the_bottleneck_is_named(shares, limit):
    summary = summary_of(*shares)
    assert run_headline(summary, find_bottleneck(summary, {}))[2].startswith(limit)


def test_work_between_steps_is_named_where_it_limits():
    rank = RankTime(0, 10, dict.fromkeys(PHASES, 0.0) | BUSY, between=3.0)
    text = find_bottleneck(summary_of(BUSY, ranks=(rank,)), {}).sentences[0]
    assert text.startswith("Work outside the training step limits this run: 75 %")


def test_the_headline_names_the_result_and_where_time_went():
    reached, went = run_headline(summary_of(WAITING))
    assert reached == "600 steps of 152 ms; the loss went from 5.55 to 2.10, on held-out text to 2.21."
    assert went == "Of each step 60 % is computing and 40 % is waiting for communication."


def test_a_run_that_diverged_is_reported():
    assert "no longer finite" in run_headline(summary_of(BUSY, loss_last=math.nan))[0]


def test_a_run_that_logged_no_loss_has_not_diverged():
    assert run_headline(summary_of(loss_first=None, loss_last=None))[0] == "600 steps of 152 ms."


def test_speed_is_in_samples_without_token_counts():
    summary = summary_of(BUSY, BUSY, tokens_per_second=None, samples_per_second=250.0)
    assert find_bottleneck(summary, {}).sentences[0].startswith("Computing limits this run at 250 samples/s")
    assert (
        find_bottleneck(replace(summary, samples_per_second=None), {})
        .sentences[0]
        .startswith("Computing limits this run: ")
    )


def test_a_run_without_held_out_text():
    assert run_headline(summary_of(val_loss_last=None))[0].endswith("to 2.10.")
