"""Trainers of `paceline bench step`: a model, its optimizer and its synchronisation, run one step at a time.

Torch's strategies get a process group on a backend of torch's, Paceline's and `ddp-paceline` the world's.

All start from the same seed and use the same fused AdamW. Its `eps` is large compared with these gradients, because
plain Adam would hide a gradient that is wrong by a factor from the check for exactness. Torch's strategies have their
best settings: gradients as views into buckets, no broadcast of buffers in forward (the reference model has only
constant ones), bucket size and static graph searched.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.fsdp import default_units
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.parallel.strategy import STRATEGIES, Sync
from paceline.tools.bench.step.step_strategies import AUTO, DDP_PACELINE, NO_SYNC, StrategyVariant
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TokenBatch
from paceline.world.accelerator import synchronize

__all__ = [
    "StepSeconds",
    "StrategyTrainer",
    "build_trainer",
    "parameter_drift",
    "random_batch",
    "run_step",
    "run_until_tuned",
]

_ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3, "fused": True}


@dataclass(frozen=True)
class StrategyTrainer:
    """A model, its optimizer and its backward pass.

    Attributes:
        variant: the strategy.
        model: called for the forward pass.
        optimizer: stepped after each backward.
        backward: runs backward and leaves synchronised gradients.
        waited_in_step: returns the seconds that the latest ``optimizer.step()`` waited for communication.
    """

    variant: StrategyVariant
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    waited_in_step: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on one rank; `waited` is the part of `optimizer` spent blocked."""

    forward: float
    backward: float
    optimizer: float
    waited: float


class _TimedZero(ZeroRedundancyOptimizer):
    """torch's ZeRO-1, which also records the time for broadcasting the updated parameters."""

    waited = 0.0

    def _sync_params(self) -> None:
        started = time.perf_counter()
        super()._sync_params()  # pyright: ignore[reportAttributeAccessIssue]
        self.waited = time.perf_counter() - started


def build_trainer(
    variant: StrategyVariant, size: GptSize, device: str, seed: int, torch_group: ProcessGroup | None = None
) -> StrategyTrainer:
    """Return the trainer of a strategy, with the same model on every rank.

    Args:
        variant: the strategy.
        size: of the model.
        device: of the model.
        seed: of the initial weights.
        torch_group: process group of torch's strategies; None: the world's.
    """
    torch.manual_seed(seed)
    net = GPT(size).to(device)
    if variant.strategy in STRATEGIES or variant.strategy == AUTO:
        return _paceline_trainer(variant, net)
    if variant.strategy not in (NO_SYNC, "fully-shard"):
        return _ddp_trainer(variant, net, None if variant.strategy == DDP_PACELINE else torch_group)
    if variant.strategy == "fully-shard":
        mesh = None if torch_group is None else DeviceMesh.from_group(torch_group, torch.device(device).type)
        for unit in [*default_units(net), net]:
            fully_shard(unit, mesh=mesh)
    return StrategyTrainer(variant, net, torch.optim.AdamW(net.parameters(), **_ADAMW))


def _paceline_trainer(variant: StrategyVariant, net: GPT) -> StrategyTrainer:
    sync = AUTO if variant.strategy == AUTO else STRATEGIES[variant.strategy]
    if isinstance(sync, Sync) and variant.bucket_mib is not None:
        sync = Sync(bucket_mib=variant.bucket_mib, overlap=sync.overlap, shard=sync.shard)
    model = DataParallel(net, sync=sync)
    waited_in_backward = 0.0

    def backward(loss: Tensor) -> None:
        nonlocal waited_in_backward
        model.backward(loss)
        waited_in_backward = model.timings.exposed_seconds

    def waited_in_step() -> float:
        return model.timings.exposed_seconds - waited_in_backward

    optimizer = ShardedOptimizer(model, torch.optim.AdamW, **_ADAMW)
    return StrategyTrainer(variant, model, optimizer, backward, waited_in_step)


def _ddp_trainer(variant: StrategyVariant, net: GPT, group: ProcessGroup | None) -> StrategyTrainer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # its successor is too young
        model = DistributedDataParallel(
            net,
            process_group=group,
            bucket_cap_mb=_ddp_cap_mib(variant, net),  # fractions work
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=variant.strategy == "ddp-static",
        )
    if variant.strategy == "ddp-zero":
        zero = _TimedZero(
            model.parameters(),
            torch.optim.AdamW,
            process_group=group,
            parameters_as_bucket_view=True,
            **_ADAMW,
        )
        return StrategyTrainer(variant, model, zero, waited_in_step=lambda: zero.waited)
    return StrategyTrainer(variant, model, torch.optim.AdamW(net.parameters(), **_ADAMW))


def _ddp_cap_mib(variant: StrategyVariant, net: GPT) -> float | None:
    """Return DDP's bucket size; None is its own default (25 MiB, the first bucket 1 MiB)."""
    if variant.bucket_mib == 0:
        return 2**-20  # one byte, so that every parameter fills a bucket
    if variant.bucket_mib == math.inf:
        return 1 + sum(param.nbytes for param in net.parameters()) / 2**20
    return variant.bucket_mib


def random_batch(size: GptSize, batch_size: int, context: int, seed: int, device: str) -> TokenBatch:
    """Return a batch of random tokens, whose values do not affect the time of a step."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocabulary, (batch_size, context + 1), generator=drawn)
    return TokenBatch(tokens[:, :-1], tokens[:, 1:], batch_size).to(device)


def run_step(trainer: StrategyTrainer, batch: TokenBatch) -> StepSeconds:
    """Run one training step and return the times of its parts on this rank."""
    started = _now(batch)
    value = token_loss(trainer.model(batch.inputs), batch.targets)
    forward_done = _now(batch)
    trainer.backward(value)
    backward_done = _now(batch)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return StepSeconds(
        forward=forward_done - started,
        backward=backward_done - forward_done,
        optimizer=_now(batch) - backward_done,
        waited=trainer.waited_in_step(),
    )


def _now(batch: TokenBatch) -> float:
    """Return the clock once the device has finished all of its work."""
    synchronize(batch.inputs.device)
    return time.perf_counter()


def run_until_tuned(trainer: StrategyTrainer, batch: TokenBatch) -> int:
    """Run steps until ``sync="auto"`` has settled and return their number: 0 for other strategies."""
    tuning = trainer.model.tuning if isinstance(trainer.model, DataParallel) else None
    steps = 0
    while tuning is not None and tuning.settled is None:
        run_step(trainer, batch)
        steps += 1
    return steps


def parameter_drift(trainer: StrategyTrainer, reference: StrategyTrainer) -> float:
    """Return the relative difference ‖a − b‖ / ‖b‖ of two trainers' parameters on this rank.

    Sharded parameters are gathered, so this is a collective.
    """
    mine, theirs = _full_parameters(trainer.model), _full_parameters(reference.model)
    return float((mine - theirs).norm() / theirs.norm())


def _full_parameters(model: torch.nn.Module) -> Tensor:
    """Return all parameters, unsharded, as one vector in float64."""
    parts = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    return torch.cat([part.detach().reshape(-1).double() for part in parts])
