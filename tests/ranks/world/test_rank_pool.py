"""The pool of warm ranks: results, failures, hangs, isolation, and no process left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import rank_pool
from rank_pool import Pool, RankError, spawn


def total_of_ranks(rank, size, start):
    import torch

    value = torch.tensor([float(start + rank)])
    torch.distributed.all_reduce(value)
    assert torch.distributed.get_world_size() == size
    return value.item()


def pid(rank, size):
    return os.getpid()


def fail_on(rank, size, bad):
    import torch

    if rank == bad:
        raise KeyError("the reason")
    torch.distributed.barrier()  # waits for the rank that failed


def fail_unpicklably(rank, size):
    class Local(Exception):
        pass

    raise Local("cannot travel")


def hang_on(rank, size, bad):
    while rank == bad:
        time.sleep(0.01)


def die(rank, size):
    if rank == 1:
        os._exit(7)


def change_process_state(rank, size):
    import torch

    os.environ["PACELINE_TEST_LEFTOVER"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.rand(rank + 1)


def state(rank, size):
    import torch

    return os.environ.get("PACELINE_TEST_LEFTOVER"), str(torch.get_default_dtype()), torch.rand(1).item()


def variable(rank, size):
    import torch

    return os.environ.get("PACELINE_TEST_RANK"), torch.distributed.is_initialized(), torch.get_num_threads()


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_world_of_any_size_reduces(pool, size):
    expected = float(sum(10 + rank for rank in range(size)))
    assert pool(size).run(total_of_ranks, 10) == [expected] * size


def test_processes_are_reused_between_cases_and_sizes(pool):
    first = pool(2).run(pid)
    assert len(set(first)) == 2
    assert pool(3).run(pid)[:2] == first
    assert pool(2).run(pid) == first
    assert pool(2).run(total_of_ranks, 0) == [1.0, 1.0]


@pytest.mark.thorough
def test_a_failure_names_the_rank_and_shows_its_traceback(pool):
    before = pool(2).run(pid)
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*raise KeyError") as caught:
        pool(2).run(fail_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.cause, KeyError)
    assert not any(psutil.pid_exists(process) for process in before)
    assert pool(2).run(total_of_ranks, 0) == [1.0, 1.0]


def test_an_unpicklable_exception_is_reported_by_its_text(pool):
    with pytest.raises(RankError, match="cannot travel") as caught:
        pool(1).run(fail_unpicklably)
    assert caught.value.cause is None


def test_a_hang_ends_and_shows_where_it_stood(pool):
    with pytest.raises(RankError, match=r"rank 1: hangs(.|\n)*hang_on") as caught:
        pool(2).run(hang_on, 1, timeout=1.0)
    assert list(caught.value.failures) == [1]
    assert pool(2).run(total_of_ranks, 0) == [1.0, 1.0]


def test_answers_to_a_case_that_was_broken_off_are_not_read_later(pool, monkeypatch):
    def break_off(workers, deadline):
        raise KeyboardInterrupt  # as pytest's time-out may, at any moment

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "_collect", staticmethod(break_off))
        with pytest.raises(KeyboardInterrupt):
            pool(2).run(fail_on, 1)
    assert pool(2).run(total_of_ranks, 0) == [1.0, 1.0]


def test_a_rank_that_dies_is_named_with_its_exit_code(pool):
    with pytest.raises(RankError, match="rank 1: exited with code 7"):
        pool(2).run(die)


def test_cases_start_from_the_same_state(pool):
    fresh = pool(2).run(state)
    pool(2).run(change_process_state)
    assert pool(2).run(state) == fresh
    assert fresh[0][:2] == (None, "torch.float32")


def test_without_a_world_each_rank_gets_its_own_variables(pool):
    env = [{"PACELINE_TEST_RANK": str(rank)} for rank in range(2)]
    assert pool(2).run(variable, world=False, env=env) == [("0", False, 1), ("1", False, 1)]
    assert pool(2).run(variable) == [(None, True, 1)] * 2


def test_spawned_ranks_are_processes_of_their_own(pool):
    warm = pool(2).run(pid)
    own = spawn(pid, 2)
    assert set(own).isdisjoint(warm)
    assert not any(psutil.pid_exists(process) for process in own)


ORPHANS = """
import os, signal, sys
sys.path[:0] = {paths!r}
from rank_pool import RankProcesses
from test_rank_pool import pid
print(*RankProcesses()(2).run(pid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_ranks_die_with_a_parent_that_is_killed(tmp_path):
    script = ORPHANS.format(paths=[str(Path(__file__).parent), str(Path(rank_pool.__file__).parent)])
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env
    )
    ranks = [int(word) for word in ended.stdout.split()]
    assert len(ranks) == 2, ended.stderr
    for process in ranks:
        try:
            psutil.Process(process).wait(timeout=10)
        except psutil.NoSuchProcess:
            continue
