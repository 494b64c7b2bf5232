"""The optimizers that use up a sharded model's gradients, each those of its own parameters."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from paceline.parallel.buckets.grad_slot import GradSlot

__all__ = ["GradientConsumers"]


class GradientConsumers:
    """Which optimizer updates which parameters.

    Args:
        slots: the model's trainable parameters.
    """

    def __init__(self, slots: Sequence[GradSlot]) -> None:
        self._slots = {id(slot.param): slot for slot in slots}
        self._held: WeakKeyDictionary[torch.optim.Optimizer, set[int]] = WeakKeyDictionary()
        self._latest: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def fits_buckets(self, costs: Mapping[int, float | None]) -> bool:
        """Return whether existing buckets have each of these parameters whole where it has a cost."""
        return all(
            (self._slots[key].update_cost is None) == (cost is None)
            for key, cost in costs.items()
            if key in self._slots
        )

    def assign(
        self, optimizer: torch.optim.Optimizer, costs: Mapping[int, float | None], *, built: bool
    ) -> None:
        """Let `optimizer` update parameters from now on.

        Args:
            optimizer: uses up their gradients.
            costs: by id of the parameter, of its update by the one rank that owns it; None: it may be cut.
            built: there are buckets, which stay as they are.
        """
        self._held[optimizer] = set(costs)
        self._latest.update(dict.fromkeys(costs, weakref.ref(optimizer)))
        slots = [self._slots[key] for key in costs if key in self._slots]
        if built or not slots:
            return
        number = min(slot.index for slot in slots)
        for slot in slots:
            slot.consumer, slot.update_cost = number, costs[id(slot.param)]

    def taken_over(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the id of a parameter of `optimizer` that belongs to one that was built later; None: there is none."""
        for key in self._held.get(optimizer, set()):
            latest = self._latest[key]()
            if latest is not None and latest is not optimizer:
                return key
        return None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in the order in which they were built."""
        return list(self._held)

    def slots_of(self, optimizer: torch.optim.Optimizer) -> list[GradSlot]:
        """Return the parameters that `optimizer` updates."""
        held = self._held.get(optimizer, set())
        return [slot for key, slot in self._slots.items() if key in held]

    @property
    def disjoint(self) -> bool:
        """Whether no parameter is updated by two optimizers."""
        counts = Counter(key for held in self._held.values() for key in held)
        return all(count == 1 for count in counts.values())

    def others_wait(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether there is a gradient that another optimizer has still to use."""
        used = {key for key, slot in self._slots.items() if slot.used}
        return any(each is not optimizer and used & held for each, held in self._held.items())
