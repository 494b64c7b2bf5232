"""Stream order on a GPU: a bucket is sent after all writes to it; here with streams that only record calls."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.parallel.buckets import bucket as bucket_module
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.grad_slot import GradSlot
from paceline.parallel.gradient_collectives import Comm


class Stream:
    """Stands for a CUDA stream: notes whom it waits for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def bucket():
    slot = GradSlot(0, "weight", torch.nn.Parameter(torch.zeros(3)))
    made = Bucket(
        0, [slot], torch.float32, torch.device("cpu"), allocate=lambda n, dtype, device: torch.empty(n)
    )
    assert made.writers is None, "a processor has one stream"
    made.note_writer()
    assert made.writers is None
    made.writers = set()
    made._writer_key = lambda: bucket_module.current_stream(made.flat.device)
    return made


def test_the_launching_stream_waits_for_the_others_once(bucket, monkeypatch):
    first, second = Stream(), Stream()
    for stream in (first, second, first, second):
        monkeypatch.setattr(bucket_module, "current_stream", lambda device, stream=stream: stream)
        bucket.note_writer()
    bucket.await_writers()
    assert second.waited == [first]
    assert first.waited == []
    bucket.begin_backward(())
    bucket.await_writers()
    assert second.waited == [first]


def test_one_stream_waits_for_nothing(bucket, monkeypatch):
    only = Stream()
    monkeypatch.setattr(bucket_module, "current_stream", lambda device: only)
    bucket.note_writer()
    bucket.await_writers()
    assert only.waited == []


@pytest.mark.parametrize("sync", ["sharded", "full-shard", "auto"])
def test_a_graph_reads_parameters_where_they_were_so_they_may_not_move(sync):
    def make_graphed_callables(net):  # as torch.cuda's, which needs a GPU
        net.forward = lambda x: x
        return net

    graphed = torch.nn.Sequential(torch.nn.Linear(2, 2), make_graphed_callables(torch.nn.Linear(2, 1)))
    comm = Comm()
    paceline.DataParallel(graphed, sync, group=comm)
    comm.size = 2
    with pytest.raises(UsageError, match="module '1' is a CUDA graph"):
        paceline.DataParallel(graphed, sync, group=comm)


def test_a_captured_backward_is_refused_among_ranks_and_only_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = paceline.DataParallel(torch.nn.Linear(2, 1))
    monkeypatch.setattr(type(model.engine), "device", torch.device("cuda:0"))
    model.backward(model(torch.ones(1, 2)).sum(), samples=1)
    model.engine.comm.size = 2
    with pytest.raises(UsageError, match="world of 2 ranks"):
        model.backward(model(torch.ones(1, 2)).sum(), samples=1)
