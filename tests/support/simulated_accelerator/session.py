"""The context in which a test has a simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from simulated_accelerator import device_module, kernels, process_group
from simulated_accelerator import simulator as simulation
from simulated_accelerator.simulator import Simulator

__all__ = ["simulated_device"]


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
    device_module.register()
    kernels.register()
    process_group.register()
    simulator = Simulator(seed, late)
    simulation.enter(simulator)
    try:
        yield simulator
        simulator.run_all()
    finally:
        simulation.leave(simulator)
