"""One fragment of a model that is synchronised every H local steps: its shared parameters θ, and how they change.

    send    Δ = θ − w, in one flat buffer; its mean over ranks is now being computed
    merge   g = Σ nᵢ·Δᵢ / Σ nᵢ has arrived: the outer optimizer turns θ into θ'; then w ← α·w + (1 − α)·θ'

θ and the outer momentum are bitwise the same on all ranks. With α = 0, what was learnt locally while the mean was
computed is lost. The *delta rule* keeps it: w ← α·w + (1 − α)·(θ' + (w − w_sent)). Without a delay it changes nothing.

A rank whose pseudo-gradient is not finite has weight 0 and takes θ'; all ranks know which one it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.compression.codecs import Codec, RawCodec
from paceline.parallel.compression.compressed_allreduce import AllToAllReduce
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.compression.packet_header import PacketHeader
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd.outer_optimizers import OuterOptimizer

__all__ = ["ModelFragment", "SyncResult"]

_ALIGN = 16
"""Pieces are multiples of this many numbers per rank, so that views of other dtypes are aligned."""


class RankFlag(IntFlag):
    """Flags in the packet header of a rank."""

    REJECTED = 1
    """Its pseudo-gradient was not finite."""
    FINISHED = 2
    """It makes no more local steps."""
    CHANGED = 4
    """Its model or optimizer is no longer the one that is synchronised, so nothing can be merged."""


@dataclass(frozen=True)
class SyncResult:
    """What all ranks know about one synchronisation.

    Attributes:
        counts: whether any rank had a contribution.
        rejected: ranks whose pseudo-gradient was not finite.
        finished: whether every rank has made its last local step.
        inner_lr: mean learning rate of the local optimizers, by the ranks' weights.
        changed: ranks whose model or optimizer is no longer the one that is synchronised.
    """

    counts: bool
    rejected: tuple[int, ...]
    finished: bool
    inner_lr: float
    changed: tuple[int, ...] = ()

    @classmethod
    def of(cls, headers: Sequence[PacketHeader]) -> SyncResult:
        """Return the result that the headers of all ranks give."""
        total = sum(header.weight for header in headers)
        return cls(
            total > 0,
            tuple(rank for rank, header in enumerate(headers) if header.flags & RankFlag.REJECTED),
            all(header.flags & RankFlag.FINISHED for header in headers),
            sum(header.weight * header.inner_lr for header in headers) / total if total else 0.0,
            tuple(rank for rank, header in enumerate(headers) if header.flags & RankFlag.CHANGED),
        )


@dataclass(frozen=True)
class _ParamSlot:
    """Position of a parameter, or of an averaged buffer, in the flat buffers."""

    name: str
    param: Tensor
    start: int
    shape: torch.Size
    """Its shape when this was created; `param` may have been given other data since."""

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of `flat`, in its shape."""
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


@dataclass(frozen=True)
class _Piece:
    """Numbers of the flat buffers that are compressed and sent together."""

    start: int
    stop: int
    codec: Codec
    feedback: ErrorFeedback | None


class ModelFragment:
    """A group of parameters; all ranks create theirs in the same order.

    Args:
        named: the parameters with their names; kept as float32, or as float64 if one of them is.
        comm: the ranks.
        exchange_thread: of these ranks.
        codec: of the pseudo-gradients; None: uncompressed.
        exempt: names of parameters that are sent uncompressed nevertheless.
        averaged: buffers, such as running statistics, of which all ranks take the mean, whatever `outer` is.
        feedback: use error feedback.
        decay: of its residual, see `ErrorFeedback`.
        outer: the outer optimizer.
        delta_rule: merge by the delta rule.
        piece_numel: numbers per piece: while one is on the wire, the next is compressed.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        comm: Comm,
        exchange_thread: ExchangeThread,
        codec: Codec | None,
        *,
        exempt: Sequence[str] = (),
        averaged: Sequence[tuple[str, Tensor]] = (),
        feedback: bool = False,
        decay: float = 1.0,
        outer: OuterOptimizer,
        delta_rule: bool = False,
        piece_numel: int,
    ) -> None:
        self._comm = comm
        device = named[0][1].device
        dtype = torch.float64 if any(param.dtype == torch.float64 for _, param in named) else torch.float32
        raw = RawCodec(dtype)
        plain = [pair for pair in named if codec is None or pair[0] in exempt]
        compressed = [pair for pair in named if codec is not None and pair[0] not in exempt]
        self._slots: list[_ParamSlot] = []
        self._pieces: list[_Piece] = []
        end = self._lay_out(compressed, 0, codec or raw, piece_numel, feedback, decay)
        self._split = end = self._lay_out(plain, end, raw, piece_numel)
        end = self._lay_out(averaged, end, raw, piece_numel)
        self._trained = len(named)
        self.theta = torch.zeros(end, dtype=dtype, device=device)
        self.momentum = torch.zeros_like(self.theta) if outer.has_momentum else None
        self._flat = torch.zeros_like(self.theta)  # Δ, then its mean
        self._sent = torch.zeros_like(self.theta) if delta_rule else None
        self._reduces = [
            AllToAllReduce(
                comm,
                self._flat[each.start : each.stop],
                each.codec,
                exchange_thread,
                each.feedback,
                mean=True,
            )
            for each in self._pieces
            if comm.size > 1
        ]
        self._header = PacketHeader()
        self._result: SyncResult | None = None
        self.pending = False
        self.reset_shared()

    def _lay_out(
        self,
        named: Sequence[tuple[str, Tensor]],
        start: int,
        codec: Codec,
        piece_numel: int,
        feedback: bool = False,
        decay: float = 1.0,
    ) -> int:
        """Append slots and pieces of parameters from `start` on; return their end."""
        end = start
        for name, param in named:
            self._slots.append(_ParamSlot(name, param, end, param.shape))
            end += param.numel()
        unit = self._comm.size * _ALIGN
        end = start + -(-(end - start) // unit) * unit
        step = max(unit, piece_numel // unit * unit)
        for begin in range(start, end, step):
            stop = min(begin + step, end)
            device = named[0][1].device
            residual = ErrorFeedback(codec, stop - begin, device, decay=decay) if feedback else None
            self._pieces.append(_Piece(begin, stop, codec, residual))
        return end

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends per synchronisation, network headers excluded."""
        return sum(reduce.sent_nbytes for reduce in self._reduces)

    @property
    def params(self) -> list[tuple[str, Tensor]]:
        """The parameters with their names, without averaged buffers."""
        return [(slot.name, slot.param) for slot in self._slots[: self._trained]]

    @property
    def has_moved(self) -> bool:
        """Whether a parameter differs from θ."""
        trained = self._slots[: self._trained]
        return any(not torch.equal(slot.of(self.theta).to(slot.param.dtype), slot.param) for slot in trained)

    def find_change(self) -> str:
        """Return which parameter was given data that don't fit into θ, and how; empty if none was."""
        for slot in self._slots[: self._trained]:
            param = slot.param
            if param.shape != slot.shape:
                return f"parameter {slot.name!r} has shape {list(param.shape)} instead of {list(slot.shape)}"
            if param.device != self.theta.device:
                return f"parameter {slot.name!r} is on {param.device} instead of {self.theta.device}"
            if torch.promote_types(param.dtype, self.theta.dtype) != self.theta.dtype:
                dtypes = (str(each).removeprefix("torch.") for each in (param.dtype, self.theta.dtype))
                return "parameter {!r} is {}, but is averaged in {}".format(slot.name, *dtypes)
        return ""

    def take_up_buffers(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """Average these buffers in place of earlier ones of the same name; return those that are gone or misfit."""
        misfits: list[str] = []
        for index, slot in enumerate(self._slots[self._trained :], self._trained):
            buffer = buffers.get(slot.name)
            if buffer is None or buffer.shape != slot.shape:
                misfits.append(slot.name)
            else:
                self._slots[index] = replace(slot, param=buffer)
        return misfits

    def shared(self) -> dict[str, Tensor]:
        """Return the parts of θ by parameter, in their shapes."""
        return {slot.name: slot.of(self.theta) for slot in self._slots[: self._trained]}

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a buffer laid out like θ, by parameter and averaged buffer."""
        return {slot.name: slot.of(flat) for slot in self._slots}

    @torch.no_grad()
    def reset_shared(self) -> None:
        """Set θ to the present parameters."""
        for slot in self._slots:
            slot.of(self.theta).copy_(slot.param)

    # ------------------------------------------------------------------ send and merge

    @torch.no_grad()
    def send(self, weight: float, inner_lr: float, *, finished: bool = False, changed: bool = False) -> bool:
        """Start the exchange of what was learnt since the last one; return whether it is finite.

        Args:
            weight: of this rank: its samples, or steps.
            inner_lr: learning rate of its optimizer.
            finished: this rank makes no more local steps.
            changed: the parameters are not to be read, see `RankFlag.CHANGED`.
        """
        if changed:
            self._flat.zero_()
        for slot in () if changed else self._slots:
            torch.sub(slot.of(self.theta), slot.param, out=slot.of(self._flat))
            if self._sent is not None:
                slot.of(self._sent).copy_(slot.param)
        # A norm may overflow although no number is infinite, so then look at every number.
        finite = math.isfinite(torch.linalg.vector_norm(self._flat)) or bool(torch.isfinite(self._flat).all())
        flags = RankFlag.FINISHED if finished else RankFlag(0)
        if changed:
            weight, flags = 0.0, flags | RankFlag.CHANGED
        if not finite:
            weight, flags = 0.0, flags | RankFlag.REJECTED
            self._flat.zero_()  # or error feedback would keep it
        self._header = PacketHeader(weight, flags, inner_lr)
        for reduce in self._reduces:
            reduce.launch(self._header)
        self._result = None
        self.pending = True
        return finite

    def wait(self) -> SyncResult:
        """Block until the mean is there; may be called again before `merge`."""
        if self._result is None:
            for reduce in self._reduces:
                reduce.wait()
            self._result = SyncResult.of(self._reduces[0].headers if self._reduces else [self._header])
        return self._result

    @torch.no_grad()
    def merge(self, outer: OuterOptimizer, mix: float = 0.0) -> SyncResult:
        """Wait for the mean and merge it into θ and the parameters.

        Args:
            outer: the outer optimizer.
            mix: α, the share of local parameters that stays.
        """
        result = self.wait()
        self.pending, self._result = False, None
        if result.counts:
            split, momentum = self._split, self.momentum if outer.has_momentum else None
            part = None if momentum is None else momentum[:split]
            outer.update(self.theta[:split], self._flat[:split], part, result.inner_lr)
            self.theta[split:].sub_(self._flat[split:])
        rejected = self._comm.rank in result.rejected
        if self.find_change():
            # Changed since it was sent: the next send reports it to all ranks, and nothing fits until then.
            return result
        for slot in self._slots:
            new, param = slot.of(self.theta), slot.param
            if self._sent is not None and not rejected:
                # In this order it is exactly θ' if nothing was learnt.
                new = (param - slot.of(self._sent)).add_(new)
            if mix and not rejected:
                new = torch.lerp(new, param.to(new.dtype), mix)
            param.copy_(new)
        return result

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, by parameter; waits for a pending mean."""
        state: dict[str, Any] = {"theta": self.by_name(self.theta)}
        if self.momentum is not None:
            state["momentum"] = self.by_name(self.momentum)
        if self.pending:
            result = self.wait()
            state["mean"] = self.by_name(self._flat)
            state["arrival"] = asdict(result)
        return state

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank, by parameter: its parameters, what it sent, its residual."""
        state: dict[str, Any] = {"own": {slot.name: slot.param.detach() for slot in self._slots}}
        if self.pending and self._sent is not None:
            state["sent"] = self.by_name(self._sent)
        if any(piece.feedback is not None for piece in self._pieces):
            residual = torch.zeros_like(self.theta)
            for piece in self._pieces:
                if piece.feedback is not None:
                    residual[piece.start : piece.stop].copy_(piece.feedback.residual)
            state["left out"] = self.by_name(residual)
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Load a state.

        Args:
            state: returned by `state`.
            own: returned by `rank_state` on this rank; None: the number of ranks has changed, so start from θ.
        """
        _fill(self.by_name(self.theta), state["theta"])
        if self.momentum is not None and "momentum" in state:
            _fill(self.by_name(self.momentum), state["momentum"])
        start = state["theta"] if own is None else own["own"]
        _fill({slot.name: slot.param for slot in self._slots}, start)
        self.pending = "mean" in state
        self._result = None
        if self.pending:
            _fill(self.by_name(self._flat), state["mean"])
            rejected = tuple(state["arrival"]["rejected"]) if own is not None else ()
            self._result = SyncResult(**{**state["arrival"], "rejected": rejected})
            if self._sent is not None:
                _fill(self.by_name(self._sent), state["theta"] if own is None else own["sent"])
        if own is not None and "left out" in own:
            residual = torch.zeros_like(self.theta)
            _fill(self.by_name(residual), own["left out"])
            for piece in self._pieces:
                if piece.feedback is not None:
                    piece.feedback.residual.copy_(residual[piece.start : piece.stop])


def _fill(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        place.copy_(values[name])
