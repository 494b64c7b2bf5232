"""Order of ranks from worst to best, with and without recorded arrivals."""

from __future__ import annotations

from dataclasses import replace

from test_straggler_detection import timelines

from paceline.tools.report.run.rank_selection import select_ranks
from paceline.tools.report.run.run_summary import RunSummary, rank_time
from paceline.tools.report.run.straggler_detection import Arrivals, compare_arrivals


def summary_of(traces):
    return RunSummary(
        steps=20,
        step_seconds=0.1,
        tokens_per_second=None,
        exposed_share=0.1,
        loss_first=None,
        loss_last=None,
        val_loss_first=None,
        val_loss_last=None,
        ranks=tuple(rank_time(rank, each) for rank, each in traces.items()),
        calls=1.0,
        nbytes=1.0,
        arrivals=compare_arrivals(traces),
        timelines=traces,
    )


def test_the_latest_rank_is_first():
    selection = select_ranks(summary_of(timelines(slow=2, ranks=3)))
    assert selection.ranks[0] == 2
    assert selection.shown == {0, 1, 2}
    assert selection.label(2) == "rank 2"
    assert "arrival at the exchange" in selection.caption()


def test_without_arrivals_the_slowest_to_compute_is_first():
    summary = replace(summary_of(timelines(slow=1, ranks=3)), arrivals=Arrivals())
    selection = select_ranks(summary)
    assert selection.ranks[0] == 1
    assert "time without waiting" in selection.caption()


def test_of_many_ranks_the_straggler_is_shown_wherever_it_is():
    selection = select_ranks(summary_of(timelines(slow=40, ranks=64, steps=4)))
    assert selection.label(selection.ranks[0]) == "rank 40 (worst)"
    assert 40 in selection.shown
    assert len(selection.shown) == 10
    assert len(selection.ranks) == 64


def test_a_run_without_a_timeline_has_no_ranks():
    assert select_ranks(summary_of({})).ranks == ()
