"""Sleeping on a word: no addition is lost between processes, and no process sleeps through a change."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from forked_child import ended, start
from paceline.backends.shm import futex
from paceline.backends.shm.shared_arena import Segment

pytestmark = pytest.mark.skipif(not futex.SUPPORTED, reason="no futex here")

NEVER = 600.0  # a wake that is missed is a test that times out


@pytest.fixture
def shared():
    """A segment and its words."""
    segment = Segment.create(4096)
    return segment, memoryview(segment.map).cast("I")


def test_additions_of_many_processes_are_all_counted(shared):
    segment, words = shared
    words[0] = 2**32 - 1000

    def work():
        for _ in range(20_000):
            futex.add(segment.address)
        return True

    assert [ended(pid) for pid in [start(work) for _ in range(4)]] == [0] * 4
    assert words[0] == 80_000 - 1000
    assert words[1] == 0


def test_a_sleeper_is_woken_by_another_process(shared):
    segment, words = shared

    def work():
        while words[1] == 0:
            words[0] += 0
            futex.wait(segment.address, 0, NEVER)
            words[1] = words[0]
        return words[1] == 1

    pid = start(work)
    time.sleep(0.05)
    futex.add(segment.address)
    futex.wake(segment.address)
    assert ended(pid) == 0


def test_alternating_processes_never_miss_a_wake(shared):
    segment, words = shared
    rounds = 20_000

    def alternate(mine, theirs):
        for number in range(rounds):
            if mine == 0:
                futex.add(segment.address)
                futex.wake(segment.address)
            while (seen := words[theirs * 16]) == number:
                futex.wait(segment.address + theirs * 64, seen, NEVER)
            if mine == 1:
                futex.add(segment.address + 64)
                futex.wake(segment.address + 64)
        return True

    assert [ended(pid, 60) for pid in [start(lambda: alternate(0, 1)), start(lambda: alternate(1, 0))]] == [
        0,
        0,
    ]
    assert (words[0], words[16]) == (rounds, rounds)


def test_wait_returns_at_once_if_the_word_has_changed(shared):
    segment, words = shared
    words[0] = 5
    futex.wait(segment.address, 4, NEVER)


def test_wait_ends_after_the_timeout(shared):
    segment, _ = shared
    began = time.monotonic()
    futex.wait(segment.address, 0, 0.05)
    assert time.monotonic() - began > 0.04


def test_a_signal_handler_may_end_a_wait(shared):
    segment, _ = shared

    def work():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            futex.wait(segment.address, 0, 20.0)
        except KeyboardInterrupt:
            return True
        return False

    pid = start(work)
    time.sleep(0.2)
    os.kill(pid, signal.SIGINT)
    assert ended(pid, 5) == 0


def test_other_threads_run_while_one_waits(shared):
    segment, _ = shared
    thread = threading.Thread(target=futex.wait, args=(segment.address, 0, 20.0))
    thread.start()
    time.sleep(0.05)
    futex.add(segment.address)
    futex.wake(segment.address)
    thread.join(5)
    assert not thread.is_alive()


def test_an_unaligned_word_is_an_error(shared):
    segment, _ = shared
    with pytest.raises(OSError, match="futex wait: EINVAL"):
        futex.wait(segment.address + 1, 0, 0.1)
