"""A journal on a full disk reports it, and loses nothing once space is free."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from forked_child import in_child
from journal_folders import numbers_in, recovered_numbers, skip_fsync, write
from paceline.async_dp.wal import hub_journal as journal_module
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.errors import CheckpointError
from paceline.testing import fault_injection

quick = pytest.fixture(autouse=True)(skip_fsync)


def refused(call):
    """Return whether `call` raised since the disk is full."""
    try:
        call()
    except CheckpointError as error:
        return "the disk is full (No space left on device)" in str(error) and "free disk space" in str(error)
    return False


def test_a_full_disk_is_reported_and_nothing_is_lost_once_space_is_free(tmp_path):
    """The space may end in the journal, in the ledger, or in another file."""
    for room in range(0, 700, 7):
        folder, failures, count = tmp_path / f"hub-{room}", 0, 0
        with HubJournal.open(folder, resume=False) as journal:
            fault_injection.disk_full(after_nbytes=room)
            for size in (2, 1, 3):
                write(journal, range(count, count + size))
                count += size
                failures += refused(journal.commit)
                failures += refused(journal.commit)
            assert failures > 0 or room > 560
            fault_injection.disarm()
            journal.commit()
            assert numbers_in(journal) == list(range(6))
        assert recovered_numbers(folder) == list(range(6))


def test_a_partial_record_is_cut_off_again(tmp_path):
    """With the kernel's file size limit, so that a part is written."""

    def fill():
        with HubJournal.open(tmp_path, resume=False) as journal:
            write(journal, [0])
            journal.commit()
            size = (tmp_path / "journal-000000000000.log").stat().st_size
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
            journal.append({"k": 1}, bytes(200_000))
            journal.append({"k": 2}, b"")
            for _ in range(2):
                with pytest.raises(CheckpointError, match="the disk is full"):
                    journal.commit()
                assert (tmp_path / "journal-000000000000.log").stat().st_size == size
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            journal.commit()
            return [values["k"] for values, _ in journal.recovered().records] == [0, 1, 2]

    assert in_child(fill) == 0
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert [(values["k"], len(payload)) for values, payload in journal.recovered().records] == [
            (0, 0), (1, 200_000), (2, 0),
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["journal-000000000000.log", "ledger.jsonl"])
def test_a_partial_write_is_truncated_in_either_file(tmp_path, monkeypatch, name):
    real, half = os.pwritev, [name]

    def halved(handle, pieces, offset):
        if half and os.readlink(f"/proc/self/fd/{handle}").endswith(half[0]):
            data = b"".join(pieces)
            real(handle, [data[: len(data) // 2]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, pieces, offset)

    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        journal.commit()
        size = (tmp_path / name).stat().st_size
        write(journal, [1, 2])
        monkeypatch.setattr(os, "pwritev", halved)
        assert refused(journal.commit)
        assert (tmp_path / name).stat().st_size == size
        half.clear()
        journal.commit()
    assert recovered_numbers(tmp_path) == [0, 1, 2]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda handle, pieces, at: real(handle, [b"".join(pieces)[:777]], at))
    with HubJournal.open(tmp_path, resume=False) as journal:
        for k in range(3):
            journal.append({"k": k}, bytes([k]) * 100_000)
            journal.append({"k": k}, b"small")
    with HubJournal.open(tmp_path, resume=True) as journal:
        found = [payload for _, payload in journal.recovered().records]
    assert found == [
        bytes([0]) * 100_000,
        b"small",
        bytes([1]) * 100_000,
        b"small",
        bytes([2]) * 100_000,
        b"small",
    ]


def test_an_append_whose_early_commit_fails_stays_buffered(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MAX_BUFFERED_NBYTES", 1)
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        assert journal.problem == ""
        fault_injection.disk_full(after_nbytes=0)
        write(journal, [1])
        assert "the disk is full" in journal.problem
        assert refused(journal.commit)
        fault_injection.disarm()
        journal.commit()
        assert journal.problem == ""
    assert recovered_numbers(tmp_path) == [0, 1]


def test_facts_that_did_not_fit_can_be_described_again(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        fault_injection.disk_full(after_nbytes=0)
        with pytest.raises(CheckpointError, match=r"run\.json' can't be written: the disk is full"):
            journal.describe({"run": "a"})
        assert journal.run_facts == {}
        fault_injection.disarm()
        journal.describe({"run": "a"})
        assert journal.run_facts == {"run": "a"}
