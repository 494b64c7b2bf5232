"""The global parameters of a hub: merging updates into them, packing copies of them for workers.

An update is a pseudo-gradient Δ = parameters that its worker started from − parameters that it reached. N workers send
theirs one by one, each with a weight w: 1/N, times its samples relative to the mean, times a weight for its staleness.

    averaging          θ ← θ − ε·w·Δ                            no momentum, hence nothing that N arrivals amplify
    delayed-nesterov   θ ← θ − ε·w·Δ, and at every N-th arrival, with g the sum of the last N w·Δ:
                       m ← μ·m + g,  θ ← θ − ε·μ·m              N arrivals make one Nesterov step on their mean
    nesterov           m ← μ·m + w·Δ,  θ ← θ − ε·(w·Δ + μ·m)    at every arrival: the momentum decays N times too fast
                                                                to be that of a mean, and too slowly to be harmless

With merging by quorum, updates are added up as they arrive, and a merge makes one step with their weighted mean: what N
arrivals make above. See `merge_window` for when that is.

[Note: Nesterov per arrival] With ε = 0.7, μ = 0.9 and weights that don't shrink with N, this diverges: N stale updates
of about the same direction are each amplified by 1/(1 − μ) (arXiv 2401.09135 §4; `paceline simulate async` shows it).
It exists for comparison and must be allowed explicitly.

Sources: Delayed Nesterov: Liu et al., arXiv 2401.09135, Algorithm 3 with c = 0; averaging: local SGD, arXiv 1805.09767.

Everything here is a function of values in the journal, so replaying it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.async_dp.hub.hub_settings import HubOptimizer
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.row_arithmetic import FloatRow, add_scaled, as_row, as_tensor, l2_norm
from paceline.errors import CheckpointError
from paceline.transport.envelope import Bytes

__all__ = ["GlobalParams", "MergedFragment", "PendingUpdates"]


class MergedFragment:
    """One fragment of the global parameters, and the state of its outer optimizer.

    Args:
        theta: its numbers, 1-D float32.
        trained: number of those that are parameters; the rest are buffers, which are only averaged.
        outer: merges updates.

    Attributes:
        momentum, gathered: state of the outer optimizer; None where it has none.
        count: arrivals since the momentum was applied last.
        revision: number of merged updates.
        pending: updates that wait for a merge; None if there are none.
    """

    def __init__(self, theta: Tensor, trained: int, outer: HubOptimizer) -> None:
        self.theta, self.trained, self.outer = theta, trained, outer
        self.momentum = theta.new_zeros(trained) if outer.has_momentum else None
        delayed = outer.has_momentum and outer.name == "delayed-nesterov"
        self.gathered = theta.new_zeros(trained) if delayed else None
        self.count = self.revision = 0
        self.pending: PendingUpdates | None = None
        self._params, self._buffers = as_row(theta[:trained]), theta[trained:]
        self._has_buffers = len(self._buffers) > 0

    def merge(self, delta: FloatRow, weight: float, workers: int, *, updates: int = 0) -> None:
        """Merge an update, or the sum of several.

        Args:
            delta: of the shape of `theta`.
            weight: 1/N for an ordinary update.
            workers: N.
            updates: number of updates in a sum, which makes one step; 0: `delta` is a single one of N.
        """
        outer, gradient = self.outer, delta
        if self._has_buffers:
            gradient = delta[: self.trained]
            add_scaled(self._buffers, -weight, delta[self.trained :])
        warm = self.revision >= outer.warmup * workers
        add_scaled(self._params, -(outer.lr if warm else 1.0) * weight, gradient)
        self.revision += updates or 1
        if self.momentum is None or not warm:
            return
        if self.gathered is None:
            self.momentum.mul_(outer.momentum).add_(as_tensor(gradient), alpha=weight)
        else:
            add_scaled(self.gathered, weight, gradient)
            self.count += 1
            if self.count < workers and not updates:
                return
            self.momentum.mul_(outer.momentum).add_(self.gathered)
            self.gathered.zero_()
            self.count = 0
        add_scaled(self._params, -outer.lr * outer.momentum, self.momentum)

    def wait(self, delta: FloatRow, worker: int, counted: float, weight: float, *, late: bool) -> None:
        """Add an update to those that wait for a merge.

        Args:
            delta: of the shape of `theta`.
            worker: that sent it.
            counted: samples for which it counts.
            weight: relative to a fresh update.
            late: it started from parameters before the last merge.
        """
        if self.pending is None:
            self.pending = PendingUpdates(torch.zeros_like(self.theta))
        pending = self.pending
        add_scaled(pending.row, counted * weight, delta)
        pending.samples += counted
        pending.workers.append(worker)
        if late:
            pending.late.append(worker)

    def merge_pending(self, scale: float, workers: int) -> None:
        """Merge the waiting updates: `scale` times their mean is one step.

        Args:
            scale: 1, or less; see `merge_window.merge_scale`.
            workers: N.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            self.merge(pending.row, scale / pending.samples, workers, updates=len(pending.workers))

    def tensors(self) -> dict[str, Tensor]:
        """Return its state by name."""
        pending = None if self.pending is None else self.pending.total
        named = {
            "theta": self.theta,
            "momentum": self.momentum,
            "gathered": self.gathered,
            "pending": pending,
        }
        return {name: each for name, each in named.items() if each is not None}


@dataclass
class PendingUpdates:
    """Updates of a fragment that wait for a merge.

    Attributes:
        total: their sum, each times its samples and its weight.
        samples: for which they count.
        workers: that sent them, in order of arrival.
        late: those of them that missed the previous merge.
    """

    total: Tensor
    samples: float = 0.0
    workers: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.row = as_row(self.total)


class GlobalParams:
    """All fragments that one hub serves.

    Args:
        layout: of the model.
        outer: merges updates.
        codec: of the copies for workers.
        served: fragments that this hub serves; other hubs serve the others.

    Attributes:
        fragments: by number.
    """

    def __init__(self, layout: ParameterLayout, outer: HubOptimizer, codec: str, served: range) -> None:
        self.layout, self._codec = layout, codec
        self.fragments = {
            number: MergedFragment(
                torch.zeros(layout.fragments[number].numel), layout.fragments[number].trained, outer
            )
            for number in served
        }
        self._codecs: dict[tuple[int, str], UpdateCodec] = {}
        self._rows = {number: as_row(each.theta) for number, each in self.fragments.items()}
        self._scratch = {
            number: as_row(torch.empty_like(each.theta)) for number, each in self.fragments.items()
        }
        self._copies: dict[int, tuple[int, Bytes]] = {}

    @property
    def revision(self) -> int:
        """Number of merged updates, in all fragments."""
        return sum(fragment.revision for fragment in self.fragments.values())

    @property
    def revisions(self) -> dict[int, int]:
        """Number of merged updates by fragment."""
        return {number: fragment.revision for number, fragment in self.fragments.items()}

    def packet_nbytes(self, fragment: int, codec: str) -> int:
        """Return the size of a packed fragment."""
        return self._codec_of(fragment, codec).nbytes

    def norm(self, fragment: int) -> float:
        """Return the norm of a fragment's parameters."""
        return l2_norm(self._rows[fragment])

    def down_nbytes(self, fragment: int) -> int:
        """Return the size of a copy for workers."""
        return self.packet_nbytes(fragment, self._codec)

    def unpack(self, fragment: int, codec: str, packet: Bytes) -> tuple[FloatRow, float]:
        """Return the numbers of a packet and their norm; the numbers are valid until the next call.

        Raises:
            DamagedEnvelope: the packet has another number of bytes than it must.
        """
        row = self._scratch[fragment]
        self._codec_of(fragment, codec).unpack(packet, row)
        return row, l2_norm(row)

    def pack(self, fragment: int) -> tuple[int, str, Bytes]:
        """Return revision, codec and bytes of a fragment, packed once per revision."""
        revision = self.fragments[fragment].revision
        held = self._copies.get(fragment)
        if held is None or held[0] != revision:
            packet = self._codec_of(fragment, self._codec).pack(self._rows[fragment])
            held = self._copies[fragment] = revision, packet
        return held[0], self._codec, held[1]

    def start(self, fragment: int, row: FloatRow) -> None:
        """Set the initial parameters of a fragment."""
        self.fragments[fragment].theta.copy_(as_tensor(row))
        self._copies.pop(fragment, None)

    def _codec_of(self, fragment: int, codec: str) -> UpdateCodec:
        key = fragment, codec
        if key not in self._codecs:
            self._codecs[key] = UpdateCodec(self.layout.fragments[fragment], codec)
        return self._codecs[key]

    # ------------------------------------------------------------------ snapshots

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a snapshot by name."""
        return {
            f"{number}.{name}": tensor
            for number, fragment in self.fragments.items()
            for name, tensor in fragment.tensors().items()
        }

    def facts(self) -> dict[str, Any]:
        """Return the rest of a snapshot."""
        return {
            "revisions": {str(number): each.revision for number, each in self.fragments.items()},
            "counts": {str(number): each.count for number, each in self.fragments.items()},
            "pending": {
                str(number): [each.pending.samples, each.pending.workers, each.pending.late]
                for number, each in self.fragments.items()
                if each.pending is not None
            },
        }

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore a snapshot.

        Raises:
            CheckpointError: it has another layout or outer optimizer.
        """
        for number, (samples, workers, late) in facts.get("pending", {}).items():
            fragment = self.fragments[int(number)]
            fragment.pending = PendingUpdates(torch.zeros_like(fragment.theta), samples, workers, late)
        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise CheckpointError(
                f"the snapshot holds {', '.join(sorted(tensors))}; this hub needs {', '.join(sorted(own))}",
                remedy="start the hub with the same outer optimizer and shards as before",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for number, fragment in self.fragments.items():
            fragment.revision = int(facts["revisions"][str(number)])
            fragment.count = int(facts["counts"][str(number)])
        self._copies.clear()
