"""Snapshots of a hub: round trip, checksums, and recovery with the records that follow."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open

from journal_folders import copy_folder, numbers_in, record_ends, recovered_numbers, skip_fsync, write
from paceline.async_dp.wal import decision_ledger, journal_recovery
from paceline.async_dp.wal import hub_journal as journal_module
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.hub_snapshot import HubSnapshot, read_snapshot, write_snapshot
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.errors import DamagedCheckpoint, UsageError
from pending_updates import put_update
from snapshot_states import open_and_read, revisions_in, snap

quick = pytest.fixture(autouse=True)(skip_fsync)


TENSORS = {
    "model.weight": torch.arange(12.0).view(3, 4), "half": torch.arange(5, dtype=torch.bfloat16),
    "flag": torch.tensor(True), "none": torch.empty(0, 3), "long": torch.arange(3),
    "8 bits": torch.ones(3, dtype=torch.uint8), "few bits": torch.ones(7).to(torch.float8_e4m3fn),
    "wave": torch.tensor([1 + 2j]), "ä/\n\0": torch.tensor(3.25),
}  # fmt: skip


# ------------------------------------------------------------------ one file


def same(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and a.reshape(-1).tolist() == b.reshape(-1).tolist()


def test_a_snapshot_round_trips_and_is_readable_by_safetensors(tmp_path):
    path = tmp_path / "one.safetensors"
    write_snapshot(path, HubSnapshot(7, 30, {"samples": 12, "loss": [1.5, None]}), TENSORS)
    snapshot, tensors = read_snapshot(path)
    assert snapshot == HubSnapshot(7, 30, {"samples": 12, "loss": [1.5, None]})
    assert tensors.keys() == TENSORS.keys()
    assert all(same(tensors[label], TENSORS[label]) for label in TENSORS)
    with safe_open(path, framework="pt") as theirs:
        assert json.loads(theirs.metadata()["facts"])["samples"] == 12
        assert same(theirs.get_tensor("model.weight"), TENSORS["model.weight"])


def test_tensors_of_any_strides_and_gradients_are_stored(tmp_path):
    path, whole = tmp_path / "one.safetensors", torch.arange(12.0).view(3, 4)
    write_snapshot(
        path, HubSnapshot(0, 0, {}), {"t": whole.t(), "p": torch.nn.Parameter(whole), "row": whole[1]}
    )
    _, tensors = read_snapshot(path)
    assert same(tensors["t"], whole.t())
    assert same(tensors["p"], whole)
    assert same(tensors["row"], whole[1])
    tensors["p"].zero_()
    assert same(read_snapshot(path)[1]["p"], whole)


@pytest.mark.thorough
def test_any_flipped_bit_is_detected(tmp_path):
    path = tmp_path / "one.safetensors"
    write_snapshot(
        path, HubSnapshot(1, 2, {"a": 1}), {"x": torch.arange(4.0), "y": torch.ones(3, dtype=torch.int8)}
    )
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint, match=r"^one\.safetensors "):
            read_snapshot(path)


def test_any_truncation_is_detected(tmp_path):
    path = tmp_path / "one.safetensors"
    write_snapshot(path, HubSnapshot(1, 2, {}), {"x": torch.arange(4.0)})
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(DamagedCheckpoint):
            read_snapshot(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DamagedCheckpoint):
        read_snapshot(path)


@pytest.mark.parametrize(
    ("tensors", "facts", "message"),
    [
        ({"w": torch.zeros(2, dtype=torch.complex128)}, {}, "tensor 'w' is complex128"),
        ({"w": torch.zeros(2, 2).to_sparse()}, {}, r"tensor 'w' is float32, torch\.sparse_coo"),
        ({}, {"a": b"x"}, r"facts of a snapshot can't hold a bytes \(in 'a'\)"),
    ],
)
def test_an_invalid_snapshot_is_refused_and_changes_nothing(tmp_path, tensors, facts, message):
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, [0, 1])
        with pytest.raises(UsageError, match=message):
            journal.snapshot(1, tensors, facts)
        write(journal, [2])
    assert recovered_numbers(tmp_path) == [0, 1, 2]


# ------------------------------------------------------------------ snapshots and records


def test_the_last_two_snapshots_are_kept_and_the_journals_since_the_older(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        for count in range(5):
            write(journal, [count])
            snap(journal, 10 * count + 5, count + 1)
            assert numbers_in(journal) == list(range(count + 1))
    assert revisions_in(tmp_path, "snapshot") == [35, 45]
    assert revisions_in(tmp_path, "journal") == [35, 45]
    assert recovered_numbers(tmp_path) == list(range(5))


@pytest.mark.parametrize("kind", [HubJournal.open, lambda folder, resume: MemoryJournal()])
def test_records_after_a_snapshot_are_recovered_with_it(tmp_path, kind):
    with kind(tmp_path, resume=False) as journal:
        assert journal.recovered().tensors is None
        write(journal, [0, 1])
        snap(journal, 7, 2)
        write(journal, [2])
        journal.commit()
        found = journal.recovered()
        assert (found.revision, found.facts) == (7, {"seen": [0, 1]})
        assert found.tensors["state"].tolist() == [2.0] * 3
        assert [values["k"] for values, _ in found.records] == [2]
        assert numbers_in(journal) == [0, 1, 2]
        with pytest.raises(UsageError, match="revision 6 after that of 7"):
            journal.snapshot(6, {}, {})


def test_a_snapshot_of_the_same_revision_can_be_repeated(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        snap(journal, 0, 0)
        for count in (2, 3):
            write(journal, range(count - 1 if count > 2 else 0, count))
            snap(journal, 4, count)
        write(journal, [3])
    assert revisions_in(tmp_path, "snapshot") == [0, 4]
    assert recovered_numbers(tmp_path) == [0, 1, 2, 3]


def test_a_damaged_newest_snapshot_is_skipped(tmp_path, caplog):
    with HubJournal.open(tmp_path, resume=False) as journal:
        for count in range(3):
            write(journal, [count])
            snap(journal, count + 1, count + 1)
        write(journal, [3])
    path = tmp_path / "snapshot-000000000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert "snapshot-000000000003.safetensors, which is damaged" in caplog.text
        assert journal.recovered().revision == 2
        assert numbers_in(journal) == [0, 1, 2, 3]
        write(journal, [4])
        with pytest.raises(UsageError, match="revision 2 after that of 3"):
            journal.snapshot(2, {}, {})
        snap(journal, 5, 5)
        assert revisions_in(tmp_path, "snapshot") == [2, 5]
        assert revisions_in(tmp_path, "journal") == [2, 3, 5]
        assert path.with_name(f"{path.name}.damaged").exists()
        snap(journal, 6, 5)
        assert not path.with_name(f"{path.name}.damaged").exists()
        assert revisions_in(tmp_path, "journal") == [5, 6]
    assert recovered_numbers(tmp_path) == [0, 1, 2, 3, 4]


def test_if_no_snapshot_is_intact_all_are_named(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        for revision in (1, 2, 3):
            snap(journal, revision, 0)
    for path in tmp_path.glob("snapshot-*"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        DamagedCheckpoint, match=r"none of the 2 snapshots .*-000000000003.*-000000000002.*\n.*a copy"
    ):
        HubJournal.open(tmp_path, resume=True)


def test_a_missing_journal_raises(tmp_path):
    with HubJournal.open(tmp_path / "whole", resume=False) as journal:
        for count in range(3):
            snap(journal, count + 1, count)
            write(journal, [count])
    for missing, message in (
        (["journal-000000000003.log"], "it ends there, and the ledger has records up to 2"),
        (["journal-000000000002.log", "journal-000000000003.log"], "no journal with record 2"),
        (
            ["snapshot-000000000003.safetensors", "journal-000000000002.log"],
            "no journal with record 1: .* record 2",
        ),
        (
            ["snapshot-000000000003.safetensors", "snapshot-000000000002.safetensors"],
            "no journal with record 0",
        ),
    ):
        folder = copy_folder(tmp_path / "whole", tmp_path / "less")
        for name in missing:
            (folder / name).unlink()
        with pytest.raises(DamagedCheckpoint, match=message):
            HubJournal.open(folder, resume=True)


def test_damage_in_an_earlier_journal_raises_where_it_is_needed(tmp_path):
    with HubJournal.open(tmp_path / "whole", resume=False) as journal:
        for count in range(3):
            snap(journal, count + 1, 2 * count)
            write(journal, [2 * count, 2 * count + 1])
    name = "journal-000000000002.log"
    data = (tmp_path / "whole" / name).read_bytes()
    between = record_ends(tmp_path / "whole" / name)[1]
    for bad in (data[:-1], data[:between], data[:60] + b"?" + data[61:], data + b"more"):
        folder = copy_folder(tmp_path / "whole", tmp_path / "bad")
        (folder / name).write_bytes(bad)
        (folder / "ledger.jsonl").write_bytes(b"")
        assert open_and_read(copy_folder(folder, tmp_path / "unneeded")) == list(range(6))
        (folder / "snapshot-000000000003.safetensors").unlink()
        with pytest.raises(DamagedCheckpoint, match=f"{name}' is damaged at byte"):
            HubJournal.open(folder, resume=True)


def test_a_removed_ledger_starts_again_and_damage_before_the_snapshot_raises(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, range(4))
        snap(journal, 1, 4)
        write(journal, [4, 5])
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    path.unlink()
    for _ in range(2):
        assert open_and_read(tmp_path) == list(range(6))
        assert [line["n"] for line in read_ledger(tmp_path)] == [4, 5]
    path.write_bytes(b"rubbish\n" + whole)
    with pytest.raises(DamagedCheckpoint, match=r"line 1 of .*\n.*move the ledger elsewhere"):
        HubJournal.open(tmp_path, resume=True)


def test_only_the_ledger_after_the_snapshot_is_read_unless_it_was_changed(tmp_path, monkeypatch):
    with HubJournal.open(tmp_path / "whole", resume=False) as journal:
        write(journal, range(20))
        snap(journal, 1, 20)
        write(journal, [20, 21])
    lines = (tmp_path / "whole" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    seen, number_of = [], decision_ledger._number_of
    monkeypatch.setattr(decision_ledger, "_number_of", lambda line: seen.append(number_of(line)) or seen[-1])
    for changed, read in (
        (lines, [19, 20, 21]),
        (lines[:20] + [b"rubbish\n"], [19, -1]),
        (lines[:20], [19]),
        (lines[:21], [19, 20]),
        (lines[:-1] + [lines[-1][:-1]], [19, 20, 21]),
    ):
        folder = copy_folder(tmp_path / "whole", tmp_path / "changed")
        (folder / "ledger.jsonl").write_bytes(b"".join(changed))
        seen.clear()
        assert open_and_read(folder) == list(range(22))
        assert seen == read
        assert (folder / "ledger.jsonl").read_bytes() == b"".join(lines)
    for changed in (lines[3:], [b"{}\n", *lines[1:]], [lines[0][:-1] + b" \n", *lines[1:]]):
        folder = copy_folder(tmp_path / "whole", tmp_path / "changed")
        (folder / "ledger.jsonl").write_bytes(b"".join(changed))
        seen.clear()
        if changed[0] == b"{}\n":
            with pytest.raises(DamagedCheckpoint, match="line 1 of"):
                HubJournal.open(folder, resume=True)
        else:
            assert open_and_read(folder) == list(range(22))
            assert len(seen) >= len(changed)
            assert (folder / "ledger.jsonl").read_bytes() == b"".join(changed)


def test_a_snapshot_is_read_once_at_recovery(tmp_path, monkeypatch):
    with HubJournal.open(tmp_path, resume=False) as journal:
        write(journal, range(3))
        snap(journal, 1, 3)
    reads = []
    read = journal_recovery.read_snapshot
    for module in (journal_recovery, journal_module):
        monkeypatch.setattr(module, "read_snapshot", lambda path: (reads.append(path), read(path))[1])
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert numbers_in(journal) == [0, 1, 2]
        assert len(reads) == 1
        assert numbers_in(journal) == [0, 1, 2], "and can be recovered again"
        snap(journal, 2, 3)
        assert journal.recovered().revision == 2


def test_all_that_a_hub_and_a_worker_write_is_their_users_alone(tmp_path):
    before = os.umask(0)
    try:
        with HubJournal.open(tmp_path / "hub", resume=False) as journal, Outbox(tmp_path / "box") as outbox:
            journal.describe({"run": "a"})
            write(journal, [0])
            snap(journal, 4, 1)
            put_update(outbox, 0)
            found = {path for folder in ("hub", "box") for path in (tmp_path / folder).iterdir()}
    finally:
        os.umask(before)
    assert {path.name.partition("-")[0] for path in found} == {
        "hub.lock", "run.json", "journal", "snapshot", "ledger.jsonl", "outbox.lock", "worker.json", "rounds.json",
        "letter",
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}
