"""Parameters on two devices: autograd runs their hooks in two threads, here started by hand on the CPU."""

from __future__ import annotations

import threading

import torch

import paceline
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.grad_slot import GradSlot
from paceline.parallel.engine.launch_queue import LaunchQueue

LONG_ENOUGH = 0.5
"""Seconds in which a thread that nothing holds back has done its work; if not, a test passes that should fail."""


class Launched:
    """A collective that is complete at once."""

    ended = None

    def poll(self):
        """Report nothing."""

    def wait(self):
        """Do not wait."""


class SlowComm:
    """Stands for two ranks: while it launches the first bucket, another thread calls the queue."""

    rank, size = 0, 2

    def __init__(self):
        self.sent = []
        self.meanwhile = None

    def all_reduce(self, flat, *, mean=False):
        """Record the bucket; the first time, after the other thread had its chance."""
        thread, self.meanwhile = self.meanwhile, None
        if thread is not None:
            thread.start()
            thread.join(LONG_ENOUGH)
        self.sent.append(flat)
        return Launched()


def test_a_bucket_is_launched_once_and_in_order_if_two_threads_find_it_full():
    comm = SlowComm()
    queue = LaunchQueue(comm, sharded=False, overlap=True)
    for index in range(3):
        slot = GradSlot(index, "weight", torch.nn.Parameter(torch.zeros(3)))
        queue.buckets.append(
            Bucket(
                index,
                [slot],
                torch.float32,
                torch.device("cpu"),
                allocate=lambda count, dtype, _device: torch.zeros(count, dtype=dtype),
            )
        )
    queue.begin_round(0)
    for bucket in queue.buckets:
        bucket.slots[0].param.grad = torch.ones(3)
    comm.meanwhile = other = threading.Thread(target=queue.launch_full, args=(False,))
    queue.launch_full(False)
    other.join()
    queue.launch_rest(False)
    assert [id(flat) for flat in comm.sent] == [id(bucket.flat) for bucket in queue.buckets]
    assert queue.timings.calls == 3


def test_two_threads_that_reach_outputs_open_one_backward():
    engine = paceline.DataParallel(torch.nn.Linear(2, 2)).engine
    begin, opened = engine.begin, []
    other = threading.Thread(target=engine.backward_reached, args=(None,))

    def slow_begin(*args):
        opened.append(args)
        if len(opened) == 1:
            other.start()
            other.join(LONG_ENOUGH)
        begin(*args)

    def reached(_grad):
        engine.backward_reached(None)
        other.join()  # the backward goes on until both are done

    engine.begin = slow_begin
    output = torch.ones(2, requires_grad=True)
    output.register_hook(reached)
    output.sum().backward()
    assert len(opened) == 1
