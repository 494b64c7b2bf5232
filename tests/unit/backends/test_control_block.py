"""Control block of a host: barriers that no rank passes early or sleeps through, and failures posted once."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time

import pytest
import torch

from forked_child import ended, in_child, start
from paceline.backends.shm import control_block as module
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import (
    EAGER_NBYTES,
    FIFO_NBYTES,
    STAGING_NBYTES,
    ControlBlock,
    GroupFailure,
    OpNotice,
)
from paceline.backends.shm.shared_arena import Segment

pytestmark = pytest.mark.skipif(not futex.SUPPORTED, reason="no futex here")
LOST = GroupFailure(2, "host", "ended (ended by SIGKILL)", step=7, exit_code=-9)


def blocks(size, passed=0):
    """Return one control block per rank, each with its own mapping, as after `passed` barriers."""
    first = Segment.create(ControlBlock.nbytes(size))
    found = []
    for rank in range(size):
        block = ControlBlock(Segment.from_fd(os.dup(first.fd)), rank, size)
        block._words[(block._own_slot + module._PROGRESS) // 4] = passed
        found.append(block)
    found[0]._words[0] = passed * size & module._MASK
    return found


def pass_barrier(block, spin=0.0):
    if not block.arrive():
        until = time.monotonic() + spin
        while not block.all_arrived():
            if time.monotonic() >= until:
                block.sleep(600.0)  # a wake that is missed is a test that times out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spin", [0.0, 100e-6])
def test_no_rank_passes_a_barrier_before_all_have_arrived(size, spin):
    """Each rank writes its round before a barrier, and afterwards finds the others in that round or the next."""
    rounds, every = 3000, blocks(size)

    def run(block):
        shared = memoryview(block.segment.map).cast("I")
        places = [block._buffers // 4 + rank * 16 for rank in range(size)]
        for number in range(1, rounds + 1):
            shared[places[block.index]] = number
            pass_barrier(block, spin)
            if any(shared[place] - number not in (0, 1) for place in places):
                return False
        return True

    assert [ended(pid, 60) for pid in [start(lambda b=block: run(b)) for block in every]] == [0] * size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("passed", [2**32 - 7, 2**31 - 3, (2**32 - 9) // 3])
def test_the_counts_of_barriers_and_arrivals_wrap_around(size, passed):
    every = blocks(size, passed)

    def run(block):
        for _ in range(20):
            pass_barrier(block)
            if block.missing():
                return False
        return block.all_arrived() and block._target == (passed + 20) * size % 2**32

    assert [ended(pid) for pid in [start(lambda b=block: run(b)) for block in every]] == [0] * size


def test_missing_ranks_are_known_when_counts_wrap_around():
    every = blocks(3, passed=2**32 - 1)
    every[0].arrive()
    assert not every[0].all_arrived()
    assert every[0].missing() == [1, 2]
    every[2].arrive()
    assert every[0].missing() == [1]
    assert every[1].arrive()
    assert every[0].all_arrived()
    assert every[0].missing() == []


def test_a_rank_one_barrier_ahead_still_counts_as_arrived():
    first, second = blocks(2)
    first.arrive()
    second.arrive()
    second.arrive()  # it did not wait for the first one to notice
    assert first.all_arrived()
    assert not second.all_arrived()
    assert second.missing() == [0]


def test_notices_of_two_turns_do_not_overwrite_each_other():
    first, second = blocks(2)
    notices = [OpNotice(bytes([turn] * 16), turn - 1, turn << 40) for turn in range(4)]
    first.post_notice(0, notices[0])
    first.post_notice(1, notices[1])
    assert [second.read_notice(turn, 0) for turn in (0, 1)] == notices[:2]
    first.post_notice(2, notices[2])
    assert [second.read_notice(turn, 0) for turn in (1, 2)] == notices[1:3]
    assert second.read_notice(0, 1) == OpNotice(bytes(16), 0, 0)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_no_two_fields_overlap(size):
    block = ControlBlock(Segment.create(ControlBlock.nbytes(size)), 0, size)
    spans = [(0, 4096)] + [(slot, 4096) for slot in block._slots]
    byte = torch.uint8
    for rank in range(size):
        for parity in (0, 1):
            for place, nbytes in (
                (block.eager_buffer(rank, parity, byte), EAGER_NBYTES),
                (block.staging_buffer(rank, parity, STAGING_NBYTES, byte), STAGING_NBYTES),
                (block.result_buffer(rank, parity, STAGING_NBYTES, byte), STAGING_NBYTES),
            ):
                spans.append((place.data_ptr() - block.segment.address, nbytes))
    spans += [(block.fifo(a, b), FIFO_NBYTES + 4096) for a in range(size) for b in range(size)]
    spans.sort()
    for (low, nbytes), (following, _) in itertools.pairwise(spans):
        assert low + nbytes <= following
    assert sum(spans[-1]) <= block.segment.nbytes
    assert block.p2p_signal(0) % 64 == 0


def test_steps_are_visible_to_the_others():
    first, second = blocks(2)
    assert second.step_of(0) == -1
    first.step = 2**40
    assert second.step_of(0) == 2**40 == first.step


# Failures.


def test_a_failure_is_visible_to_all():
    first, second, third = blocks(3)
    assert not second.failed
    assert second.first_failure() is None
    first.post_failure(LOST)
    assert second.failed
    assert second.first_failure() == third.first_failure() == first.first_failure() == LOST


def test_the_first_failure_is_kept():
    first, second, third = blocks(3)
    second.post_failure(LOST)
    first.post_failure(GroupFailure(0, "host", "another one"))
    second.post_failure(GroupFailure(1, "host", "a third one"))
    assert third.first_failure() == LOST


@pytest.mark.parametrize("text", ["x" * 10_000, "😀" * 3000, '"\\\n\x01' * 1000, "\ud800 lone", ""])
def test_a_failure_may_have_any_text(text):
    first, second = blocks(2)
    first.post_failure(GroupFailure(2, "h" * 64, text, step=7))
    failure = second.first_failure()
    assert failure is not None
    assert (failure.rank, failure.host, failure.step) == (2, "h" * 64, 7)
    assert failure.text[:50] == text[:50].replace("\ud800", "?")
    assert second.step_of(1) == -1, "the next rank's slot is untouched"


def test_a_rank_that_arrives_late_learns_that_another_gave_up():
    first, second, third = blocks(3)
    for block in (first, second, third):
        block.arrive()
    first.arrive()
    third.arrive()
    first.post_failure(LOST)  # gave up waiting for the second one
    assert not second.barrier_failed(), "its last barrier was complete"
    assert second.arrive(), "now all have arrived"
    assert second.barrier_failed()
    assert third.barrier_failed()


def test_a_failure_wakes_a_sleeping_rank():
    first, second = blocks(2)
    seen = []

    def sleep():
        first.arrive()
        first.sleep(600.0)
        seen.append(first.first_failure())

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    time.sleep(0.1)
    second.post_failure(LOST)
    thread.join(60)
    assert seen == [LOST]


def test_readers_never_see_a_partial_failure():
    """Many ranks post at once while another reads; every failure read is complete."""
    for attempt in range(30):
        every = blocks(4)

        def post(block, seed=attempt):
            time.sleep(random.Random(seed + block.index).random() * 1e-3)
            block.post_failure(GroupFailure(block.index, "host", str(block.index) * 500, step=3))
            return True

        pids = [start(lambda b=block: post(b)) for block in every[1:]]
        while every[0].first_failure() is None:
            pass
        failure = every[0].first_failure()
        assert failure is not None
        assert failure.text == str(failure.rank) * 500
        assert [ended(pid) for pid in pids] == [0] * 3


def test_a_child_process_shares_the_block():
    first, second = blocks(2)

    def work():
        second.step = 11
        second.post_failure(LOST)
        return True

    assert in_child(work) == 0
    assert (first.step_of(1), first.first_failure()) == (11, LOST)
