"""Programs that write to disk until they are killed: a hub's journal, or a worker's outbox.

Each reports on its standard output, line by line, what must survive. They run as
``python async_worker_program.py KIND FOLDER SEED``, and import no torch, except for ``snapshots``.
"""

from __future__ import annotations

import os
import random
import sys

from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.worker_outbox import Outbox

__all__ = ["payload_of"]


def payload_of(k):
    """Return the payload of record k: up to 300 KB, so that some are killed half written."""
    return bytes([k % 251]) * (k * 7919 % 300_000 if k % 3 else 40)


def tell(*what):
    """Write a line, which is there even if this process is killed right after."""
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def keep_journal(folder, chance, *, snapshots):
    """Append and commit without end, from where the journal is."""
    if snapshots:
        import torch
    with HubJournal.open(folder, resume=True) as journal:
        found = journal.recovered()
        k = found.facts.get("seen", 0) + sum(1 for _ in found.records)
        revision = found.revision
        assert snapshots or "torch" not in sys.modules
        tell("open", k)
        while True:
            for _ in range(chance.randrange(1, 6)):
                assert journal.append({"k": k}, payload_of(k)) == k
                k += 1
            journal.commit()
            tell("committed", k)
            if snapshots and chance.random() < 0.3:
                revision += 1
                journal.snapshot(revision, {"state": torch.full((50_000,), float(k))}, {"seen": k})
                tell("snapshot", revision)


def keep_outbox(folder, chance):
    """Offer and acknowledge without end."""
    with Outbox(folder) as outbox:
        tell("worker", outbox.worker)
        while True:
            fragment = chance.randrange(3)
            for letter in outbox.pending():
                if letter.fragment == fragment:
                    tell("leaving", fragment, letter.round)
                    outbox.acknowledge(letter.round, fragment)
                    tell("left", fragment, letter.round)
            number = outbox.next_round(fragment)
            tell("begun", fragment, number)
            outbox.put(number, fragment, {"k": number}, payload_of(number))
            tell("offered", fragment, number)


if __name__ == "__main__":
    kind, folder, seed = sys.argv[1:]
    if kind == "outbox":
        keep_outbox(folder, random.Random(int(seed)))
    else:
        keep_journal(folder, random.Random(int(seed)), snapshots=kind == "snapshots")
