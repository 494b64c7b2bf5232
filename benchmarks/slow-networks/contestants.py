"""Who takes part in `step.py`: one function each, and the table of their names.

A contestant is built on every rank, takes the :class:`Stage` and returns how one training step is done, what it
expects to send, and how often it synchronises. To add one, write a function and a line of `CONTESTANTS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from figures import DDP, DDP_FP16, NO_SYNC
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from workload import model_and_optimizer, trainer

from paceline.lm.batches import Batch

__all__ = ["CONTESTANTS", "Contestant", "Stage", "ring_nbytes"]


@dataclass(frozen=True)
class Stage:
    """What a contestant is built from.

    Attributes:
        rank, ranks: which rank this is, of how many; one a host.
        batch: what it trains on.
        gloo: a process group of torch's own, for torch's contestants; the world's group is the "paceline" backend.
    """

    rank: int
    ranks: int
    batch: Batch
    gloo: dist.ProcessGroup


@dataclass(frozen=True)
class Contestant:
    """How one contestant trains on this rank.

    Attributes:
        step: one training step.
        model: whose parameters it trains.
        sent: bytes that a host is expected to send in one step, without headers; a round's bytes / `every`.
        every: steps after which the ranks are equal; it is timed over whole rounds of so many.
        equal: whether anything is equal on all ranks after a round.
        agreed: returns what is; None: the model's parameters.
    """

    step: Callable[[], object]
    model: torch.nn.Module
    sent: float
    every: int = 1
    equal: bool = True
    agreed: Callable[[], Iterable[torch.Tensor]] | None = None


def ring_nbytes(nbytes: float, ranks: int) -> float:
    """Return what each rank of a ring sends to all-reduce a buffer: a share to the next one, 2 (N - 1) times."""
    return 2 * (ranks - 1) / ranks * nbytes


def no_sync(stage: Stage) -> Contestant:
    """Return a model that every rank trains for itself: what computing takes."""
    model, optimizer = model_and_optimizer()
    return Contestant(trainer(model, optimizer, stage.batch), model, 0.0, equal=False)


def ddp(stage: Stage, *, mib: int, fp16: bool = False) -> Contestant:
    """Return torch's DistributedDataParallel with buckets of `mib` MiB.

    Its best settings: gradients are views into buckets, and buffers, all of them constant here, are not sent.
    """
    net, optimizer = model_and_optimizer()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # its successor is too young
        model = DistributedDataParallel(
            net,
            process_group=stage.gloo,
            bucket_cap_mb=mib,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
            init_sync=False,  # all begin with the same parameters
        )
    nbytes = sum(parameter.nbytes for parameter in net.parameters())
    if fp16:
        model.register_comm_hook(stage.gloo, fp16_compress_hook)
        nbytes //= 2
    return Contestant(trainer(model, optimizer, stage.batch), net, ring_nbytes(nbytes, stage.ranks))


CONTESTANTS: dict[str, Callable[[Stage], Contestant]] = {
    NO_SYNC: no_sync,
    **{name: partial(ddp, mib=mib) for mib, name in DDP.items()},
    **{name: partial(ddp, mib=mib, fp16=True) for mib, name in DDP_FP16.items()},
}
