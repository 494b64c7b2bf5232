"""A hub that dies or fails at any disk operation loses nothing that was committed."""

from __future__ import annotations

import os
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failing_disk import FailingDisk, die, refuse
from forked_child import ended
from journal_folders import copy_folder, numbers_in, recovered_numbers, skip_fsync, write
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.errors import CheckpointError, PacelineError
from paceline.testing import fault_injection
from snapshot_states import open_and_read, revisions_in, snap

quick = pytest.fixture(autouse=True)(skip_fsync)


def refusal(call):
    """Return why a call failed, empty if it did not."""
    try:
        call()
    except PacelineError as error:
        return str(error)
    return ""


def live(folder, report, retry):
    """Append, commit and snapshot; report the number of committed records, and repeat a failed operation once."""
    journal, count = HubJournal.open(folder, resume=True), 0

    def attempt(call):
        nonlocal journal
        why = refusal(lambda: call(journal)) if retry else call(journal)
        if not why:
            return
        assert "full" in why
        why = refusal(lambda: call(journal))
        if why:
            assert "any more" in why
            journal.close()
            journal = HubJournal.open(folder, resume=True)
            call(journal)

    attempt(lambda journal: journal.describe({"run": "a"}))
    for revision in (0, 5, 9, 12):
        write(journal, [count, count + 1])
        attempt(lambda journal: journal.commit())
        count += 2
        report(count)
        attempt(partial(snap, revision=revision, count=count))
        write(journal, [count])
        attempt(lambda journal: journal.commit())
        count += 1
        report(count)
    journal.close()


@pytest.mark.thorough
def test_a_hub_that_dies_at_any_disk_operation_loses_nothing(tmp_path):
    """The restarted hub continues from there."""
    at = 0
    while True:
        at += 1
        folder, (reading, writing) = tmp_path / f"hub-{at}", os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with FailingDisk(at, die):
                    live(folder, lambda count, pipe=writing: os.write(pipe, b"%d " % count), retry=False)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        code = ended(pid)
        committed = max(map(int, os.read(reading, 1000).split()), default=0)
        os.close(reading)
        assert code in (0, 9)
        numbers = recovered_numbers(folder)
        assert numbers == list(range(len(numbers)))
        assert committed <= len(numbers) <= committed + 2
        with HubJournal.open(folder, resume=True) as journal:
            write(journal, [len(numbers)])
            snap(journal, 20, len(numbers) + 1)
            write(journal, [len(numbers) + 1])
        assert recovered_numbers(folder) == list(range(len(numbers) + 2))
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        if code == 0:
            break
    assert at > 100


@pytest.mark.thorough
def test_a_hub_that_dies_while_it_recovers_loses_nothing(tmp_path):
    """It finds a damaged snapshot, a torn journal, an incomplete ledger, and an unfinished file."""
    whole = tmp_path / "whole"
    with HubJournal.open(whole, resume=False) as journal:
        for count in range(3):
            snap(journal, count + 1, 2 * count)
            write(journal, [2 * count, 2 * count + 1])
    path = whole / "snapshot-000000000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    path = whole / "journal-000000000003.log"
    path.write_bytes(path.read_bytes()[:-1])
    path = whole / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]) + b'{"n')
    (whole / ".snapshot-000000000004.safetensors-x1").mkdir()
    at, code = 0, 9
    while code:
        at += 1
        folder = copy_folder(whole, tmp_path / "hub")
        pid = os.fork()
        if pid == 0:
            try:
                with FailingDisk(at, die):
                    HubJournal.open(folder, resume=True).close()
                os._exit(0)
            finally:
                os._exit(1)
        code = ended(pid)
        assert code in (0, 9)
        assert recovered_numbers(folder) == list(range(5))
        assert revisions_in(folder, "snapshot") == [2]
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert at > 15


@pytest.mark.thorough
def test_a_failure_of_any_disk_operation_is_reported_and_loses_nothing(tmp_path):
    at = 0
    while True:
        at += 1
        folder = tmp_path / f"hub-{at}"
        with FailingDisk(at, refuse) as disk:
            why = refusal(lambda folder=folder: live(folder, lambda count: None, retry=True))
            if why:  # on opening it
                assert at < 20, why
                disk.at = 0
                live(folder, lambda count: None, retry=True)
        assert recovered_numbers(folder) == list(range(12))
        if disk.count < at:
            break
    assert at > 100


def test_no_record_is_appended_once_the_next_journal_may_exist(tmp_path, monkeypatch):
    """The disk failed after the rename of the new journal, before it was flushed."""
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        with monkeypatch.context() as patch:
            patch.setattr("paceline.async_dp.wal.journal_file.write_atomic", written_but_not_flushed)
            with pytest.raises(CheckpointError, match=r"journal-000000000004\.log' can't be written"):
                snap(journal, 4, 1)
        with pytest.raises(CheckpointError, match=r"can't be written any more: journal-0+4\.log was begun"):
            write(journal, [1])
    with HubJournal.open(tmp_path, resume=True) as journal:
        write(journal, [1])
    assert recovered_numbers(tmp_path) == [0, 1]


def test_a_snapshot_that_may_have_been_written_is_used_if_intact(tmp_path, monkeypatch):
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        snap(journal, 4, 1)
        write(journal, [1])
        with monkeypatch.context() as patch:
            patch.setattr("paceline.async_dp.wal.hub_snapshot.write_atomic", written_but_not_flushed)
            with pytest.raises(CheckpointError, match="can't be written: Input/output error"):
                snap(journal, 4, 2)
        assert numbers_in(journal) == [0, 1]
        write(journal, [2])
    assert recovered_numbers(tmp_path) == [0, 1, 2]


def written_but_not_flushed(path, write, **_):
    path.unlink(missing_ok=True)
    write(path)
    raise OSError(5, "Input/output error")


def test_the_ledger_is_flushed_before_a_snapshot_replaces_records(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        monkeypatch.setattr(
            os, "fdatasync", lambda h: calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{h}")))
        )
        monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(os.path.basename(b)), replace(a, b)))
        snap(journal, 4, 1)
        log, snapshot = "journal-{:012d}.log", "snapshot-000000000004.safetensors"
        assert calls == [log.format(0), "ledger.jsonl", snapshot, log.format(4)]


@pytest.mark.parametrize("seed", range(6))
def test_a_disk_that_is_full_after_any_number_of_bytes(tmp_path, seed):
    chance = random.Random(seed)
    with HubJournal.open(tmp_path, resume=False) as journal:
        count, revision, refusals = 0, 0, 0
        for _ in range(40):
            fault_injection.disarm()
            if chance.random() < 0.7:
                fault_injection.disk_full(after_nbytes=chance.randrange(400))
            if chance.random() < 0.5:
                write(journal, [count])
                count += 1
            try:
                if chance.random() < 0.5:
                    journal.commit()
                else:
                    revision += 1
                    snap(journal, revision, count)
            except CheckpointError as error:
                refusals += "full" in str(error)
        fault_injection.disarm()
    assert refusals > 5
    assert recovered_numbers(tmp_path) == list(range(count))


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_history_is_recovered_whichever_snapshot_is_damaged(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("hub")
    count = revision = snapshots = 0
    for _ in range(data.draw(st.integers(1, 3))):
        with HubJournal.open(folder, resume=True) as journal:
            assert numbers_in(journal) == list(range(count))
            for step in data.draw(
                st.lists(st.sampled_from(["append", "commit", "snapshot", "again"]), max_size=8)
            ):
                if step == "append":
                    write(journal, [count])
                    count += 1
                elif step == "commit":
                    journal.commit()
                else:
                    revision += step == "snapshot"
                    snap(journal, revision, count)
                    snapshots = len(revisions_in(folder, "snapshot"))
        if snapshots == 2 and data.draw(st.booleans()):
            newest = max(folder.glob("snapshot-*.safetensors"))
            newest.write_bytes(newest.read_bytes()[:-1])
            snapshots = 1
            assert open_and_read(folder) == list(range(count))
            with HubJournal.open(folder, resume=True) as journal:
                revision += 1
                snap(journal, revision, count)
                snapshots = 2
    assert recovered_numbers(folder) == list(range(count))
