"""Hub and workers over MPI: the same envelopes and refusals as over ZeroMQ, and all ranks end."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpi_worlds

pytestmark = pytest.mark.skipif(mpi_worlds.MPIEXEC is None, reason=mpi_worlds.REASON)

PROGRAM = Path(__file__).with_name("hub_over_mpi_ranks.py")


def run_case(ranks, case):
    ended = mpi_worlds.mpi_world(ranks, PROGRAM, case)
    assert ended.code == 0, ended
    return ended.reports()


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_arrive_in_both_directions(ranks):
    assert run_case(ranks, "many_messages") == {
        rank: 60 if rank else 60 * (ranks - 1) for rank in range(ranks)
    }


def test_invalid_messages_are_counted_and_not_delivered():
    results = run_case(3, "invalid_messages")
    assert set(results[0]) == {"DamagedEnvelope", "TruncatedEnvelope", "ForeignEnvelope"}
    assert sum(results[0].values()) == results[1] + results[2]


def test_a_hub_that_does_not_poll_blocks_its_workers_and_receives_everything_later():
    results = run_case(3, "slow_hub")
    assert results[0] == results[1] + results[2]
    assert 1 < results[1] < 20


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["woken", "leave"])
def test_no_rank_waits_for_ever(case):
    assert run_case(2, case) == {0: 1, 1: 1}
