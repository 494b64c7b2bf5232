"""Trainings with a whole-matrix optimizer on the hidden matrices and AdamW on the rest, and the same in one process."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

import model_zoo
import paceline
from matrix_models import SPLITS, build_matrices
from matrix_optimizers import PER_PARAMETER, SplitByHand

__all__ = ["ADAMW", "batches", "one_process", "optimizers", "step_on_ranks", "update", "wrapped"]

ADAMW = {"lr": 0.02, "weight_decay": 0.05}


def batches(steps, shares, accumulate=1):
    """Return, for every step and micro-step, the inputs and targets of each rank; `steps` are numbers of steps."""
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(17 + step)

        def draw(rank, n, generator=generator):
            x = torch.randn(n, model_zoo.WIDTH, generator=generator, dtype=torch.float64) + 0.3 * rank
            return x, torch.randn(n, 1, generator=generator, dtype=torch.float64)

        found.append([[draw(rank, n) for rank, n in enumerate(shares)] for _ in range(accumulate)])
    return found


# ------------------------------------------------------------------ with Paceline


def optimizers(model, kind="Muon", split=None, **changed):
    """Return an optimizer of the hidden matrices, and AdamW for the other parameters."""
    matrices, rest = paceline.matrix_parameters(model)
    cls, options = PER_PARAMETER[kind]
    options = options | changed | ({} if split is None else {"split": split})
    return [
        paceline.ShardedOptimizer(model, cls, params=matrices, **options),
        paceline.ShardedOptimizer(model, torch.optim.AdamW, params=rest, **ADAMW),
    ]


def wrapped(name, sync, kind="Muon", group=None, dtype=torch.float64):
    """Return a wrapped model and its two optimizers."""
    model = paceline.DataParallel(build_matrices(name).to(dtype), sync=sync, group=group)
    return model, optimizers(model, kind, SPLITS.get(name))


def update(optims):
    """Step all optimizers, then drop the gradients."""
    for optim in optims:
        optim.step()
    for optim in optims:
        optim.zero_grad()


def _backward(model, x, y):
    if len(x):
        model.backward(model_zoo.loss_of(model, "", x, y), samples=len(x))
    else:
        model.backward(None, samples=0)


def step_on_ranks(model, optims, micro_steps, rank, clip=None):
    """Take a step with this rank's part of each micro-batch.

    Args:
        micro_steps: of one step, from `batches`.
        clip: ``"model"`` or ``"torch"``: whose ``clip_grad_norm_`` is called.
    """
    *earlier, last = [micro[rank] for micro in micro_steps]
    for x, y in earlier:
        with model.accumulate():
            _backward(model, x, y)
    _backward(model, *last)
    if clip == "model":
        model.clip_grad_norm_(0.05)
    elif clip == "torch":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    update(optims)


# ------------------------------------------------------------------ in one process


def one_process(name, kind, data, clip=None, split=None):
    """Train on whole batches without Paceline's optimizers; return the parameters."""
    model = build_matrices(name)
    matrices, rest = paceline.matrix_parameters(model)
    split = SPLITS.get(name, {}) if split is None else split
    blocks = {
        matrix: count
        for matrix, _ in matrices
        for pattern, count in split.items()
        if fnmatchcase(matrix, pattern)
    }
    cls, options = PER_PARAMETER[kind]
    optims = [
        SplitByHand(cls, matrices, blocks, **options),
        torch.optim.AdamW([param for _, param in rest], **ADAMW),
    ]
    for micro_steps in data:
        x, y = (torch.cat([pair[at] for micro in micro_steps for pair in micro]) for at in range(2))
        model_zoo.loss_of(model, "", x, y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        update(optims)
    return [param.detach() for param in model.parameters()]
