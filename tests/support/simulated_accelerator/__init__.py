"""A simulated accelerator, device "sim": finds missing waits and host synchronisations where there is no GPU.

    with simulated_device(seed=3) as simulator:
        model = net.to("sim")
        step(model)                                   # queued; runs late, in a random legal order
        assert simulator.synchronisations == []

Operations return at once and run on the CPU at random moments, or when the host waits. Memory that nobody has written
yet, or that was freed, is NaN. ``torch.get_device_module("sim")`` has streams and events as ``torch.cuda`` has, and
backend "sim:simccl" of ``torch.distributed`` has NCCL's manners.

The device is registered with torch until the process ends. That has to be before the first backward pass of the
process, which then can't fork any more. So simulations run in processes of their own: the ranks of the fixture
`simulated_pool`. All tests of a folder run there if its conftest.py imports `pytest_pyfunc_call` from
`simulated_accelerator.isolated_tests`.
"""

from __future__ import annotations

from simulated_accelerator.host_waits import HostWait
from simulated_accelerator.queues import DeviceError
from simulated_accelerator.session import register, simulated_device, simulated_world
from simulated_accelerator.simulator import Simulator

__all__ = ["DeviceError", "HostWait", "Simulator", "register", "simulated_device", "simulated_world"]
