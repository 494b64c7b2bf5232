"""Trainings that are saved in one layout, a strategy on a number of ranks, and resumed in another one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paceline
from matrix_cases import optimizers
from matrix_models import SPLITS, build_matrices
from same_states import difference

__all__ = ["FORMATS", "LAYOUTS", "Layout", "Mixed", "Training", "compare_all", "save_everywhere"]

FORMATS = ["paceline", "dcp"]
WIDTH = 6


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of ranks, of which four may be 2 × 2."""

    sync: str
    ranks: int
    axes: int = 1

    def __str__(self) -> str:
        return f"{self.sync}-{'2x2' if self.axes == 2 else self.ranks}"

    def mesh(self):
        """Return the ranks as `DataParallel` takes them."""
        return (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if self.axes == 2 else None
        )


WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)]


class Mixed(nn.Module):
    """Weights of 0 to 3 dimensions, unequal sizes, one frozen, one unused, one under two names; buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 11), nn.Linear(11, 11)
        self.tied = self.second
        self.norm = nn.LayerNorm(11)
        self.conv = nn.Conv1d(1, 3, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(27, 1)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.25)
        hidden = torch.tanh(self.tied(torch.tanh(self.norm(self.second(torch.tanh(self.first(x)))))))
        return self.head(torch.tanh(self.conv(hidden[:, None])).flatten(1)) * self.scale + self.frozen.sum()


class Training:
    """A model and its optimizers in a layout.

    Args:
        kind: ``"adamw"``; ``"muon"`` or ``"soap"``: of whole matrices, some of them blocks of parameters, and AdamW for
            the rest; ``"master"``: bfloat16 with copies in float32.
        layout: of the ranks.
        seed: of the weights.
    """

    def __init__(self, kind: str, layout: Layout, seed: int = 0):
        torch.manual_seed(seed)
        self.kind, group = kind, layout.mesh()
        if kind in ("muon", "soap"):
            name = {"muon": "Fused", "soap": "Experts"}[kind]
            self.model = paceline.DataParallel(
                build_matrices(name, seed).float(), sync=layout.sync, group=group
            )
            self.optims = optimizers(self.model, kind.capitalize(), SPLITS[name])
        else:
            net = Mixed().bfloat16() if kind == "master" else Mixed()
            self.model = paceline.DataParallel(net, sync=layout.sync, group=group)
            params = [param for param in self.model.parameters() if param.requires_grad]
            groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.0625, "betas": (0.5, 0.75)}]
            options = {"master_dtype": torch.float32} if kind == "master" else {}
            self.optims = [
                paceline.ShardedOptimizer(self.model, torch.optim.AdamW, groups, lr=0.125, **options)
            ]

    def backward(self, step: int, rank: int) -> None:
        """Compute gradients."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        dtype = torch.bfloat16 if self.kind == "master" else torch.float32
        self.model.backward(
            self.model(torch.randn(4, WIDTH, generator=generator).to(dtype)).float().square().mean()
        )

    def train(self, steps: int, rank: int) -> None:
        """Take some steps."""
        for step in range(steps):
            self.backward(step, rank)
            for optim in self.optims:
                optim.step()
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Go on without an update."""
        for optim in self.optims:
            optim.zero_grad()

    def checkpoint(self, folder: str | Path, **options) -> paceline.Checkpoint:
        """Return a checkpoint of all objects."""
        named = {f"optimizer{number}": optim for number, optim in enumerate(self.optims)}
        return paceline.Checkpoint(folder, self.model, **named, **options)

    def state(self, rank: int):
        """Return weights and buffers, and on rank 0 the whole state of each optimizer, in torch's format."""
        for optim in self.optims:
            optim.consolidate_state_dict()
        weights = [param.detach().clone() for param in self.model.whole_parameters()]
        buffers = dict(self.model.module.named_buffers())
        return weights, buffers, [optim.state_dict() for optim in self.optims] if rank == 0 else []


def save_everywhere(rank, size, kind, layout, folder):
    """Train in a layout, and save in every format; write the whole state besides."""
    paceline.init()
    training = Training(kind, layout)
    training.train(3, rank)
    for format in FORMATS:
        with training.checkpoint(Path(folder, f"{layout}-{format}"), format=format) as checkpoint:
            checkpoint.step = 3
            checkpoint.save(wait=True)
    state = training.state(rank)
    if rank == 0:
        torch.save(state, Path(folder, f"{layout}.pt"))


def compare_all(rank, size, kind, layout, folder, sources, again=None):
    """Load what was saved in other layouts, and compare all of it; return what differs.

    Args:
        kind: of the training.
        layout: of these ranks.
        folder: of the checkpoints.
        sources: layouts and formats in which they were saved.
        again: where what was loaded is saved and loaded once more, before a step has used it.
    """
    paceline.init()
    problems = []
    for source, format in sources:
        expected = torch.load(Path(folder, f"{source}.pt"), weights_only=False)
        training = Training(kind, layout, seed=1)
        with training.checkpoint(Path(folder, f"{source}-{format}")) as checkpoint:
            assert checkpoint.load().step == 3
        found = []
        if again is not None:
            found.append(("at once", compare(training, expected, rank)))
            with training.checkpoint(Path(again, f"{source}-{format}"), format=format) as checkpoint:
                checkpoint.save(wait=True)
            training = Training(kind, layout, seed=2)
            with training.checkpoint(Path(again, f"{source}-{format}")) as checkpoint:
                checkpoint.load()
        buffers = dict(training.model.module.named_buffers())
        if not all(optim.movable for optim in training.optims):
            buffers = copy.deepcopy(buffers)
            training.backward(7, rank)  # settles what each rank has of the state
            training.drop_gradients()
        found.append(("at last", compare(training, expected, rank, buffers)))
        problems += [f"{source} {format} {when}: {text}" for when, text in found if text]
    return problems


def compare(training, expected, rank, buffers=None):
    """Return where weights, buffers (those of the model, if none are given) and states differ from expected ones."""
    weights, held, states = training.state(rank)
    wanted_weights, wanted_buffers, wanted_states = expected
    return (
        difference(weights, wanted_weights, "weights")
        or difference(held if buffers is None else buffers, wanted_buffers, "buffers")
        or (difference(states, wanted_states, "states") if rank == 0 else "")
    )


LAYOUTS = {
    kind: [Layout(sync, *world) for sync in syncs for world in WORLDS]
    for kind, syncs in {
        "adamw": ["naive", "bucketed", "sharded", "full-shard"],
        "muon": ["bucketed", "sharded", "full-shard"],
        "soap": ["bucketed", "sharded", "full-shard"],
        "master": ["bucketed", "sharded", "full-shard"],
    }.items()
}
"""Layouts by kind of training."""
