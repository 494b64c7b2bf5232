"""A bucket of gradients that travels compressed: what is sent, what is left out, and how much that was.

Residuals of error feedback are in the same unit as what is sent: parts of the mean that the round makes. So where a
round's result is scaled afterwards (`weights`: the samples were not those of the round before), the residual is too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.compressed_allreduce import (
    AllGatherReduce,
    AllToAllReduce,
    CompressedReduce,
)
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.compression.powersgd_allreduce import TAGS, PowerSGDAllReduce
from paceline.parallel.engine.bucket import Bucket, GradSlot
from paceline.parallel.engine.comm import Comm

__all__ = ["CompressedBucket", "CompressionStats"]

_MEASURED_EVERY = 100
"""Rounds between two in which the error of compression is measured, which costs passes over the memory. It is
measured too in the first round, and wherever packets become others (the end of a warm-up)."""


@dataclass(frozen=True)
class CompressionStats:
    """What compression does to one bucket.

    Attributes:
        bucket: its number, in launch order. names: of its parameters.
        nbytes: of its gradients. sent_nbytes: that a rank sends for it in one step.
        uncompressed_nbytes: that a rank would send without compression.
        error: ‖x − D(C(x))‖ / ‖x‖ of what this rank compressed, in the latest step that was measured; NaN: in none.
        step: that step.
    """

    bucket: int
    names: tuple[str, ...]
    nbytes: int
    sent_nbytes: int
    uncompressed_nbytes: float
    error: float
    step: int


class CompressedBucket:
    """Sends one bucket.

    Args:
        bucket: its gradients. compression: how. comm: the ranks. courier: of the engine.
        sharded: leave each rank with its own part of the sum.
    """

    def __init__(
        self, bucket: Bucket, compression: Compression, comm: Comm, courier: ExchangeThread, *, sharded: bool
    ) -> None:
        self._bucket, self._compression, self._comm, self._courier = bucket, compression, comm, courier
        self._sharded = sharded
        self._tag = comm.reserve_tags(TAGS)  # no parcel needs more
        self._phase: Hashable = None
        self._parcel: CompressedReduce | None = None
        self.feedback: ErrorFeedback | None = None
        self._codec: Codec | None = None
        self._taken_up: tuple[list[dict[str, Any]], dict[str, Any]] | None = None
        self._error, self._measured = float("nan"), -1

    def launch(self, step: int, *, mean: bool) -> Self:
        """Start summing the bucket over all ranks, or averaging it, in round number `step`."""
        parcel, phase = self._parcel, self._compression.phase(step)
        measure = step % _MEASURED_EVERY == 0
        if parcel is None or phase != self._phase:
            parcel = self._parcel = self._pack(step)
            self._phase, measure = phase, True
            self._resume()
        if mean:
            self._bucket.flat.mul_(1 / self._comm.size)
        if measure:
            self._measured = step
        parcel.launch(measure=measure)
        return self

    def look(self) -> None:
        """Do nothing: when packets came is not known."""

    ended: float | None = None
    """When the sum was there: not known before it was waited for."""

    def wait(self) -> None:
        """Block until the sum is there."""
        parcel = self._engaged()
        parcel.wait()
        self._error = parcel.error.relative

    def _pack(self, step: int) -> CompressedReduce:
        bucket, comm, compression = self._bucket, self._comm, self._compression
        codec = self._codec = compression.codec(rank=comm.rank, step=step)
        if self.feedback is not None:
            self.feedback.codec = codec
        elif compression.feedback:
            self.feedback = ErrorFeedback(
                codec, bucket.flat.numel(), bucket.flat.device, momentum=compression.momentum
            )
        if compression.factors(step):
            return PowerSGDAllReduce(
                comm,
                bucket.flat,
                lambda flat: [_shaped(flat, slot) for slot in bucket.slots],
                [slot.param.shape for slot in bucket.slots],
                self._courier,
                rank=compression.rank,
                seed=compression.seed,
                residual=None if self.feedback is None else self.feedback.residual,
                tag=self._tag,
            )
        if compression.is_sparse and not self._sharded:
            return AllGatherReduce(comm, bucket.flat, codec, self.feedback, tag=self._tag)
        return AllToAllReduce(
            comm, bucket.flat, codec, self._courier, self.feedback, scatter=self._sharded, tag=self._tag
        )

    def _engaged(self) -> CompressedReduce:
        assert self._parcel is not None, "nothing was launched"
        return self._parcel

    # ------------------------------------------------------------------ what it costs

    @property
    def calls(self) -> int:
        """Collectives that one sum consists of."""
        if isinstance(self._parcel, PowerSGDAllReduce):
            return 5
        return 1 if self._sharded or isinstance(self._parcel, AllGatherReduce) else 2

    @property
    def sent_nbytes(self) -> int:
        """What this rank sends for one sum, headers of the network aside."""
        return self._engaged().sent_nbytes

    @property
    def payload_nbytes(self) -> float:
        """The payload of these collectives, by the rule of `SyncTimings.nbytes`."""
        return self.sent_nbytes * self._comm.size / (self._comm.size - 1)

    def stats(self) -> CompressionStats:
        """Return what compression does to the bucket."""
        ways = 1 if self._sharded else 2
        whole = self._bucket.grads.nbytes
        return CompressionStats(
            self._bucket.index,
            tuple(slot.name for slot in self._bucket.slots),
            whole,
            self.sent_nbytes,
            ways * whole * (self._comm.size - 1) / self._comm.size,
            self._error,
            self._measured,
        )

    # ------------------------------------------------------------------ what it left out

    def left_out(self) -> dict[str, dict[str, Tensor]]:
        """Return what this rank keeps from step to step, by parameter, flattened: residual, velocity, thin matrix."""
        kept: dict[str, dict[str, Tensor]] = {}
        for slot in self._bucket.slots:
            part = slice(slot.start, slot.start + slot.numel)
            if self.feedback is not None:
                kept[slot.name] = {"residual": self.feedback.residual[part]}
                if self.feedback.velocity is not None:
                    kept[slot.name]["velocity"] = self.feedback.velocity[part]
        if isinstance(self._parcel, PowerSGDAllReduce):
            for slot, thin in zip(self._bucket.slots, self._parcel.low.thin_q(), strict=True):
                kept.setdefault(slot.name, {})["q"] = thin
        return kept

    def codec_state(self) -> dict[str, Any]:
        """Return what the next packets of this rank depend on beside the gradients."""
        return {} if self._codec is None else self._codec.state_dict()

    def take_up(self, kept: Sequence[Mapping[str, Mapping[str, Tensor]]], codec: Mapping[str, Any]) -> None:
        """Go on from what ranks had left out: this one has all of it to send from now on.

        Args:
            kept: what `left_out` returned on some ranks. codec: what `codec_state` returned on this one; may be empty.
        """
        self._taken_up = [dict(each) for each in kept], dict(codec)

    def _resume(self) -> None:
        """Fill the memory, once it is there, with what was taken up."""
        if self._taken_up is None:
            return
        (kept, codec), self._taken_up = self._taken_up, None
        if self._codec is not None and codec:
            self._codec.load_state_dict(codec)
        for slot in self._bucket.slots:
            part = slice(slot.start, slot.start + slot.numel)
            for parts in (each[slot.name] for each in kept if slot.name in each):
                if self.feedback is not None and "residual" in parts:
                    self.feedback.residual[part] += parts["residual"].to(self.feedback.residual.device)
                if self.feedback is not None and self.feedback.velocity is not None and "velocity" in parts:
                    self.feedback.velocity[part] += parts["velocity"].to(self.feedback.velocity.device)
        if isinstance(self._parcel, PowerSGDAllReduce):
            for slot, thin in zip(self._bucket.slots, self._parcel.low.thin_q(), strict=True):
                for parts in (each[slot.name] for each in kept[:1] if slot.name in each):
                    thin.copy_(parts["q"])

    def rescale(self, factor: float) -> None:
        """Take note that the latest result was multiplied by `factor`."""
        if self.feedback is not None:
            self.feedback.scale(factor)


def _shaped(flat: Tensor, slot: GradSlot) -> Tensor:
    """Return a parameter's part of a buffer laid out like its bucket, as a matrix.

    Its numbers are taken as they lie in memory, so a transposed parameter is another matrix of the same rank.
    """
    return flat[slot.start : slot.start + slot.numel].view(slot.param.shape)
