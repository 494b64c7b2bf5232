"""Which parameters are synchronised together, and at which local steps: fragments of the model, one after another.

With one fragment, all parameters are sent after every H-th step at once. With P fragments each is still sent every H
steps, but one every H/P, so the network carries a P-th as much at a time and all the time (Streaming DiLoCo,
arXiv 2501.18512 §2.1). Fragment p has the layers p, p + P, p + 2P …: neighbours are never sent together.

    H = 6, P = 3   steps   1  2  3  4  5  6  7  8  9 10 11 12
                   sent          0     1     2     0     1     2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SyncSchedule", "layers_of", "split_into_fragments"]


@dataclass(frozen=True)
class SyncSchedule:
    """When fragments are sent and merged.

    Attributes:
        every: H, local steps between two sendings of a fragment.
        fragments: P, at most H.
        delay: τ, local steps from sending to merging, below H.

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> SyncSchedule(every=6, fragments=3, delay=1).sent_at(4), SyncSchedule(6, 3, 1).merged_at(5)
        (1, 1)
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}", remedy=f"give a whole number of {least} or more")
        if self.fragments > self.every:
            raise UsageError(
                f"fragments={self.fragments} with every={self.every}: some would be sent at the same step",
                remedy="give at most as many fragments as steps between two synchronisations",
            )
        if self.delay >= self.every:
            raise UsageError(
                f"delay={self.delay} with every={self.every}: a fragment would be sent again before it is merged",
                remedy=f"give a delay of 0 to {self.every - 1} steps",
            )

    def fragment_sent_at(self, step: int) -> int | None:
        """Return the fragment that is sent after local step `step`, counted from 1."""
        return self._fragment_at.get(step % self.every) if step > 0 else None

    def steps_until_send(self, step: int) -> int:
        """Return how many steps after local step `step` a fragment is sent next, 1 or more."""
        if self.fragments == 1:
            return self.every - step % self.every
        return 1 + min((place - step - 1) % self.every for place in self._fragment_at)

    @cached_property
    def _fragment_at(self) -> dict[int, int]:
        """Fragments, by the place in the cycle of `every` steps at which they are sent."""
        return {
            (fragment + 1) * self.every // self.fragments % self.every: fragment
            for fragment in range(self.fragments)
        }

    def send_step(self, number: int) -> int:
        """Return the local step after which the sending of this number is due, counted from 0."""
        cycle, fragment = divmod(number, self.fragments)
        return cycle * self.every + (fragment + 1) * self.every // self.fragments

    def fragment_merged_at(self, step: int) -> int | None:
        """Return the fragment that is merged after local step `step`, before one is sent."""
        sent = step - self.delay
        return self.fragment_sent_at(sent) if sent > 0 else None


def layers_of(module: nn.Module) -> list[list[str]]:
    """Return the names of the trained parameters, layer by layer, in registration order.

    A layer is a member of a ``ModuleList`` or ``Sequential`` (the outermost one) or, outside of them, a child of the
    module, or a parameter of its own.
    """
    from torch import nn

    listed = [
        name for name, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.Sequential)
    ]
    layers: dict[str, list[str]] = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            layers.setdefault(_layer(name, listed), []).append(name)
    return list(layers.values())


def _layer(name: str, listed: Sequence[str]) -> str:
    """Return what the layer of parameter `name` is called; the lists come outermost first."""
    for each in listed:
        prefix = f"{each}." if each else ""
        if name.startswith(prefix):
            return prefix + name.removeprefix(prefix).partition(".")[0]
    return name.partition(".")[0]


def split_into_fragments(layers: Sequence[Sequence[str]], fragments: int) -> list[list[str]]:
    """Return the parameters of each fragment.

    Raises:
        UsageError: there are more fragments than layers.

    Example:
        >>> strided([["a"], ["b.w", "b.b"], ["c"]], 2)
        [['a', 'c'], ['b.w', 'b.b']]
    """
    if fragments > len(layers):
        raise UsageError(
            f"fragments={fragments}, but the model has {len(layers)} layers",
            remedy=f"give at most {len(layers)} fragments",
        )
    return [[name for layer in layers[first::fragments] for name in layer] for first in range(fragments)]
