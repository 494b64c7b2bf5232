"""Memory use of a journal, and the journal in memory."""

from __future__ import annotations

import json
import resource
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal_folders import payload_of, skip_fsync
from journal_values import VALUES
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.journal_records import JOURNAL_HEADER_NBYTES
from paceline.async_dp.wal.memory_journal import MemoryJournal

quick = pytest.fixture(autouse=True)(skip_fsync)


# ------------------------------------------------------------------ memory


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.thorough
def test_memory_stays_flat_over_100_000_records(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        early = 0
        for n in range(100_000):
            journal.append({"worker": n % 50, "loss": 1.5}, b"x" * 500)
            if n % 100 == 99:
                journal.commit()
            if n == 10_000:
                early = resident_nbytes()
        assert resident_nbytes() - early < 6 << 20  # the 90,000 take 55 MB on the disk
        assert sum(1 for _ in journal.recovered().records) == 100_000


def test_records_are_read_one_at_a_time(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        for _ in range(40):
            journal.append({}, bytes(1 << 20))
    tracemalloc.start()
    try:
        with HubJournal.open(tmp_path, resume=True) as journal:
            assert sum(len(payload) for _, payload in journal.recovered().records) == 40 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20


def test_a_memory_journal_keeps_nothing_if_so_configured(tmp_path):
    journal = MemoryJournal(keep=False)
    tracemalloc.start()
    try:
        for n in range(10_000):
            assert journal.append({"worker": 1}, b"x" * 1000) == n
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10_000
    journal.commit()
    assert list(journal.recovered().records) == []


# ------------------------------------------------------------------ both alike


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), VALUES, st.binary(max_size=20)),
            st.just(("commit",)),
            st.just(("crash",)),
        ),
        max_size=20,
    )
)
def test_the_memory_journal_behaves_as_the_hub_journal(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("hub")
    memory, disk = MemoryJournal(), HubJournal.open(folder, resume=False)
    for step in steps:
        if step[0] == "append":
            assert memory.append(*step[1:]) == disk.append(*step[1:])
        elif step[0] == "commit":
            memory.commit()
            disk.commit()
        else:
            memory.crash()
            disk._unusable = "it was killed"  # so that close() commits nothing
            disk.close()
            disk = HubJournal.open(folder, resume=True)
        assert list(memory.recovered().records) == list(disk.recovered().records)
        assert list(memory.ledger()) == list(read_ledger(folder))
    disk.close()


def test_ledger_and_records_hold_equal_values(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.append({"list": (1, [2.5, None]), "in": {"a": True}, "text": "line\nend \u2028"})
        journal.commit()
        ((values, _),) = journal.recovered().records
    (line,) = read_ledger(tmp_path)
    assert (
        line
        == {"n": 0, **values}
        == {"n": 0, "list": [1, [2.5, None]], "in": {"a": True}, "text": "line\nend \u2028"}
    )
    assert json.loads((tmp_path / "ledger.jsonl").read_bytes()) == line


def test_a_new_journal_holds_only_its_header(tmp_path):
    HubJournal.open(tmp_path, resume=False).close()
    assert (tmp_path / "journal-000000000000.log").stat().st_size == JOURNAL_HEADER_NBYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hub.lock",
        "journal-000000000000.log",
        "ledger.jsonl",
    ]
    assert payload_of(0) == b""
