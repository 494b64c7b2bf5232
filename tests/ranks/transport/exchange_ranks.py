"""Ranks of test_mpi_exchange_ranks.py: ``python exchange_ranks.py CASE``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from mpi_worlds import report
from paceline.errors import EnvelopeError
from paceline.transport.mpi_exchange.message_carrier import MpiCarrier
from paceline.transport.mpi_exchange.ring_and_all_to_all import AllToAllExchange, RingExchange

SIZES = (0, 1, 4, 4099, 100_003)
FRAMES = (1000, 1 << 20)


def numbers(nbytes, rank, shift=0):
    return ((np.arange(nbytes, dtype=np.int64) * (2 * rank + 3) + shift) % 251).astype(np.uint8)


def shapes(carrier):
    """Run rings and all-to-alls of many sizes, some with work; received data equals the sent data."""
    rank, size, made = carrier.rank, carrier.size, 0
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/mpich" in line]
    assert all(line.endswith("(deleted)") for line in shared), "it would stay where ranks are killed"
    for frame_nbytes in FRAMES:
        ring = RingExchange(carrier, timeout=30, frame_nbytes=frame_nbytes)
        every = AllToAllExchange(carrier, timeout=30, frame_nbytes=frame_nbytes)
        for nbytes in SIZES:
            left = [50]

            def work(left=left):
                left[0] -= 1
                return left[0] >= 0

            into = np.zeros(nbytes, np.uint8)
            ring.exchange(numbers(nbytes, rank), into, work).raise_for_problems()
            assert left[0] == -1
            assert np.array_equal(into, numbers(nbytes, (rank - 1) % size))

            data = np.concatenate([numbers(nbytes, rank, target) for target in range(size)])
            into = np.zeros(nbytes * size, np.uint8)
            outcome = every.exchange(data, into)
            outcome.raise_for_problems()
            wanted = [numbers(nbytes, source, rank) for source in range(size)]
            assert np.array_equal(into, np.concatenate(wanted))
            assert outcome.expected_checksum == outcome.received_checksum
            made += 2
    return made


def faults(carrier, names):
    """Inject every fault on every rank in turn; return the problems that each rank reports."""
    found = []
    for number, name in enumerate(names):
        faulty = number % carrier.size
        ring = RingExchange(
            carrier, timeout=30, frame_nbytes=1000, fault=name if carrier.rank == faulty else ""
        )
        data, into = numbers(10_000, carrier.rank), np.zeros(10_000, np.uint8)
        outcome = ring.exchange(data, into)
        again = ring.exchange(data, into)
        assert again.problems == ()
        assert np.array_equal(into, numbers(10_000, (carrier.rank - 1) % carrier.size))
        problems = [[each.kind, each.found_by, each.culprit] for each in outcome.problems]
        found.append([name, faulty, outcome.whole, outcome.closed, problems])
    return found


def stopped(carrier):
    """Rank 1 is stopped, as by a machine that hangs: the others name it."""
    report(carrier.rank, os.getpid())
    ring = RingExchange(carrier, timeout=0.5)
    if carrier.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        ring.exchange(numbers(10**6, carrier.rank), np.zeros(10**6, np.uint8))
    except EnvelopeError as error:
        print(f"rank {carrier.rank}: {error}", flush=True)
        time.sleep(1)  # so that both others can report
        carrier.abort(1)


def killed(carrier):
    """Rank 1 is killed: mpiexec ends the others."""
    report(carrier.rank, os.getpid())
    ring = RingExchange(carrier, timeout=30)
    if carrier.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.exchange(numbers(10**6, carrier.rank), np.zeros(10**6, np.uint8))


def sizes_differ(carrier):
    """Rank 0 sends more than the others expect."""
    nbytes = 3000 if carrier.rank == 0 else 2000
    outcome = RingExchange(carrier, timeout=30, frame_nbytes=1000).exchange(
        numbers(nbytes, carrier.rank), np.zeros(nbytes, np.uint8)
    )
    return [[each.kind, each.found_by, each.culprit, each.text] for each in outcome.problems]


def main():
    carrier = MpiCarrier()
    case, arguments = sys.argv[1], sys.argv[2:]
    if case == "faults":
        report(carrier.rank, faults(carrier, arguments))
    elif case in ("stopped", "killed"):
        globals()[case](carrier)
    else:
        report(carrier.rank, globals()[case](carrier))


if __name__ == "__main__":
    main()
