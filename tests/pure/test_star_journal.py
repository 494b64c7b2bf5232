"""A hub's journal: nothing that was committed is lost, nothing that is damaged goes unseen."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import tracemalloc

import pytest
from forks import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from star_folders import copied, ends_of, found_in, numbers_in, payload_of, small_run, write

from paceline import faults
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError
from paceline.star.keeping import journal as journal_module
from paceline.star.keeping.journal import Journal
from paceline.star.keeping.ledger import read_ledger
from paceline.star.keeping.memory import MemoryJournal
from paceline.star.keeping.plain import packed
from paceline.star.keeping.records import FORMAT, START_NBYTES, encode, start_of


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody pulls a plug here, so nobody waits for the disk."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda handle: None)
    yield
    faults.disarm()


@pytest.fixture(params=["disk", "memory"])
def any_journal(request, tmp_path):
    with Journal.open(tmp_path / "hub", resume=False) if request.param == "disk" else MemoryJournal() as one:
        yield one


# ------------------------------------------------------------------ what goes in comes out

PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
VALUES = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "n"), PLAIN, max_size=4)


@settings(deadline=None, max_examples=60)
@given(records=st.lists(st.tuples(VALUES, st.binary(max_size=200), st.booleans()), max_size=8))
def test_what_was_appended_comes_back_and_the_ledger_tells_the_same(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("hub")
    for resume in (False, True):
        with Journal.open(folder, resume=resume) as journal:
            for values, payload, commit in records:
                journal.append(values, payload)
                if commit:
                    journal.commit()
    with Journal.open(folder, resume=True) as journal:
        assert list(journal.recovered().records) == [(values, payload) for values, payload, _ in 2 * records]
    lines = list(read_ledger(folder))
    assert lines == [{"n": n, **values} for n, (values, *_) in enumerate(2 * records)]


def test_records_are_numbered_from_0_over_all_lives(tmp_path):
    for first in (0, 2):
        with Journal.open(tmp_path, resume=True) as journal:
            assert [journal.append({}), journal.append({})] == [first, first + 1]


def test_a_loss_that_is_not_finite_is_noted(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
        journal.append({"loss": math.nan, "norm": math.inf})
    (line,) = read_ledger(tmp_path)
    assert math.isnan(line["loss"])
    assert line["norm"] == math.inf


def test_what_was_not_committed_is_not_told_and_is_there_after_a_commit(any_journal):
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


def test_many_bytes_that_wait_are_committed_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MOST_WAITING_NBYTES", 1000)
    with Journal.open(tmp_path, resume=False) as journal:
        write(journal, range(10))
        seen = numbers_in(journal)
        assert seen == list(range(len(seen)))
        assert 5 < len(seen) < 10
    assert found_in(tmp_path) == list(range(10))


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
def test_what_is_not_plain_is_refused_and_nothing_was_appended(tmp_path, values, message):
    with Journal.open(tmp_path, resume=False) as journal:
        with pytest.raises(UsageError, match=message):
            journal.append(values, b"payload")
        assert journal.append({"k": 0}) == 0
    assert found_in(tmp_path) == [0]


def test_values_nested_without_end_are_refused(tmp_path):
    endless = {}
    endless["a"] = endless
    with Journal.open(tmp_path, resume=False) as journal, pytest.raises(UsageError, match="nested deeper"):
        journal.append(endless)


def test_a_payload_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.star.keeping.records.PAYLOAD_LIMIT_NBYTES", 10)
    with Journal.open(tmp_path, resume=False) as journal:
        with pytest.raises(UsageError, match="11 bytes, more than 10"):
            journal.append({}, b"x" * 11)
        assert journal.append({"k": 0}) == 0


def test_a_commit_waits_for_the_disk_once_and_only_then_writes_the_lines(tmp_path, monkeypatch):
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
    for life in range(2):
        with Journal.open(tmp_path, resume=True) as journal:
            assert ("fsync", log) in calls  # what was found is on the disk before records say so
            calls.clear()
            write(journal, range(5 * life, 5 * life + 5))
            assert calls == []
            journal.commit()
            assert calls == [("pwritev", log), ("fdatasync", log), ("pwritev", ledger)]
            calls.clear()
            journal.commit()
            assert calls == []


# ------------------------------------------------------------------ the folder


def test_facts_of_the_run_are_told_once(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
        assert journal.run_facts == {}
        journal.describe({"run": "a", "fragments": [1, 2]})
    with Journal.open(tmp_path, resume=True) as journal:
        assert journal.run_facts == {"run": "a", "fragments": [1, 2]}
        journal.describe({"run": "a", "fragments": (1, 2)})
        with pytest.raises(UsageError, match="described before, with other facts: run 'a' → 'b'"):
            journal.describe({"run": "b", "fragments": [1, 2]})
        with pytest.raises(UsageError, match="facts: more not told → None"):
            journal.describe({"run": "a", "fragments": [1, 2], "more": None})
        with pytest.raises(UsageError, match="facts of a run can't hold a set"):
            journal.describe({"run": {1}})


def test_facts_that_were_described_as_none_are_described(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
        journal.describe({})
    with Journal.open(tmp_path, resume=True) as journal, pytest.raises(UsageError, match="with other facts"):
        journal.describe({"run": "a"})


@pytest.mark.parametrize("what", ["facts", "records", "snapshot"])
def test_a_folder_with_a_run_is_only_resumed(tmp_path, what):
    with Journal.open(tmp_path, resume=False) as journal:
        if what == "facts":
            journal.describe({"run": "a"})
        elif what == "records":
            journal.append({})
        else:
            journal.snapshot(3, {}, {})
    with pytest.raises(UsageError, match=r"holds a run\n.*resume it, or choose another"):
        Journal.open(tmp_path, resume=False)
    Journal.open(tmp_path, resume=True).close()


def test_a_hub_that_noted_nothing_has_left_no_run(tmp_path):
    for _ in range(2):
        Journal.open(tmp_path / "new" / "hub", resume=False).close()


@pytest.mark.parametrize("own", [True, False])
def test_two_hubs_on_one_folder_are_one_too_many(tmp_path, monkeypatch, own):
    monkeypatch.setattr("paceline.star.keeping.lock._PATIENCE_SECONDS", 0.0)
    with Journal.open(tmp_path, resume=False) as journal:
        journal.append({})
        journal.commit()
        if own:
            with pytest.raises(UsageError, match=rf"by this hub: process {os.getpid()} on "):
                Journal.open(tmp_path, resume=True)
        else:
            pid = os.getpid()

            def other():
                with pytest.raises(
                    UsageError, match=rf"by another hub: process {pid} on .*, since .*\n.*end that hub"
                ):
                    Journal.open(tmp_path, resume=True)
                return True

            assert in_child(other) == 0
    Journal.open(tmp_path, resume=True).close()


def test_a_folder_that_can_not_be_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be the folder of a hub"):
        Journal.open(tmp_path / "file" / "hub", resume=False)


def test_a_lock_is_free_after_an_opening_that_failed(tmp_path):
    path = small_run(tmp_path, [3], acknowledged=1)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    errors = []  # kept, and with them the frames that failed
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint) as caught:
            Journal.open(tmp_path, resume=True)
        errors.append(caught.value)
    path.write_bytes(good)
    assert found_in(tmp_path) == [0, 1, 2]


def test_a_closed_journal_takes_nothing_and_closing_twice_is_closing_once(tmp_path):
    journal = Journal.open(tmp_path, resume=False)
    journal.append({"k": 0})
    journal.close()
    journal.close()
    for use in (lambda: journal.append({}), journal.commit):
        with pytest.raises(CheckpointError, match="takes nothing more: it is closed"):
            use()
    assert found_in(tmp_path) == [0]


def test_an_interrupted_journal_takes_nothing_more(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with Journal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        journal.commit()
        write(journal, [1])
        monkeypatch.setattr(os, "pwritev", interrupt)
        with pytest.raises(KeyboardInterrupt):
            journal.commit()
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match="it was interrupted"):
            journal.append({})
    assert found_in(tmp_path) == [0]


# ------------------------------------------------------------------ crashes


@pytest.mark.parametrize("ledger", ["kept", "removed"])
def test_a_journal_cut_at_any_byte_holds_what_was_committed_or_says_that_it_does_not(tmp_path, ledger):
    """The last of three groups was being committed."""
    path = small_run(tmp_path, [3, 1, 3], acknowledged=2)
    ends, data, lines = ends_of(path), path.read_bytes(), (tmp_path / "ledger.jsonl").read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        (tmp_path / "ledger.jsonl").write_bytes(lines if ledger == "kept" else b"")
        whole = sum(end <= cut for end in ends) - 1
        if whole < (4 if ledger == "kept" else 0):
            why = "it ends there" if cut in ends else "a record ends at|the head of a record ends"
            where = "at its beginning: " if whole < 0 else rf"at byte {ends[whole]}, .* begins: ({why})"
            with pytest.raises(DamagedCheckpoint, match=f"'{path}' is damaged {where}"):
                Journal.open(tmp_path, resume=True)
            assert path.read_bytes() == data[:cut]
        else:
            assert found_in(tmp_path) == list(range(whole))
            assert path.stat().st_size == ends[whole]


def test_any_flipped_bit_is_damage_that_is_told_or_was_never_committed(tmp_path):
    path = small_run(tmp_path, [2, 1], acknowledged=1)
    ends, data, lines = ends_of(path), path.read_bytes(), (tmp_path / "ledger.jsonl").read_bytes()
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
                Journal.open(tmp_path, resume=True)
        else:
            assert found_in(tmp_path) == [0, 1]


def test_later_records_know_what_was_on_the_disk_even_without_a_ledger(tmp_path):
    path = small_run(tmp_path, [2, 2, 2], acknowledged=3)
    ends, data = ends_of(path), path.read_bytes()
    for record in range(6):
        flipped = bytearray(data)
        flipped[ends[record] + 40] ^= 4
        path.write_bytes(flipped)
        (tmp_path / "ledger.jsonl").unlink(missing_ok=True)
        if record < 4:
            with pytest.raises(DamagedCheckpoint, match=f'truncate -s {ends[record]} .*"n": {record} on'):
                Journal.open(tmp_path, resume=True)
        else:
            assert found_in(copied(tmp_path, tmp_path.with_name("copy"))) == list(range(record))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_whatever_is_missing_of_the_last_group_all_before_it_is_there(tmp_path_factory, data):
    """A disk that loses power may have written any parts of a group, and the file may have any length."""
    folder = tmp_path_factory.mktemp("hub")
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    path = small_run(folder, sizes, acknowledged=len(sizes) - 1)
    committed = sum(sizes[:-1])
    ends, content = ends_of(path), bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(ends[committed], len(content) - 1))
        stop = data.draw(st.integers(start + 1, len(content)))
        content[start:stop] = data.draw(st.sampled_from([b"\0", b"\xff", b"\x8bPLR"]))[:1] * (stop - start)
    length = data.draw(st.integers(ends[committed], len(content)))
    path.write_bytes(content[:length] + bytes(data.draw(st.integers(0, 50))))
    lines = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(lines[: data.draw(st.integers(0, len(lines)))])
    numbers = found_in(folder)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= committed
    with Journal.open(folder, resume=True) as journal:
        write(journal, range(len(numbers), len(numbers) + 3))
    assert found_in(folder) == list(range(len(numbers) + 3))


def test_a_record_inside_a_payload_is_no_record(tmp_path):
    inner = small_run(tmp_path / "inner", [2, 2], acknowledged=2).read_bytes()
    with Journal.open(tmp_path / "hub", resume=False) as journal:
        write(journal, [0])
        journal.append({"k": 1}, inner)
        journal.commit()
    path = tmp_path / "hub" / "journal-000000000000.log"
    ends = ends_of(path)
    data = bytearray(path.read_bytes())
    data[ends[1]] ^= 1
    path.write_bytes(data)
    (tmp_path / "hub" / "ledger.jsonl").write_bytes(b'{"n": 0, "k": 0, "text": ""}\n')
    assert found_in(tmp_path / "hub") == [0]


def test_a_record_of_another_number_is_not_the_next(tmp_path):
    path = small_run(tmp_path, [2], acknowledged=1)
    data = path.read_bytes()
    forged = encode(3, 2, packed({}), b"", start_of(data[:START_NBYTES]).key + len(data))
    path.write_bytes(data + b"".join(forged))
    assert found_in(tmp_path) == [0, 1]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.star.keeping.records.FORMAT", FORMAT + 1)
    path = small_run(tmp_path, [1], acknowledged=1)
    monkeypatch.undo()
    with pytest.raises(UsageError, match=rf"'{path}' can't be read: it has format {FORMAT + 1}"):
        Journal.open(tmp_path, resume=True)


def test_damaged_facts_of_the_run_are_told(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
        journal.describe({"run": "abc"})
    page = tmp_path / "run.json"
    good = page.read_bytes()
    for bad in (good.replace(b"abc", b"abd"), good[:-3], b"", b"[]", b"\xff"):
        page.write_bytes(bad)
        with pytest.raises(DamagedCheckpoint, match=r"run\.json'.*\n.*from a copy"):
            Journal.open(tmp_path, resume=True)


# ------------------------------------------------------------------ the ledger


def test_a_ledger_that_lags_by_anything_is_completed_and_nothing_is_doubled(tmp_path):
    small_run(tmp_path / "whole", [3, 2], acknowledged=2)
    lines = (tmp_path / "whole" / "ledger.jsonl").read_bytes()
    for cut in range(len(lines) + 1):
        folder = copied(tmp_path / "whole", tmp_path / "cut")
        (folder / "ledger.jsonl").write_bytes(lines[:cut])
        assert [line["n"] for line in read_ledger(folder)] == list(range(lines[:cut].count(b"\n")))
        assert found_in(folder) == list(range(5))
        assert (folder / "ledger.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    "bad", [b"rubbish\n", b'{"n": 77}\n', b'{"n": 0}\n', b'{"k": 3}\n', b"\0\0\0\0", b"[" * 9999 + b"\n"]
)
def test_what_is_wrong_in_a_ledger_is_put_right_from_the_journal(tmp_path, bad):
    small_run(tmp_path, [3, 2], acknowledged=2)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for place in range(1, 6):
        path.write_bytes(b"".join([*lines[:place], bad, *lines[place:]]))
        assert found_in(tmp_path) == list(range(5))
        assert path.read_bytes() == b"".join(lines)


def test_a_ledger_is_read_as_far_as_it_is_written_and_a_bad_line_is_told(tmp_path):
    assert list(read_ledger(tmp_path)) == []
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1')
    assert list(read_ledger(tmp_path)) == [{"n": 0}]
    path.write_bytes(b'{"n": 0}\nrubbish\n{"n": 2}\n')
    with pytest.raises(DamagedCheckpoint, match=r"line 2 of .*rubbish"):
        list(read_ledger(tmp_path))


def test_a_ledger_can_be_read_while_the_hub_runs(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
        write(journal, range(3))
        journal.commit()
        write(journal, [3])
        assert [line["k"] for line in read_ledger(tmp_path)] == [0, 1, 2]


# ------------------------------------------------------------------ a full disk


def refused(call):
    """Return whether there was no room for what `call` writes."""
    try:
        call()
    except CheckpointError as error:
        return "the disk is full (No space left on device)" in str(error) and "make room" in str(error)
    return False


def test_a_full_disk_is_told_and_nothing_is_lost_once_there_is_room(tmp_path):
    """Wherever the room ends: in the journal, in the ledger, or in what is written by itself."""
    for room in range(0, 700, 7):
        folder, told, count = tmp_path / f"hub-{room}", 0, 0
        with Journal.open(folder, resume=False) as journal:
            faults.disk_full(after_nbytes=room)
            for size in (2, 1, 3):
                write(journal, range(count, count + size))
                count += size
                told += refused(journal.commit)
                told += refused(journal.commit)
            assert told > 0 or room > 560
            faults.disarm()
            journal.commit()
            assert numbers_in(journal) == list(range(6))
        assert found_in(folder) == list(range(6))


def test_a_partial_record_is_cut_off_again(tmp_path):
    """With a limit of the kernel, so that a part is really written."""

    def fill():
        with Journal.open(tmp_path, resume=False) as journal:
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
    with Journal.open(tmp_path, resume=True) as journal:
        assert [(values["k"], len(payload)) for values, payload in journal.recovered().records] == [
            (0, 0), (1, 200_000), (2, 0),
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["journal-000000000000.log", "ledger.jsonl"])
def test_a_part_that_was_written_is_cut_off_in_either_file(tmp_path, monkeypatch, name):
    real, half = os.pwritev, [name]

    def halved(handle, pieces, offset):
        if half and os.readlink(f"/proc/self/fd/{handle}").endswith(half[0]):
            data = b"".join(pieces)
            real(handle, [data[: len(data) // 2]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, pieces, offset)

    with Journal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        journal.commit()
        size = (tmp_path / name).stat().st_size
        write(journal, [1, 2])
        monkeypatch.setattr(os, "pwritev", halved)
        assert refused(journal.commit)
        assert (tmp_path / name).stat().st_size == size
        half.clear()
        journal.commit()
    assert found_in(tmp_path) == [0, 1, 2]


def test_a_kernel_that_takes_little_at_a_time_is_given_the_rest(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda handle, pieces, at: real(handle, [b"".join(pieces)[:777]], at))
    with Journal.open(tmp_path, resume=False) as journal:
        for k in range(3):
            journal.append({"k": k}, bytes([k]) * 100_000)
            journal.append({"k": k}, b"small")
    with Journal.open(tmp_path, resume=True) as journal:
        found = [payload for _, payload in journal.recovered().records]
    assert found == [
        bytes([0]) * 100_000,
        b"small",
        bytes([1]) * 100_000,
        b"small",
        bytes([2]) * 100_000,
        b"small",
    ]


def test_an_append_that_must_commit_first_and_can_not_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MOST_WAITING_NBYTES", 1)
    with Journal.open(tmp_path, resume=False) as journal:
        write(journal, [0])
        faults.disk_full(after_nbytes=0)
        with pytest.raises(CheckpointError, match="disk is full"):
            journal.append({"k": 1})
        faults.disarm()
        write(journal, [1])
    assert found_in(tmp_path) == [0, 1]


def test_a_page_of_facts_that_does_not_fit_can_be_described_again(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
        faults.disk_full(after_nbytes=0)
        with pytest.raises(CheckpointError, match=r"run\.json' can't be written: the disk is full"):
            journal.describe({"run": "a"})
        assert journal.run_facts == {}
        faults.disarm()
        journal.describe({"run": "a"})
        assert journal.run_facts == {"run": "a"}


# ------------------------------------------------------------------ memory


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_stays_flat_over_100_000_records(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
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
    with Journal.open(tmp_path, resume=False) as journal:
        for _ in range(40):
            journal.append({}, bytes(1 << 20))
    tracemalloc.start()
    try:
        with Journal.open(tmp_path, resume=True) as journal:
            assert sum(len(payload) for _, payload in journal.recovered().records) == 40 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20


def test_a_journal_in_memory_forgets_if_it_is_to(tmp_path):
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
def test_the_journal_in_memory_does_as_the_one_on_the_disk(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("hub")
    memory, disk = MemoryJournal(), Journal.open(folder, resume=False)
    for step in steps:
        if step[0] == "append":
            assert memory.append(*step[1:]) == disk.append(*step[1:])
        elif step[0] == "commit":
            memory.commit()
            disk.commit()
        else:
            memory.crash()
            disk._broken = "it was killed"  # so that close() commits nothing
            disk.close()
            disk = Journal.open(folder, resume=True)
        assert list(memory.recovered().records) == list(disk.recovered().records)
        assert list(memory.ledger()) == list(read_ledger(folder))
    disk.close()


def test_json_and_msgpack_say_the_same_of_what_is_appended(tmp_path):
    with Journal.open(tmp_path, resume=False) as journal:
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


def test_a_new_journal_begins_with_its_beginning_alone(tmp_path):
    Journal.open(tmp_path, resume=False).close()
    assert (tmp_path / "journal-000000000000.log").stat().st_size == START_NBYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hub.lock",
        "journal-000000000000.log",
        "ledger.jsonl",
    ]
    assert payload_of(0) == b""
