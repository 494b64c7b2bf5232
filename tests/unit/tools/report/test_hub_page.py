"""Page of an asynchronous run: complete, self-contained, names escaped, for any size and stage of a run."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from test_run_page import parse

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_settings import HubRules, PopulationRules, ScreeningRules
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.report.hub.hub_charts import _with_empty
from paceline.tools.report.hub.hub_page import write_hub_report
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import LinearTask
from paceline.tools.simulate.simulated_machines import ChurnEvent, SimulatedMachine
from reported_hub_folder import demo, global_score, join, long_run, record, refuse, traffic, update, write


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of a run in which everything happens, for tests that only read it."""
    return write_hub_report(demo(tmp_path_factory.mktemp("hub"))).read_text()


def test_the_page_shows_results_contributions_and_decisions(page):
    for text in (
        "<h1>Asynchronous run demo</h1>",
        "In 51.5 s the hub accepted 41 updates of 3 workers",
        "The global model&#39;s score went from 4.8 to 2.85 (lower is better).",
        "torch DDP would have sent 4.92 GB",
        "Most updates of dan were refused (not finite 4): investigate this first.",
        "<h2>Score</h2>", "<h2>Contributions</h2>", "<h2>Staleness</h2>", "<h2>Network</h2>",
        "grey: the hub is down",
        "1 MB/s are reserved in each direction (dashed); at most 20 % of it was used.",
        '<th scope="row">1.5 s</th><td>17:20:01</td><td>dan</td><td>replaced by the best</td>',
        "<td>score 9.0 is 50% behind the best, 6.0 of ann</td>",
        "<td>put in quarantine</td><td>for 1 min 0 s",
        "<td>the hub</td><td>was down</td>",
        "<td>cy</td><td>joined</td>",
        "<td>fell silent</td>", "<td>left</td>",
    ):  # fmt: skip
        assert text in page, text


def test_the_page_is_whole_loads_nothing_and_has_every_chart_once(page):
    tags = parse(page)
    assert tags.loads == []
    assert "<script src" not in page
    assert not re.search(r"url\((?!#)", page)
    assert len(tags.ids) == len(set(tags.ids))
    assert "prefers-color-scheme: dark" in page
    assert page.count('<figure class="curves') == 2
    assert page.count('<div class="bars"') == 2


HOSTILE = [
    "<script>alert(1)</script>", "--><img src=x onerror=alert(1)>", '" onload="alert(1)', "]]><svg/onload=alert(1)>",
    "{{ 7*7 }}", "</text></svg><b>", "&lt;b&gt;", "$\\frac{1}{0$", "_", "id=\"x\" url(#y) href=\"#z\"",
]  # fmt: skip


def page_of_names(folder, names, reason, run):
    """Return the page of a run with malicious names of workers, reasons and run."""
    records = [join(0, number, name) for number, name in enumerate(names)]
    for number, _ in enumerate(names):
        records += [update(1 + number, number, score=2.0), global_score(2 + number, number, 1.0)]
        records += [refuse(3 + number, number, f"{reason}: {reason}", until=60.0)]
        records += [record("replace", 4, worker=number, by=0, lr=0.1, why=f"{reason} of 0")]
    return write_hub_report(write(folder, records, name=run)).read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [5, 30])
def test_names_and_reasons_of_others_are_text_never_markup(tmp_path, workers):
    names = [HOSTILE[number % len(HOSTILE)] for number in range(workers)]
    harmless = [f"name{number % len(HOSTILE)}" for number in range(workers)]
    page = page_of_names(tmp_path / "ill", names, HOSTILE[0], HOSTILE[1])
    same = page_of_names(tmp_path / "good", harmless, "reason", "run")
    assert parse(page).loads == []
    found, expected = elements(page), elements(same)
    assert found == expected
    assert '<th scope="row">&lt;script&gt;alert(1)&lt;/script&gt;' in page
    assert "{{ 7*7 }}" in page


def elements(page):
    """Return how often each element is in a page with the same attributes, by name, and each comment."""
    found = Counter()

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found[tag, tuple(name for name, _ in attrs)] += 1

        def handle_comment(self, data):
            found["comment", data] += 1

    Reader().feed(page)
    return found


def test_a_hub_that_has_just_begun_has_a_page_that_shows_it(tmp_path):
    with HubJournal.open(tmp_path, resume=True):
        page = write_hub_report(tmp_path).read_text()
    parse(page)
    assert "There are no records yet" in page
    assert "<svg" not in page


def test_a_run_without_updates_is_reported(tmp_path):
    page = write_hub_report(write(tmp_path, [traffic(5), join(6, 1, "ann"), traffic(10)])).read_text()
    parse(page)
    assert "No update has been accepted yet: in 5 s 1 worker joined." in page
    assert "<h2>Network</h2>" in page
    assert "<h2>Staleness</h2>" not in page


def test_training_losses_replace_missing_scores(tmp_path):
    reports = {1: {"steps": 1, "speed": 2.0, "loss": 4.0}}
    records = [join(0, 1, "ann"), *(traffic(5 * at, workers=reports) for at in range(1, 9)), update(50, 1)]
    page = write_hub_report(write(tmp_path, records)).read_text()
    assert "<h2>Training loss</h2>" in page
    assert "Training losses reported by 1 worker" in page


def test_missing_values_are_noted(tmp_path):
    folder = write(tmp_path, [update(1, 1)])
    with (folder / "ledger.jsonl").open("a") as file:
        file.write("?\n")
    assert '<p class="note">The ledger is damaged: line 2' in write_hub_report(folder).read_text()


@pytest.mark.thorough
def test_many_lines_of_thirty_workers_are_a_page_of_bounded_size(tmp_path):
    page = write_hub_report(write(tmp_path, long_run(30_000, workers=30))).read_text()
    parse(page)
    assert '<th scope="row">10 others</th>' in page
    assert "The largest 20 of 30 workers." in page
    assert "10 more workers are not drawn" in page
    assert len(page) < 1_000_000


def test_the_histogram_has_no_holes_and_ends_with_its_last_bar():
    assert _with_empty([(0.5, 1.0, 3), (1.5, 2.0, 1)]) == [
        (0.0, 0.5, 0),
        (0.5, 1.0, 3),
        (1.0, 1.5, 0),
        (1.5, 2.0, 1),
    ]


def test_a_run_of_days_shows_dates(tmp_path):
    page = write_hub_report(
        write(tmp_path, [join(0, 1), update(5 * 86400, 1), record("leave", 5 * 86400, worker=1)])
    ).read_text()
    assert '<th scope="row">120 h 0 min</th><td>2026-07-30 17:20:00</td>' in page


@pytest.mark.thorough
def test_the_ledger_of_a_real_hub_is_read(tmp_path, monkeypatch):
    """Every kind of record, with the fields that the hub gives it."""
    written, note = [], Hub._record

    def noted(hub, kind, payload=b"", **values):
        written.append({"kind": kind, "t": hub._wall(), **values})
        note(hub, kind, payload, **values)

    monkeypatch.setattr(Hub, "_record", noted)
    machines = [
        *(SimulatedMachine(0.01 * (1 + each)) for each in range(4)),
        SimulatedMachine(0.02, lr=1e-6),
        SimulatedMachine(0.02, lr=1e-5),
    ]
    plan = AsyncPlan(
        machines=machines,
        steps=600,
        cadence=SyncSchedule(20, 1, 5),
        policy=SelectionPolicy(scored=True),
        same_init=False,
        rules=HubRules(
            population=PopulationRules(60),
            screen=ScreeningRules(max_score_increase=0.0, strikes=2),
            silent_after=1.0,
        ),
        churn=[ChurnEvent(4.0, 1, False), ChurnEvent(6.0, 1, True)],
    )  # fmt: skip
    simulate_async(plan, LinearTask())
    kinds = {each["kind"] for each in written}
    expected = "join silent score replace together begin update global_score refuse"
    assert set(expected.split()) <= kinds
    page = write_hub_report(write(tmp_path, written)).read_text()
    parse(page)
    assert 'class="note"' not in page
    for text in (
        "put in quarantine",
        "update refused",
        "all adopt its parameters",
        "replaced by the best",
        "fell silent",
    ):
        assert f"<td>{text}" in page, text
    updates = [each for each in written if each["kind"] == "update"]
    samples = sum(each["samples"] for each in updates)
    assert f"{len(updates):,} updates" in page
    assert f"<b>{samples / 1e3:.3g} k</b>" in page
