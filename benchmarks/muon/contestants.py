"""What `muon.py` compares: ways to train the reference GPT with Muon on its hidden matrices and AdamW on the rest.

All start from the same weights and use the same optimizers with the same options: ``torch.optim.Muon`` and
torch's fused AdamW. DDP has its best settings (`tuned_ddp`, 25 MiB). ZeroRedundancyOptimizer updates Muon's matrices,
with its parameters in buckets, and AdamW runs on all ranks; of the four ways to combine them this one was the fastest.
ZeRO can't overlap Muon with backward: that is for optimizers with a functional form, and Muon has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import paceline
from bench_harness.ranks import tuned_ddp
from paceline.parallel.sharding.fsdp import default_units
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import gpt_size

__all__ = ["DDP", "FSDP", "KINDS", "OURS_ON_GLOO", "OURS_ON_PACELINE", "ZERO", "Contestant", "build"]

DDP = "torch DDP + Muon"
ZERO = "torch DDP + ZeRO(Muon)"
FSDP = "torch fully_shard + Muon"
OURS_ON_GLOO = "sharded, gloo"
OURS_ON_PACELINE = "sharded, paceline"
KINDS = (DDP, ZERO, FSDP, OURS_ON_GLOO, OURS_ON_PACELINE)

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3, "fused": True}
"""`eps` is large beside these gradients, so that one that is wrong by a factor shows in the parameters."""

BUCKET_MIB = 25.0

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Contestant:
    """A model with its optimizers.

    Attributes:
        net: the reference GPT inside.
        model: called for the forward pass.
        optimizers: stepped one after the other.
        backward: runs backward.
    """

    net: GPT
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    backward: Callable[[Tensor], None] = Tensor.backward

    def update(self) -> None:
        """Step all optimizers and drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def hidden_matrices(net: GPT) -> tuple[Named, Named]:
    """Return the matrices of the blocks, and the other parameters: embedding, head and norms."""
    named = list(net.named_parameters())
    matrices = [(name, param) for name, param in named if name.startswith("blocks.") and param.ndim == 2]
    chosen = {name for name, _ in matrices}
    return matrices, [(name, param) for name, param in named if name not in chosen]


def build(kind: str, size: str, gloo: ProcessGroup, own: ProcessGroup) -> Contestant:
    """Return a contestant, with the same model on every rank.

    Args:
        kind: one of `KINDS`.
        size: of the model.
        gloo: the ranks over gloo. own: the ranks over the paceline backend.
    """
    torch.manual_seed(0)
    net = GPT(gpt_size(size))
    if kind == OURS_ON_GLOO:
        return _ours(net, gloo)
    if kind == OURS_ON_PACELINE:
        return _ours(net, own)
    matrices, rest = hidden_matrices(net)
    if kind == FSDP:
        for unit in [*default_units(net), net]:
            fully_shard(unit, mesh=DeviceMesh.from_group(gloo, "cpu"))
        matrices, rest = hidden_matrices(net)  # parameters are DTensors now
        return Contestant(net, net, [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)])
    model = tuned_ddp(net, BUCKET_MIB, gloo)
    muon = torch.optim.Muon(matrices, **MUON) if kind == DDP else _zero(matrices, gloo)
    return Contestant(net, model, [muon, torch.optim.AdamW(rest, **ADAMW)])


def _zero(matrices: Named, group: ProcessGroup) -> ZeroRedundancyOptimizer:
    params = [param for _, param in matrices]
    return ZeroRedundancyOptimizer(
        params, torch.optim.Muon, process_group=group, parameters_as_bucket_view=True, **MUON
    )


def _ours(net: GPT, group: ProcessGroup) -> Contestant:
    model = paceline.DataParallel(net, group=group, sync="sharded")
    matrices, rest = paceline.matrix_parameters(model)
    muon = paceline.ShardedOptimizer(model, torch.optim.Muon, params=matrices, **MUON)
    adamw = paceline.ShardedOptimizer(model, torch.optim.AdamW, params=rest, **ADAMW)
    return Contestant(net, model, [muon, adamw], model.backward)
