"""What ranks of several measurements do: share a GPU, gather values, count traffic, wrap a model in torch DDP."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from paceline.testing.netlab.lab_network import InterfaceBytes, parse_traffic
from paceline.world import World, init

__all__ = ["WIRE_OVERHEAD", "gather", "interface_bytes", "on_one_gpu", "tuned_ddp"]

WIRE_OVERHEAD = 1514 / 1448
"""A full frame ÷ its payload: Ethernet 14, IPv4 20, TCP with time stamps 32."""


def on_one_gpu() -> World:
    """Initialize a world over NCCL whose ranks are all on one card of this machine.

    NCCL refuses two ranks of a host on one card, so every rank names a host of its own. They talk over loopback
    sockets, and the card runs the ranks' kernels in turns.
    """
    os.environ |= {"NCCL_HOSTID": f"host-of-rank-{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    return init("nccl", device="cuda:0")


def gather(value: Any) -> list[Any]:
    """Return every rank's value."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def interface_bytes() -> InterfaceBytes:
    """Return what the interface of this rank's host in a lab has counted."""
    return parse_traffic(Path("/proc/net/dev").read_text())


def tuned_ddp(
    net: nn.Module, bucket_mib: float | None, group: ProcessGroup | None = None
) -> DistributedDataParallel:
    """Return torch DDP at its best settings for a model with constant buffers and the same parameters on all ranks.

    Gradients are views into the buckets, buffers are not broadcast, the graph is static. `bucket_mib` None is its
    default: a first bucket of 1 MiB, then 25.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # its successor is too young
        return DistributedDataParallel(
            net,
            process_group=group,
            bucket_cap_mb=bucket_mib,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
            init_sync=False,
        )
