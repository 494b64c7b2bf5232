"""Many groups, few descriptors, no shared memory: the paceline backend with scarce resources."""

from __future__ import annotations

import os
import resource
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backend_scenes import enter, error_of, open_resources, run_forked
from paceline.backends import group_factory


def create_and_destroy_groups(rank, size, count):
    def used():
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        return open_resources(), len(os.listdir("/proc/self/fd")), threading.active_count(), resident

    before = None
    for number in range(count):
        group = dist.new_group(backend="paceline")
        kept = group.allocate_tensor(20_000).fill_(1)
        works = [dist.all_reduce(kept, group=group, async_op=number % 3 == 0)]
        message = torch.full((1000,), float(rank))
        works.append(dist.isend(message, 1, group) if rank == 0 else dist.irecv(message, 0, group))
        for work in filter(None, works):
            work.wait()
        assert kept.eq(size).all()
        assert message.eq(0).all()
        dist.destroy_process_group(group)
        del group, kept, work, works
        if number == count // 5:
            before = used()
    return before, used()


@pytest.mark.thorough
def test_groups_that_are_created_and_destroyed_leave_nothing(pool):
    for before, after in pool(2, "paceline").run(create_and_destroy_groups, 150, timeout=100):
        assert after[0] == before[0]
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2]
        assert after[3] < before[3] + (64 << 20), "120 control blocks are 1 GB"


def out_of_descriptors(report, rank, size, folder):
    group = enter(folder, rank, size)
    tensor = group.allocate_tensor(3_000_000).fill_(1)
    dist.barrier()
    if rank == 1:
        spare = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, 4096))
        while True:
            try:
                os.dup(0)
            except OSError:
                break
    report(error_of(lambda: dist.all_reduce(tensor)))
    os._exit(0)


def descriptors_scene(fork, folder):
    return run_forked(fork, 2, out_of_descriptors, folder)


@pytest.mark.thorough
def test_a_rank_without_descriptors_is_reported(killable):
    zero, one = killable.run_ranks(descriptors_scene)
    assert one[0] == "OSError"
    assert "raise the limit (ulimit -n)" in one[1]
    assert zero[0] == "PeerLost"
    assert "ulimit -n" in zero[1]


def falls_back(report, rank, size, folder, how):
    if how == "disabled":
        os.environ["PACELINE_SHARED_MEMORY"] = "0"
    elif how == "another user" and rank == 1:
        os.setuid(12345)
    elif how == "no descriptors" and rank == 1:
        group_factory.PeerListener = lambda: (_ for _ in ()).throw(OSError(24, "Too many open files"))
    elif how == "another namespace" and rank == 1:
        made = group_factory._peer_info
        group_factory._peer_info = lambda *args: replace(made(*args), address="elsewhere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = enter(folder, rank, size)
    tensor = group.allocate_tensor(1000).fill_(rank)
    dist.all_reduce(tensor)
    report(([str(each.message) for each in caught if "paceline" in str(each.message)], tensor[0].item()))
    dist.destroy_process_group()


def fallback_scene(fork, folder, how):
    os.chmod(folder, 0o777)
    world = Path(folder, "world")
    world.touch()
    world.chmod(0o666)
    return run_forked(fork, 3, falls_back, folder, how)


REASONS = {
    "disabled": "PACELINE_SHARED_MEMORY=0",
    "another user": "belongs to another user",
    "no descriptors": "Too many open files",
    "another namespace": "another network namespace?",
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", REASONS)
def test_without_shared_memory_gloo_is_used_and_one_rank_warns(killable, how):
    if how == "another user" and os.getuid() != 0:
        pytest.skip("only root can be another user")
    results = killable.run_ranks(fallback_scene, how)
    assert [value for _, value in results] == [3.0] * 3
    warned = [text for texts, _ in results for text in texts]
    assert len(warned) == 1, warned
    assert "no shared memory, using gloo instead" in warned[0]
    assert REASONS[how] in warned[0]
