"""The contexts in which a test has a simulated device, and a world of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from simulated_accelerator import device_module, kernels
from simulated_accelerator import simulator as simulation
from simulated_accelerator.backward_streams import ordered_backward_passes
from simulated_accelerator.group import process_group
from simulated_accelerator.host_memory import page_locked_memory
from simulated_accelerator.simulator import Simulator
from simulated_accelerator.storage_resizing import resizable_storages
from simulated_accelerator.streams import current_number, start_on_default_stream

__all__ = ["register", "simulated_device", "simulated_world"]


def register() -> None:
    """Register the device with torch, until the process ends; before the first backward pass of the process."""
    device_module.register()
    kernels.register()
    process_group.register()


@contextlib.contextmanager
def simulated_device(seed: int = 0, late: bool = True) -> Iterator[Simulator]:
    """Make device "sim" and backend "simccl" available; at the end, everything that was queued runs.

    Args:
        seed: of the order in which streams run.
        late: False runs every operation at its call, for comparison.

    Raises:
        DeviceError: at the end: a queued operation failed.
        RuntimeError: there is a simulated device already.
    """
    register()
    simulator = Simulator(seed, late)
    simulation.enter(simulator)
    start_on_default_stream()
    try:
        with page_locked_memory(), resizable_storages(), ordered_backward_passes(current_number):
            yield simulator
        simulator.run_all()
    finally:
        simulation.leave(simulator)


@contextlib.contextmanager
def simulated_world(
    rank: int,
    size: int,
    path: str,
    backend: str | None = "sim:simccl",
    *,
    seed: int = 0,
    timeout: float = 20.0,
) -> Iterator[Simulator]:
    """Make a simulated device, with an order of execution of its own, and the process group of all ranks.

    Args:
        rank: this rank.
        size: number of ranks.
        path: file where the ranks meet, which does not exist yet.
        backend: "sim:simccl"; None: torch's choice; or "cpu:gloo,sim:simccl" with a group for tensors of the host.
        seed: of the orders of all ranks.
        timeout: seconds to wait for other ranks.
    """
    with simulated_device(seed * size + rank) as simulator:
        dist.init_process_group(
            backend,
            init_method=f"file://{path}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        try:
            yield simulator
            simulator.run_all()
        finally:
            dist.destroy_process_group()
