"""Registers device "sim" with torch, once per process."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from simulated_accelerator import simulator as simulation
from simulated_accelerator import streams

__all__ = ["NAME", "register"]

NAME = "sim"


class _Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[attr-defined]
    def is_available(self) -> bool:
        return simulation.is_active()

    def has_primary_context(self, index: int) -> bool:
        return simulation.is_active()

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[attr-defined]
    def __init__(self) -> None:
        super().__init__()
        self._type = torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]

    def type_(self) -> Any:
        return self._type


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0):
        raise RuntimeError(f"invalid device {device!r}: the simulated device has index 0")


class _Module(types.ModuleType):
    """What ``torch.get_device_module("sim")`` returns: the part of ``torch.cuda`` that programs use."""

    Stream, Event = streams.Stream, streams.Event
    current_stream, default_stream = (
        staticmethod(streams.current_stream),
        staticmethod(streams.default_stream),
    )
    stream, set_stream = staticmethod(streams.stream), staticmethod(streams.set_stream)
    synchronize = staticmethod(streams.synchronize)
    set_device = staticmethod(_set_device)
    is_available = staticmethod(simulation.is_active)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1 if simulation.is_active() else 0

    @staticmethod
    def is_initialized() -> bool:
        return simulation.is_active()

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed(seed: int) -> None:
        simulation.active().random_seeds = int(seed) << 20

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        simulation.active().random_seeds = int(seed) << 20

    @staticmethod
    def get_rng_state(device: Any = NAME) -> Tensor:
        return torch.tensor([simulation.active().random_seeds & (2**63 - 1)]).view(torch.uint8).clone()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = NAME) -> None:
        simulation.active().random_seeds = int(state.view(torch.int64).item())


_kept: list[Any] = []  # torch holds the C++ parts alone


def register() -> None:
    """Register the device; a second call changes nothing."""
    if _kept:
        return
    module, hooks, guard = _Module(NAME), _Hooks(), _Guard()
    _kept.extend((module, hooks, guard))
    _setup_privateuseone_for_python_backend(NAME, module, hooks, guard)
