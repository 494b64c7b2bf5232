"""Ring and all-to-all under mpiexec: all ranks finish, every injected fault is named, nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpi_worlds
from paceline.transport.mpi_exchange.outgoing_messages import ENVELOPE_FAULTS

pytestmark = pytest.mark.skipif(mpi_worlds.MPIEXEC is None, reason=mpi_worlds.REASON)

PROGRAM = Path(__file__).with_name("exchange_ranks.py")
CLOSABLE = sorted(set(ENVELOPE_FAULTS) - {"stall"})


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_all_ranks_finish_with_the_data_sent_to_them(ranks):
    ended = mpi_worlds.mpi_world(ranks, PROGRAM, "shapes")
    assert ended.code == 0, ended
    assert ended.reports() == dict.fromkeys(range(ranks), 20)


def test_faults_on_the_wire_are_reported_alike_by_all_ranks():
    ended = mpi_worlds.mpi_world(3, PROGRAM, "faults", *CLOSABLE)
    assert ended.code == 0, ended
    reports = ended.reports()
    assert sorted(reports) == [0, 1, 2]
    kind = {"drop": "Truncated", "truncate": "Truncated", "flip": "Damaged", "repeat": "Repeated"}
    kind |= {"foreign": "Foreign", "lose": "Missing", "swap": "Misplaced"}
    for number, name in enumerate(CLOSABLE):
        faulty = number % 3
        victim = (faulty + 1) % 3
        for rank in range(3):
            shown, at, whole, closed, problems = reports[rank][number]
            assert (shown, at, closed) == (name, faulty, True)
            assert whole == (rank != victim), f"{name}: rank {rank}"
            assert problems == reports[0][number][4], "ranks disagree"
            assert {(found_by, culprit) for _, found_by, culprit in problems} == {(victim, faulty)}
            assert problems[0][0] == f"{kind[name.partition('-')[0]]}Envelope"


@pytest.mark.thorough
def test_a_rank_that_hangs_is_named_and_all_end():
    ended = mpi_worlds.mpi_world(3, PROGRAM, "stopped", timeout=40)
    assert ended.code != 0
    assert "rank 1 reported nothing for" in ended.out
    assert "rank 2 found a MissingEnvelope of rank 1" in ended.out
    assert mpi_worlds.all_ended(ended.reports().values())


@pytest.mark.thorough
def test_a_rank_that_is_killed_ends_all():
    ended = mpi_worlds.mpi_world(3, PROGRAM, "killed", timeout=40)
    assert ended.code != 0
    assert mpi_worlds.all_ended(ended.reports().values())


def test_ranks_with_different_sizes_get_an_error():
    ended = mpi_worlds.mpi_world(2, PROGRAM, "sizes_differ")
    assert ended.code == 0, ended
    problems = ended.reports()[1]
    assert problems == ended.reports()[0]
    assert {found_by for _, found_by, _, _ in problems} == {0, 1}
    assert "ForeignEnvelope" in {kind for kind, *_ in problems}
    assert any("3000 bytes in 3 frames; expected 2000 bytes in 2 frames" in text for *_, text in problems)
