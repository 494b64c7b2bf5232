"""Sentences and rows about an asynchronous run."""

from __future__ import annotations

import pytest

from paceline._core.format import format_number, format_percent, plural
from paceline.tools.report.hub.hub_records import HubRun, read_records
from paceline.tools.report.hub.hub_summary import contribution_rows, ddp_nbytes, local_steps
from paceline.tools.report.hub.hub_text import (
    contributions_caption,
    decisions_caption,
    format_refusals,
    hub_headline,
    scores_caption,
    staleness_caption,
    traffic_caption,
)
from paceline.tools.report.hub.worker_statistics import WorkerTable
from reported_hub_folder import begin, global_score, join, record, refuse, traffic, update


def run_of(*records):
    run = HubRun(folder=None)  # type: ignore[arg-type]
    read_records(run, records)
    return run


def sentences(*records):
    run = run_of(*records)
    return hub_headline(run, contribution_rows(run))


def two_workers(**changes):
    return [
        join(0, 1, "ann"),
        join(0, 2, "bob"),
        begin(0, 1),
        *(update(at, 1 + at % 2, **changes) for at in range(10)),
    ]


def test_results_staleness_and_traffic_are_described():
    found = sentences(
        *two_workers(),
        traffic(10, 6_000_000, 2_000_000),
        global_score(11, 1, 5.0),
        refuse(12, 1),
        global_score(75, 2, 2.5),
    )
    assert found == (
        "In 1 min 15 s the hub accepted 10 updates of 2 workers, trained on 6.4 k samples; 1 was refused (9.1 %).",
        "The global model's score went from 5 to 2.5 (lower is better).",
        "Half of all updates were at most 0.5 rounds stale on arrival, the worst 0.5; in a round every worker sends "
        "one.",
        "The hub received 2 MB and sent 6 MB; torch DDP would have sent 1.2 GB for the same steps, 150× as much.",
    )


def test_a_score_that_got_worse_is_called_so():
    found = sentences(
        *two_workers(), global_score(1, 1, 5.0), global_score(3, 1, 4.0), global_score(9, 1, 60.0)
    )
    assert found[1] == (
        "The global model's score went from 5 to 60, worse than at the beginning; its best was 4 after 3 s "
        "(lower is better)."
    )


def test_a_single_score_and_none():
    assert "was scored once: 5" in sentences(*two_workers(), global_score(1, 1, 5.0))[1]
    assert "No worker reported a score" in sentences(*two_workers())[1]


def test_ddp_bytes_are_those_of_the_local_steps_and_their_workers():
    run = run_of(
        begin(0, 1),
        update(1, 1, steps=10, workers=4),
        update(2, 2, steps=30, workers=1),
        update(3, 1, steps=20, workers=2),
    )
    assert ddp_nbytes(run) == pytest.approx(4e6 * (10 * 1.5 + 0 + 20 * 1.0))
    assert local_steps(run) == 60


def test_a_step_is_counted_once_for_any_number_of_fragments():
    one = run_of(begin(0, 1), update(1, 1, steps=20))
    four = run_of(begin(0, 1), *(update(1, 1, steps=20, fragment=each) for each in range(4)))
    assert ddp_nbytes(one) == ddp_nbytes(four)
    assert local_steps(one) == local_steps(four) == 20


def test_ddp_bytes_are_unknown_without_the_model_or_other_workers():
    assert ddp_nbytes(run_of(update(1, 1))) is None
    assert ddp_nbytes(run_of(begin(0, 1), update(1, 1, workers=1))) is None
    assert "torch DDP" not in " ".join(sentences(update(1, 1), traffic(5)))


def test_asynchronous_training_that_sends_more_than_ddp_is_reported():
    assert "only 10 % of that" in " ".join(sentences(*two_workers(), traffic(9, 6 * 10**9, 6 * 10**9)))


def test_a_run_without_updates_is_reported():
    assert sentences() == ("There are no records yet: no worker has joined, and the hub has just started.",)
    assert sentences(traffic(5), traffic(10)) == (
        "No update has been accepted yet: in 5 s no worker joined.",
    )
    found = sentences(join(0, 1), refuse(4, 1), refuse(5, 1))
    assert found[0] == "No update has been accepted yet: in 5 s 1 worker joined; 2 updates were refused."
    assert found[1].startswith("Most updates of 1 were refused (not finite 2)")


def test_separate_workers_are_described_with_the_best_one():
    scores = [record("score", 9, worker=each, score=7.0 - each, steps=20, lr=0.1) for each in (1, 2)]
    assert (
        sentences(join(0, 2, "ann"), *scores)[1] == "2 workers train separately; the best score is 5, of ann."
    )


def test_a_worker_that_is_mostly_refused_is_named():
    found = sentences(
        *two_workers(), *(refuse(20, 2, why) for why in ["not finite"] * 5 + ["stale: 20.0 rounds old"])
    )
    assert "Most updates of bob were refused (not finite 5, stale 1): investigate this first." in found
    found = sentences(*two_workers(), *(refuse(20, each) for each in (2, 3, 4, 5) for _ in range(6)))
    assert any("as were those of 3 more workers" in sentence for sentence in found)


def test_the_largest_contributor_is_named_if_above_its_share():
    many = [update(1, 1, samples=100.0), *(update(1, each, samples=10.0) for each in range(2, 6))]
    assert "1 alone contributed 71 % of the training." in sentences(*many)
    assert not any("alone" in sentence for sentence in sentences(*two_workers()))
    assert not any("alone" in sentence for sentence in sentences(update(1, 1)))


def test_a_full_reservation_is_named_as_the_limit():
    full = [traffic(5 * at, 4_900, 10, bandwidth=1000) for at in range(1, 5)]
    assert any(
        "more than 90 % of it was used 100 % of the time" in each for each in sentences(*two_workers(), *full)
    )
    half = [*full, *(traffic(5 * at, 100, 10, bandwidth=1000) for at in range(5, 20))]
    assert not any("limits" in each for each in sentences(*two_workers(), *half))


def test_more_than_twenty_workers_are_the_largest_and_others():
    run = run_of(*(update(1, each, samples=float(each), weight=0.1) for each in range(1, 51)))
    rows = contribution_rows(run, 20)
    assert [row.name for row in rows[:2]] == ["50", "49"]
    assert (len(rows), rows[-1].name, rows[-1].worker.updates) == (21, "30 others", 30)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.weight for row in rows) == pytest.approx(1)
    assert "The largest 20 of 50 workers." in contributions_caption(run, rows)
    assert len(contribution_rows(run_of(*(update(1, each) for each in range(20))), 20)) == 20


def test_workers_that_are_summarised_count_as_others():
    run = HubRun(folder=None, workers=WorkerTable(limit=10))  # type: ignore[arg-type]
    read_records(run, [update(1, each, samples=float(each)) for each in range(1, 51)])
    rows = contribution_rows(run, 3)
    assert (len(rows), rows[0].name, rows[-1].name) == (4, "50", "47 others")
    assert sum(row.worker.updates for row in rows) == 50
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_shares_are_of_updates_where_no_samples_are_reported():
    run = run_of(update(1, 1, samples=0.0), *(update(1, 2, samples=0.0) for _ in range(3)))
    assert [(row.name, row.share) for row in contribution_rows(run)] == [("2", 0.75), ("1", 0.25)]
    assert "Share of all updates" in contributions_caption(run, contribution_rows(run))


def test_shares_are_numbers_for_any_reported_samples():
    run = run_of(*(update(1, each, samples=1.7e308) for each in (1, 2)))
    assert [row.share for row in contribution_rows(run)] == [0.5, 0.5]
    assert hub_headline(run, contribution_rows(run))


def test_samples_that_are_steps_are_called_so():
    run = run_of(update(1, 1, samples=20.0, steps=20))
    assert "count each step as one sample" in contributions_caption(run, contribution_rows(run))
    assert "count each step" not in contributions_caption(run_of(update(1, 1)), ())


def test_the_score_chart_is_described_with_its_marks():
    run = run_of(
        *two_workers(), record("replace", 1, worker=1, by=2, why=""), record("together", 2, worker=2, why="")
    )
    found = scores_caption(run, 1, losses=False)
    assert "of 1 worker themselves. 1 more worker is not drawn." in found
    assert found.endswith(
        "Dashed line: all workers adopt the best one's parameters; cross: a worker is replaced by the best."
    )
    assert "grey" in scores_caption(run_of(traffic(5), traffic(50)), 0, losses=False).lower()
    assert scores_caption(run, 2, losses=True).startswith(
        "Training losses reported by 2 workers; there are no scores of the global model"
    )


def test_old_updates_are_reported():
    assert "none was 4 rounds stale or more." in staleness_caption(run_of(update(1, 1)))
    assert "50 % were 4 rounds stale or more." in staleness_caption(
        run_of(update(1, 1), update(1, 1, staleness=9.0))
    )


def test_the_reservation_is_shown_with_its_used_part():
    assert "No rate is reserved" in traffic_caption(run_of(traffic(5), traffic(10)))
    found = traffic_caption(
        run_of(traffic(5, 4000, 100, bandwidth=1000), traffic(10, 100, 2000, bandwidth=1000))
    )
    assert "at most 400 B/s received and 800 B/s sent" in found
    assert "1 kB/s are reserved in each direction (dashed); at most 80 % of it was used." in found
    assert traffic_caption(run_of(traffic(5, 9000, bandwidth=1000))).endswith(
        "at most 180 % of it was used: too much."
    )
    assert "last changed after" in traffic_caption(
        run_of(traffic(5, bandwidth=10), traffic(10, bandwidth=20))
    )


def test_the_number_of_hidden_decisions_is_shown():
    assert "more are not shown" not in decisions_caption(run_of(join(0, 1)))
    assert decisions_caption(run_of(*(join(0, each) for each in range(1500)))).endswith(
        "1,300 more are not shown."
    )


def test_numbers_are_described():
    assert format_refusals({"a": 1, "b": 3, "c": 2, "d": 1, "e": 1, "f": 4}) == "f 4, b 3, c 2, a 1, others 2"
    assert (format_number(1234.5), format_number(float("nan"))) == ("1234", "not a number")
    assert (format_percent(0), format_percent(0.0123), format_percent(0.5)) == (
        "0 %",
        "1.2 %",
        "50 %",
    )
    assert (plural(1, "worker"), plural(1000, "update")) == ("1 worker", "1,000 updates")


def test_merges_by_quorum_are_described_and_give_updates_their_weights():
    waiting = {"weight": None, "relative": 1.0}
    records = [join(0, 1, "ann"), join(0, 2, "bob"), begin(0, 1)]
    for at in range(1, 5):
        records += [update(at, 1, counted=30.0, **waiting), update(at, 2, counted=10.0, **waiting)]
        late = [2] if at == 4 else []
        records.append(
            record(
                "merge",
                at + 0.5,
                fragment=0,
                updates=2,
                of=[1, 2],
                late=late,
                grace=0.5,
                scale=1.0,
                workers=4,
            )
        )
    run = run_of(*records, update(5, 1, counted=30.0, **waiting))
    assert (run.merges, run.merged, run.late, run.weight) == (4, 8, 1, pytest.approx(4.0))
    assert {row.name: row.worker.weight for row in contribution_rows(run)} == {
        "ann": pytest.approx(3.0),
        "bob": pytest.approx(1.0),
    }
    (sentence,) = [each for each in hub_headline(run, contribution_rows(run)) if "merge" in each]
    assert sentence == (
        "4 merges by quorum took 2 updates on average; half of them waited at most 500 ms for more than the quorum, "
        "and 12 % of the updates were late and joined the next merge."
    )
    assert not any("merge" in each for each in sentences(*two_workers()))
