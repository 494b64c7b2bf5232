"""Builds the contestants of `paceline bench step` and runs single steps of them.

Torch's own contestants get a process group of torch's own, ours and `ddp-paceline` the world's.

All start from the same seed and use the same fused AdamW; its `eps` is large beside these gradients, for plain Adam
would hide a gradient that is wrong by a factor from the check for exactness. torch's own entries get their best
settings: gradients as views into buckets, no broadcast of buffers in forward (the reference model has only constant
ones), bucket size and static graph searched.
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
from paceline.tools.bench.step.step_strategies import AUTO, DDP_PACELINE, NO_SYNC, Entry
from paceline.tools.models.gpt import GPT, loss
from paceline.tools.models.gpt_sizes import Size
from paceline.tools.models.token_windows import Batch

__all__ = ["Contestant", "Turn", "build", "drift", "random_batch", "settle", "step"]

_ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3, "fused": True}


@dataclass(frozen=True)
class Contestant:
    """A model, its optimizer and how it does backward.

    Attributes:
        entry: which contestant it is.
        model: called for the forward pass.
        optimizer: stepped after each backward.
        backward: runs backward and leaves synchronised gradients.
        waited_in_step: seconds that the latest ``optimizer.step()`` stood still for communication.
    """

    entry: Entry
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], None]
    waited_in_step: Callable[[], float]


@dataclass(frozen=True)
class Turn:
    """Seconds of one step on one rank; `waited` is the part of `optimizer` that stood still."""

    forward: float
    backward: float
    optimizer: float
    waited: float


class _TimedZero(ZeroRedundancyOptimizer):
    """torch's ZeRO-1, with the time that it spends on sending the updated parameters round."""

    waited = 0.0

    def _sync_params(self) -> None:
        started = time.perf_counter()
        super()._sync_params()  # pyright: ignore[reportAttributeAccessIssue]
        self.waited = time.perf_counter() - started


def build(entry: Entry, size: Size, device: str, seed: int, torchs: ProcessGroup | None = None) -> Contestant:
    """Return the contestant `entry` with a model of `size`, the same on every rank.

    Args:
        torchs: the process group of torch's contestants; None: the world's.
    """
    torch.manual_seed(seed)
    net = GPT(size).to(device)
    if entry.strategy in STRATEGIES or entry.strategy == AUTO:
        return _ours(entry, net)
    if entry.strategy == NO_SYNC:
        return Contestant(entry, net, torch.optim.AdamW(net.parameters(), **_ADAMW), Tensor.backward, _never)
    if entry.strategy == "fully-shard":
        mesh = None if torchs is None else DeviceMesh.from_group(torchs, torch.device(device).type)
        for unit in [*default_units(net), net]:
            fully_shard(unit, mesh=mesh)
        return Contestant(entry, net, torch.optim.AdamW(net.parameters(), **_ADAMW), Tensor.backward, _never)
    return _ddp(entry, net, None if entry.strategy == DDP_PACELINE else torchs)


def _ours(entry: Entry, net: GPT) -> Contestant:
    plan = AUTO if entry.strategy == AUTO else STRATEGIES[entry.strategy]
    if isinstance(plan, Sync) and entry.bucket_mib is not None:
        plan = Sync(bucket_mib=entry.bucket_mib, overlap=plan.overlap, shard=plan.shard)
    model = DataParallel(net, sync=plan)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, **_ADAMW)
    waited_in_backward = 0.0

    def backward(loss: Tensor) -> None:
        nonlocal waited_in_backward
        model.backward(loss)
        waited_in_backward = model.timings.exposed_seconds

    def waited_in_step() -> float:
        return model.timings.exposed_seconds - waited_in_backward

    return Contestant(entry, model, optimizer, backward, waited_in_step)


def _ddp(entry: Entry, net: GPT, group: ProcessGroup | None) -> Contestant:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # its successor is too young
        model = DistributedDataParallel(
            net,
            process_group=group,
            bucket_cap_mb=_ddp_cap_mib(entry, net),  # fractions work
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=entry.strategy == "ddp-static",
        )
    if entry.strategy == "ddp-zero":
        zero = _TimedZero(
            model.parameters(),
            torch.optim.AdamW,
            process_group=group,
            parameters_as_bucket_view=True,
            **_ADAMW,
        )
        return Contestant(entry, model, zero, Tensor.backward, lambda: zero.waited)
    return Contestant(entry, model, torch.optim.AdamW(net.parameters(), **_ADAMW), Tensor.backward, _never)


def _ddp_cap_mib(entry: Entry, net: GPT) -> float | None:
    """Return DDP's bucket size: None is its own default (25 MiB, the first bucket 1 MiB)."""
    if entry.bucket_mib == 0:
        return 2**-20  # one byte, so that every parameter fills a bucket
    if entry.bucket_mib == math.inf:
        return 1 + sum(param.nbytes for param in net.parameters()) / 2**20
    return entry.bucket_mib


def _never() -> float:
    return 0.0


def random_batch(size: Size, batch_size: int, context: int, seed: int, device: str) -> Batch:
    """Return a batch of tokens drawn at random: what a step takes does not depend on what they say."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocabulary, (batch_size, context + 1), generator=drawn)
    return Batch(tokens[:, :-1], tokens[:, 1:], batch_size).to(device)


def step(contestant: Contestant, batch: Batch) -> Turn:
    """Run one training step and return how long its parts took on this rank."""
    started = _now(batch)
    value = loss(contestant.model(batch.inputs), batch.targets)
    ran = _now(batch)
    contestant.backward(value)
    synchronised = _now(batch)
    contestant.optimizer.step()
    contestant.optimizer.zero_grad()
    ended = _now(batch)
    return Turn(ran - started, synchronised - ran, ended - synchronised, contestant.waited_in_step())


def _now(batch: Batch) -> float:
    """Return the clock once the device has done what it was given."""
    if batch.inputs.is_cuda:
        torch.cuda.synchronize(batch.inputs.device)
    return time.perf_counter()


def settle(contestant: Contestant, batch: Batch) -> int:
    """Run the steps that ``sync="auto"`` takes to settle on a plan, and return how many: none for the others."""
    tuning = contestant.model.tuning if isinstance(contestant.model, DataParallel) else None
    steps = 0
    while tuning is not None and tuning.settled is None:
        step(contestant, batch)
        steps += 1
    return steps


def drift(contestant: Contestant, reference: Contestant) -> float:
    """Return how far two contestants' parameters are apart on this rank: ‖a − b‖ / ‖b‖ over all of them.

    Sharded parameters are gathered, so all ranks must call it.
    """
    mine, theirs = _whole(contestant.model), _whole(reference.model)
    return float((mine - theirs).norm() / theirs.norm())


def _whole(model: torch.nn.Module) -> Tensor:
    """Return all parameters, whole, as one vector in float64."""
    parts = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    return torch.cat([part.detach().reshape(-1).double() for part in parts])
