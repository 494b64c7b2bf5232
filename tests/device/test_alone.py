"""A world of one on a GPU: the bare model's gradients, no waiting for the GPU, CUDA graphs, no memory taken."""

from __future__ import annotations

import time

import on_device as on
import pytest
import torch

import paceline
from hub_process import hub_thread
from paceline._core.job_key import JobKey

STEPS, TOLERANCE = 5, 1e-10
DEVICE = "cuda:0"


@pytest.fixture(params=["none", "nccl"])
def world(request):
    """A world of one, without a process group and with one."""
    made = paceline.init(None if request.param == "none" else request.param, device=DEVICE)
    yield made
    paceline.shutdown()


def step(model, optim, inputs, targets):
    model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
    optim.step()
    optim.zero_grad()


@pytest.mark.parametrize("name", on.MODELS)
@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded", "full-shard"])
def test_gradients_are_the_bare_models(world, name, sync):
    model = paceline.DataParallel(on.build(name, DEVICE), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=on.RATE)
    for number in range(STEPS):
        step(model, optim, *on.batch(number, [0], DEVICE))
    assert on.max_difference(model.whole_parameters(), on.one_process(name, DEVICE, STEPS)) <= TOLERANCE


@pytest.mark.parametrize("name", on.MODELS)
def test_on_a_stream_of_the_program(world, name):
    expected = on.one_process(name, DEVICE, STEPS)
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = paceline.DataParallel(on.build(name, DEVICE))
        optim = torch.optim.AdamW(model.parameters(), lr=on.RATE)
        for number in range(STEPS):
            on.loss_of(model, *on.batch(number, [0], DEVICE)).backward()
            optim.step()
            optim.zero_grad()
        gap = on.max_difference(model.whole_parameters(), expected)
    torch.cuda.current_stream().wait_stream(stream)
    assert gap <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_never_waits_for_the_gpu(world, dtype):
    """The loss is of `dtype`, too: the rounded weight is computed without the GPU."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(
        DEVICE, dtype
    )
    model = paceline.DataParallel(net)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=on.RATE, fused=True)
    inputs, targets = (
        torch.randn(8, 64, device=DEVICE, dtype=dtype),
        torch.randn(8, 1, device=DEVICE, dtype=dtype),
    )

    def one_step():
        model.backward(on.loss_of(model, inputs, targets), samples=7)
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()

    for _ in range(2):
        one_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            one_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_whole_step_in_a_graph(world):
    """Forward, backward and update are captured once and replayed on new batches; the bare model takes the same."""
    model = paceline.DataParallel(on.build("Plain", DEVICE))
    bare = on.build("Plain", DEVICE)
    optim, other = (
        torch.optim.AdamW(each.parameters(), lr=on.RATE, capturable=True) for each in (model, bare)
    )
    inputs, targets = on.batch(0, [0], DEVICE)
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optim, inputs, targets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
        optim.step()
    for number in range(1, STEPS):
        for static, fresh in zip((inputs, targets), on.batch(number, [0], DEVICE), strict=True):
            static.copy_(fresh)
        graph.replay()
    for number in [0, 0, 0, *range(1, STEPS)]:
        on.loss_of(bare, *on.batch(number, [0], DEVICE)).backward()
        other.step()
        other.zero_grad()
    assert on.max_difference(list(model.parameters()), list(bare.parameters())) <= TOLERANCE


def test_a_world_of_one_takes_no_memory(world):
    def peak(wrap):
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE))
        optim = torch.optim.AdamW(model.parameters(), fused=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            model(torch.ones(64, 1024, device=DEVICE)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    peak(lambda net: net)  # workspaces of the first use
    bare, ours = peak(lambda net: net), peak(paceline.DataParallel)
    assert abs(ours - bare) <= 4096


@pytest.mark.parametrize("compression", [None, "bf16", "int4", "topk-int2"])
def test_a_worker_of_a_hub_trains_on_the_gpu(monkeypatch, compression):
    for name, value in JobKey.generate().environment().items():
        monkeypatch.setenv(name, value)
    model, inputs, targets = on.build("Plain", DEVICE).float(), *on.batch(0, [0], DEVICE)
    inputs, targets = inputs.float(), targets.float()
    optim = torch.optim.AdamW(model.parameters(), lr=on.RATE)
    first = on.loss_of(model, inputs, targets).item()
    with hub_thread() as hub:
        with paceline.AsyncDataParallel(model, optim, hub.address, 4, 1, compression=compression) as training:
            deadline = time.monotonic() + 60
            while training.counts.taken < 40 and time.monotonic() < deadline:
                on.loss_of(model, inputs, targets).backward()
                optim.step()
                optim.zero_grad()
        assert hub.hub.updates >= training.counts.sent >= 30
        assert hub.hub.refused == {}
    assert on.loss_of(model, inputs, targets).item() < 0.5 * first
