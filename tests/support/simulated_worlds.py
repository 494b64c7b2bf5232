"""Worlds of simulated accelerators beside the ranks' CPUs, in which a test runs on both and compares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from simulated_accelerator import Simulator, simulated_device

__all__ = ["same_bits", "simulated_world"]


@contextlib.contextmanager
def simulated_world(
    rank: int, size: int, path: str, seed: int, backend: str = "cpu:gloo,sim:simccl"
) -> Iterator[Simulator]:
    """A world with a simulated device per rank, each with its own order of execution; the host has gloo."""
    limit = timedelta(seconds=30)
    with simulated_device(seed * size + rank) as simulator:
        method = f"file://{path}-{seed}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=limit)
        try:
            yield simulator
            simulator.run_all()
        finally:
            dist.destroy_process_group()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal to the bit; of a NaN, sign and payload don't matter."""
    if one.is_floating_point():
        one, other = (torch.where(each.isnan(), torch.nan, each) for each in (one, other))
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
