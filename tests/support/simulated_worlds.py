"""Worlds of simulated accelerators beside the ranks' CPUs, in which a test runs on both and compares."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from simulated_accelerator import Simulator, simulated_world

__all__ = ["same_bits", "world_beside_cpus"]


def world_beside_cpus(rank: int, size: int, path: str, seed: int) -> AbstractContextManager[Simulator]:
    """A world with a simulated device per rank, in an order of execution by `seed`; the host has gloo."""
    return simulated_world(rank, size, f"{path}-{seed}", "cpu:gloo,sim:simccl", seed=seed, timeout=30.0)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal to the bit; of a NaN, sign and payload don't matter."""
    if one.is_floating_point():
        one, other = (torch.where(each.isnan(), torch.nan, each) for each in (one, other))
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
