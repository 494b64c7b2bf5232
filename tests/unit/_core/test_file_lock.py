"""A lock ends with its holder: when it is closed or when the process dies, whatever forked children live on."""

from __future__ import annotations

import os
import signal

import pytest

from forked_child import ended, in_child, start
from paceline._core.file_lock import FolderLock
from paceline.errors import UsageError


@pytest.fixture
def sleeper():
    """Starts children that only wait, as persistent workers of a DataLoader do."""
    children = []

    def begin():
        children.append(start(lambda: signal.pause() is None))

    yield begin
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL


def locked(path, timeout=0.0):
    """Lock a file and release it; raises if it is held."""
    FolderLock(path, "worker", timeout=timeout).close()
    return True


def test_a_closed_lock_is_free_while_a_forked_child_lives(tmp_path, sleeper):
    lock = FolderLock(tmp_path / "lock", "worker")
    sleeper()
    lock.close()
    assert locked(tmp_path / "lock")


def test_a_child_that_closes_its_copy_does_not_release_the_lock(tmp_path):
    path = tmp_path / "lock"
    lock = FolderLock(path, "worker")
    assert in_child(lambda: lock.close() is None) == 0
    with pytest.raises(UsageError, match="in use by this worker"):
        locked(path)
    lock.close()


def test_the_lock_of_a_killed_process_is_free_while_its_children_live(tmp_path):
    path, pids = tmp_path / "lock", tmp_path / "pids"

    def hold():
        lock = FolderLock(path, "worker")
        child = start(lambda: signal.pause() is None)
        pids.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
        return lock

    assert in_child(hold) == -signal.SIGKILL
    try:
        assert locked(path)
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)
