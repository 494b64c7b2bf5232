"""Ranks that are late, interrupted, fail during a call, fork, or exit with calls pending."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from backend_scenes import enter, error_of, run_forked
from paceline.backends.block_reduction import BLOCK_NBYTES
from paceline.backends.shm.shared_arena import arena
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.errors import CollectiveError, PeerLost


def late_in_the_middle(report, rank, size, folder):
    """Rank 1 is slow during a call; when it continues, rank 0 has reused the memory long since."""
    group = enter(folder, rank, size, timeout=0.5)
    tensor = group.allocate_tensor(16 * BLOCK_NBYTES // 4).fill_(1)
    place, read = tensor.data_ptr(), ShmCollectives._notices

    def slowly(self):
        if rank == 1:
            ShmCollectives._notices = read
            time.sleep(2.0)
        return read(self)

    ShmCollectives._notices = slowly
    held = [dist.all_reduce(tensor, async_op=True)]
    kind, text = error_of(lambda: held[0])
    held.clear()
    del tensor
    gc.collect()  # errors hold the frames they passed
    if rank == 1:
        report((kind, text, error_of(dist.barrier)))
        return
    dist.destroy_process_group()
    again = [arena.allocate(16 * BLOCK_NBYTES // 4, torch.float32).fill_(7) for _ in range(3)]
    time.sleep(2.5)
    assert place not in [each.data_ptr() for each in again]
    report((kind, text, all(bool(each.eq(7).all()) for each in again)))


@pytest.mark.thorough
def test_memory_of_a_failed_call_is_not_reused(killable):
    zero, one = killable.run_ranks(late_scene)
    assert zero[0] == "CollectiveTimeout"
    assert "rank 1 on host" in zero[1]
    assert "did not arrive within the timeout of 0.5 s (its process is alive)" in zero[1]
    assert zero[2], "what rank 0 allocated since then is whole"
    assert one[0] == "CollectiveTimeout", "rank 1 raises too, although all ranks have arrived"
    assert one[2][0] == "CollectiveTimeout"


def late_scene(fork, folder):
    return run_forked(fork, 2, late_in_the_middle, folder)


def late_for_a_small_call(report, rank, size, folder):
    enter(folder, rank, size, timeout=0.3)
    time.sleep(rank * 1.0)
    report([error_of(lambda: dist.all_reduce(torch.ones(4)))[0] for _ in range(2)])
    dist.destroy_process_group()


def late_small_scene(fork, folder):
    return run_forked(fork, 2, late_for_a_small_call, folder)


def test_a_rank_that_arrives_too_late_raises(killable):
    assert killable.run_ranks(late_small_scene) == [["CollectiveTimeout"] * 2] * 2


def waiting_for_a_stopped_rank(report, rank, size, folder, calls):
    group = enter(folder, rank, size, timeout=0.5 if rank == 0 else 30.0)  # rank 0 times out first
    dist.barrier()
    tensor = torch.empty(4)
    if rank == 2:
        if calls == "arrived":
            control = group._collectives.control
            before = control._progress
            dist.all_reduce(tensor, async_op=True)
            while control._progress == before:
                time.sleep(0.01)
        report("ready")
        time.sleep(60)  # it is stopped meanwhile
    report("ready")
    while not os.path.exists(f"{folder}/stopped"):
        time.sleep(0.01)
    if rank == 1:
        report(error_of(lambda: dist.recv(tensor, 2)))
    elif calls == "message":
        report(error_of(lambda: dist.recv(tensor, 1)))
    else:
        report(error_of(lambda: dist.all_reduce(tensor)))
    dist.destroy_process_group()


def stopped_scene(fork, folder, calls):
    ranks = [fork(waiting_for_a_stopped_rank, rank, 3, folder, calls) for rank in range(3)]
    assert [each.receive() for each in ranks] == ["ready"] * 3
    ranks[2].kill(signal.SIGSTOP)
    open(f"{folder}/stopped", "x").close()
    return [each.receive() for each in ranks[:2]]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            "missing",
            "did not arrive within the timeout of 0.5 s (its process is stopped); missing in all: rank 1, rank 2",
        ),
        ("arrived", "is stopped (rank 1 did not arrive within the timeout of 0.5 s)"),
        ("message", "is stopped (rank 1 did not arrive within the timeout of 0.5 s)"),
    ],
)
def test_a_rank_that_waits_for_a_stopped_one_is_not_blamed(killable, calls, expected):
    for kind, text in killable.run_ranks(stopped_scene, calls):
        assert kind == "CollectiveTimeout"
        assert f"rank 2 on host {socket.gethostname()} {expected}, while" in text


def failing_during_a_call(report, rank, size, folder):
    group = enter(folder, rank, size)
    group.note_step(4)
    tensor, read = group.allocate_tensor(1_000_000).fill_(1), ShmCollectives._notices

    def breaking(self):
        if rank == 2:
            raise MemoryError("no memory for the scratch")
        return read(self)

    ShmCollectives._notices = breaking
    report(error_of(lambda: dist.all_reduce(tensor)))
    dist.destroy_process_group()


def failing_scene(fork, folder):
    return run_forked(fork, 3, failing_during_a_call, folder)


def test_an_error_during_a_call_reaches_the_others(killable):
    zero, one, two = killable.run_ranks(failing_scene)
    assert two == ("MemoryError", "no memory for the scratch")
    for kind, text in (zero, one):
        assert kind == "PeerLost"
        assert (
            "failed in all_reduce(float32[1000000], SUM): MemoryError: no memory for the scratch in step 4"
            in text
        )


def interrupted(report, rank, size, folder, asynchronous):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter(folder, rank, size)
    dist.barrier()
    report("ready")
    if rank == 1:
        time.sleep(1.0)
    tensor = torch.ones(100_000)
    try:
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if work is not None:
            work.wait()
    except (KeyboardInterrupt, CollectiveError) as error:
        report((type(error).__name__, str(error)))
    sys.exit(130 if rank == 0 else 0)


def interrupt_scene(fork, folder, asynchronous):
    ranks = [fork(interrupted, rank, 2, folder, asynchronous) for rank in range(2)]
    assert [each.receive() for each in ranks] == ["ready"] * 2
    time.sleep(0.2)
    ranks[0].kill(signal.SIGINT)
    reports = [ranks[0].receive()]
    codes = [ranks[0].wait()]
    reports.append(ranks[1].receive())
    return reports, [*codes, ranks[1].wait()]


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_ends_the_wait_and_the_process(killable, asynchronous):
    (zero, one), codes = killable.run_ranks(interrupt_scene, asynchronous)
    assert zero[0] == "KeyboardInterrupt"
    assert codes == [130, 0]
    assert one[0] == "PeerLost"
    wanted = (
        "ended (exit code 130)" if asynchronous else "failed in all_reduce(float32[100000], SUM): Keyboard"
    )
    assert f"rank 0 on host {os.uname().nodename} {wanted}" in one[1]


# Pending calls without a wait.


def pending_calls(report, rank, size, folder, how):
    enter(folder, rank, size)
    dist.barrier()
    tensors = [torch.ones(100_000) for _ in range(20)]
    if how == "no wait":
        works = [dist.all_reduce(each, async_op=True) for each in tensors]
        report("made")
        del works
        sys.exit(0)
    if how == "destroyed":
        works = [dist.all_reduce(each, async_op=True) for each in tensors]
        dist.destroy_process_group()
        report(
            all(work.is_success() for work in works) and all(bool(each.eq(size).all()) for each in tensors)
        )
        sys.exit(0)
    if rank == 0:
        work = dist.all_reduce(tensors[0], async_op=True)
        time.sleep(0.2)
        if how == "aborted":
            dist.group.WORLD.abort()
        report(error_of(lambda: work) if how == "aborted" else threading.active_count())
        sys.exit(0)
    time.sleep(0.5)
    try:
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[1])
    except PeerLost as error:
        report((error.rank, error.exit_code))


def pending_scene(fork, folder, how):
    return run_forked(fork, 3, pending_calls, folder, how)


@pytest.mark.parametrize(("how", "result"), [("no wait", "made"), ("destroyed", True)])
def test_pending_calls_complete_and_do_not_delay_the_exit(killable, how, result):
    assert killable.run_ranks(pending_scene, how) == [result] * 3


def test_a_rank_may_exit_while_its_call_waits_for_the_others(killable):
    _, one, two = killable.run_ranks(pending_scene, "left alone")
    assert one == two == (0, 0)


def test_a_group_may_be_aborted_while_its_call_waits_for_the_others(killable):
    zero, one, two = killable.run_ranks(pending_scene, "aborted")
    assert zero[0] == "CollectiveError"
    assert "left" in zero[1]
    assert one == two == (0, None), "it left the group"


# Forking.


def forks_a_child(report, rank, size, folder):
    group = enter(folder, rank, size)
    kept = group.allocate_tensor(1_000_000).fill_(rank)
    dist.all_reduce(kept)
    if rank == 0:
        reading, writing = os.pipe()
        for ending in ("quick", "proper"):
            pid = os.fork()
            if pid == 0:
                os.write(writing, error_of(lambda: dist.all_reduce(torch.ones(3)))[1].encode()[:200])
                kept.resize_(0)
                del kept
                if ending == "quick":
                    os._exit(0)
                atexit._run_exitfuncs()  # and no more: torch itself can't go down in a forked child
                os._exit(0)
            os.waitpid(pid, 0)
        report(os.read(reading, 1000).decode())
    else:
        report("")
    dist.barrier()
    dist.all_reduce(kept)
    assert kept.eq(size * sum(range(size))).all()
    dist.destroy_process_group()


def forking_scene(fork, folder):
    return run_forked(fork, 3, forks_a_child, folder)


def test_a_forked_child_is_not_a_rank_and_disturbs_none(killable):
    text, *_ = killable.run_ranks(forking_scene)
    assert text.count("this process was forked from rank 0 and is not a rank") == 2
