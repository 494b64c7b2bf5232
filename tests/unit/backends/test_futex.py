"""Sleeping on a word: no addition is lost between processes, and nobody sleeps through a change."""

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

FOR_EVER = 600.0  # a wake that is missed is a test that times out


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
            futex.wait(segment.address, 0, FOR_EVER)
            words[1] = words[0]
        return words[1] == 1

    pid = start(work)
    time.sleep(0.05)
    futex.add(segment.address)
    futex.wake(segment.address)
    assert ended(pid) == 0


def test_two_processes_that_take_turns_never_miss_each_other(shared):
    segment, words = shared
    rounds = 20_000

    def play(mine, theirs):
        for number in range(rounds):
            if mine == 0:
                futex.add(segment.address)
                futex.wake(segment.address)
            while (seen := words[theirs * 16]) == number:
                futex.wait(segment.address + theirs * 64, seen, FOR_EVER)
            if mine == 1:
                futex.add(segment.address + 64)
                futex.wake(segment.address + 64)
        return True

    assert [ended(pid, 60) for pid in [start(lambda: play(0, 1)), start(lambda: play(1, 0))]] == [0, 0]
    assert (words[0], words[16]) == (rounds, rounds)


def test_nobody_waits_where_the_word_has_changed(shared):
    segment, words = shared
    words[0] = 5
    futex.wait(segment.address, 4, FOR_EVER)


def test_waiting_ends_after_its_time(shared):
    segment, _ = shared
    began = time.monotonic()
    futex.wait(segment.address, 0, 0.05)
    assert time.monotonic() - began > 0.04


def test_waiting_ends_with_a_signal_and_the_handler_decides(shared):
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


def test_other_threads_run_while_one_sleeps(shared):
    segment, _ = shared
    thread = threading.Thread(target=futex.wait, args=(segment.address, 0, 20.0))
    thread.start()
    time.sleep(0.05)
    futex.add(segment.address)
    futex.wake(segment.address)
    thread.join(5)
    assert not thread.is_alive()


def test_a_word_at_no_multiple_of_4_is_an_error(shared):
    segment, _ = shared
    with pytest.raises(OSError, match="futex wait: EINVAL"):
        futex.wait(segment.address + 1, 0, 0.1)
