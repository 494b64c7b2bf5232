"""Position of a loader in an iterable dataset, as plain JSON.

    {"format": 1, "kind": "stream", "epoch": 3, "step": 117, "over": false, "workers": 2,
     "layers": [{"parts": [1, 1], "block": 1, "scheme": …, "seed": …, "taken": [[[0, 64], [1, 32]], …]}, …]}

It is the same on all ranks. `layers` are those of `RankReader`; `taken` holds for every rank pairs (worker, number of
the rank's samples of this worker's stream that it has used).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline._core.json_codec import Whole
from paceline.data.iterable_sharding import StreamLayer
from paceline.data.map_loader_state import decode_state
from paceline.data.sampling.block_dispatch import DispatchScheme, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.errors import UsageError

__all__ = ["StreamState"]

_FORMAT = 1


@dataclass(frozen=True)
class StreamState:
    """A position in an epoch of a stream.

    Attributes:
        epoch, step: numbers of completed ones.
        over: the epoch is complete.
        workers: number of worker processes, each with its own stream; 0: the rank reads itself.
        layers: earlier assignments; the last one is the present one.
    """

    epoch: int
    step: int
    over: bool
    workers: int
    layers: list[StreamLayer]

    @property
    def per_rank(self) -> bool:
        """True if every rank has its own stream."""
        return self.layers[-1].shares is None

    @property
    def ranks(self) -> int:
        """Latest number of ranks."""
        return len(self.layers[-1].taken)

    def to_json(self) -> dict[str, Any]:
        """Return the position as numbers, strings and lists."""
        return {
            "format": _FORMAT,
            "kind": "stream",
            "epoch": self.epoch,
            "step": self.step,
            "over": self.over,
            "workers": self.workers,
            "layers": [
                {
                    "parts": None if layer.shares is None else list(layer.shares.parts),
                    "block": layer.block,
                    "scheme": layer.scheme,
                    "seed": layer.seed,
                    "taken": [[list(pair) for pair in sorted(each.items())] for each in layer.taken],
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> StreamState:
        """Return the position with this `state`.

        Raises:
            UsageError: it is of another kind or format, or invalid.
        """
        if not isinstance(state, Mapping) or (state.get("kind"), state.get("format")) != ("stream", _FORMAT):
            raise UsageError(
                "this is not the state of a loader of an iterable dataset",
                remedy=f"pass a state that state_dict() of such a loader returned (format {_FORMAT})",
            )
        read = decode_state(state, _StreamRecord)
        layers = [layer.build(read.workers) for layer in read.layers]
        if not layers:
            raise UsageError("the loader's state has no layers")
        found = cls(read.epoch, read.step, read.over, read.workers, layers)
        if any((each.shares is None) != found.per_rank for each in layers) or (
            found.per_rank and any(len(each.taken) != found.ranks for each in layers)
        ):
            raise UsageError("the loader's state has layers of different kinds")
        return found


@dataclass(frozen=True)
class _LayerRecord:
    parts: tuple[int, ...] | None
    block: int
    scheme: DispatchScheme
    seed: int
    taken: tuple[list[tuple[Whole, Whole]], ...]

    def build(self, workers: int) -> StreamLayer:
        if not self.taken or any(worker >= max(1, workers) for each in self.taken for worker, _ in each):
            raise UsageError(f"the loader's state has taken {self.taken} of {workers} workers")
        shares = None if self.parts is None else RankShares(self.parts)
        block = dispatch_blocks(
            0, len(self.taken), block=self.block, scheme=self.scheme, shares=shares
        ).block  # validated
        return StreamLayer(shares, block, self.scheme, self.seed, tuple(dict(each) for each in self.taken))


@dataclass(frozen=True)
class _StreamRecord:
    epoch: Whole
    step: Whole
    over: bool
    workers: Whole
    layers: list[_LayerRecord]
