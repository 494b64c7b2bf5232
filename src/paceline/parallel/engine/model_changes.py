"""Finds parameters that were added, replaced, frozen or thawed since their model was wrapped.

Each rank sends a digest of what it found in the round status. Ranks that differ all raise, as do ranks that agree on a
change after which gradients would not be synchronised. So no rank waits for one that stopped alone.

[Note: cost] Modules are walked only after a module or parameter was registered anywhere in the process, or if a
parameter without a gradient is no longer where it was. Only parameters without a gradient may be frozen.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.errors import UnsyncedGradients
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import verify_same

__all__ = ["HARMLESS", "ModelWatch", "digest_of", "raise_for_changes"]

HARMLESS = "frozen"
"""A change after which gradients are still synchronised, if all ranks made it."""

_counter = itertools.count(1)
_registrations = 0
_installed = False


def _count_registration(*_: Any) -> None:
    global _registrations
    _registrations = next(_counter)


class ModelWatch:
    """Finds parameters that a module did not have when this was made.

    Args:
        module: the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        global _installed
        if not _installed:
            register_module_parameter_registration_hook(_count_registration)
            register_module_module_registration_hook(_count_registration)
            _installed = True
        self._module = module
        self._names = {name for name, _ in module.named_parameters()}
        self._known = {id(param): param for param in module.parameters()}
        self._owners = {
            id(param): (owner, key)
            for owner in module.modules()
            for key, param in owner._parameters.items()
            if param is not None
        }
        self._seen = _registrations
        self.added: dict[str, str] = {}
        """What happened to trainable parameters that the module did not have, by name."""
        self.ignored: Collection[str] = ()
        """Names of parameters that are not synchronised, and may change."""
        self.added_frozen: list[tuple[str, torch.nn.Parameter]] = []
        """Parameters that it did not have and that are not trained, since `find` was called."""

    def find(self, idle: Iterable[torch.nn.Parameter], passing: Callable[[], Collection[int]]) -> None:
        """Set `added` and `added_frozen`.

        Args:
            idle: parameters without a gradient.
            passing: returns ids of parameters that stand in the module for others for a while.
        """
        gone = [id(param) for param in idle if not self._in_place(param)]
        if not gone and self._seen == _registrations:
            return
        self._seen = _registrations
        for each in gone:
            del self._owners[each]
        self.added = {}
        stand_ins = passing()
        for name, param in self._module.named_parameters():
            if id(param) in self._known or id(param) in stand_ins or name in self.ignored:
                continue
            if param.requires_grad:
                self.added[name] = "replaced" if name in self._names else "added"
            else:
                self._known[id(param)] = param
                self.added_frozen.append((name, param))

    def _in_place(self, param: torch.nn.Parameter) -> bool:
        owner, key = self._owners.get(id(param), (None, ""))
        return owner is None or owner._parameters.get(key) is param


def digest_of(changes: Mapping[str, str]) -> int:
    """Return 16 bits that tell changes of one rank from those of another; 0 for none."""
    return (zlib.crc32(repr(sorted(changes.items())).encode()) & 0xFFFF) or 1 if changes else 0


def raise_for_changes(changes: Mapping[str, str], names: Iterable[str], comm: Comm, step: int) -> None:
    """Raise if ranks differ in their changes, or gradients would not be synchronised; all ranks call this.

    Args:
        changes: of this rank: what happened to each parameter.
        names: of all parameters of the model.
        comm: the ranks.
        step: for the message.

    Raises:
        MismatchError: ranks differ; names the first parameter and the ranks.
        UnsyncedGradients: parameters were added, replaced, thawed or converted on all ranks.
    """
    every = sorted({*names, *changes})
    facts = [f"parameter {name!r} {changes.get(name, 'unchanged')}" for name in every]
    remedy = "change a wrapped model in the same way on every rank"
    verify_same(facts, "the model, since it was wrapped,", comm.group, remedy=remedy)
    refused = {name: change for name, change in changes.items() if change != HARMLESS}
    if refused:
        listed = [f"{name!r} was {change}" for name, change in refused.items()]
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        raise UnsyncedGradients(
            f"parameter {', '.join(listed[:3])}{more}, after the model was wrapped: its gradients are not synchronised",
            rank=comm.rank,
            step=step,
            remedy="wrap the model again (DataParallel(model.module)), and build its optimizer again",
        )
