"""Callbacks of futures of collectives, and the order in which calls of a queue begin and end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from paceline.backends.async_work import WorkQueue
from paceline.backends.call_steps import Stage

PROGRAM = """
import sys, threading, time
import torch
from paceline.backends.collective_work import CollectiveWork

work, begun = CollectiveWork([torch.ones(1)]), threading.Event()

def callback(future):
    begun.set()
    time.sleep(0.5)
    {then}
    print("returned", flush=True)

work.get_future().then(callback)
threading.Thread(target=work.finish, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("then", ["pass", "work.get_future().then(lambda _: None)"])
def test_a_callback_returns_before_the_interpreter_ends(then):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "returned\n", "")


class Calls:
    """Calls of a queue, and what has happened: (event, number of the call)."""

    def __init__(self):
        self.events, self.submitted = [], threading.Event()
        self.queue = WorkQueue("test")

    def steps(self, number, stages):
        """Yield the stages; the first call begins once all calls are submitted."""
        self.submitted.wait(10)
        self.events.append(("begins", number))
        for step, stage in enumerate(stages):
            yield stage
            self.events.append((f"step {step}", number))

    def submit(self, number, *stages, overlaps=True, tensors=()):
        return self.queue.submit(
            lambda: self.steps(number, stages), list(tensors), "call", asynchronous=True, overlaps=overlaps
        )

    def run(self, *works):
        self.submitted.set()
        for work in works:
            work.wait()
        self.queue.close()
        return self.events


def test_a_call_begins_once_the_one_before_is_posted_and_ends_after_it():
    calls = Calls()
    first = calls.submit(0, Stage.BEGUN, Stage.POSTED, Stage.SENT)
    events = calls.run(first, calls.submit(1, Stage.BEGUN, Stage.SENT))
    assert events == [
        ("begins", 0), ("step 0", 0), ("begins", 1), ("step 1", 0), ("step 0", 1), ("step 2", 0), ("step 1", 1)
    ]  # fmt: skip


@pytest.mark.parametrize(("mib", "together"), [(1, 8), (3, 3), (64, 2)])
def test_short_calls_begin_together_until_they_have_enough_to_send(mib, together):
    calls, tensor = Calls(), torch.empty(mib << 20, dtype=torch.uint8)
    works = [calls.submit(number, Stage.POSTED, Stage.SENT, tensors=[tensor]) for number in range(10)]
    events = calls.run(*works)
    assert events[:together] == [("begins", number) for number in range(together)]
    assert events[together] == ("step 0", 0)
    assert [number for event, number in events if event == "step 1"] == list(range(10))


def test_no_call_begins_before_the_callbacks_of_an_open_one_have_returned():
    calls = Calls()
    first = calls.submit(0, Stage.POSTED, Stage.SENT)
    first.get_future().then(lambda _: calls.events.append(("callback", 0)))
    events = calls.run(first, calls.submit(1, Stage.SENT))
    assert events == [
        ("begins", 0), ("step 0", 0), ("step 1", 0), ("callback", 0), ("begins", 1), ("step 0", 1)
    ]  # fmt: skip


def test_a_call_that_waits_from_the_start_begins_after_the_one_before():
    calls = Calls()
    first, second = calls.submit(0, Stage.POSTED, Stage.SENT), calls.submit(1, overlaps=False)
    events = calls.run(first, second, calls.submit(2, Stage.SENT))
    assert events == [
        ("begins", 0), ("step 0", 0), ("step 1", 0), ("begins", 1), ("begins", 2), ("step 0", 2)
    ]  # fmt: skip


def test_an_error_of_a_call_is_its_own_and_an_aborted_queue_fails_open_calls():
    def fail():
        raise ValueError("of the second")

    calls = Calls()
    first = calls.submit(0, Stage.POSTED, Stage.SENT)
    second = calls.queue.submit(fail, [], "call", asynchronous=True, overlaps=True)
    calls.submitted.set()
    assert first.wait()
    with pytest.raises(ValueError, match="of the second"):
        second.wait()
    reached, go_on = threading.Event(), threading.Event()

    def stuck():
        yield Stage.SENT
        reached.set()
        go_on.wait(10)

    open_calls = [
        calls.queue.submit(stuck, [], "call", asynchronous=True, overlaps=True),
        calls.submit(1, Stage.SENT),
    ]
    reached.wait(10)
    calls.queue.abort(RuntimeError("aborted"))
    for work in open_calls:
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
    go_on.set()
    calls.queue.close()
