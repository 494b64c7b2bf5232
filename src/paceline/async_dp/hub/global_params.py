"""The centre that all workers of a star share: its fragments, how updates get in and copies get out.

Whatever is done here depends on numbers that the journal holds, so doing it again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.async_dp.float_rows import FloatRow, as_tensor, fastest_form, l2_norm
from paceline.async_dp.hub.outer_merge import HubOptimizer, MergedFragment
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.errors import CheckpointError
from paceline.transport.envelope import Bytes

__all__ = ["GlobalParams"]


class GlobalParams:
    """All fragments that one hub keeps.

    Args:
        layout: of the model. outer: how updates are taken in. down: how copies are packed.
        mine: the fragments that this hub keeps; others are another hub's.

    Attributes:
        of_fragment: the centre of each.
    """

    def __init__(self, layout: ParameterLayout, outer: HubOptimizer, down: str, mine: range) -> None:
        self.layout = layout
        self.of_fragment = {
            number: MergedFragment(
                torch.zeros(layout.fragments[number].numel), layout.fragments[number].trained, outer
            )
            for number in mine
        }
        self._down = down
        self._packings: dict[tuple[int, str], UpdateCodec] = {}
        self._theta = {number: fastest_form(each.theta) for number, each in self.of_fragment.items()}
        self._scratch = {
            number: fastest_form(torch.empty_like(each.theta)) for number, each in self.of_fragment.items()
        }
        self._copies: dict[int, tuple[int, Bytes]] = {}

    @property
    def revision(self) -> int:
        """Updates taken in so far, by all fragments."""
        return sum(centre.revision for centre in self.of_fragment.values())

    @property
    def revisions(self) -> dict[int, int]:
        """Updates taken in so far, by fragment."""
        return {number: centre.revision for number, centre in self.of_fragment.items()}

    def nbytes(self, fragment: int, codec: str) -> int:
        """Return the size of a packet."""
        return self._packing(fragment, codec).nbytes

    def unpacked(self, fragment: int, codec: str, packet: Bytes) -> tuple[FloatRow, float]:
        """Return the numbers of a packet, which are valid until the next one, and their norm.

        Raises:
            DamagedEnvelope: it has not as many bytes as it must have.
        """
        into = self._scratch[fragment]
        self._packing(fragment, codec).unpack(packet, into)
        return into, l2_norm(into)

    def take(self, fragment: int, delta: FloatRow, weight: float, workers: int) -> int:
        """Take in an update; return the fragment's new revision."""
        centre = self.of_fragment[fragment]
        centre.take(delta, weight, workers)
        return centre.revision

    def copy(self, fragment: int) -> tuple[int, str, Bytes]:
        """Return revision, codec and bytes of a fragment as it is, packed once for each revision."""
        centre = self.of_fragment[fragment]
        held = self._copies.get(fragment)
        if held is None or held[0] != centre.revision:
            packet = self._packing(fragment, self._down).pack(self._theta[fragment])
            held = self._copies[fragment] = centre.revision, packet
        return held[0], self._down, held[1]

    def begin(self, fragment: int, numbers: FloatRow) -> None:
        """Have a fragment begin with these numbers."""
        self.of_fragment[fragment].theta.copy_(as_tensor(numbers))
        self._copies.pop(fragment, None)

    def _packing(self, fragment: int, codec: str) -> UpdateCodec:
        key = fragment, codec
        if key not in self._packings:
            self._packings[key] = UpdateCodec(self.layout.fragments[fragment], codec)
        return self._packings[key]

    # ------------------------------------------------------------------ over a restart

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers, by name."""
        return {
            f"{number}.{name}": tensor
            for number, centre in self.of_fragment.items()
            for name, tensor in centre.tensors().items()
        }

    def facts(self) -> dict[str, Any]:
        """Return all else that is to be known to go on."""
        return {
            "revisions": {str(number): each.revision for number, each in self.of_fragment.items()},
            "counts": {str(number): each.count for number, each in self.of_fragment.items()},
        }

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointError: it is of another layout or outer optimizer.
        """
        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise CheckpointError(
                f"the snapshot holds {', '.join(sorted(tensors))}; this hub keeps {', '.join(sorted(own))}",
                remedy="start the hub with the same outer optimizer and shards as before",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for number, centre in self.of_fragment.items():
            centre.revision = int(facts["revisions"][str(number)])
            centre.count = int(facts["counts"][str(number)])
        self._copies.clear()
