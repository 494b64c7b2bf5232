"""Atomic replacement of files."""

from __future__ import annotations

import os

import pytest

from paceline._core.files import write_text


def test_new_content_takes_the_place_of_the_old_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "file"
    for text in ("one\n", "zwei ½\n"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_stay_and_a_new_file_has_the_usual_ones(tmp_path):
    usual, path = tmp_path / "usual", tmp_path / "file"
    usual.write_text("")
    write_text(path, "x")
    assert path.stat().st_mode == usual.stat().st_mode
    path.chmod(0o600)
    write_text(path, "y")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
