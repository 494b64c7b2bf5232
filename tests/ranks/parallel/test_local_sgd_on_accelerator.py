"""Local SGD on an accelerator: the CPU's parameters to the bit, and no host waits within a local step."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import SyncError
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd import outer_loop
from simulated_worlds import same_bits, world_beside_cpus

KINDS = {
    "averages": ("LocalSGD", {"every": 3, "compression": None}),
    "int8": ("LocalSGD", {"every": 3, "compression": "int8"}),
    "every step": ("LocalSGD", {"every": 1, "compression": "int8"}),
    "delay, fragments, mix": (
        "LocalSGD",
        {"every": 4, "fragments": 2, "delay": 1, "mix": 0.3, "compression": "int4"},
    ),
    "diloco": ("DiLoCo", {"every": 3, "warmup": 3}),
    "streaming diloco": (
        "DiLoCo",
        {"every": 4, "fragments": 2, "delay": 2, "mix": 0.5, "compression": "topk-int2"},
    ),
    "kept local steps": (
        "DiLoCo",
        {"every": 3, "delay": 1, "keep_local_steps": True, "compression": None},
    ),
    "slowmo": ("SlowMo", {"every": 3, "piece_mib": 0.01}),
    "topk": ("SlowMo", {"every": 3, "compression": paceline.Compression("topk", keep=0.1)}),
}
STEPS = 8


class OnStream(Comm):
    """Ranks whose calls are ordered on a stream."""

    stream_ordered = True


class OnHost(Comm):
    """Ranks whose calls the host runs."""

    stream_ordered = False


def network(device):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(16, 80), nn.Tanh(), nn.BatchNorm1d(80), nn.Linear(80, 40), nn.Tanh(), nn.Linear(40, 4)
    ).to(device)


def batches(rank, steps, device):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 16, generator=generator).to(device) for _ in range(steps)]


def trained(rank, device, kind, options, *, steps=STEPS, before=None, simulator=None):
    """Train a bare model; return parameters and buffers, and where the host waited within steps."""
    comm = OnStream if device == "sim" else OnHost
    model = network(device)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + rank))
    given = batches(rank, steps, device)
    waits = []
    with (
        mock.patch.object(outer_loop, "Comm", comm),
        getattr(paceline, kind)(model, optim, **options) as loop,
    ):
        if simulator is not None:
            simulator.run_all()
            simulator.synchronisations.clear()
        for step, inputs in enumerate(given, 1):
            if simulator is not None:
                simulator.next_step()
            if before is not None:
                before(model, step)
            model(inputs).square().mean().backward()
            optim.step()
            optim.zero_grad()
        if simulator is not None:
            waits = [wait for wait in simulator.synchronisations if not wait.age]
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, waits, loop


def on_both(rank, size, path, seed, kinds):
    """Train on the CPU and on the device; return per kind where the host waited, and what differs."""
    found = {}
    with world_beside_cpus(rank, size, path, seed) as simulator:
        for name in kinds:
            kind, options = KINDS[name]
            steps = STEPS - (2 * rank if name == "slowmo" else 0)  # one rank makes fewer
            host, _, _ = trained(rank, "cpu", kind, options, steps=steps)
            ours, waits, _ = trained(rank, "sim", kind, options, steps=steps, simulator=simulator)
            found[name] = waits, [key for key in host if not same_bits(host[key], ours[key].cpu())]
    return found


FEW = ["int8", "streaming diloco", "slowmo"]


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        (0, FEW),
        *(pytest.param(seed, list(KINDS), marks=pytest.mark.thorough) for seed in (1, 4)),
    ],
)
def test_parameters_are_the_cpu_s_and_the_host_never_waits_in_a_step(simulated_pool, tmp_path, seed, kinds):
    ranks = 2 if seed < 4 else 3
    for found in simulated_pool(ranks).run(on_both, str(tmp_path / "store"), seed, kinds, world=False):
        assert found == dict.fromkeys(kinds, ([], []))


# ---------------------------------------------------------------------- what the host reads one step later


class Messages(logging.Handler):
    """Keeps the messages of local SGD."""

    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("paceline.parallel").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def poisoned(rank, size, path, seed, options, victims):
    """Parameters become NaN on some ranks at step 5; return what is known after the block."""

    def before(model, step):
        if rank in victims and step == 5:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nan

    messages = Messages()
    with world_beside_cpus(rank, size, path, seed) as simulator:
        ours, waits, loop = trained(
            rank, "sim", "DiLoCo", options, steps=11, before=before, simulator=simulator
        )
        params = torch.cat([each.cpu().double().view(-1) for each in ours.values()])
    return params, waits, loop.rejected, messages.texts


@pytest.mark.parametrize("delay", [0, 1])
def test_a_rank_that_is_left_out_is_named_and_is_well_again_after_one_merge(simulated_pool, tmp_path, delay):
    options = {"every": 3, "delay": delay, "compression": "int8"}
    results = simulated_pool(2).run(poisoned, str(tmp_path / "store"), 1, options, [1], world=False)
    for params, waits, rejected, _ in results:
        assert torch.equal(params, results[0][0])
        assert params.isfinite().all()
        assert waits == []
        assert rejected == {1: 1}
    assert results[0][3] == ["step 6: the pseudo-gradient of rank 1 is NaN or infinite and was left out"]
    assert results[1][3] == [
        "rank 1, step 6: '0.weight', '3.weight', '0.bias', … is NaN or infinite; "
        "this rank takes the other ranks' parameters"
    ]


def test_if_all_ranks_are_left_out_the_shared_parameters_stay(simulated_pool, tmp_path):
    options = {"every": 3, "outer_momentum": 0.5, "compression": None}
    results = simulated_pool(2).run(poisoned, str(tmp_path / "store"), 1, options, [0, 1], world=False)
    for params, _, rejected, _ in results:
        assert torch.equal(params, results[0][0])
        assert params.isfinite().all()
        assert rejected == {0: 1, 1: 1}


def changed(rank, size, path, seed):
    """Rank 1 replaces a layer in step 4; return when each rank raises, and what."""
    steps = []

    def before(model, step):
        steps.append(step)
        if rank == 1 and step == 4:
            model[-1] = nn.Linear(40, 4, device="sim")

    with world_beside_cpus(rank, size, path, seed) as simulator:
        try:
            trained(rank, "sim", "LocalSGD", {"every": 3}, before=before, simulator=simulator)
        except SyncError as error:
            simulator.run_all()
            return steps[-1], error.rank, error.step, str(error)
    return None


def test_a_changed_model_is_not_merged_and_all_ranks_raise_after_the_next_step(simulated_pool, tmp_path):
    results = simulated_pool(2).run(changed, str(tmp_path / "store"), 1, world=False)
    for last, blamed, step, _ in results:
        assert (last, blamed, step) == (7, 1, 6)
    assert "model or optimizer has changed" in results[0][3]
    assert "parameter '5.weight' is no longer one of the model" in results[1][3]
