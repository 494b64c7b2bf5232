"""One fragment of a model that is synchronised every H local steps: its shared parameters, and how they change.

    send    Δ = θ − w, in one flat buffer; from here on its mean over ranks is under way
    merge   g = Σ nᵢ·Δᵢ / Σ nᵢ has come: the outer optimizer turns θ into θ'; then w ← θ' + (w − w_sent)

θ and the outer momentum are the same on all ranks to the bit. The *delta rule* in `merge` keeps what was learnt
locally while the mean was under way; without a delay there is nothing of the kind, and w ← θ'. With α > 0 a share of
the local parameters stays: w ← α·w + (1 − α)·(θ' + (w − w_sent)).

A rank whose pseudo-gradient is not finite counts as nothing and takes θ': all ranks know who it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.compression.codecs import Codec, RawCodec
from paceline.parallel.compression.compressed_allreduce import AllToAllReduce, PacketHeader
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.engine.comm import Comm
from paceline.parallel.local_sgd.outer_optimizers import OuterOptimizer

__all__ = ["Arrival", "ModelFragment", "Note"]


class Note:
    """What a rank says beside its pseudo-gradient, as bits of a number."""

    REJECTED = 1
    """It was not finite."""
    FINISHED = 2
    """This rank makes no more local steps."""


@dataclass(frozen=True)
class Arrival:
    """What all ranks know of one synchronisation.

    Attributes:
        counts: whether any rank had something to give. rejected: ranks whose pseudo-gradient was not finite.
        finished: whether every rank has made its last local step.
        inner_lr: learning rate of the local optimizers: mean over ranks, by their weights.
    """

    counts: bool
    rejected: tuple[int, ...]
    finished: bool
    inner_lr: float

    @classmethod
    def of(cls, labels: Sequence[PacketHeader]) -> Arrival:
        """Return what the labels of all ranks say."""
        notes, total = [int(label.note) for label in labels], sum(label.weight for label in labels)
        return cls(
            total > 0,
            tuple(rank for rank, note in enumerate(notes) if note & Note.REJECTED),
            all(note & Note.FINISHED for note in notes),
            sum(label.weight * label.rate for label in labels) / total if total else 0.0,
        )


@dataclass(frozen=True)
class _Place:
    """Where a parameter, or a buffer that is averaged, lies in the flat buffers."""

    name: str
    param: Tensor
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of `flat`, in its shape."""
        return flat[self.start : self.start + self.param.numel()].view(self.param.shape)


class ModelFragment:
    """A group of parameters; all ranks make theirs in the same order.

    Args:
        named: the parameters with their names; float32 and less are kept as float32, float64 as it is.
        comm: the ranks. courier: of the same.
        codec: of the pseudo-gradients; None: as they are. exempt: names of those that go as they are all the same.
        averaged: buffers, such as running statistics; of these all ranks take the mean, whatever `outer` is.
        feedback: remember what compression leaves out.
        outer: the outer optimizer.
        keeps_local: whether there is a delay, so that what was sent must be remembered.
        piece_numel: numbers that are compressed and sent together: while one is on the wire, the next is compressed.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        comm: Comm,
        courier: ExchangeThread,
        codec: Codec | None,
        *,
        exempt: Sequence[str] = (),
        averaged: Sequence[tuple[str, Tensor]] = (),
        feedback: bool = False,
        outer: OuterOptimizer,
        keeps_local: bool = False,
        piece_numel: int,
    ) -> None:
        self._comm = comm
        first = named[0][1]
        dtype = torch.float64 if any(param.dtype == torch.float64 for _, param in named) else torch.float32
        raw = RawCodec(dtype)
        plain = [pair for pair in named if codec is None or pair[0] in exempt]
        squeezed = [pair for pair in named if not (codec is None or pair[0] in exempt)]
        self._places: list[_Place] = []
        spans: list[tuple[int, int, Codec]] = []
        start = self._lay_out(squeezed, 0, codec or raw, piece_numel, spans)
        start = self._lay_out(plain, start, raw, piece_numel, spans)
        self._trained, self._split = len(self._places), start
        start = self._lay_out(averaged, start, raw, piece_numel, spans)
        self.theta = torch.zeros(start, dtype=dtype, device=first.device)
        self.momentum = torch.zeros_like(self.theta) if outer.remembers else None
        self._flat = torch.zeros_like(self.theta)  # Δ, then its mean
        self._sent = torch.zeros_like(self.theta) if keeps_local else None
        self.residuals = [
            ErrorFeedback(its, stop - begin, first.device) if feedback and its is not raw else None
            for begin, stop, its in spans
        ]
        self._spans = spans
        self._parcels = (
            [
                AllToAllReduce(comm, self._flat[begin:stop], its, courier, residual, mean=True)
                for (begin, stop, its), residual in zip(spans, self.residuals, strict=True)
            ]
            if comm.size > 1
            else []
        )
        self._label = PacketHeader()
        self._arrival: Arrival | None = None
        self.under_way = False
        self.adopt()

    def _lay_out(
        self,
        named: Sequence[tuple[str, Tensor]],
        start: int,
        codec: Codec,
        piece_numel: int,
        spans: list[tuple[int, int, Codec]],
    ) -> int:
        """Place parameters one behind the other from `start` on, note the pieces, return where it ends."""
        at = start
        for name, param in named:
            self._places.append(_Place(name, param, at))
            at += param.numel()
        unit = self._comm.size * _ALIGN
        piece = max(unit, piece_numel // unit * unit)
        while start < at:
            stop = min(start + piece, start + -(-(at - start) // unit) * unit)
            spans.append((start, stop, codec))
            start = stop
        return start

    # ------------------------------------------------------------------ what it is

    @property
    def sent_nbytes(self) -> int:
        """What one synchronisation has this rank send, headers of the network aside."""
        return sum(parcel.sent_nbytes for parcel in self._parcels)

    @property
    def params(self) -> list[tuple[str, Tensor]]:
        """The parameters with their names, without the buffers that are averaged."""
        return [(place.name, place.param) for place in self._places[: self._trained]]

    def shared(self) -> dict[str, Tensor]:
        """Return the parts of θ by parameter, in their shapes."""
        return {place.name: place.of(self.theta) for place in self._places[: self._trained]}

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a buffer that is laid out like θ, by parameter and averaged buffer."""
        return {place.name: place.of(flat) for place in self._places}

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the parameters as they are for θ."""
        for place in self._places:
            place.of(self.theta).copy_(place.param)

    # ------------------------------------------------------------------ send and merge

    @torch.no_grad()
    def send(self, weight: float, inner_lr: float, *, finished: bool = False) -> bool:
        """Start the exchange of what was learnt since the last one; tell whether it is finite.

        Args:
            weight: how much this rank counts: its samples, or steps. inner_lr: its optimizer's learning rate.
            finished: this rank makes no more local steps.
        """
        for place in self._places:
            torch.sub(place.of(self.theta), place.param, out=place.of(self._flat))
            if self._sent is not None:
                place.of(self._sent).copy_(place.param)
        good = math.isfinite(torch.linalg.vector_norm(self._flat)) or _all_finite(self._flat)
        if not good:
            weight = 0.0
            self._flat.zero_()  # or error feedback would remember it
        note = (0 if good else Note.REJECTED) | (Note.FINISHED if finished else 0)
        self._label = PacketHeader(weight, float(note), inner_lr)
        for parcel in self._parcels:
            parcel.launch(self._label)
        self._arrival = None
        self.under_way = True
        return good

    @torch.no_grad()
    def merge(self, outer: OuterOptimizer, mix: float = 0.0) -> Arrival:
        """Wait for the mean and take it in.

        Args:
            outer: what becomes of it. mix: α, the share of local parameters that stays.
        """
        arrival = self.arrive()
        self.under_way, self._arrival = False, None
        if arrival.counts:
            split, momentum = self._split, self.momentum if outer.remembers else None
            part = None if momentum is None else momentum[:split]
            outer.update(self.theta[:split], self._flat[:split], part, arrival.inner_lr)
            self.theta[split:].sub_(self._flat[split:])
        rejected = self._comm.rank in arrival.rejected
        for place in self._places:
            new, param = place.of(self.theta), place.param
            if self._sent is None or rejected:
                param.copy_(new if mix == 0.0 or rejected else new + mix * (param - new))
                continue
            # In this order it is exactly θ' where nothing was learnt.
            new = (param - place.of(self._sent)).add_(new)
            param.copy_(new if mix == 0.0 else torch.lerp(new, param.to(new.dtype), mix))
        return arrival

    def arrive(self) -> Arrival:
        """Wait until the mean is here, and return what is known of it; may be called again before `merge`."""
        if self._arrival is None:
            for parcel in self._parcels:
                parcel.wait()
            self._arrival = Arrival.of(self._parcels[0].labels if self._parcels else [self._label])
        return self._arrival

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, by parameter; waits for a mean that is under way."""
        state: dict[str, Any] = {"theta": self.by_name(self.theta)}
        if self.momentum is not None:
            state["momentum"] = self.by_name(self.momentum)
        if self.under_way:
            arrival = self.arrive()
            state["mean"] = self.by_name(self._flat)
            state["arrival"] = asdict(arrival)
        return state

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank alone has, by parameter: its parameters, what it sent, what compression left out."""
        state: dict[str, Any] = {"own": {place.name: place.param.detach() for place in self._places}}
        if self.under_way and self._sent is not None:
            state["sent"] = self.by_name(self._sent)
        if any(residual is not None for residual in self.residuals):
            state["left out"] = self.by_name(self._joined_residual())
        return state

    def _joined_residual(self) -> Tensor:
        joined = torch.zeros_like(self.theta)
        for (start, stop, _), residual in zip(self._spans, self.residuals, strict=True):
            if residual is not None:
                joined[start:stop].copy_(residual.residual)
        return joined

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Take up a state.

        Args:
            state: what `state` returned.
            own: what `rank_state` returned on this rank; None: there were other ranks, so this one begins from θ.
        """
        _fill(self.by_name(self.theta), state["theta"])
        if self.momentum is not None and "momentum" in state:
            _fill(self.by_name(self.momentum), state["momentum"])
        start = state["theta"] if own is None else own["own"]
        _fill({place.name: place.param for place in self._places}, start)
        self.under_way = "mean" in state
        self._arrival = None
        if self.under_way:
            _fill(self.by_name(self._flat), state["mean"])
            rejected = tuple(state["arrival"]["rejected"]) if own is not None else ()
            self._arrival = Arrival(**{**state["arrival"], "rejected": rejected})
            if self._sent is not None:
                _fill(self.by_name(self._sent), state["theta"] if own is None else own["sent"])
        if own is not None and "left out" in own:
            joined = torch.zeros_like(self.theta)
            _fill(self.by_name(joined), own["left out"])
            for (start, stop, _), residual in zip(self._spans, self.residuals, strict=True):
                if residual is not None:
                    residual.residual.copy_(joined[start:stop])


_ALIGN = 16
"""Pieces are multiples of this many numbers for each rank, so that views of other dtypes are aligned."""


def _fill(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        place.copy_(values[name])


def _all_finite(flat: Tensor) -> bool:
    """Look at every number: a norm may overflow where none of them is infinite."""
    return bool(torch.isfinite(flat).all())
