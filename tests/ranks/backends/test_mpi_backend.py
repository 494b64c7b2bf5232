"""The mpi4py backend of torch.distributed, under mpiexec: random calls, DDP, errors, and exits that don't hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mpi_worlds

pytestmark = pytest.mark.skipif(mpi_worlds.MPIEXEC is None, reason=mpi_worlds.REASON)

PROGRAM = Path(__file__).with_name("mpi_backend_ranks.py")


@pytest.fixture
def world(tmp_path):
    """Return a function that runs a case on a number of ranks with a file rendezvous."""

    def run(ranks, case, timeout=100):
        env = {"PACELINE_INIT_METHOD": f"{tmp_path.as_uri()}/rendezvous"}
        return mpi_worlds.mpi_world(ranks, PROGRAM, case, timeout=timeout, env=env)

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_calls_and_ddp_equal_a_plain_loop_and_gloo(world, ranks):
    ended = world(ranks, "collectives")
    assert ended.code == 0, ended
    results = ended.reports()
    assert sorted(results) == list(range(ranks))
    for one in results.values():
        assert one["made"] >= 70
        assert one["on_gloo"] > one["made"] / 4 or ranks == 1
        assert one["widened"]
        assert one["ddp"]
        assert one["objects"] == list(range(ranks))
        assert one["name"] == "mpi4py"
        assert one["allocated"] is False
    if ranks > 1:
        assert sum(one["moved"] for one in results.values()) > 20
        numels, ops, roots, sizes, tags, band = zip(
            *(one["disagree"] for one in results.values()), strict=True
        )
        assert all("MismatchError" in text and "all_reduce(float32[5], SUM)" in text for text in numels[:1])
        assert all("MismatchError" in text for text in (*numels, *ops, *roots, *sizes))
        assert "rank 0 sends 8 bytes to rank" in sizes[0]
        assert all("MPI has tags from 0 to" in text for text in tags)
        assert all("BAND is not defined for torch.float32" in text for text in band)


@pytest.mark.thorough
def test_a_missing_rank_is_an_error_and_all_ranks_end(world):
    ended = world(2, "late", timeout=60)
    assert ended.code != 0
    assert "CollectiveTimeout" in ended.err
    assert "arrived at all_reduce(float32[3], SUM) within 1.5 s" in ended.err
    assert mpi_worlds.all_ended(ended.reports().values())


@pytest.mark.thorough
def test_a_rank_that_raises_ends_the_others(world):
    ended = world(2, "raising", timeout=60)
    assert ended.code != 0
    assert "an error of the program" in ended.err
    assert mpi_worlds.all_ended(ended.reports().values())


@pytest.mark.thorough
def test_unmatched_messages_are_errors_and_do_not_hang(world):
    ended = world(2, "unmatched", timeout=60)
    assert "has 8 bytes, the tensor 12" in ended.reports()[1][1]
    assert ended.code != 0
    assert "rank 0 ends all ranks of MPI: a message that it sent was never received" in ended.err


@pytest.mark.thorough
def test_ranks_without_mpiexec_get_the_command(tmp_path):
    program = (
        "import sys, paceline\n"
        f"paceline.init('mpi4py', init_method='{tmp_path.as_uri()}/rendezvous', "
        "rank=int(sys.argv[1]), size=2, timeout=60)"
    )
    command = [sys.executable, "-c", program]
    both = [
        subprocess.Popen(
            [*command, str(rank)],
            env=mpi_worlds.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for one in both:
        shown, _ = one.communicate(timeout=90)
        assert one.returncode == 1
        assert "there are 2 ranks, but the MPI world that this process was started in has 1" in shown
        assert "mpiexec -n 2 python" in shown


def test_without_mpi4py_the_error_names_the_install_command(monkeypatch):
    from paceline.errors import UsageError
    from paceline.world.mpi_world import load_mpi

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[mpi\]'"):
        load_mpi()
