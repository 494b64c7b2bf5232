"""Selects the device of a rank and the backend that fits it."""

from __future__ import annotations

import os
import re
from typing import Any

from paceline.errors import UsageError, WorldError, unknown

__all__ = ["DEVICE_TYPES", "accelerator_backend", "check_backend", "choose_device"]

DEVICE_TYPES = ("cpu", "cuda", "xpu")
"""The types of device that command lines offer; `choose_device` takes any that torch has."""

_CPU_BACKENDS = ("paceline", "gloo", "mpi4py")
_WITH_FALLBACK = ("paceline", "mpi4py")  # by the accelerator's own backend

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The variables in which a launcher limits the devices that a rank sees."""


def check_backend(backend: str) -> None:
    """Raise `UsageError` unless `backend` is for the CPU or for an accelerator that torch knows."""
    known = [*_CPU_BACKENDS, *_accelerator_backends()]
    if backend not in known:
        raise unknown("backend", backend, known)


def accelerator_backend(kind: str) -> str:
    """Return torch's backend for a type of accelerator; empty for the CPU, and where none takes its memory."""
    import torch.distributed as dist

    name = (
        ""
        if kind == "cpu" or not dist.is_available()
        else dist.Backend.default_device_backend_map.get(kind, "")
    )
    return name if name and kind in dist.Backend.backend_capability.get(name, []) else ""


def choose_device(
    device: str | None, backend: str | None, local_rank: int, local_size: int
) -> tuple[str, str]:
    """Return the device (``"cpu"``, ``"cuda:<index>"`` or of another accelerator) and the backend of a rank.

    Without `device`, the accelerator is used (CUDA first) if there is one and the backend is not one for the CPU. If a
    launcher shows each rank one GPU only (CUDA_VISIBLE_DEVICES), that is GPU 0 for each. The backend is ``"none"`` if
    torch has none for the device.

    Raises:
        WorldError: an accelerator is requested and absent, or the node has fewer of them than ranks.
        UsageError: `device` is not a device, or `backend` does not support it.
    """
    kind, index = _parse(device)
    only = _accelerator_backends().get(backend or "", "")
    kind = kind or only or ("cpu" if backend in _CPU_BACKENDS else _default_kind())
    own = accelerator_backend(kind)
    if kind == "cpu":
        if only:
            needed = "GPUs" if only == "cuda" else f"{only.upper()} devices"
            raise UsageError(
                f"backend {backend!r} needs {needed}, but device is 'cpu'",
                remedy="use backend='paceline' on CPU",
            )
        return "cpu", backend or "paceline"
    if index is not None:
        number = index
    else:  # this rank's device is that of its local rank, or 0 if it sees only one
        limited = local_size > 1 and _VISIBLE.get(kind, "") in os.environ
        number = 0 if limited and _module(kind).device_count() == 1 else local_rank
    _check_present(kind, number, f"device {device!r}" if device else f"backend {backend!r}")
    if backend is not None and not _serves(backend, kind):
        raise UsageError(
            f"backend {backend!r} does not serve device {device!r}",
            remedy=f"use backend={own!r}"
            if own
            else "torch.distributed has no backend for it: use device='cpu'",
        )
    return f"{kind}:{number}", backend or own or "none"


def _parse(device: Any) -> tuple[str, int | None]:
    """Return type and index of a device; an empty type and None if not given."""
    if device in (None, ""):
        return "", None
    found = re.fullmatch(r"cpu|([a-z]+)(?::(\d+))?", device) if isinstance(device, str) else None
    if found is None or not (device == "cpu" or _module(found[1])):
        raise UsageError(
            f"unknown device {device!r}",
            remedy="valid: cpu, cuda, cuda:<index>, and torch's other accelerators (xpu …) likewise",
        )
    return found[1] or "cpu", None if found[2] is None else int(found[2])


def _module(kind: str) -> Any:
    """Return torch's module of a type of accelerator; None if torch does not know it."""
    import torch

    try:
        return None if kind == "cpu" else torch.get_device_module(kind)
    except RuntimeError:
        return None


def _default_kind() -> str:
    """Return the accelerator's type if there is one whose ranks can communicate, else ``"cpu"``."""
    from paceline.world.accelerator import find_accelerator

    found = find_accelerator()
    return found if found is not None and accelerator_backend(found) else "cpu"


def _accelerator_backends() -> dict[str, str]:
    """Return the type of device of each backend that is for one type of accelerator alone."""
    import torch.distributed as dist

    if not dist.is_available():
        return {}
    capability = dist.Backend.backend_capability
    return {name: kinds[0] for name, kinds in capability.items() if len(kinds) == 1 and kinds[0] != "cpu"}


def _serves(backend: str, kind: str) -> bool:
    """Return whether `backend` takes memory of an accelerator of type `kind`."""
    import torch.distributed as dist

    if backend in _WITH_FALLBACK:
        return bool(accelerator_backend(kind))
    return kind in dist.Backend.backend_capability.get(backend, [])


def _check_present(kind: str, number: int, requested: str) -> None:
    import torch

    module, label = _module(kind), kind.upper()
    if module is None or not module.is_available():
        known = hasattr(torch.version, kind)
        missing = known and getattr(torch.version, kind) is None
        reason = f"this PyTorch is built without {label}" if missing else "no GPU can be used here"
        raise WorldError(
            f"{requested} requires {label}, but {reason}",
            remedy="use device='cpu', or see `paceline doctor`",
        )
    count = module.device_count()
    if number >= count:
        name = "GPU" if kind == "cuda" else label
        raise WorldError(
            f"this rank should use {name} {number}, but the node has {count}",
            remedy=f"start at most {count} ranks on this node, or use device='cpu'",
        )
