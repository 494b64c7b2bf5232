"""The shared board: meetings that nobody passes early or sleeps through, and failures told once."""

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


def boards(size, start_at=0):
    """Return one board per rank, each with a mapping of its own; arrivals count from `start_at`."""
    first = Segment.create(ControlBlock.nbytes(size))
    found = []
    for rank in range(size):
        board = ControlBlock(Segment.from_fd(os.dup(first.fd)), rank, size)
        board._target = start_at
        board._progress = start_at
        board._words[(board._own_slot + module._PROGRESS) // 4] = start_at
        found.append(board)
    found[0]._words[0] = start_at
    return found


def meet(board, patience=0.0):
    if not board.arrive():
        until = time.monotonic() + patience
        while not board.all_arrived():
            if time.monotonic() >= until:
                board.sleep(600.0)  # a wake that is missed is a test that times out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("patience", [0.0, 100e-6])
def test_nobody_passes_a_meeting_before_all_are_there(size, patience):
    """Each rank writes where it is before a meeting, and after it finds the others there or one further."""
    rounds, every = 3000, boards(size)

    def run(board):
        page = memoryview(board.segment.map).cast("I")
        places = [board._buffers // 4 + rank * 16 for rank in range(size)]
        for number in range(1, rounds + 1):
            page[places[board.index]] = number
            meet(board, patience)
            if any(page[place] - number not in (0, 1) for place in places):
                return False
        return True

    assert [ended(pid, 60) for pid in [start(lambda b=board: run(b)) for board in every]] == [0] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_count_of_arrivals_runs_round(size):
    every = boards(size, start_at=2**32 - 5 * size - 1)

    def run(board):
        for _ in range(20):
            meet(board)
            if board.missing():
                return False
        return board.all_arrived() and board._target == 15 * size - 1

    assert [ended(pid) for pid in [start(lambda b=board: run(b)) for board in every]] == [0] * size


def test_late_ranks_are_known_also_when_counts_run_round():
    every = boards(3, start_at=2**32 - 1)
    every[0].arrive()
    assert not every[0].all_arrived()
    assert every[0].missing() == [1, 2]
    every[2].arrive()
    assert every[0].missing() == [1]
    assert every[1].arrive()
    assert every[0].all_arrived()
    assert every[0].missing() == []


def test_a_rank_may_be_one_meeting_ahead_and_the_others_still_see_it_there():
    first, second = boards(2)
    first.arrive()
    second.arrive()
    second.arrive()  # it did not wait for the first one to notice
    assert first.all_arrived()
    assert not second.all_arrived()
    assert second.missing() == [0]


def test_notices_of_two_turns_stand_side_by_side():
    first, second = boards(2)
    notices = [OpNotice(bytes([turn] * 16), turn - 1, turn << 40) for turn in range(4)]
    first.post_notice(0, notices[0])
    first.post_notice(1, notices[1])
    assert [second.read_notice(turn, 0) for turn in (0, 1)] == notices[:2]
    first.post_notice(2, notices[2])
    assert [second.read_notice(turn, 0) for turn in (1, 2)] == notices[1:3]
    assert second.read_notice(0, 1) == OpNotice(bytes(16), 0, 0)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_no_two_places_of_the_board_overlap(size):
    board = ControlBlock(Segment.create(ControlBlock.nbytes(size)), 0, size)
    stretches = [(0, 4096)] + [(slot, 4096) for slot in board._slots]
    byte = torch.uint8
    for rank in range(size):
        for parity in (0, 1):
            for place, nbytes in (
                (board.eager_buffer(rank, parity, byte), EAGER_NBYTES),
                (board.staging_buffer(rank, parity, STAGING_NBYTES, byte), STAGING_NBYTES),
                (board.result_buffer(rank, parity, STAGING_NBYTES, byte), STAGING_NBYTES),
            ):
                stretches.append((place.data_ptr() - board.segment.address, nbytes))
    stretches += [(board.fifo(a, b), FIFO_NBYTES + 4096) for a in range(size) for b in range(size)]
    stretches.sort()
    for (low, nbytes), (following, _) in itertools.pairwise(stretches):
        assert low + nbytes <= following
    assert sum(stretches[-1]) <= board.segment.nbytes
    assert board.p2p_signal(0) % 64 == 0


def test_steps_are_seen_by_the_others():
    first, second = boards(2)
    assert second.step_of(0) == -1
    first.step = 2**40
    assert second.step_of(0) == 2**40 == first.step


# Failures.


def test_a_failure_is_seen_by_all():
    first, second, third = boards(3)
    assert not second.failed
    assert second.first_failure() is None
    first.post_failure(LOST)
    assert second.failed
    assert second.first_failure() == third.first_failure() == first.first_failure() == LOST


def test_what_was_told_first_stands():
    first, second, third = boards(3)
    second.post_failure(LOST)
    first.post_failure(GroupFailure(0, "host", "another one"))
    second.post_failure(GroupFailure(1, "host", "a third one"))
    assert third.first_failure() == LOST


@pytest.mark.parametrize("text", ["x" * 10_000, "😀" * 3000, '"\\\n\x01' * 1000, "\ud800 lone", ""])
def test_any_text_can_be_told(text):
    first, second = boards(2)
    first.post_failure(GroupFailure(2, "h" * 64, text, step=7))
    told = second.first_failure()
    assert told is not None
    assert (told.rank, told.host, told.step) == (2, "h" * 64, 7)
    assert told.text[:50] == text[:50].replace("\ud800", "?")
    assert second.step_of(1) == -1, "the neighbour's slot is untouched"


def test_a_meeting_that_somebody_gave_up_is_known_to_whoever_comes_late():
    first, second, third = boards(3)
    for board in (first, second, third):
        board.arrive()
    first.arrive()
    third.arrive()
    first.post_failure(LOST)  # gave up waiting for the second one
    assert not second.barrier_failed(), "its last meeting was held"
    assert second.arrive(), "now everybody has been there"
    assert second.barrier_failed()
    assert third.barrier_failed()


def test_a_sleeper_hears_of_a_failure():
    first, second = boards(2)
    heard = []

    def sleep():
        first.arrive()
        first.sleep(600.0)
        heard.append(first.first_failure())

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    time.sleep(0.1)
    second.post_failure(LOST)
    thread.join(60)
    assert heard == [LOST]


def test_readers_never_see_half_a_failure():
    """Many ranks tell at once while others read; whatever is read is whole."""
    for attempt in range(30):
        every = boards(4)

        def tell(board, seed=attempt):
            time.sleep(random.Random(seed + board.index).random() * 1e-3)
            board.post_failure(GroupFailure(board.index, "host", str(board.index) * 500, step=3))
            return True

        pids = [start(lambda b=board: tell(b)) for board in every[1:]]
        while every[0].first_failure() is None:
            pass
        told = every[0].first_failure()
        assert told is not None
        assert told.text == str(told.rank) * 500
        assert [ended(pid) for pid in pids] == [0] * 3


def test_a_board_in_a_child_is_the_same_board():
    first, second = boards(2)

    def work():
        second.step = 11
        second.post_failure(LOST)
        return True

    assert in_child(work) == 0
    assert (first.step_of(1), first.first_failure()) == (11, LOST)
