"""Trainings whose parts are measured: the reference model, or a user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

import torch

from paceline.errors import UsageError
from paceline.parallel.sharding.fsdp import default_units
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.bench.step_parts.parts_settings import split_workload_name
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize

__all__ = ["Workload", "model_fingerprint", "reference_workload", "unit_of_parameter", "user_workload"]


@dataclass(frozen=True)
class Workload:
    """A model and its loss.

    Attributes:
        name: of the model.
        batch: samples of a rank.
        shape: of a sample, as text.
        build: returns the model, the same on every rank.
        loss_of: returns the loss of a (wrapped) model on this rank's batch.
    """

    name: str
    batch: int
    shape: str
    build: Callable[[], torch.nn.Module]
    loss_of: Callable[[torch.nn.Module], torch.Tensor]

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return fused AdamW over parameters."""
        return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def reference_workload(size: GptSize, batch: int, context: int, device: str, seed: int = 0) -> Workload:
    """Return the training of a reference model on random tokens, as in ``paceline bench step``."""
    tokens = random_batch(size, batch, context, seed, device)

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        return GPT(size).to(device)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return token_loss(model(tokens.inputs), tokens.targets)

    return Workload(size.name, batch, f"context {context}", build, loss_of)


def user_workload(text: str) -> Workload:
    """Return the training that a user's file defines.

    Args:
        text: ``FILE.py:FUNCTION``; the function returns ``(model, loss_of, batch)``: a module on its device, a function
            from the (wrapped) module to the loss on this rank's batch, and the number of samples in the batch.

    Raises:
        UsageError: the file or function does not exist, or it returns something else.
    """
    path, name = split_workload_name(text)
    spec = importlib.util.spec_from_file_location(f"workload_in_{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look up the definitions of the file
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise UsageError(
            f"{path} has no function {name!r}", remedy="name one that returns (model, loss_of, batch)"
        )

    def call() -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor], int]:
        torch.manual_seed(0)
        returned: Any = make()
        match returned:
            case (torch.nn.Module(), loss_of, SupportsIndex()) if callable(loss_of):
                return returned[0], returned[1], index(returned[2])
            case tuple() as parts:
                types = f"({', '.join(type(part).__name__ for part in parts)})"
            case other:
                types = type(other).__name__
        raise UsageError(f"{text} returned {types}", remedy="return (model, loss_of, samples of the batch)")

    _, loss_of, batch = call()
    return Workload(f"{path.stem}:{name}", batch, "as the file says", lambda: call()[0], loss_of)


def model_fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of the names, shapes and types of all parameters, twelve hex digits."""
    lines = [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def unit_of_parameter(model: torch.nn.Module) -> dict[str, int]:
    """Return for every parameter the number of the unit in which full-shard gathers it; 0 for the root."""
    names = {id(param): name for name, param in model.named_parameters()}
    units = dict.fromkeys(names.values(), 0)
    for number, unit in enumerate(default_units(model), start=1):
        for param in unit.parameters():
            units[names[id(param)]] = number
    return units
