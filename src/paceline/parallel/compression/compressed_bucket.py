"""A gradient bucket that is reduced in compressed form, and its compression state across restarts.

Residuals are in the unit of what is sent: parts of the mean that the round computes. So where the result of a round is
scaled afterwards (`loss_weights`: the samples were not those of the round before), the residual is scaled too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor

from paceline.parallel.compression.buffer_codec import CompressionLoss
from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.compressed_allreduce import (
    AllGatherReduce,
    AllToAllReduce,
    CompressedReduce,
)
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.compression.powersgd import TAGS, PowerSGDAllReduce
from paceline.parallel.gradient_collectives import Comm

__all__ = ["CompressedBucket", "CompressionStats", "ResidualState"]

_MEASURE_INTERVAL = 100
"""Rounds between measurements of the compression error, which cost passes over memory. It is measured in the first
round and whenever the packets change (the end of a warm-up) as well."""


class GradientSlot(Protocol):
    """A parameter's gradient in a bucket, as compression sees it."""

    name: str
    start: int
    numel: int

    @property
    def param(self) -> Tensor: ...


class GradientBucket(Protocol):
    """A bucket of the engine, as compression sees it."""

    index: int
    flat: Tensor
    grads: Tensor

    @property
    def slots(self) -> Sequence[GradientSlot]: ...

    @property
    def compressed(self) -> CompressedBucket | None: ...


class GradientBuckets(Protocol):
    """The engine's buckets, none before the first round, and its ranks."""

    comm: Comm

    @property
    def buckets(self) -> Sequence[GradientBucket]: ...


@dataclass(frozen=True, kw_only=True)
class CompressionStats:
    """What compression does to one bucket.

    Attributes:
        bucket: position in launch order.
        names: of its parameters.
        nbytes: of its gradients.
        sent_nbytes: sent by a rank in one step.
        uncompressed_nbytes: a rank would send without compression.
        error: ‖x − D(C(x))‖ / ‖x‖ of this rank's compressions in the latest measured step; NaN: none was measured.
        step: the latest measured step.
    """

    bucket: int
    names: tuple[str, ...]
    nbytes: int
    sent_nbytes: int
    uncompressed_nbytes: float
    error: float
    step: int


class CompressedBucket:
    """Reduces one bucket in compressed form.

    Args:
        bucket: the gradients.
        compression: the method.
        comm: the ranks.
        exchange_thread: of the engine.
        sharded: leave each rank with its own part of the sum.
    """

    ended: float | None = None
    """When the sum arrived: not known before it is waited for."""

    def __init__(
        self,
        bucket: GradientBucket,
        compression: Compression,
        comm: Comm,
        exchange_thread: ExchangeThread,
        *,
        sharded: bool,
    ) -> None:
        self._bucket, self._compression, self._comm = bucket, compression, comm
        self._exchange_thread, self._sharded = exchange_thread, sharded
        self._tag = comm.reserve_tags(TAGS)  # the most that any reduction needs
        self._phase: Hashable = None
        self._reduce: CompressedReduce | None = None
        self.feedback: ErrorFeedback | None = None
        self._codec: Codec | None = None
        self._loaded: tuple[list[dict[str, Any]], dict[str, Any]] | None = None
        self._loss, self._measured = CompressionLoss(), -1

    def launch(self, step: int, *, mean: bool) -> Self:
        """Start summing the bucket over all ranks, or averaging it, in round number `step`."""
        reduce, phase = self._reduce, self._compression.phase(step)
        measure = step % _MEASURE_INTERVAL == 0
        if reduce is None or phase != self._phase:
            reduce = self._reduce = self._make_reduce(step)
            self._phase, measure = phase, True
            self._restore()
        if mean:
            self._bucket.flat.mul_(1 / self._comm.size)
        if measure:
            self._measured = step
        reduce.launch(measure=measure)
        return self

    def poll(self) -> None:
        """Do nothing: when packets arrived is not known."""

    def wait(self) -> None:
        """Block until the bucket holds the sum (on an accelerator: order the current stream behind that)."""
        reduce = self._launched()
        reduce.wait()
        self._loss = reduce.loss

    def rescale(self, factor: float | Tensor) -> None:
        """Scale the residual like the latest result."""
        if self.feedback is not None:
            self.feedback.scale(factor)

    def _make_reduce(self, step: int) -> CompressedReduce:
        bucket, comm, compression = self._bucket, self._comm, self._compression
        codec = self._codec = compression.codec(rank=comm.rank, step=step)
        if self.feedback is not None:
            self.feedback.codec = codec
        elif compression.feedback:
            self.feedback = ErrorFeedback(
                codec,
                bucket.flat.numel(),
                bucket.flat.device,
                momentum=compression.momentum,
                decay=compression.feedback_decay,
            )
        if compression.is_low_rank(step):
            return PowerSGDAllReduce(
                comm,
                bucket.flat,
                self._matrices,
                [slot.param.shape for slot in bucket.slots],
                self._exchange_thread,
                rank=compression.rank,
                seed=compression.seed,
                residual=None if self.feedback is None else self.feedback.residual,
                tag=self._tag,
            )
        if compression.is_sparse and not self._sharded:
            return AllGatherReduce(comm, bucket.flat, codec, self.feedback, self._tag)
        return AllToAllReduce(
            comm,
            bucket.flat,
            codec,
            self._exchange_thread,
            self.feedback,
            scatter=self._sharded,
            tag=self._tag,
        )

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a buffer laid out like the bucket, in the shapes of the parameters.

        Numbers are taken in memory order, so a transposed parameter gives another matrix of the same rank.
        """
        return [
            flat[slot.start : slot.start + slot.numel].view(slot.param.shape) for slot in self._bucket.slots
        ]

    def _launched(self) -> CompressedReduce:
        assert self._reduce is not None, "nothing was launched"
        return self._reduce

    # ------------------------------------------------------------------ cost

    @property
    def calls(self) -> int:
        """Collectives per sum."""
        return self._launched().calls

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends per sum, network headers excluded."""
        return self._launched().sent_nbytes

    @property
    def payload_nbytes(self) -> float:
        """Payload of the collectives, by the rule of `SyncTimings.nbytes`."""
        return self.sent_nbytes * self._comm.size / (self._comm.size - 1)

    def stats(self) -> CompressionStats:
        """Return what compression does to the bucket; on an accelerator this waits for the latest measurement."""
        nbytes, ways = self._bucket.grads.nbytes, 1 if self._sharded else 2
        return CompressionStats(
            bucket=self._bucket.index,
            names=tuple(slot.name for slot in self._bucket.slots),
            nbytes=nbytes,
            sent_nbytes=self.sent_nbytes,
            uncompressed_nbytes=ways * nbytes * (self._comm.size - 1) / self._comm.size,
            error=self._loss.relative,
            step=self._measured,
        )

    # ------------------------------------------------------------------ state

    def rank_state(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's state by parameter, flattened: residual, velocity, low-rank Q."""
        state: dict[str, dict[str, Tensor]] = {}
        if self.feedback is not None:
            for slot in self._bucket.slots:
                part = slice(slot.start, slot.start + slot.numel)
                state[slot.name] = {"residual": self.feedback.residual[part]}
                if self.feedback.velocity is not None:
                    state[slot.name]["velocity"] = self.feedback.velocity[part]
        if isinstance(self._reduce, PowerSGDAllReduce):
            for slot, (_, q) in zip(self._bucket.slots, self._reduce.factors.pairs, strict=True):
                state.setdefault(slot.name, {})["q"] = q.view(-1)
        return state

    def codec_state(self) -> dict[str, Any]:
        """Return what later packets of this rank depend on besides the gradients."""
        return {} if self._codec is None else self._codec.state_dict()

    def load_state(
        self, states: Sequence[Mapping[str, Mapping[str, Tensor]]], codec: Mapping[str, Any]
    ) -> None:
        """Continue from the states of some ranks, whose residuals this one takes over.

        Args:
            states: returned by `rank_state` on those ranks.
            codec: returned by `codec_state` on this rank; may be empty.
        """
        self._loaded = [dict(each) for each in states], dict(codec)

    def _restore(self) -> None:
        """Fill residuals and factors, once they exist, from the loaded states."""
        if self._loaded is None:
            return
        (states, codec), self._loaded = self._loaded, None
        if self._codec is not None and codec:
            self._codec.load_state_dict(codec)
        for name, own in self.rank_state().items():
            for number, loaded in enumerate(each[name] for each in states if name in each):
                for key in own.keys() & loaded.keys():
                    if key != "q":
                        own[key] += loaded[key].to(own[key].device)
                    elif number == 0:
                        own[key].copy_(loaded[key])


class ResidualState:
    """The compression state of one rank's buckets; empty where nothing is compressed.

    Args:
        engine: its buckets.
    """

    def __init__(self, engine: GradientBuckets) -> None:
        self._engine = engine
        self._loaded: list[dict[str, Any]] = []  # of ranks before a restart, until there are buckets

    def state(self) -> dict[str, Any]:
        """Return what compression keeps on this rank from step to step, by parameter; often empty."""
        buckets = self._compressed()
        if not buckets:
            return _merged(self._loaded)
        parts = {name: state for bucket in buckets for name, state in bucket.rank_state().items()}
        return {"parts": parts, "codecs": [bucket.codec_state() for bucket in buckets]}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks.

        If the number of ranks has changed, new ranks take over the residuals of old ones: nothing is lost.

        Args:
            states: returned by `state`, by rank.
        """
        size, rank = self._engine.comm.size, self._engine.comm.rank
        same = len(states) == size
        mine = [state for number, state in enumerate(states) if number % size == rank and state]
        self._loaded = [dict(state) if same else {**state, "codecs": []} for state in mine]
        self.resume()

    def resume(self) -> None:
        """Hand the loaded state to the buckets, if they exist."""
        buckets = self._compressed()
        if not self._loaded or not buckets:
            return
        states, self._loaded = self._loaded, []
        codecs = states[0]["codecs"] if len(states) == 1 else []
        for number, bucket in enumerate(buckets):
            own = codecs[number] if len(codecs) == len(buckets) else {}
            bucket.load_state([state["parts"] for state in states], own)

    def _compressed(self) -> list[CompressedBucket]:
        return [bucket.compressed for bucket in self._engine.buckets if bucket.compressed is not None]


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state with the residuals of several."""
    if len(states) < 2:
        return dict(states[0]) if states else {}
    parts: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, kept in state["parts"].items():
            merged = parts.setdefault(name, {})
            for key, value in kept.items():
                merged[key] = merged[key] + value if key in merged and key != "q" else value
    return {"parts": parts, "codecs": []}
