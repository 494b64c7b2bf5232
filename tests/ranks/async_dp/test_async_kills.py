"""Hubs and workers that are killed at any moment recover the state on disk."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from async_worker_program import payload_of

from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.worker_outbox import Outbox

PROGRAM = str(Path(__file__).with_name("async_worker_program.py"))


def killed(kind, folder, seed, chance):
    """Run a program, kill it after one of its first lines, and return its output."""
    with subprocess.Popen(
        [sys.executable, PROGRAM, kind, str(folder), str(seed)], stdout=subprocess.PIPE
    ) as program:
        lines = [program.stdout.readline() for _ in range(chance.choice([1, 2, 5, 10]))]
        time.sleep(chance.choice([0.0, 0.001, 0.005, 0.02]))
        program.kill()
        lines += program.stdout.readlines()
        assert program.wait() == -9
    return [line.decode().split() for line in lines]


def recovered(folder):
    """Check the records of a journal and its ledger, and return how many there are."""
    with HubJournal.open(folder, resume=True) as journal:
        found = journal.recovered()
        count = found.facts.get("seen", 0)
        if found.tensors is not None:
            assert (found.tensors["state"] == count).all()
        for values, payload in found.records:
            assert values == {"k": count}
            assert payload == payload_of(count)
            count += 1
    assert [(line["n"], line["k"]) for line in read_ledger(folder)] == [(n, n) for n in range(count)]
    return count


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "kills"), [("journal", 20), ("snapshots", 6)])
def test_a_killed_hub_recovers_all_that_it_committed(tmp_path, kind, kills):
    chance, committed, in_all = random.Random(7), 0, 0
    for kill in range(kills):
        lines = killed(kind, tmp_path, kill, chance)
        assert int(lines[0][1]) >= committed
        committed = max(int(number) for what, number in lines if what != "snapshot")
        in_all += sum(what == "committed" for what, _ in lines)
        if kill % 3:
            count = recovered(tmp_path)
            assert count >= committed
    assert recovered(tmp_path) >= committed
    assert in_all > kills // 2


@pytest.mark.thorough
def test_a_killed_worker_keeps_its_pending_updates_and_uses_no_round_twice(tmp_path):
    chance, begun, workers = random.Random(7), set(), set()
    pending, in_all = {}, 0
    for kill in range(20):
        lines = killed("outbox", tmp_path, kill, chance)
        workers.add(lines[0][1])
        doubtful = set()
        for what, *place in lines[1:]:
            fragment, number = map(int, place)
            if what == "begun":
                assert (fragment, number) not in begun
                begun.add((fragment, number))
                doubtful = {(fragment, number)}
            elif what == "acknowledging":
                doubtful = {(fragment, number)}
            elif what == "pending":
                pending[fragment], doubtful, in_all = number, set(), in_all + 1
            else:
                del pending[fragment]
                doubtful = set()
        with Outbox(tmp_path) as outbox:
            found = {update.fragment: update.round for update in outbox.pending()}
            assert all(update.payload == payload_of(update.round) for update in outbox.pending())
        assert set(found.items()) | doubtful == set(pending.items()) | doubtful
        pending = found
    assert len(workers) == 1
    assert in_all > 5
