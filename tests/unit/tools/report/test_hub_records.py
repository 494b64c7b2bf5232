"""Reading a hub's folder: counts, times, curves; growing, damaged and invalid ledgers."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest

from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.errors import UsageError
from paceline.tools.report.hub.hub_records import HubRun, is_hub_folder, read_hub_run, read_records
from paceline.tools.report.hub.worker_statistics import WorkerTable, printable
from reported_hub_folder import (
    START,
    begin,
    demo,
    global_score,
    join,
    line,
    long_run,
    record,
    refuse,
    traffic,
    update,
    write,
)


@pytest.fixture
def run(tmp_path):
    return lambda *records: read_hub_run(write(tmp_path / "hub", records))


def worker(run, number):
    found = run.workers.get(number)
    assert found is not None
    return found


def test_updates_are_counted_for_all_and_for_each(run):
    hub_run = run(
        begin(0, 1),
        update(1, 1, samples=10.0, weight=0.5, staleness=0.25, steps=3),
        update(2, 2, samples=30.0, weight=0.25, staleness=3.5, steps=4, fragment=1),
        update(3, 2, samples=30.0, weight=0.25, staleness=0.75, steps=5),
    )
    assert (hub_run.updates, hub_run.samples, hub_run.weight, hub_run.parameters, hub_run.fragments) == (
        3,
        70.0,
        1.0,
        1e6,
        {0, 1},
    )
    assert (hub_run.staleness.median, hub_run.staleness.largest) == (0.75, 3.5)
    assert [count for *_, count in hub_run.staleness_bars.rows()] == [1, 1, 1]
    two = worker(hub_run, 2)
    assert (two.updates, two.samples, two.steps, two.weight, two.staleness.largest) == (
        2,
        60.0,
        9.0,
        0.5,
        3.5,
    )


def test_refusals_are_counted_by_general_reason(run):
    why = ["exploding: 12.3 times the usual norm", "exploding: 99.0 times the usual norm", "not finite"]
    hub_run = run(
        *(
            refuse(at, 5, each)
            for at, each in enumerate([*why, *[f"in quarantine for {s} s more" for s in (9, 8)]])
        )
    )
    expected = {"exploding": 2, "not finite": 1, "in quarantine": 2}
    assert hub_run.refused == worker(hub_run, 5).refused == expected


def test_a_quarantine_is_reported_once_when_it_begins(run):
    hub_run = run(
        refuse(0, 5), refuse(1, 5, until=60.0), refuse(2, 5, "in quarantine for 59 s more", until=59.0)
    )
    assert [each.what for each in hub_run.decisions.newest()] == [
        "update refused",
        "put in quarantine",
        "update refused",
    ]
    assert "1 min 0 s" in hub_run.decisions.newest()[1].why


def test_the_time_that_workers_were_there_leaves_out_silence_and_absence(run):
    hub_run = run(
        join(0, 1), join(0, 2), join(0, 3),
        record("silent", 10, worker=1), record("back", 15, worker=1), record("leave", 20, worker=2), update(30, 3),
    )  # fmt: skip
    assert [worker(hub_run, number).present_seconds for number in (1, 2, 3)] == pytest.approx([25, 20, 30])


def test_a_hub_that_was_away_is_seen_where_its_notes_on_traffic_leave_a_gap(run):
    hub_run = run(
        join(0, 1), join(0, 2), *(traffic(at) for at in (5, 10.2, 15.3)), update(18, 1), update(18.5, 2),
        join(40, 1), update(41, 1), traffic(44), update(50, 1),
    )  # fmt: skip
    (away,) = hub_run.downtime.downtimes
    assert (away.since - START, away.until - START) == pytest.approx((18.5, 39))
    assert [worker(hub_run, number).present_seconds for number in (1, 2)] == pytest.approx([18 + 10, 18.5])
    assert "was down" in [each.what for each in hub_run.decisions.newest()]


def test_a_hub_that_was_started_again_at_once_is_seen_all_the_same(run):
    hub_run = run(traffic(5), traffic(10), update(13, 1), join(14, 1), traffic(19), traffic(24))
    assert [(each.since - START, each.until - START) for each in hub_run.downtime.downtimes] == [(13, 14)]


def test_a_hub_that_is_never_away_has_no_gap(run):
    hub_run = run(*(traffic(5.1 * at, seconds=5.1) for at in range(1, 200)))
    assert (hub_run.downtime.count, list(hub_run.downtime.downtimes)) == (0, [])


def test_traffic_is_added_up_and_its_peaks_kept(run):
    hub_run = run(
        traffic(5, 1000, 500, bandwidth=300),
        traffic(10, 5000, 100, bandwidth=300),
        traffic(15, 10, 20, bandwidth=900),
    )
    link = hub_run.traffic
    assert (link.sent, link.received, link.record_count) == (6010, 620, 3)
    assert (link.peak_sent.rate, link.peak_received.rate, link.peak_sent.at - START) == (1000, 100, 10)
    assert [(each.begin - START, each.end - START, each.rate) for each in link.reserved] == [
        (0, 10, 300),
        (10, 15, 900),
    ]
    assert (link.saturated, link.with_reservation) == (1, 3)


def test_scores_of_the_global_model_and_of_workers_become_curves(run):
    hub_run = run(
        record("score", 1, worker=1, score=9.0, steps=20, lr=0.1),
        record("score", 2, worker=2, score=None, steps=20, lr=0.1),
        record("replace", 2, worker=1, by=2, lr=0.1, why="bad"), record("together", 3, worker=2, why="now"),
        global_score(4, 1, 5.0), update(5, 1, score=4.0), global_score(6, 2, 2.0), global_score(7, 2, None),
        global_score(8, 2, 3.0),
    )  # fmt: skip
    assert [(at - START, score) for at, score in hub_run.global_scores.points()] == [
        (4, 5.0),
        (6, 2.0),
        (8, 3.0),
    ]
    assert hub_run.best_score is not None
    assert (hub_run.best_score.score, hub_run.best_score.at - START) == (2.0, 6)
    assert [score for _, score in hub_run.scores[1].points()] == [9.0, 4.0]
    assert 2 not in hub_run.scores
    assert [(mark.worker, mark.score) for mark in hub_run.replacements] == [(1, 9.0)]
    assert hub_run.merged_at == START + 3


def test_speeds_and_losses_are_those_of_the_notes_on_traffic(run):
    hub_run = run(
        traffic(
            5,
            workers={1: {"steps": 1, "speed": 2.0, "loss": 4.0}, 2: {"steps": 1, "speed": 0.0, "loss": None}},
        ),
        traffic(10, workers={1: {"steps": 1, "speed": 4.0, "loss": 3.0}}),
    )
    assert (worker(hub_run, 1).speed, worker(hub_run, 2).speed) == (3.0, None)
    assert [loss for _, loss in hub_run.losses[1].points()] == [4.0, 3.0]
    assert hub_run.max_present == 2


def test_a_ledger_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    folder = write(tmp_path, [join(0, 1), update(1, 1)])
    with (folder / "ledger.jsonl").open("a") as file:
        file.write(line(2, update(2, 1))[:-9])
    assert (read_hub_run(folder).updates, read_hub_run(folder).notes) == (1, [])


def test_lines_written_during_the_read_count(tmp_path):
    folder = write(tmp_path, [update(at, 1) for at in range(5000)])
    from paceline.async_dp.wal.decision_ledger import read_ledger

    def growing():
        for number, values in enumerate(read_ledger(folder)):
            if number == 100:
                with (folder / "ledger.jsonl").open("a") as file:
                    file.writelines(line(5000 + more, update(9999, 2)) for more in range(10))
            yield values

    run = HubRun(folder=folder)
    read_records(run, growing())
    assert (run.updates, worker(run, 2).updates) == (5010, 10)


def test_lines_before_a_damaged_one_are_read_and_it_is_named(tmp_path):
    folder = write(tmp_path, [join(0, 1), update(1, 1)])
    with (folder / "ledger.jsonl").open("a") as file:
        file.write("\0\0\0\n" + line(3, update(2, 1)))
    hub_run = read_hub_run(folder)
    assert hub_run.updates == 1
    assert hub_run.notes == [
        "The ledger is damaged: line 3 can't be read, and the records after it are skipped. A hub restarted with this "
        "folder repairs what it can."
    ]


def test_a_damaged_facts_page_is_reported_and_a_newer_one_refused(tmp_path):
    folder = write(tmp_path, [update(1, 1)])
    page = folder / "run.json"
    newer = json.loads(page.read_text()) | {"format": 99}
    page.write_text("{")
    assert "run.json is damaged" in read_hub_run(folder).notes[0]
    page.write_text(json.dumps(newer))
    with pytest.raises(UsageError, match="format 99"):
        read_hub_run(folder)
    page.unlink()
    assert (read_hub_run(folder).name, read_hub_run(folder).notes) == ("", [])


def test_invalid_lines_are_counted_and_skipped(run):
    hub_run = run(
        {"kind": "update"},
        {"kind": "update", "t": 5, "worker": "x"},
        {"t": "now"},
        {"kind": 7, "t": 1},
        update(2, 1),
    )
    assert (hub_run.updates, hub_run.records) == (1, 2)
    assert hub_run.notes == ["Skipped 3 line(s) of the ledger without a valid time or worker."]


NONSENSE = [
    None,
    True,
    "x",
    "",
    -1,
    0,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    {"1": 2},
    [1],
    "9" * 300,
]


def test_a_ledger_with_any_content_can_be_read(run):
    chance = random.Random(0)
    good = [
        join(0, 1, "a"), begin(0, 1), update(0, 1), refuse(0, 1),
        traffic(0, workers={1: {"steps": 1, "speed": 2.0, "loss": 3.0}}),
        global_score(0, 1, 1.0), record("score", 0, worker=1, score=1.0), record("replace", 0, worker=1, by=2, why="x"),
        record("together", 0, worker=1, why="x"), record("leave", 0, worker=1), record("silent", 0, worker=1),
    ]  # fmt: skip
    records = []
    for _ in range(5000):
        values = dict(chance.choice(good))
        values[chance.choice(list(values))] = chance.choice(NONSENSE)
        records.append(values)
    assert run(*records).records > 3000


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_ledger():
    run = HubRun(folder=None)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        read_records(run, long_run(20_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert run.records > 20_000
    assert peak < 3e6  # the records themselves take several times as much
    assert len(run.global_scores.points()) <= 2000


def test_memory_does_not_grow_with_workers_that_join_and_leave():
    run = HubRun(folder=None)  # type: ignore[arg-type]
    records = (
        each
        for number in range(12_000)
        for each in (
            join(number, number),
            update(number, number, score=1.0),
            record("leave", number, worker=number),
        )
    )
    read_records(run, records)
    assert len(run.scores) <= 256
    assert sum(1 for _ in run.workers) <= 5000
    assert len(run.workers) == run.updates == 12_000


def test_workers_that_are_one_keep_their_sums():
    workers = WorkerTable(limit=4)
    for number in range(10):
        each = workers.mark_seen(number, 0.0)
        each.updates, each.samples = 1, float(number)
        each.staleness.add(number)
    assert (len(workers), sum(each.samples for each in workers) + workers.others.samples) == (10, 45.0)
    assert workers.ranked()[0].number == 9
    assert workers.others.staleness.count == workers.others.count == workers.others.updates


def test_workers_with_the_same_name_are_distinguished():
    workers = WorkerTable()
    for number, name in ((1, "gpu"), (2, "gpu"), (3, "4"), (4, ""), (5, "own")):
        workers.get_or_add(number, 0.0).name = name
    assert workers.names() == {1: "gpu #1", 2: "gpu #2", 3: "4 #3", 4: "4", 5: "own"}


def test_texts_lose_unprintable_characters():
    assert printable("a\x00\u202eb\ud800\n c ") == "ab c"
    assert printable("x" * 100) == "x" * 39 + "…"
    assert printable(17) == "17"


def test_the_last_name_that_a_worker_gave_counts(run):
    hub_run = run(join(0, 1, "old"), join(1, 1, "new"), join(2, 1, ""))
    assert hub_run.workers.names() == {1: "new"}


def test_a_hubs_folder_is_distinguished_from_others(tmp_path):
    assert not is_hub_folder(tmp_path)
    assert not is_hub_folder(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "steps.jsonl").write_text("")
    assert not is_hub_folder(tmp_path)
    with HubJournal.open(tmp_path / "hub", resume=True):
        assert is_hub_folder(tmp_path / "hub")
        assert read_hub_run(tmp_path / "hub").records == 0
    assert is_hub_folder(demo(tmp_path / "other"))


def test_the_name_of_the_run_is_that_of_its_page(tmp_path):
    assert read_hub_run(write(tmp_path, [], name="night \x1b[31mrun")).name == "night [31mrun"
