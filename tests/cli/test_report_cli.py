"""``paceline report``: pages, files, options and refused input."""

from __future__ import annotations

import json
import sys
import webbrowser

import pytest

from paceline.tools.cli import app as module
from recorded_run import write_run


def paceline(monkeypatch, *arguments):
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code or 0


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    lines = [json.dumps({"step": step, "loss": 5.0 / step}) for step in range(1, 4)]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def browser(monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not opened.append(url))
    return opened


def test_the_page_is_written_and_named(monkeypatch, capsys, run, browser):
    assert paceline(monkeypatch, "report", run) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "3 steps" in (run / "report.html").read_text()
    assert browser == []


def test_the_browser_opens_only_with_the_option(monkeypatch, run, browser):
    assert paceline(monkeypatch, "report", run, "--open") == 0
    assert browser == [(run / "report.html").resolve().as_uri()]


def test_without_a_browser_the_page_is_there_all_the_same(monkeypatch, capsys, run):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert paceline(monkeypatch, "report", run, "--open") == 0
    assert "no web browser found" in capsys.readouterr().err


def test_a_folder_that_is_no_run(monkeypatch, capsys, tmp_path, run):
    assert paceline(monkeypatch, "report", tmp_path) == 2
    shown = capsys.readouterr().err
    assert "has no run.json" in shown
    assert f"did you mean {run}?" in shown
    assert paceline(monkeypatch, "report", tmp_path / "nothing") == 2
    assert "is no folder" in capsys.readouterr().err


def test_without_the_extra_the_install_command_is_named(monkeypatch, capsys, run):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert paceline(monkeypatch, "report", run) == 2
    shown = capsys.readouterr().err
    assert "pip install 'paceline[report]'" in shown
    assert "Traceback" not in shown


def test_the_page_needs_no_matplotlib(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert paceline(monkeypatch, "report", run) == 0


def test_two_runs_are_compared_in_the_folder_of_the_second(monkeypatch, capsys, tmp_path):
    first = write_run(tmp_path / "old", steps=40)
    second = write_run(tmp_path / "new", steps=40, slow_rank=1)
    assert paceline(monkeypatch, "report", first, second) == 0
    assert capsys.readouterr().out.strip() == str(second / "compare-old.html")
    assert "new compared with old" in (second / "compare-old.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "a"], "are the same run"),
        (["a", "b", "--trace", "t.json"], "--trace is for one run"),
        (["a", "b", "--profile", "p.json"], "--profile is for one run"),
        (["a", "--torch-trace", "t.json"], "--trace timeline.json"),
        (["a", "c"], "is no folder"),
    ],
)
def test_what_does_not_fit_two_runs_is_refused(monkeypatch, capsys, tmp_path, arguments, message):
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=2)
    monkeypatch.chdir(tmp_path)
    assert paceline(monkeypatch, "report", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_missing_run_prints_the_usage(monkeypatch, capsys):
    assert paceline(monkeypatch, "report") == 2
    assert "Usage: paceline report" in capsys.readouterr().err


def test_the_timeline_is_written_for_perfetto(monkeypatch, capsys, tmp_path):
    folder = write_run(tmp_path / "run", steps=4)
    file = tmp_path / "deep" / "trace.json"
    assert paceline(monkeypatch, "report", folder, "--trace", file) == 0
    assert str(file) in capsys.readouterr().out
    assert json.loads(file.read_text())["traceEvents"]


def test_without_a_timeline_there_is_nothing_to_write(monkeypatch, capsys, run, tmp_path):
    assert paceline(monkeypatch, "report", run, "--trace", tmp_path / "trace.json") == 2
    assert "has no timeline" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()
