"""A hub's journal: nothing that was committed is lost, and the folder belongs to one run."""

from __future__ import annotations

import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forked_child import in_child
from journal_folders import numbers_in, recovered_numbers, skip_fsync, write, write_groups
from journal_values import VALUES
from paceline.async_dp.wal import hub_journal as journal_module
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError

quick = pytest.fixture(autouse=True)(skip_fsync)


@pytest.fixture(params=["disk", "memory"])
def any_journal(request, tmp_path):
    with (
        HubJournal.open(tmp_path / "hub", resume=False) if request.param == "disk" else MemoryJournal() as one
    ):
        yield one


# ------------------------------------------------------------------ records round trip


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(records=st.lists(st.tuples(VALUES, st.binary(max_size=200), st.booleans()), max_size=8))
def test_appended_records_are_recovered_and_equal_the_ledger(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("hub")
    for resume in (False, True):
        with HubJournal.open(folder, resume=resume) as journal:
            for values, payload, commit in records:
                journal.append(values, payload)
                if commit:
                    journal.commit()
    with HubJournal.open(folder, resume=True) as journal:
        assert list(journal.recovered().records) == [(values, payload) for values, payload, _ in 2 * records]
    lines = list(read_ledger(folder))
    assert lines == [{"n": n, **values} for n, (values, *_) in enumerate(2 * records)]


def test_records_are_numbered_from_0_over_all_restarts(tmp_path):
    for first in (0, 2):
        with HubJournal.open(tmp_path, resume=True) as journal:
            assert [journal.append({}), journal.append({})] == [first, first + 1]


def test_the_journal_stays_in_its_folder_when_the_program_changes_its_directory(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with HubJournal.open("hub", resume=False) as journal:
        monkeypatch.chdir("other")
        journal.describe({"workers": 2})
        write(journal, range(3))
        journal.commit()
    assert (tmp_path / "hub" / "run.json").exists()
    assert recovered_numbers(tmp_path / "hub") == [0, 1, 2]
    assert list((tmp_path / "other").iterdir()) == []


def test_a_loss_that_is_not_finite_is_recorded(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.append({"loss": math.nan, "norm": math.inf})
    (line,) = read_ledger(tmp_path)
    assert math.isnan(line["loss"])
    assert line["norm"] == math.inf


def test_records_are_recovered_only_after_a_commit(any_journal):
    any_journal.append({"k": 0})
    assert list(any_journal.recovered().records) == []
    any_journal.commit()
    assert list(any_journal.recovered().records) == [({"k": 0}, b"")]


def test_a_payload_may_change_once_it_was_appended(any_journal):
    payload = bytearray(b"x" * 100_000)
    any_journal.append({}, payload)
    any_journal.append({}, memoryview(payload)[10:20])
    payload[:] = b"y" * len(payload)
    any_journal.commit()
    assert [held for _, held in any_journal.recovered().records] == [b"x" * 100_000, b"x" * 10]


def test_many_buffered_bytes_are_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MAX_BUFFERED_NBYTES", 1000)
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, range(10))
        seen = numbers_in(journal)
        assert seen == list(range(len(seen)))
        assert 5 < len(seen) <= 10
    assert recovered_numbers(tmp_path) == list(range(10))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 1}, "can't have a value 'n'"),
        ({"a": b"x"}, r"can't hold a bytes \(in 'a'\)"),
        ({"a": {"b": [1, {2}]}}, r"can't hold a set \(in 'a'\)"),
        ({"a": {1: 2}}, r"can't hold 1 as a name \(in 'a'\)"),
        ({7: 1}, "can't hold 7 as a name"),
        ({"a": 2**64}, "needs more than 64 bits"),
        ({"a": "\ud800"}, "no Unicode"),
        ({"\ud800": 1}, "as a name"),
        ({"a": object()}, "a object"),
        ({"a": "x" * 70_000}, "take 70.* bytes, more than 65536"),
    ],
)
def test_values_that_are_not_plain_are_refused_and_not_appended(tmp_path, values, message):
    with HubJournal.open(tmp_path, resume=False) as journal:
        with pytest.raises(UsageError, match=message):
            journal.append(values, b"payload")
        assert journal.append({"k": 0}) == 0
    assert recovered_numbers(tmp_path) == [0]


def test_endlessly_nested_values_are_refused(tmp_path):
    endless = {}
    endless["a"] = endless
    with HubJournal.open(tmp_path, resume=False) as journal, pytest.raises(UsageError, match="nested deeper"):
        journal.append(endless)


def test_a_payload_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.async_dp.wal.journal_records.PAYLOAD_LIMIT_NBYTES", 10)
    with HubJournal.open(tmp_path, resume=False) as journal:
        with pytest.raises(UsageError, match="11 bytes, more than 10"):
            journal.append({}, b"x" * 11)
        assert journal.append({"k": 0}) == 0


def test_a_commit_flushes_once_before_the_ledger_is_written(tmp_path, monkeypatch):
    calls = []

    def noted(name):
        real = getattr(os, name)

        def call(handle, *args):
            calls.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
            return real(handle, *args)

        monkeypatch.setattr(os, name, call)

    for name in ("pwritev", "fsync", "fdatasync"):
        noted(name)
    log, ledger = "journal-000000000000.log", "ledger.jsonl"
    for start in range(2):
        with HubJournal.open(tmp_path, resume=True) as journal:
            assert ("fsync", log) in calls  # recovered records are on disk before they are reported
            calls.clear()
            write(journal, range(5 * start, 5 * start + 5))
            assert calls == []
            journal.commit()
            assert calls == [("pwritev", log), ("fdatasync", log), ("pwritev", ledger)]
            calls.clear()
            journal.commit()
            assert calls == []


# ------------------------------------------------------------------ the folder


def test_facts_of_the_run_are_described_once(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        assert journal.run_facts == {}
        journal.describe({"run": "a", "fragments": [1, 2]})
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert journal.run_facts == {"run": "a", "fragments": [1, 2]}
        journal.describe({"run": "a", "fragments": (1, 2)})
        with pytest.raises(UsageError, match="described before, with other facts: run 'a' → 'b'"):
            journal.describe({"run": "b", "fragments": [1, 2]})
        with pytest.raises(UsageError, match="facts: more missing → None"):
            journal.describe({"run": "a", "fragments": [1, 2], "more": None})
        with pytest.raises(UsageError, match="facts of a run can't hold a set"):
            journal.describe({"run": {1}})


def test_empty_facts_count_as_described(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.describe({})
    with (
        HubJournal.open(tmp_path, resume=True) as journal,
        pytest.raises(UsageError, match="with other facts"),
    ):
        journal.describe({"run": "a"})


@pytest.mark.parametrize("what", ["facts", "records", "snapshot"])
def test_a_folder_with_a_run_is_only_resumed(tmp_path, what):
    with HubJournal.open(tmp_path, resume=False) as journal:
        if what == "facts":
            journal.describe({"run": "a"})
        elif what == "records":
            journal.append({})
        else:
            journal.snapshot(3, {}, {})
    with pytest.raises(UsageError, match=r"holds a run\n.*resume it, or choose another"):
        HubJournal.open(tmp_path, resume=False)
    HubJournal.open(tmp_path, resume=True).close()


def test_a_hub_that_recorded_nothing_leaves_no_run(tmp_path):
    for _ in range(2):
        HubJournal.open(tmp_path / "new" / "hub", resume=False).close()


@pytest.mark.parametrize("own", [True, False])
def test_a_second_hub_on_a_folder_is_refused(tmp_path, monkeypatch, own):
    monkeypatch.setattr("paceline._core.file_lock._TIMEOUT_SECONDS", 0.0)
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.append({})
        journal.commit()
        if own:
            with pytest.raises(UsageError, match=rf"by this hub: process {os.getpid()} on "):
                HubJournal.open(tmp_path, resume=True)
        else:
            pid = os.getpid()

            def other():
                with pytest.raises(
                    UsageError, match=rf"by another hub: process {pid} on .*, since .*\n.*end that hub"
                ):
                    HubJournal.open(tmp_path, resume=True)
                return True

            assert in_child(other) == 0
    HubJournal.open(tmp_path, resume=True).close()


def test_an_impossible_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be the folder of a hub"):
        HubJournal.open(tmp_path / "file" / "hub", resume=False)


def test_a_lock_is_free_after_an_opening_that_failed(tmp_path):
    path = write_groups(tmp_path, [3], acknowledged=1)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    errors = []  # kept, and with them the frames that failed
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint) as caught:
            HubJournal.open(tmp_path, resume=True)
        errors.append(caught.value)
    path.write_bytes(good)
    assert recovered_numbers(tmp_path) == [0, 1, 2]


def test_a_closed_journal_refuses_records_and_can_be_closed_twice(tmp_path):
    journal = HubJournal.open(tmp_path, resume=False)
    journal.append({"k": 0})
    journal.close()
    journal.close()
    for use in (lambda: journal.append({}), journal.commit):
        with pytest.raises(CheckpointError, match="can't be written any more: it is closed"):
            use()
    assert recovered_numbers(tmp_path) == [0]


def test_an_interrupted_journal_refuses_records(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        journal.commit()
        write(journal, [1])
        monkeypatch.setattr(os, "pwritev", interrupt)
        with pytest.raises(KeyboardInterrupt):
            journal.commit()
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match="it was interrupted"):
            journal.append({})
    assert recovered_numbers(tmp_path) == [0]
