"""``paceline report`` of a hub's folder, while a hub has it open and after."""

from __future__ import annotations

import sys

import pytest

from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.tools.cli import app as module


def paceline(monkeypatch, *arguments):
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code or 0


def update(number):
    return {
        "kind": "update", "t": 1.0 + number, "worker": 7, "fragment": 0, "round": number, "revision": number + 1,
        "base": number, "dtype": "int4", "weight": 1.0, "workers": 1, "samples": 20.0, "steps": 20,
        "staleness": 0.0, "norm": 0.5, "score": None,
    }  # fmt: skip


def test_a_hubs_folder_has_its_own_page_also_while_the_hub_runs(monkeypatch, capsys, tmp_path):
    with HubJournal.open(tmp_path, resume=True) as journal:
        journal.describe({"run": "night"})
        journal.append({"kind": "join", "t": 1.0, "worker": 7, "name": "gpu-1", "every": 20, "delay": 5})
        journal.append(update(0), b"x")
        journal.commit()
        assert paceline(monkeypatch, "report", tmp_path) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert "Asynchronous run night" in page
        assert "accepted 1 update of 1 worker" in page
        assert '<th scope="row">gpu-1</th>' in page
        journal.append(update(1), b"x")
        journal.commit()
        assert paceline(monkeypatch, "report", tmp_path) == 0
    assert "accepted 2 updates of 1 worker" in (tmp_path / "report.html").read_text()


def test_a_hub_continues_while_its_page_is_written(monkeypatch, tmp_path):
    for _ in range(2):
        with HubJournal.open(tmp_path, resume=True) as journal:
            journal.append(update(0), b"x")
            journal.commit()
        assert paceline(monkeypatch, "report", tmp_path) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
