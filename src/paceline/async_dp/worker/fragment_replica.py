"""A worker's replica of one fragment: starting parameters, snapshot, and the delta rule for received parameters.

    snapshot         w_s ← w                     training thread, when the fragment is due
    pack             Δ = θ − w_s, packed         communication thread; error feedback keeps the compression error
    receive          θ' ← received parameters    communication thread
    apply_received   w ← θ' + (w − w_s), θ ← θ'  training thread: the delta rule

The training thread only copies and adds; it never packs, waits or takes a lock. The two threads pass a fragment to each
other through `state`, and only its owner touches its buffers.

The delta rule keeps what was learnt since w_s. With `overwrite` that is dropped, w ← θ': when a worker joins, is
replaced, or its update was refused as harmful.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

import torch
from torch import Tensor

from paceline.async_dp.protocol.hub_messages import BULK_KINDS
from paceline.async_dp.protocol.parameter_layout import FragmentLayout
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS, UpdateCodec
from paceline.async_dp.row_arithmetic import FloatRow, as_row, as_tensor, copy_into, subtract
from paceline.transport.envelope import Bytes
from paceline.transport.header_layout import Header

__all__ = ["FragmentReplica", "FragmentState", "packet_limit"]


_HARMLESS = "stale"
_RESET_OPTIMIZER = ("not finite", "exploding", "in quarantine")
"""Reasons of refusal that invalidate the optimizer's state too."""


class FragmentState(Enum):
    """Owner of a fragment's buffers."""

    IDLE = auto()
    """The training thread; no exchange is in progress."""
    EXCHANGING = auto()
    """The communication thread."""
    RECEIVED = auto()
    """The training thread, which may apply what was received."""


class FragmentReplica:
    """A fragment of one worker.

    Args:
        fragment: its layout.
        tensors: the model's, by name.
        codec: of updates.

    Attributes:
        state: which thread owns it.
        base: θ, the parameters that the worker started from.
        revision: of `base`; −1: there is none yet.
        received_revision: of what was received last.
        sent: whether w_s was sent as an update; else it was only for a fetch.
        overwrite: apply received parameters without the delta rule.
        reset_optimizer: with `overwrite`: the optimizer's state is invalid too.
        round: of the update in progress.
        due: step at which received parameters are applied.
        next_codec: name of the codec from the next update on; None: as now.
        samples: since the last snapshot.
        steps: since the last snapshot.
    """

    def __init__(self, fragment: FragmentLayout, tensors: Mapping[str, Tensor], codec: UpdateCodec) -> None:
        self.fragment, self.codec = fragment, codec
        self.bind(tensors)
        flats = [torch.zeros(fragment.numel) for _ in range(3)]
        self.base, self._snapshot, self._received = map(as_row, flats)
        self._base_parts, self._snapshot_parts, self._received_parts = map(self._parts, flats)
        self._codecs: dict[str, UpdateCodec] = {}
        self.state, self.revision, self.received_revision = FragmentState.IDLE, -1, -1
        self.sent, self.overwrite, self.reset_optimizer = False, False, True
        self.next_codec: str | None = None
        self.round, self.due, self.samples, self.steps = 0, 0, 0.0, 0

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors as the model's from now on, of the same types as before."""
        model = [tensors[each.name].detach() for each in self.fragment.tensors]
        self._same_type = [each.dtype == torch.float32 and each.device.type == "cpu" for each in model]
        self._model = [
            as_row(each) if same else each for each, same in zip(model, self._same_type, strict=True)
        ]

    def _parts(self, flat: Tensor) -> list[FloatRow]:
        """Return the part of each of the model's tensors, in its shape."""
        parts = [each.view_in(flat) for each in self.fragment.tensors]
        return [as_row(part) if same else part for part, same in zip(parts, self._same_type, strict=True)]

    def note_refusal(self, why: str) -> None:
        """Record that the hub refused the last update: unless it was harmless, what was learnt since is dropped."""
        if not why.startswith(_HARMLESS):
            self.overwrite, self.reset_optimizer = True, why.startswith(_RESET_OPTIMIZER)

    # The training thread.

    def snapshot(self) -> None:
        """Copy the parameters: w_s."""
        for values, part in zip(self._model, self._snapshot_parts, strict=True):
            copy_into(values, part)
        self.samples, self.steps = 0.0, 0

    def apply_received(self) -> None:
        """Apply received parameters, by the delta rule or with `overwrite`."""
        if self.overwrite:
            for values, received in zip(self._model, self._received_parts, strict=True):
                copy_into(received, values)
        else:
            for values, received, part, same in zip(
                self._model, self._received_parts, self._snapshot_parts, self._same_type, strict=True
            ):
                if same:
                    values -= part
                    values += received
                else:
                    new = as_tensor(values).to(as_tensor(received))
                    copy_into(new.sub_(as_tensor(part)).add_(as_tensor(received)), values)
        self.base, self._received = self._received, self.base
        self._base_parts, self._received_parts = self._received_parts, self._base_parts
        self.revision = self.received_revision
        self.overwrite, self.state = False, FragmentState.IDLE

    def discard_received(self) -> None:
        """Keep the worker's own parameters; the next update starts after what was sent, which is merged."""
        if self.sent:
            copy_into(self._snapshot, self.base)
            self.revision = self.received_revision
        self.overwrite, self.state = False, FragmentState.IDLE

    def swap_received(self) -> None:
        """Exchange the model's parameters with the received ones; again to undo it."""
        for values, received in zip(self._model, self._received_parts, strict=True):
            kept = as_tensor(values).clone()
            copy_into(received, values)
            as_tensor(received).copy_(kept)

    # The communication thread.

    def pack(self) -> Bytes:
        """Return the packet of Δ = θ − w_s."""
        if self.next_codec is not None:
            self.codec, self.next_codec = self.codec.with_codec(self.fragment, self.next_codec), None
        subtract(self.base, self._snapshot, self._received)
        return self.codec.pack(self._received)

    def pack_params(self) -> Bytes:
        """Return the packet of the snapshot w_s, float32."""
        return self.codec_of("fp32").pack(self._snapshot)

    def receive(self, revision: int, codec: str, packet: Bytes) -> None:
        """Unpack parameters and pass them to the training thread."""
        self.codec_of(codec).unpack(packet, self._received)
        self.received_revision = revision
        self.state = FragmentState.RECEIVED

    def codec_of(self, name: str) -> UpdateCodec:
        """Return a codec without error feedback."""
        found = self._codecs.get(name)
        if found is None:
            found = self._codecs[name] = UpdateCodec(self.fragment, name)
        return found


def packet_limit(replicas: Mapping[int, FragmentReplica], header: Header) -> int | None:
    """Return the most bytes of a message with this header from a hub; None: it is not expected."""
    if header.kind not in BULK_KINDS:
        return 0
    replica = replicas.get(header.meta.get("fragment", -1))
    if replica is None or header.dtype not in UPDATE_CODECS:
        return None
    return replica.codec_of(header.dtype).nbytes
