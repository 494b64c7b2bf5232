"""A simulated accelerator, device "sim": finds missing waits and host synchronisations where there is no GPU.

    with simulated_device(seed=3) as simulator:
        model = net.to("sim")
        step(model)                                   # queued; runs late, in a random legal order
        assert simulator.synchronisations == []

Operations return at once and run on the CPU at random moments, or when the host waits. Memory that nobody has written
yet, or that was freed, is NaN. ``torch.get_device_module("sim")`` has streams and events as ``torch.cuda`` has.
"""

from __future__ import annotations

from simulated_accelerator import device_module, kernels
from simulated_accelerator.host_waits import HostWait
from simulated_accelerator.queues import DeviceError
from simulated_accelerator.simulator import Simulator, simulated_device

__all__ = ["DeviceError", "HostWait", "Simulator", "simulated_device"]

device_module.register()
kernels.register()
