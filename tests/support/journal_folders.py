"""Writes small runs into a hub's folder, and reads them back."""

from __future__ import annotations

import json
import os
import shutil

from paceline.async_dp.wal.hub_folder import LEDGER
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.journal_records import (
    JOURNAL_HEADER_NBYTES,
    RECORD_HEADER_NBYTES,
    parse_record_header,
)
from paceline.testing import fault_injection

__all__ = [
    "copy_folder",
    "numbers_in",
    "payload_of",
    "record_ends",
    "recovered_numbers",
    "skip_fsync",
    "write",
    "write_groups",
]


def payload_of(k):
    """Return the payload of the k-th record: other bytes and another length for each."""
    return bytes((k * 37 + place) % 256 for place in range(k % 5 * 7))


def write(journal, numbers):
    """Append a record for each number."""
    for k in numbers:
        assert journal.append({"k": k, "text": "ä" * (k % 3)}, payload_of(k)) == k


def write_groups(folder, groups, *, acknowledged):
    """Write groups of records, of which only the first ones were acknowledged when the hub died.

    Returns:
        the journal's file.
    """
    count, ledger = 0, b""
    with HubJournal.open(folder, resume=True) as journal:
        for number, size in enumerate(groups):
            if number == acknowledged:
                ledger = (folder / LEDGER).read_bytes()
            write(journal, range(count, count + size))
            journal.commit()
            count += size
    if acknowledged < len(groups):
        (folder / LEDGER).write_bytes(ledger)
    return folder / "journal-000000000000.log"


def record_ends(path):
    """Return the end of the header of a journal, then of each record."""
    data, ends = path.read_bytes(), [JOURNAL_HEADER_NBYTES]
    while ends[-1] < len(data):
        ends.append(
            ends[-1] + parse_record_header(data[ends[-1] : ends[-1] + RECORD_HEADER_NBYTES]).total_nbytes
        )
    return ends


def numbers_in(journal):
    """Check all records of a run, those in the snapshot too, and return their numbers."""
    found = journal.recovered()
    numbers = list(found.facts.get("seen", []))
    if found.tensors is not None:
        assert found.tensors["state"].tolist() == [len(numbers)] * 3
    for values, payload in found.records:
        numbers.append(values["k"])
        assert payload == payload_of(values["k"])
    return numbers


def recovered_numbers(folder):
    """Recover a folder, check that its ledger has the same records, and return their numbers."""
    with HubJournal.open(folder, resume=True) as journal:
        numbers = numbers_in(journal)
    lines = (folder / LEDGER).read_bytes().decode().splitlines(keepends=True)
    assert [json.loads(line)["n"] for line in lines] == numbers
    assert all(line.endswith("\n") and json.loads(line)["k"] == json.loads(line)["n"] for line in lines)
    return numbers


def copy_folder(folder, to):
    """Return a copy of a folder."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(folder, to)


def skip_fsync(monkeypatch):
    """Skip fsync, since no test cuts the power; made a fixture by the files that use it."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda handle: None)
    yield
    fault_injection.disarm()
