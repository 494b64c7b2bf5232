"""One fragment of a model that is synchronised every H local steps: its shared parameters θ, and how they change.

    send    Δ = θ − w, in one flat buffer; its mean over ranks is now being computed
    merge   g = Σ nᵢ·Δᵢ / Σ nᵢ has arrived: the outer optimizer turns θ into θ'; then w ← α·w + (1 − α)·θ'

θ and the outer momentum are bitwise the same on all ranks. With α = 0, what was learnt locally while the mean was
computed is lost. The *delta rule* keeps it: w ← α·w + (1 − α)·(θ' + (w − w_sent)). Without a delay it changes nothing.

A rank whose pseudo-gradient is not finite has weight 0 and takes θ'; all ranks know which one it was.

On an accelerator whose collectives are ordered on a stream, the host waits for nothing: the weight, and whether it is
0, are scalars of the device, and the merge masks what a CPU would skip. The host reads the result later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.compression.codecs import Codec, RawCodec
from paceline.parallel.compression.compressed_allreduce import AllToAllReduce
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.compression.packet_header import PacketHeader, header_row
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd.fragment_layout import FragmentLayout
from paceline.parallel.local_sgd.outer_optimizers import OuterOptimizer
from paceline.parallel.local_sgd.sync_result import CopiedResult, DeviceResult, RankFlag, SyncResult
from paceline.world.accelerator import has_streams

__all__ = ["ModelFragment"]


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

    Attributes:
        pending: a mean is being computed, or was not merged yet.
        rejected: whether this rank's latest pseudo-gradient was not finite; on an accelerator a flag there.
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
        layout = FragmentLayout(comm.size, piece_numel)
        layout.append(compressed, codec or raw, feedback=feedback, decay=decay)
        layout.append(plain, raw)
        self._split = layout.end
        layout.append(averaged, raw)
        self._slots, self._pieces, end = layout.slots, layout.pieces, layout.end
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
        self._on_device = has_streams(device) and (comm.size == 1 or comm.stream_ordered)
        self._header: PacketHeader | Tensor = PacketHeader()
        self._finite = torch.ones(len(self._slots), dtype=torch.bool, device=device)
        self._result: SyncResult | None = None
        self._copied: CopiedResult | None = None
        self._changed = False
        self._bad: list[str] = []
        self.rejected: bool | Tensor = False
        self.pending = False
        self.reset_shared()

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
    def send(
        self,
        weight: float | Tensor,
        inner_lr: float | Tensor,
        *,
        finished: bool = False,
        changed: bool = False,
    ) -> None:
        """Start the exchange of what was learnt since the last one.

        Args:
            weight: of this rank: its samples, or steps; on an accelerator it may be a scalar there.
            inner_lr: learning rate of its optimizer; as `weight`.
            finished: this rank makes no more local steps.
            changed: the parameters are not to be read, see `RankFlag.CHANGED`.
        """
        if changed:
            self._flat.zero_()
        for slot in () if changed else self._slots:
            torch.sub(slot.of(self.theta), slot.param, out=slot.of(self._flat))
            if self._sent is not None:
                slot.of(self._sent).copy_(slot.param)
        flags = RankFlag.FINISHED if finished else RankFlag(0)
        if changed:
            weight, flags = 0.0, flags | RankFlag.CHANGED
        self._changed, self._bad = changed, []
        make = self._header_on_device if self._on_device else self._header_on_host
        self._header = make(weight, flags, inner_lr)
        for reduce in self._reduces:
            reduce.launch(self._header)
        self._result = None
        self.pending = True

    def _header_on_host(
        self, weight: float | Tensor, flags: RankFlag, inner_lr: float | Tensor
    ) -> PacketHeader:
        """Return the header of what is sent, which is zero unless it is finite, or error feedback would keep it."""
        # A norm may overflow although no number is infinite, so then look at every number.
        finite = math.isfinite(torch.linalg.vector_norm(self._flat)) or bool(torch.isfinite(self._flat).all())
        self.rejected = not finite
        if not finite:
            weight, flags = 0.0, flags | RankFlag.REJECTED
            self._bad = [slot.name for slot in self._slots if not slot.of(self._flat).isfinite().all()]
            self._flat.zero_()
        return PacketHeader(float(weight), flags, float(inner_lr))

    def _header_on_device(self, weight: float | Tensor, flags: RankFlag, inner_lr: float | Tensor) -> Tensor:
        """Do as `_header_on_host`, without reading the device."""
        largest = torch.stack(torch._foreach_norm([slot.of(self._flat) for slot in self._slots], math.inf))
        self._finite = largest.isfinite()
        self.rejected = ~self._finite.all()
        self._flat.masked_fill_(self.rejected, 0.0)
        row = header_row(self.theta.device, weight, flags, inner_lr)
        row[0].masked_fill_(self.rejected, 0.0)
        row[1].add_(self.rejected, alpha=int(RankFlag.REJECTED))
        return row

    def wait(self, *, read: bool = True) -> SyncResult | None:
        """Block until the mean is there (on an accelerator: order the current stream behind it).

        May be called again before `merge`.

        Args:
            read: on an accelerator, wait for the device and return the result. Otherwise the merge takes it from the
                device, and `read_result` returns it afterwards.
        """
        if self._result is None:
            for reduce in self._reduces:
                reduce.wait()
            if not self._on_device:
                own = self._header
                assert isinstance(own, PacketHeader), "made on the host"
                self._result = SyncResult.of(self._reduces[0].headers if self._reduces else [own])
            elif read:
                self._copy_result()
                self._result = self.read_result()
        return self._result

    @torch.no_grad()
    def merge(self, outer: OuterOptimizer, mix: float = 0.0) -> None:
        """Merge the mean into θ and the parameters, after `wait`.

        Args:
            outer: the outer optimizer.
            mix: α, the share of local parameters that stays.
        """
        result = self._result
        if result is None:
            self._copy_result()
            result = DeviceResult.of(self._header_rows())
        self.pending, self._result = False, None
        self._update_shared(outer, result)
        if self._changed or self.find_change():
            # Nothing fits: all ranks raise once they have read the headers, of this exchange or of the next.
            return
        for slot in self._slots:
            new, param = slot.of(self.theta), slot.param
            own = new
            if self._sent is not None:
                # In this order it is exactly θ' if nothing was learnt.
                if not mix and self.rejected is False and param.dtype == new.dtype:
                    param.sub_(slot.of(self._sent)).add_(new)
                    continue
                own = (param - slot.of(self._sent)).add_(new)
            if mix:
                own = torch.lerp(own, param.to(own.dtype), mix)
            if own is not new and self.rejected is not False:
                own = new if self.rejected is True else torch.where(self.rejected, new, own)
            param.copy_(own)

    @torch.no_grad()
    def take_shared(self) -> None:
        """Set the parameters to θ, unless they no longer fit."""
        if not self.find_change():
            for slot in self._slots:
                slot.param.copy_(slot.of(self.theta))

    def _update_shared(self, outer: OuterOptimizer, result: SyncResult | DeviceResult) -> None:
        """Change θ and the outer momentum, unless no rank had a contribution."""
        if result.counts is False:
            return
        split, momentum = self._split, self.momentum if outer.has_momentum else None
        changed = [self.theta[:split], *([] if momentum is None else [momentum[:split]])]
        # Without a contribution the mean is 0; but an outer momentum would move θ.
        before = [each.clone() for each in changed] if isinstance(result.counts, Tensor) else []
        outer.update(
            changed[0], self._flat[:split], None if momentum is None else changed[1], result.inner_lr
        )
        for each, kept in zip(changed, before, strict=False):
            each.copy_(torch.where(result.counts, each, kept))  # type: ignore[arg-type]
        self.theta[split:].sub_(self._flat[split:])

    # ------------------------------------------------------------------ results that the host reads later

    def _header_rows(self) -> Tensor:
        """Return the headers of all ranks on the device, [ranks, 4]."""
        if self._reduces:
            return self._reduces[0].header_rows
        assert isinstance(self._header, Tensor), "made on the device"
        return self._header.view(1, -1)

    def _copy_result(self) -> None:
        self._copied = CopiedResult(self._header_rows(), self._finite)

    def read_result(self) -> SyncResult:
        """Return what the latest synchronisation on an accelerator brought; waits until it has come."""
        assert self._copied is not None, "something was merged"
        result, finite = self._copied.read()
        self._copied = None
        self._bad = [slot.name for slot, fine in zip(self._slots, finite, strict=True) if not fine]
        return result

    @property
    def bad_names(self) -> list[str]:
        """Parameters and buffers that made this rank's latest pseudo-gradient not finite, as far as the host knows."""
        return self._bad

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, by parameter; waits for a pending mean."""
        state: dict[str, Any] = {"theta": self.by_name(self.theta)}
        if self.momentum is not None:
            state["momentum"] = self.by_name(self.momentum)
        if self.pending:
            result = self.wait()
            assert result is not None, "read"
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
            self.rejected = self._comm.rank in rejected
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
