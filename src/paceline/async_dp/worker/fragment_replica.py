"""One fragment on a worker's side: what it began from, what it sent, and what becomes of its parameters.

    snapshot   w_s ← w                     the training thread, when the fragment is due
    pack       Δ = θ − w_s, packed         the communication thread; error feedback keeps what packing leaves out
    arrive     θ' ← what came              the communication thread
    take       w ← θ' + (w − w_s), θ ← θ'  the training thread: the delta rule

So the training thread copies and adds, and never packs, waits or holds a lock: the two threads hand a fragment to one
another by `state`, and only who has it touches its buffers.

What was learnt since w_s is kept by the delta rule. It is not when the whole is to be taken, w ← θ': when a worker
joins, when it is replaced, when its update was refused as harmful.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import torch
from torch import Tensor

from paceline.async_dp.float_rows import FloatRow, as_tensor, copy_into, fastest_form, subtract
from paceline.async_dp.protocol.parameter_layout import FragmentLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.transport.envelope import Bytes

__all__ = ["FragmentReplica", "FragmentState"]


class FragmentState(Enum):
    """Who has a fragment."""

    HERE = auto()
    """The training thread; nothing is under way."""
    OUT = auto()
    """The communication thread: an update or a fetch is under way."""
    READY = auto()
    """The training thread may take in what came."""


class FragmentReplica:
    """A fragment of one worker.

    Args:
        fragment: what lies where. tensors: the model's, by name. packing: of updates.

    Attributes:
        state: who has it.
        base: θ, what the worker began from; revision: of it, −1 before there is one.
        whole: what came is to be taken as it is; anew: and the optimizer's state is of no more use.
        came_revision: of what came last.
        offered: whether w_s was sent; else it only fetches.
        round: of the update that is out. due: step at which what comes is taken in.
        next_codec: how updates are packed from the next one on, None: as they are.
        samples, steps: learnt since the last snapshot.
    """

    def __init__(self, fragment: FragmentLayout, tensors: Mapping[str, Tensor], packing: UpdateCodec) -> None:
        self.fragment, self.packing = fragment, packing
        model = [tensors[place.name].detach() for place in fragment.places]
        self._alike = [each.dtype == torch.float32 and each.device.type == "cpu" for each in model]
        self._model = [
            fastest_form(each) if alike else each for each, alike in zip(model, self._alike, strict=True)
        ]
        flats = [torch.zeros(fragment.numel) for _ in range(3)]
        self.base, self._sent, self._came = map(fastest_form, flats)
        self._base_parts, self._sent_parts, self._came_parts = map(self._parts, flats)
        self._packings: dict[str, UpdateCodec] = {}
        self.came_revision = -1
        self.state, self.revision, self.offered = FragmentState.HERE, -1, False
        self.whole, self.anew = False, True
        self.next_codec: str | None = None
        self.round, self.due, self.samples, self.steps = 0, 0, 0.0, 0

    # The training thread.

    def snapshot(self) -> None:
        """Remember the parameters as they are: w_s."""
        for numbers, sent in zip(self._model, self._sent_parts, strict=True):
            copy_into(numbers, sent)
        self.samples, self.steps = 0.0, 0

    def take(self) -> None:
        """Take in what came: by the delta rule, or the whole."""
        if self.whole:
            for numbers, came in zip(self._model, self._came_parts, strict=True):
                copy_into(came, numbers)
        else:
            for numbers, came, sent, alike in zip(
                self._model, self._came_parts, self._sent_parts, self._alike, strict=True
            ):
                if alike:
                    numbers -= sent
                    numbers += came
                else:
                    new = as_tensor(numbers).to(as_tensor(came))
                    copy_into(new.sub_(as_tensor(sent)).add_(as_tensor(came)), numbers)
        self.base, self._came = self._came, self.base
        self._base_parts, self._came_parts = self._came_parts, self._base_parts
        self.revision = self.came_revision
        self.whole = False
        self.state = FragmentState.HERE

    def decline(self) -> None:
        """Go on with one's own; what was offered is in the centre, so the next update begins behind it."""
        if self.offered:
            copy_into(self._sent, self.base)
            self.revision = self.came_revision
        self.whole = False
        self.state = FragmentState.HERE

    def swap(self) -> None:
        """Exchange the model's parameters for what came, or back."""
        for numbers, came in zip(self._model, self._came_parts, strict=True):
            kept = as_tensor(numbers).clone()
            copy_into(came, numbers)
            as_tensor(came).copy_(kept)

    # The communication thread.

    def pack(self) -> Bytes:
        """Return the packet of Δ = θ − w_s."""
        if self.next_codec is not None:
            self.packing, self.next_codec = self.packing.with_codec(self.fragment, self.next_codec), None
        subtract(self.base, self._sent, self._came)
        return self.packing.pack(self._came)

    def pack_whole(self) -> Bytes:
        """Return the packet of the parameters as they were at the snapshot, float32."""
        return self.packing_by("fp32").pack(self._sent)

    def arrive(self, revision: int, codec: str, packet: Bytes) -> None:
        """Unpack the centre, or what is to be taken in its place, and hand it to the training thread."""
        self.packing_by(codec).unpack(packet, self._came)
        self.came_revision = revision
        self.state = FragmentState.READY

    def packing_by(self, codec: str) -> UpdateCodec:
        """Return the packing by a codec, without feedback."""
        found = self._packings.get(codec)
        if found is None:
            found = self._packings[codec] = UpdateCodec(self.fragment, codec)
        return found

    def _parts(self, flat: Tensor) -> list[FloatRow]:
        """Return the part of each of the model's tensors, in its shape."""
        parts = [place.of(flat) for place in self.fragment.places]
        return [fastest_form(part) if alike else part for part, alike in zip(parts, self._alike, strict=True)]
