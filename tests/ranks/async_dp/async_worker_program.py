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
    """Return the payload of record k: up to 300 KB, so that some kills interrupt a write."""
    return bytes([k % 251]) * (k * 7919 % 300_000 if k % 3 else 40)


def report(*what):
    """Write a line, which survives a kill right after."""
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def keep_journal(folder, chance, *, snapshots):
    """Append and commit forever, after the recovered records."""
    if snapshots:
        import torch
    with HubJournal.open(folder, resume=True) as journal:
        found = journal.recovered()
        k = found.facts.get("seen", 0) + sum(1 for _ in found.records)
        revision = found.revision
        assert snapshots or "torch" not in sys.modules
        report("open", k)
        while True:
            for _ in range(chance.randrange(1, 6)):
                assert journal.append({"k": k}, payload_of(k)) == k
                k += 1
            journal.commit()
            report("committed", k)
            if snapshots and chance.random() < 0.3:
                revision += 1
                journal.snapshot(revision, {"state": torch.full((50_000,), float(k))}, {"seen": k})
                report("snapshot", revision)


def keep_outbox(folder, chance):
    """Put and acknowledge updates forever."""
    with Outbox(folder) as outbox:
        report("worker", outbox.worker)
        while True:
            fragment = chance.randrange(3)
            for update in outbox.pending():
                if update.fragment == fragment:
                    report("acknowledging", fragment, update.round)
                    outbox.acknowledge(update.round, fragment)
                    report("acknowledged", fragment, update.round)
            number = outbox.next_round(fragment)
            report("begun", fragment, number)
            outbox.put(number, fragment, {"k": number}, payload_of(number))
            report("pending", fragment, number)


if __name__ == "__main__":
    kind, folder, seed = sys.argv[1:]
    if kind == "outbox":
        keep_outbox(folder, random.Random(int(seed)))
    else:
        keep_journal(folder, random.Random(int(seed)), snapshots=kind == "snapshots")
