"""Parameters that are DTensors of any placement, with optimizers of torch's: saved and resumed to the bit elsewhere."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import paceline
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.newest_checkpoint import find_problem
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import UsageError
from same_states import difference

SHAPES = {
    "weight": (7, 5), "bias": (7,), "conv": (4, 3, 5, 3), "small": (2, 3), "none": (0, 4), "scale": (), "wide": (3, 8),
}  # fmt: skip


def on_axis(axis):
    """Return the placement of a shape with shards along an axis, the last one that it has if it has fewer."""
    return lambda shape: Shard(min(axis, len(shape) - 1)) if shape else Replicate()


def whole(shape):
    return Replicate()


def strided(shape):
    return _StridedShard(0, split_factor=2) if shape else Replicate()


CASES = {
    "one process": (1, (), []),
    "rows of 3": (3, (3,), [on_axis(0)]),
    "rows of 4": (4, (4,), [on_axis(0)]),
    "columns of 3": (3, (3,), [on_axis(1)]),
    "pixels of 4": (4, (4,), [on_axis(2)]),
    "replicated": (2, (2,), [whole]),
    "rows of 2, twice": (4, (2, 2), [whole, on_axis(0)]),
    "columns of 2, twice": (4, (2, 2), [on_axis(1), whole]),
    "grid": (4, (2, 2), [on_axis(0), on_axis(1)]),
    "grid of pixels": (4, (2, 2), [on_axis(2), on_axis(0)]),
    "rows of rows": (4, (2, 2), [on_axis(0), on_axis(0)]),
    "strided rows": (4, (2, 2), [strided, on_axis(0)]),
}  # fmt: skip
"""Ranks, their mesh, and the placement of a shape along each axis of the mesh."""

FORMATS = ["paceline", "dcp"]
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.125, amsgrad=True, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5, foreach=False),
}


class Net(nn.Module):
    """Parameters of all shapes in the placements of a case, one that is no DTensor, and a buffer."""

    def __init__(self, case, seed):
        super().__init__()
        _, shape, placements = CASES[case]
        mesh = init_device_mesh("cpu", shape) if shape else None
        generator = torch.Generator().manual_seed(seed)
        self.place = lambda value: (
            distribute_tensor(
                value, mesh, [each(tuple(value.shape)) for each in placements], src_data_rank=None
            )
            if mesh is not None
            else value
        )
        for name, size in SHAPES.items():
            self.register_parameter(name, nn.Parameter(self.place(torch.randn(size, generator=generator))))
        self.plain = nn.Parameter(torch.randn(3, generator=generator))
        self.register_buffer("seen", self.place(torch.randn(6, 2, generator=generator)))


def built(case, kind, seed):
    net = Net(case, seed)
    return net, OPTIMIZERS[kind](list(net.parameters()))


def train(net, optimizer, steps):
    for step in range(steps):
        for number, (name, param) in enumerate(net.named_parameters()):
            if name != "small" or step:  # whose state is younger
                grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
                param.grad = grad if name == "plain" else net.place(grad)
        optimizer.step()
        optimizer.zero_grad()


def gathered(value):
    """Return a state with whole tensors; a collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return [gathered(item) for item in value] if isinstance(value, list) else value


def state_of(net, optimizer):
    return gathered(dict(net.state_dict())), gathered(optimizer.state_dict())


def save(rank, size, case, kind, folder):
    """Save in both formats, and write the whole state besides."""
    paceline.init()
    net, optimizer = built(case, kind, 0)
    train(net, optimizer, 2)
    for format in FORMATS:
        with paceline.Checkpoint(
            Path(folder, f"{case}-{format}"), net, optimizer, format=format
        ) as checkpoint:
            checkpoint.save(wait=True)
    state = state_of(net, optimizer)
    if rank == 0:
        torch.save(state, Path(folder, f"{case}.pt"))


def load(rank, size, case, kind, folder):
    """Load what was saved in every case; return what differs from the state of one process."""
    paceline.init()
    expected = torch.load(Path(folder, "one process.pt"))
    problems = []
    for source in CASES:
        problems.append(difference(torch.load(Path(folder, f"{source}.pt")), expected, f"{source} itself"))
        for format in FORMATS:
            net, optimizer = built(case, kind, 1)
            train(net, optimizer, 1)
            placements = [getattr(param, "placements", None) for param in net.parameters()]
            with paceline.Checkpoint(Path(folder, f"{source}-{format}"), net, optimizer) as checkpoint:
                assert checkpoint.load() is not None
            problems.append(difference(state_of(net, optimizer), expected, f"{source} {format} "))
            assert [getattr(param, "placements", None) for param in net.parameters()] == placements
    train(net, optimizer, 1)  # which needs the state in the placement of the parameters
    return [text for text in problems if text]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """`saved(kind)` returns the folder with the checkpoints of all cases, each of which is saved once."""
    done = {}

    def save_all(kind, cases=tuple(CASES)):
        folder, there = done.setdefault(kind, (tmp_path_factory.mktemp(kind), set()))
        for case in cases:
            if case not in there:
                pool(CASES[case][0]).run(save, case, kind, folder)
                there.add(case)
        return folder

    return save_all


@pytest.mark.sweep
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_what_any_placement_saves_every_placement_loads(pool, saved, case, kind):
    for problems in pool(CASES[case][0]).run(load, case, kind, saved(kind), timeout=200):
        assert problems == []


@pytest.mark.parametrize("case", ["rows of 2, twice", "grid", "rows of 4", "strided rows"])
@pytest.mark.parametrize("format", ["paceline", "dcp"])
def test_every_element_is_written_once(saved, case, format):
    """By the tensors' own bytes: nothing is written by two replicas, nor are parts that a rank lacks."""
    folder = saved("AdamW", [case])
    files = LocalFolder(folder / f"{case}-{format}").files("step-00000000")
    assert find_problem(files) == ""
    reader = CheckpointReader(files)
    for name, tensor in reader.manifest.tensors.items():
        boxes = reader.manifest.layouts[tensor.layout]
        assert sum(math.prod(sizes) for _, _, sizes in boxes) == math.prod(tensor.shape), name
    writers = {
        rank
        for tensor in reader.manifest.tensors.values()
        for rank, *_ in reader.manifest.layouts[tensor.layout]
    }
    assert writers == set(range(4))


# ------------------------------------------------------------------ refused


def refused(rank, size, placement, folder):
    paceline.init()
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4, 3)
    net = nn.Module()
    net.fused = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))
    checkpoint = paceline.Checkpoint(folder, net)
    try:
        checkpoint.save(wait=True)
    except UsageError as error:
        return str(error)
    finally:
        checkpoint.close()
    return "saved"


def test_a_rank_with_several_regions_is_refused_by_name(pool, tmp_path):
    for text in pool(2).run(refused, _StridedShard(0, split_factor=2), tmp_path):
        assert "'model.fused', shape [8, 3], is sharded as" in text
        assert "this rank holds several regions" in text
        assert "divides evenly" in text
    assert list(tmp_path.glob("step-*")) == []


def test_a_sum_that_is_not_reduced_is_refused_by_name(pool, tmp_path):
    for text in pool(2).run(refused, Partial(), tmp_path):
        assert "'model.fused' is a sum that is not yet reduced" in text
        assert "redistribute it" in text
    assert list(tmp_path.glob("step-*")) == []


# ------------------------------------------------------------------ FSDP2 over tensor parallelism


def fsdp_over_tp(size, widths):
    torch.manual_seed(5)
    sizes = [6, *widths, 1]
    layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in itertools.pairwise(sizes)]
    net = nn.Sequential(*layers)
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    elif size > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.125, foreach=False)


def step(net, optimizer):
    net(torch.randn(4, 6, generator=torch.Generator().manual_seed(2))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_or_load(rank, size, widths, folder, format):
    paceline.init()
    net, optimizer = fsdp_over_tp(size, widths)
    with paceline.Checkpoint(folder, net, optimizer, format=format) as checkpoint:
        if checkpoint.load() is None:
            step(net, optimizer)
            checkpoint.save(wait=True)
    placements = {str(param.placements) for param in net.parameters() if isinstance(param, DTensor)}
    state = state_of(net, optimizer)
    step(net, optimizer)
    return state, placements


@pytest.mark.parametrize("format", ["paceline", "dcp"])
@pytest.mark.parametrize("widths", [(8, 4), (6, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize("first", [4, 3, 1])
def test_fsdp_over_tensor_parallelism(pool, tmp_path, first, widths, format):
    found = pool(first).run(save_or_load, widths, tmp_path, format)
    if first == 4:
        assert any("_StridedShard" in text or "_S(" in text for text in found[0][1]), found[0][1]
    expected = found[0][0]
    for size in (4, 2, 1, 3):
        for state, _ in pool(size).run(save_or_load, widths, tmp_path, format):
            assert difference(state, expected) == "", size
