"""Ranks of the paceline backend that die, leave, stop or err: every other rank is told who, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from brood import Brood

from paceline.errors import CollectiveError, CollectiveTimeout, MismatchError, PeerLost, UsageError

RUNS = 50
LIMIT_SECONDS = 2.0  # the product's promise, not a time limit of the test


@pytest.fixture(scope="module")
def brood():
    with Brood() as made:
        yield made


def enter(rank, size, folder, timeout=30.0, name="world"):
    dist.init_process_group(
        "paceline",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return dist.group.WORLD


def left_behind(addresses):
    """Return what is left on this machine of groups that met at `addresses`."""
    sockets = Path("/proc/net/unix").read_text()
    files = [name for name in os.listdir("/dev/shm") if "paceline" in name]
    return [address for address in addresses if address in sockets] + files


def some_calls(rank, size, group, seed):
    """Make random collectives for ever, the same on all ranks."""
    drawn = random.Random(seed)
    kept = group.allocate_tensor(400_000)
    kept.fill_(1.0)
    while True:
        numel = drawn.choice([1, 1000, 9000, 70_000, 400_000])
        tensor = kept[:numel] if drawn.random() < 0.4 else torch.ones(numel)
        match drawn.randrange(6):
            case 0 | 1:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            case 2:
                works = [dist.all_reduce(tensor, op=dist.ReduceOp.MIN, async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
            case 3:
                dist.broadcast(tensor, drawn.randrange(size))
            case 4:
                dist.all_gather([torch.empty(numel) for _ in range(size)], tensor)
            case 5:
                send = dist.isend(tensor, (rank + 1) % size)
                dist.recv(torch.empty(numel), (rank - 1) % size)
                send.wait()
        yield


def until_lost(rank, size, folder, victim, how, seed):
    """Make calls until a rank is lost; return what this rank was told, when, and that it can start anew."""
    group = enter(rank, size, folder)
    moment = random.Random(seed + 1).uniform(0.0, 0.25)
    group.note_step(0)
    addresses = [card.address for card in group._route._neighbours.cards]
    dist.barrier()
    if rank == victim and how == "SIGKILL":
        threading.Timer(moment, vanish, [folder]).start()
    started, step = time.monotonic(), 0
    try:
        for _ in some_calls(rank, size, group, seed):
            step += 1
            group.note_step(step)
            if rank == victim and how != "SIGKILL" and time.monotonic() - started > moment:
                (Path(folder) / "when").write_text(str(time.monotonic()))
                if how == "exit 3":
                    os._exit(3)
                if how == "raise":
                    raise SystemExit(5)
                if how == "leave":
                    dist.destroy_process_group()
                    time.sleep(1.0)
                    return None
    except CollectiveError as error:
        told = time.monotonic() - float((Path(folder) / "when").read_text())
        with pytest.raises(CollectiveError, match=f"rank {error.rank}"):
            dist.barrier()
        dist.destroy_process_group()
        again = sorted(set(range(size)) - {victim})
        enter(again.index(rank), len(again), folder, name="again")
        tensor = torch.ones(10_000)
        dist.all_reduce(tensor)
        assert tensor[0] == len(again)
        dist.destroy_process_group()
        what = type(error).__name__, error.rank, error.host, error.step, error.exit_code, told, str(error)
        return what, addresses


def vanish(folder):
    (Path(folder) / "when").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def check(reports, victim, kind, code):
    for rank, report in enumerate(reports):
        if rank == victim:
            continue
        assert report.code == 0, report.text
        (told, named, host, step, exit_code, seconds, text), addresses = report.value
        assert (told, named, exit_code) == (kind, victim, code), text
        assert host == socket.gethostname()
        assert step is not None
        assert f"in step {step}" in text
        assert seconds < LIMIT_SECONDS, text
        assert not left_behind(addresses)


@pytest.mark.timeout(280)
def test_a_rank_that_is_killed_at_any_moment_is_named_to_all(brood):
    longest = 0.0
    for run in range(RUNS):
        drawn = random.Random(run)
        size = drawn.choice([2, 3, 4])
        victim = drawn.randrange(size)
        reports = brood.run(until_lost, size, victim, "SIGKILL", run)
        assert reports[victim].code == -signal.SIGKILL, run
        check(reports, victim, "PeerLost", -signal.SIGKILL)
        longest = max(longest, *(report.value[0][5] for report in reports if report.value))
    print(f"{RUNS} ranks killed; the last survivor was told after at most {longest:.2f} s")


@pytest.mark.parametrize(("how", "code"), [("exit 3", 3), ("raise", 5), ("leave", None)])
def test_a_rank_that_ends_otherwise_is_named_with_its_exit_code(brood, how, code):
    for run in range(3):
        reports = brood.run(until_lost, 3, run, how, 100 + run)
        check(reports, run, "PeerLost", code)


def until_late(rank, size, folder):
    """Stop rank 1; return what the others are told after the time-out of two seconds."""
    group = enter(rank, size, folder, timeout=2.0)
    group.note_step(7)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    try:
        dist.all_reduce(torch.ones(100_000))
    except CollectiveTimeout as error:
        stopped = next(card for card in group._route._neighbours.cards if card.rank == 1)
        time.sleep(0.5)  # the other survivors' turn
        if rank == 0:
            os.kill(stopped.pid, signal.SIGKILL)
        return error.rank, error.step, error.exit_code, str(error)


def test_a_rank_that_is_stopped_is_named_after_the_time_out(brood):
    reports = brood.run(until_late, 3)
    for rank in (0, 2):
        named, step, code, text = reports[rank].value
        assert (named, step, code) == (1, 7, None), text
        assert "its process is stopped" in text
        assert reports[rank].code == 0


def different_calls(rank, size, folder):
    """Call what the other rank does not, in several ways; return the errors' texts."""
    enter(rank, size, folder)
    ones = torch.ones
    pairs = [
        (lambda: dist.all_reduce(ones(4)), lambda: dist.broadcast(ones(4), 0)),
        (lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(5))),
        (lambda: dist.all_reduce(ones(90_000)), lambda: dist.all_reduce(ones(90_001))),
        (lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(4, dtype=torch.float64))),
        (lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(4), op=dist.ReduceOp.MAX)),
        (lambda: dist.broadcast(ones(4), 0), lambda: dist.broadcast(ones(4), 1)),
        (lambda: dist.barrier(), lambda: dist.all_reduce(ones(4))),
    ]
    told = []
    for pair in pairs:
        with pytest.raises(MismatchError) as caught:
            pair[rank]()
        told.append(str(caught.value))
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)  # the group is still in step
        assert total.tolist() == [1.0] * 3
    with pytest.raises(UsageError, match="not defined for"):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
    dist.barrier()
    dist.destroy_process_group()
    return told


def test_different_calls_are_told_to_all_and_the_group_goes_on(brood):
    zero, one = brood.run(different_calls, 2)
    assert not zero.text + one.text
    assert (
        "this rank calls all_reduce(float32[4], SUM), rank 1 calls broadcast(float32[4], root 0)"
        in zero.value[0]
    )
    assert (
        "this rank calls broadcast(float32[4], root 0), rank 0 calls all_reduce(float32[4], SUM)"
        in one.value[0]
    )


def leave_in_a_hurry(rank, size, folder, how):
    """End with a collective under way; return how many threads are left."""
    enter(rank, size, folder)
    dist.barrier()
    if how == "aborts":
        if rank == 0:
            work = dist.all_reduce(torch.ones(50_000), async_op=True)
            time.sleep(0.3)
            dist.group.WORLD.abort()  # what the exit of Python does where nobody destroys the group
            with pytest.raises(CollectiveError, match="left"):
                work.wait()
        else:
            time.sleep(1.0)
    else:
        work = dist.all_reduce(torch.ones(50_000), async_op=True)
        dist.destroy_process_group()
        assert work.is_success()
    return threading.active_count()


@pytest.mark.parametrize("how", ["aborts", "destroys"])
def test_a_rank_can_end_with_collectives_under_way(brood, how):
    for report in brood.run(leave_in_a_hurry, 2, how):
        assert (report.value, report.code) == (1, 0), report.text


def interrupted(rank, size, folder):
    """Be interrupted in a collective, as by Ctrl-C, on rank 0."""
    enter(rank, size, folder)
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        with pytest.raises(PeerLost, match=r"gave up in all_reduce.*KeyboardInterrupt"):
            dist.all_reduce(torch.ones(50_000))
        return True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(50_000))
    time.sleep(1.5)
    return True


def test_an_interrupt_ends_the_wait_and_is_told(brood):
    for report in brood.run(interrupted, 2):
        assert (report.value, report.code) == (True, 0), report.text


def many_groups(rank, size, folder):
    """Make and destroy groups; return what is open before and after."""

    def count():
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(Path("/proc/self/maps").read_text()),
        )

    for number in range(30):
        group = enter(rank, size, folder, name=f"world-{number}")
        kept = group.allocate_tensor(100_000)
        dist.all_reduce(kept.fill_(1.0))
        work = dist.isend(kept, 1) if rank == 0 else dist.irecv(kept, 0)
        work.wait()
        del kept
        dist.destroy_process_group()
        if number == 9:
            before = count()
    return before, count()


def test_groups_leave_nothing_in_the_process(brood):
    for report in brood.run(many_groups, 2):
        (fds, threads, maps), (fds_after, threads_after, maps_after) = report.value
        assert fds_after <= fds
        assert threads_after <= threads
        assert maps_after < maps * 1.2
