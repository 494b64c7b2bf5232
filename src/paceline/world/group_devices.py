"""Which types of device a process group serves, by which backend, and on which device its control messages are.

torch makes groups of one backend for several types of device (``"gloo"``), of one per type (``"cpu:gloo,cuda:nccl"``),
and without a name of the accelerator's backend alone; `torch.distributed.get_backend` then returns ``"undefined"``.
"""

from __future__ import annotations

import contextlib
import os
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.errors import WorldError
from paceline.world.environment import find_launcher

__all__ = ["backend_name", "group_device", "queues_on_streams", "served_backends"]

_CPU = torch.device("cpu")
_used_devices: WeakKeyDictionary[ProcessGroup, torch.device] = WeakKeyDictionary()
"""The accelerator of each group's latest message."""


def default_group() -> ProcessGroup | None:
    """Return the default group; None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def backend_name(group: ProcessGroup | None = None) -> str:
    """Return the name of the group's backend, such as ``"nccl"``; if it has several, as ``"cpu:gloo,cuda:nccl"``."""
    backends = _configured_backends(group)
    names = set(backends.values())
    return names.pop() if len(names) == 1 else ",".join(f"{kind}:{name}" for kind, name in backends.items())


def served_backends(group: ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend by which the group serves each type of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    place = default_group() if group is None else group
    backends = _configured_backends(group)
    if not isinstance(place, ProcessGroup) or type(place) is ProcessGroup:
        return backends
    # a group written in Python serves accelerators by groups inside it, where torch has them
    inside = {each.type: place._get_backend(each).name() for each in place._device_types}
    own = {kind: name for kind, name in backends.items() if kind == "cpu" or queues_on_streams(name)}
    return inside | own


def _configured_backends(group: ProcessGroup | None) -> dict[str, str]:
    """Return the backend of each type of device, as torch was configured to make the group."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}


def queues_on_streams(backend: str) -> bool:
    """Return whether collectives run on streams of an accelerator, as NCCL's, in the order in which they are called.

    Backends for accelerators alone do; those for the CPU too (gloo, MPI) have the host move the data.

    Args:
        backend: a name, or as ``"cpu:gloo,cuda:nccl"``: whether one of them does.

    Example:
        >>> queues_on_streams("cpu:gloo,cuda:nccl"), queues_on_streams("gloo")
        (True, False)
    """
    names = [pair.rpartition(":")[2] for pair in backend.split(",")]
    return any("cpu" not in dist.Backend.backend_capability.get(name, ["cpu"]) for name in names)


def group_device(group: ProcessGroup | None, device: torch.device = _CPU) -> torch.device:
    """Return the device on which `group` takes a small message that is on `device`.

    That is `device` where the group serves its type, and else the CPU if the group serves it. Otherwise it is an
    accelerator: the one bound to the group (``init_process_group(device_id=...)``), or of the group's latest message,
    or this process's, which without ``set_device`` is the one with the number of its local rank.
    """
    place = default_group() if group is None else group
    if place is None:
        return device
    kinds = list(served_backends(group))
    if device.type in kinds:
        if device.type != "cpu":
            _used_devices[place] = device
        return device
    if "cpu" in kinds:
        return _CPU
    for known in (place, default_group()):
        if known is not None:
            for found in (getattr(known, "bound_device_id", None), _used_devices.get(known)):
                if found is not None and found.type in kinds:
                    return found
    return _device_of_process(kinds[0])


def _device_of_process(kind: str) -> torch.device:
    """Return the current device, or where the program may not have set it, that of the local rank."""
    module = torch.get_device_module(kind)
    current, local_rank = module.current_device(), ""
    with contextlib.suppress(WorldError):
        launcher = find_launcher(os.environ)
        local_rank = os.environ.get(launcher.local_rank, "") if launcher is not None else ""
    if current == 0 and local_rank.isdecimal() and int(local_rank) < module.device_count():
        return torch.device(kind, int(local_rank))
    return torch.device(kind, current)
