"""Atomic replacement of files."""

from __future__ import annotations

import os

import pytest

from paceline._core.files import make_private_folder, open_private, write_text


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


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_private_files_and_folders_are_the_owners_alone_whatever_the_umask(tmp_path):
    make_private_folder(tmp_path / "run")
    write_text(tmp_path / "run/file", "x", private=True)
    os.close(open_private(tmp_path / "run/opened", os.O_WRONLY | os.O_CREAT))
    assert modes(tmp_path) == {"run": 0o700}
    assert modes(tmp_path / "run") == {"file": 0o600, "opened": 0o600}


@pytest.mark.usefixtures("umask")
def test_a_folder_with_the_setgid_bit_shares_what_is_private_with_its_group(tmp_path):
    tmp_path.chmod(0o2750)
    make_private_folder(tmp_path / "run")
    write_text(tmp_path / "run/file", "x", private=True)
    os.close(open_private(tmp_path / "run/opened", os.O_WRONLY | os.O_CREAT))
    assert modes(tmp_path) == {"run": 0o750}
    assert modes(tmp_path / "run") == {"file": 0o640, "opened": 0o640}
    tmp_path.chmod(0o2770)
    make_private_folder(tmp_path / "writable")
    assert modes(tmp_path)["writable"] == 0o770


def test_what_exists_keeps_its_permissions(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "run/file"
    folder.mkdir(mode=0o755)
    path.write_text("")
    path.chmod(0o644)
    make_private_folder(folder)
    write_text(path, "x", private=True)
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT))
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o755, 0o644)
