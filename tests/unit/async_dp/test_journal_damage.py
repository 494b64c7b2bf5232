"""A truncated or corrupted journal: damage raises, and a torn end is cut off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal_folders import copy_folder, record_ends, recovered_numbers, skip_fsync, write, write_groups
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.journal_records import (
    JOURNAL_FORMAT,
    JOURNAL_HEADER_NBYTES,
    encode_record,
    pack_values,
    parse_journal_header,
)
from paceline.errors import DamagedCheckpoint, UsageError

quick = pytest.fixture(autouse=True)(skip_fsync)


# ------------------------------------------------------------------ crashes


@pytest.mark.thorough
@pytest.mark.parametrize("ledger", ["kept", "removed"])
def test_a_journal_cut_at_any_byte_recovers_committed_records_or_raises(tmp_path, ledger):
    """The last of three groups was being committed."""
    path = write_groups(tmp_path, [3, 1, 3], acknowledged=2)
    ends, data, lines = record_ends(path), path.read_bytes(), (tmp_path / "ledger.jsonl").read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        (tmp_path / "ledger.jsonl").write_bytes(lines if ledger == "kept" else b"")
        whole = sum(end <= cut for end in ends) - 1
        if whole < (4 if ledger == "kept" else 0):
            why = "it ends there" if cut in ends else "a record ends at|the header of a record ends"
            where = "at its beginning: " if whole < 0 else rf"at byte {ends[whole]}, .* begins: ({why})"
            with pytest.raises(DamagedCheckpoint, match=f"'{path}' is damaged {where}"):
                HubJournal.open(tmp_path, resume=True)
            assert path.read_bytes() == data[:cut]
        else:
            assert recovered_numbers(tmp_path) == list(range(whole))
            assert path.stat().st_size == ends[whole]


@pytest.mark.thorough
def test_any_flipped_bit_raises_unless_it_was_never_committed(tmp_path):
    path = write_groups(tmp_path, [2, 1], acknowledged=1)
    ends, data, lines = record_ends(path), path.read_bytes(), (tmp_path / "ledger.jsonl").read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        (tmp_path / "ledger.jsonl").write_bytes(lines)
        record = sum(8 * end <= bit for end in ends) - 1
        if record < 2:
            at = 0 if record < 0 else ends[record]
            where = "at its beginning" if record < 0 else f"at byte {at}, where record {record} begins"
            with pytest.raises(DamagedCheckpoint, match=f"'{path}' is damaged {where}: (?!it ends there)"):
                HubJournal.open(tmp_path, resume=True)
        else:
            assert recovered_numbers(tmp_path) == [0, 1]


def test_later_records_prove_earlier_commits_without_a_ledger(tmp_path):
    path = write_groups(tmp_path, [2, 2, 2], acknowledged=3)
    ends, data = record_ends(path), path.read_bytes()
    for record in range(6):
        flipped = bytearray(data)
        flipped[ends[record] + 40] ^= 4
        path.write_bytes(flipped)
        (tmp_path / "ledger.jsonl").unlink(missing_ok=True)
        if record < 4:
            with pytest.raises(DamagedCheckpoint, match=f'truncate -s {ends[record]} .*"n": {record} on'):
                HubJournal.open(tmp_path, resume=True)
        else:
            assert recovered_numbers(copy_folder(tmp_path, tmp_path.with_name("copy"))) == list(range(record))


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_all_groups_before_a_torn_last_one_are_recovered(tmp_path_factory, data):
    """A disk that loses power may have written any parts of a group, and the file may have any length."""
    folder = tmp_path_factory.mktemp("hub")
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    path = write_groups(folder, sizes, acknowledged=len(sizes) - 1)
    committed = sum(sizes[:-1])
    ends, content = record_ends(path), bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(ends[committed], len(content) - 1))
        stop = data.draw(st.integers(start + 1, len(content)))
        content[start:stop] = data.draw(st.sampled_from([b"\0", b"\xff", b"\x8bPLR"]))[:1] * (stop - start)
    length = data.draw(st.integers(ends[committed], len(content)))
    path.write_bytes(content[:length] + bytes(data.draw(st.integers(0, 50))))
    lines = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(lines[: data.draw(st.integers(0, len(lines)))])
    numbers = recovered_numbers(folder)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= committed
    with HubJournal.open(folder, resume=True) as journal:
        write(journal, range(len(numbers), len(numbers) + 3))
    assert recovered_numbers(folder) == list(range(len(numbers) + 3))


def test_a_record_inside_a_payload_is_no_record(tmp_path):
    inner = write_groups(tmp_path / "inner", [2, 2], acknowledged=2).read_bytes()
    with HubJournal.open(tmp_path / "hub", resume=False) as journal:
        write(journal, [0])
        journal.append({"k": 1}, inner)
        journal.commit()
    path = tmp_path / "hub" / "journal-000000000000.log"
    ends = record_ends(path)
    data = bytearray(path.read_bytes())
    data[ends[1]] ^= 1
    path.write_bytes(data)
    (tmp_path / "hub" / "ledger.jsonl").write_bytes(b'{"n": 0, "k": 0, "text": ""}\n')
    assert recovered_numbers(tmp_path / "hub") == [0]


def test_a_record_of_another_number_is_not_the_next(tmp_path):
    path = write_groups(tmp_path, [2], acknowledged=1)
    data = path.read_bytes()
    forged = encode_record(
        3, 2, pack_values({}), b"", parse_journal_header(data[:JOURNAL_HEADER_NBYTES]).key + len(data)
    )
    path.write_bytes(data + b"".join(forged))
    assert recovered_numbers(tmp_path) == [0, 1]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.async_dp.wal.journal_records.JOURNAL_FORMAT", JOURNAL_FORMAT + 1)
    path = write_groups(tmp_path, [1], acknowledged=1)
    monkeypatch.undo()
    with pytest.raises(UsageError, match=rf"'{path}' can't be read: it has format {JOURNAL_FORMAT + 1}"):
        HubJournal.open(tmp_path, resume=True)


def test_damaged_facts_of_the_run_raise(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.describe({"run": "abc"})
    facts_file = tmp_path / "run.json"
    good = facts_file.read_bytes()
    for bad in (good.replace(b"abc", b"abd"), good[:-3], b"", b"[]", b"\xff"):
        facts_file.write_bytes(bad)
        with pytest.raises(DamagedCheckpoint, match=r"run\.json'.*\n.*from a copy"):
            HubJournal.open(tmp_path, resume=True)


# ------------------------------------------------------------------ the ledger


def test_a_ledger_cut_anywhere_is_completed_without_duplicates(tmp_path):
    write_groups(tmp_path / "whole", [3, 2], acknowledged=2)
    lines = (tmp_path / "whole" / "ledger.jsonl").read_bytes()
    for cut in range(len(lines) + 1):
        folder = copy_folder(tmp_path / "whole", tmp_path / "cut")
        (folder / "ledger.jsonl").write_bytes(lines[:cut])
        assert [line["n"] for line in read_ledger(folder)] == list(range(lines[:cut].count(b"\n")))
        assert recovered_numbers(folder) == list(range(5))
        assert (folder / "ledger.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    "bad", [b"rubbish\n", b'{"n": 77}\n', b'{"n": 0}\n', b'{"k": 3}\n', b"\0\0\0\0", b"[" * 9999 + b"\n"]
)
def test_a_damaged_ledger_is_repaired_from_the_journal(tmp_path, bad):
    write_groups(tmp_path, [3, 2], acknowledged=2)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for place in range(1, 6):
        path.write_bytes(b"".join([*lines[:place], bad, *lines[place:]]))
        assert recovered_numbers(tmp_path) == list(range(5))
        assert path.read_bytes() == b"".join(lines)


def test_a_ledger_is_read_up_to_its_last_whole_line_and_a_bad_line_raises(tmp_path):
    assert list(read_ledger(tmp_path)) == []
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1')
    assert list(read_ledger(tmp_path)) == [{"n": 0}]
    path.write_bytes(b'{"n": 0}\nrubbish\n{"n": 2}\n')
    with pytest.raises(DamagedCheckpoint, match=r"line 2 of .*rubbish"):
        list(read_ledger(tmp_path))


def test_a_ledger_can_be_read_while_the_hub_runs(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, range(3))
        journal.commit()
        write(journal, [3])
        assert [line["k"] for line in read_ledger(tmp_path)] == [0, 1, 2]
