"""Output files: unwritable ones, and ones that must not be replaced, are refused first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tools.result_files import check_writable


def test_a_file_that_is_there_or_not_may_be_written(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("{}")
    for path in (there, tmp_path / "new.json"):
        check_writable(path, "--json")
    assert there.read_text() == "{}"


def test_a_folder_is_created_only_on_request(tmp_path):
    with pytest.raises(UsageError, match=r"--json .*: no such folder"):
        check_writable(tmp_path / "a" / "b.json", "--json")
    check_writable(tmp_path / "a" / "b.json", "--out", make_folder=True)
    assert (tmp_path / "a").is_dir()


def test_only_regular_files_are_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "it is not a regular file"), (tmp_path, "it is a folder")):
        with pytest.raises(UsageError, match=f"--json .*: {why}"):
            check_writable(path, "--json")
    assert pipe.is_fifo()


def test_a_file_in_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    there = tmp_path / "there.json"
    there.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(UsageError, match="no permission"):
        check_writable(there, "--json")


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"can't write --json .*: File name too long"):
        check_writable(tmp_path / ("a" * 300), "--json")
