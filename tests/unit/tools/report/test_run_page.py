"""Page of a run: complete, self-contained, content escaped, written atomically."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from paceline.errors import UsageError
from paceline.tools.report.run.run_page import timing_caveats, write_run_report
from recorded_run import write_run

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Tags(HTMLParser):
    """Checks that tags close in order, and collects attributes that would load something."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.loads = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.note(tag, attributes)

    def handle_startendtag(self, tag, attributes):
        self.note(tag, attributes)

    def note(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.loads.append((tag, value))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "demo", ranks=2, steps=30, slow_rank=1)


@pytest.mark.thorough
def test_the_page_shows_the_run_its_times_and_the_bottleneck(folder):
    path = write_run_report(folder)
    assert path == folder / "report.html"
    page = path.read_text()
    for text in (
        "Run demo",
        "paceline train --nproc-per-node 2 --steps 30",
        "Rank 1 limits this run",
        "Step time",
        "Loss",
        "tokens/s",
        "exposed communication",
        "<h2>Utilisation</h2>",
        "median; p90 ",
        "25 MiB",
        "in 7 collectives",
        "AMD EPYC 7763",
        "3,281,000",
        "def parse(self, line):",
    ):
        assert text in page, text


def test_the_page_is_whole_and_loads_nothing(folder):
    page = write_run_report(folder).read_text()
    tags = parse(page)
    assert tags.loads == []
    assert "<script src" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert len(tags.ids) == len(set(tags.ids))
    assert "prefers-color-scheme: dark" in page


def test_each_chart_is_there_once(folder):
    page = write_run_report(folder).read_text()
    assert page.count('<figure class="curves') == 5  # loss, speed, step time, utilisation, learning rate
    assert page.count('<div class="bars"') == 1


def test_tables_have_names_and_headers_of_columns_and_rows(folder):
    page = write_run_report(folder).read_text()
    tables = page.count("<table")
    assert tables == page.count("<caption>") >= 3
    bodies = re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert all(
        row.lstrip().startswith('<th scope="row">') for body in bodies for row in body.split("<tr>")[1:]
    )
    assert "<th>" not in page


def test_the_page_of_a_custom_loop_shows_what_it_logged(folder):
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    own = [
        {"step": line["step"], "samples_per_second": 32 / line["step_seconds"], "accuracy": line["loss"] / 10}
        for line in lines
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    page = write_run_report(folder).read_text()
    parse(page)
    assert "<h2>accuracy</h2>" in page
    assert "samples, all ranks, median" in page
    assert "Samples per second of all ranks together." in page
    assert "<h2>Loss</h2>" not in page
    assert "diverged" not in page


@pytest.mark.thorough
def test_the_loss_of_a_custom_loop_is_not_called_cross_entropy(folder):
    assert "Loss of the training batches as logged." in write_run_report(folder).read_text()
    facts = json.loads((folder / "run.json").read_text()) | {"model": {"name": "mini"}}
    (folder / "run.json").write_text(json.dumps(facts))
    assert (
        "Cross-entropy of the training batches and of held-out text." in write_run_report(folder).read_text()
    )


def test_content_of_a_run_is_escaped(folder):
    facts = json.loads((folder / "run.json").read_text())
    facts["settings"]["data"] = "<script>alert(1)</script>"
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "sample.txt").write_text("</pre><img src=x>")
    page = write_run_report(folder).read_text()
    assert parse(page).loads == []
    assert "&lt;script&gt;" in page
    assert "&lt;/pre&gt;&lt;img src=x&gt;" in page


def test_notes_about_a_killed_run_are_shown(folder):
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 31')
    assert "The last line of steps.jsonl is truncated" in write_run_report(folder).read_text()


def test_a_run_that_has_just_begun_still_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    page = write_run_report(tmp_path).read_text()
    parse(page)
    assert "No step was completed." in page
    assert "<svg tabindex" not in page


def test_one_step_and_no_trace(tmp_path):
    folder = write_run(tmp_path / "r", steps=1)
    for path in (folder / "trace").iterdir():
        path.unlink()
    page = write_run_report(folder).read_text()
    parse(page)
    assert "1 step of" in page


def test_of_many_ranks_the_worst_the_median_and_the_best_are_shown(tmp_path):
    page = write_run_report(write_run(tmp_path / "r", ranks=20, steps=3, slow_rank=17)).read_text()
    bars = re.findall(r'<div data-rank="(\d+)"( hidden)?><span class="label">(rank \d+[^<]*)<', page)
    assert bars[0] == ("17", "", "rank 17 (worst)")
    assert len(bars) == 20
    assert sum(hidden == "" for _, hidden, _ in bars) == 10
    assert [name.partition(" (")[2] for *_, name in bars if "(" in name] == ["worst)", "median)", "best)"]
    assert "The worst 8, the median and the best are shown; 10 more ranks can be chosen." in page


def test_the_page_of_very_many_ranks_is_bounded_and_says_what_it_leaves_out(tmp_path):
    page = write_run_report(write_run(tmp_path / "r", ranks=300, steps=2, slow_rank=299)).read_text()
    assert "rank 299 (worst)" in page
    assert "44 ranks between them left out of this page." in page
    assert len(page) < 600_000


def test_remedies_are_plain_text(folder):
    remedies = re.search(r'<ol class="actions".*?</ol>', write_run_report(folder).read_text(), re.DOTALL)[0]
    assert remedies.count("<span") <= remedies.count("<li>")


def test_writing_again_replaces_and_leaves_nothing_beside(folder):
    before = sorted(path.name for path in folder.iterdir())
    (folder / "report.html").write_text("old")
    write_run_report(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "report.html"])
    assert "old" not in (folder / "report.html").read_text()[:10]


@pytest.mark.thorough
def test_a_failure_leaves_the_old_page(folder, monkeypatch):
    write_run_report(folder)
    old = (folder / "report.html").read_text()
    names = sorted(path.name for path in folder.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match="No space left"):
        write_run_report(folder)
    assert (folder / "report.html").read_text() == old
    assert sorted(path.name for path in folder.iterdir()) == names


def test_without_jinja2_the_remedy_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"(?s)jinja2.*pip install 'paceline\[report\]'"):
        write_run_report(folder)
    assert not (folder / "report.html").exists()


def with_facts(folder, **facts):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return write_run_report(folder).read_text()


def test_sent_bytes_are_shown_beside_uncompressed_ones(folder):
    buckets = [
        {"first parameter": "head.weight", "parameters": 18, "nbytes": 3_407_872, "sent_nbytes": 865_000,
         "uncompressed_nbytes": 3_407_872.0, "error": 0.008, "step": 0},
        {"first parameter": "<b>", "parameters": 1, "error": None},
    ]  # fmt: skip
    counted = {"at begin": {"sent": 100, "received": 50}, "at end": {"sent": 13_000_100, "received": 2050}}
    sent = {"sent_nbytes": 12.3e6, "would_be_nbytes": 1.2e9, "interface bytes": counted, "buckets": buckets}
    page = with_facts(folder, sent=sent)
    parse(page)
    assert "Rank 0 sent 12.3 MB, 98× less than float32 gradients at every step." in page
    for cell in ("1.2 GB", "13 MB", "2 kB", "0.8 %", "–"):
        assert f"<td>{cell}</td>" in page
    for name in ("head.weight … (18)", "&lt;b&gt; … (1)"):
        assert f'<th scope="row">{name}</th>' in page
    assert "<h3>sent</h3>" not in page


@pytest.mark.sweep
@pytest.mark.parametrize(
    "sent", [{}, [], {"sent_nbytes": 5.0, "would_be_nbytes": 0}, {"would_be_nbytes": "x", "buckets": 3}]
)
def test_a_run_without_byte_counts_shows_none(folder, sent):
    assert "Bytes sent" not in with_facts(folder, sent=sent)


def test_bytes_that_are_not_counted_are_called_so(folder):
    page = with_facts(folder, sent={"sent_nbytes": None, "would_be_nbytes": 1e6, "interface bytes": {}})
    assert "Bytes sent by this strategy are not counted." in page


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"synchronised": "full-shard"}, "PyTorch waits inside forward and backward"),
        ({"world": {"device": "cuda:0"}}, "Times are host times"),
        ({"world": {"backend": "nccl"}}, "Times are host times"),
        ({"world": {"device": "cpu", "backend": "gloo"}, "synchronised": "bucketed"}, ""),
    ],
)
def test_the_page_names_the_limits_of_its_times(facts, message):
    text = " ".join(timing_caveats(facts))
    assert message in text
    assert bool(text) is bool(message)
