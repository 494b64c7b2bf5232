"""What is synchronised together, and at which local steps: fragments of the model, one after another.

With one fragment, all parameters are due at once after every H-th step. With P fragments each is still due every H
steps, but one every H/P, so the network carries a P-th as much at a time, all the time (Streaming DiLoCo, arXiv
2501.18512 §2.2). Fragment p has the layers p, p + P, p + 2P …: neighbouring layers are never sent together.

Local SGD merges a fragment when it is due, and has sent it τ steps before. These are the steps of Algorithm 2 in that
paper, with the offsets t_p = (p + 1)·H/P − τ. Asynchronous training sends a fragment when it is due.

    H = 6, P = 3, τ = 1   steps    1  2  3  4  5  6  7  8  9 10 11 12
                          due         0     1     2     0     1     2
                          sent     0     1     2     0     1     2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.parallel.compression.compression_config import Compression

__all__ = ["SyncSchedule", "check_synchronisable", "layers_of", "split_into_fragments"]


@dataclass(frozen=True)
class SyncSchedule:
    """Local steps at which fragments are sent and merged.

    Attributes:
        every: H, local steps from one time that a fragment is due to the next.
        fragments: P, at most H.
        delay: τ, local steps from sending to merging, below H.

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> schedule = SyncSchedule(every=6, fragments=3, delay=1)
        >>> schedule.fragment_sent_at(3), schedule.fragment_due_at(4)
        (1, 1)
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}", remedy=f"give an integer of {least} or more")
        if self.fragments > self.every:
            raise UsageError(
                f"fragments={self.fragments} with every={self.every}: some would be sent at the same step",
                remedy="give at most one fragment per step between two synchronisations",
            )
        if self.delay >= self.every:
            raise UsageError(
                f"delay={self.delay} with every={self.every}: a fragment would be sent again before it is merged",
                remedy=f"give a delay of 0 to {self.every - 1} steps",
            )

    def fragment_due_at(self, step: int) -> int | None:
        """Return the fragment that is due after local step `step`, counted from 1."""
        return self._fragment_at.get(step % self.every) if step > 0 else None

    def fragment_sent_at(self, step: int) -> int | None:
        """Return the fragment that is sent after local step `step`, `delay` steps before it is due."""
        return self.fragment_due_at(step + self.delay) if step > 0 else None

    def steps_until_due(self, step: int) -> int:
        """Return the steps from local step `step` until a fragment is due, 1 or more."""
        if self.fragments == 1:
            return self.every - step % self.every
        return 1 + min((offset - step - 1) % self.every for offset in self._fragment_at)

    def merge_step(self, number: int) -> int:
        """Return the local step after which merge number `number`, counted from 0, is due."""
        return self._due_step(self.first_sent + number)

    @cached_property
    def first_sent(self) -> int:
        """The fragment that is sent first: earlier ones would have had to be sent before the first step."""
        return next(fragment for fragment in range(self.fragments) if self._due_step(fragment) > self.delay)

    def _due_step(self, number: int) -> int:
        cycle, fragment = divmod(number, self.fragments)
        return cycle * self.every + (fragment + 1) * self.every // self.fragments

    @cached_property
    def _fragment_at(self) -> dict[int, int]:
        """Fragments by the offset in the cycle of `every` steps at which they are due."""
        return {self._due_step(fragment) % self.every: fragment for fragment in range(self.fragments)}


def layers_of(module: nn.Module) -> list[list[str]]:
    """Return the names of the trained parameters, layer by layer, in registration order.

    A layer is a member of a ``ModuleList`` or ``Sequential`` (the outermost one) or, outside of them, a child or a
    parameter of the module.
    """
    from torch import nn

    lists = [
        name for name, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.Sequential)
    ]
    layers: dict[str, list[str]] = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            layers.setdefault(_layer(name, lists), []).append(name)
    return list(layers.values())


def _layer(name: str, lists: Sequence[str]) -> str:
    """Return the name of a parameter's layer; `lists` come outermost first."""
    for each in lists:
        prefix = f"{each}." if each else ""
        if name.startswith(prefix):
            return prefix + name.removeprefix(prefix).partition(".")[0]
    return name.partition(".")[0]


def split_into_fragments(layers: Sequence[Sequence[str]], fragments: int) -> list[list[str]]:
    """Return the parameters of each fragment.

    Raises:
        UsageError: more fragments than layers.

    Example:
        >>> split_into_fragments([["a"], ["b.w", "b.b"], ["c"]], 2)
        [['a', 'c'], ['b.w', 'b.b']]
    """
    if fragments > len(layers):
        raise UsageError(
            f"fragments={fragments}, but the model has {len(layers)} layers",
            remedy=f"give at most {len(layers)} fragments",
        )
    return [[name for layer in layers[first::fragments] for name in layer] for first in range(fragments)]


def check_synchronisable(
    user: str, params: Mapping[str, Tensor], compression: Compression | None, *, sharded: bool = False
) -> list[str]:
    """Return the names of the trained parameters that are exempt from compression, once all can be averaged.

    Args:
        user: what synchronises them, for messages.
        params: of the model, by name.
        compression: of what is sent.
        sharded: allow sharded parameters, which the caller gathers.

    Raises:
        UsageError: a parameter can't be averaged or compressed; it is named.
    """
    from torch.distributed.tensor import DTensor

    trained = {name: param for name, param in params.items() if param.requires_grad}
    if not trained:
        raise UsageError(f"{user}: the model has no trainable parameter", remedy="unfreeze some")
    device = next(iter(trained.values())).device
    for name, param in trained.items():
        refused = isinstance(param, DTensor) and not sharded
        if refused or not param.is_floating_point():
            kind = "sharded" if refused else str(param.dtype).removeprefix("torch.")
            raise UsageError(
                f"{user}: parameter {name!r} is {kind}",
                remedy="use a model whose ranks hold real, whole parameters",
            )
        if param.device != device:
            raise UsageError(
                f"{user}: parameter {name!r} is on {param.device}, others on {device}",
                remedy="keep the model on one device",
            )
    if compression is None:
        return []
    if compression.name == "powersgd":
        raise UsageError(
            f"{user} with powersgd, which tracks a gradient from step to step",
            remedy="use int4 or int8: pseudo-gradients are sent rarely",
        )
    exempt = [name for name, param in trained.items() if compression.exempts(name, param)]
    for name, param in trained.items():
        if name not in exempt:
            compression.check_supported(name, param)
    return exempt
