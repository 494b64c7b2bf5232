"""Where a loader of an iterable dataset stands, as plain JSON.

    {"format": 1, "kind": "stream", "epoch": 3, "step": 117, "over": false, "workers": 2,
     "layers": [{"parts": [1, 1], "block": 1, "scheme": …, "seed": …, "taken": [[[0, 64], [1, 32]], …]}, …]}

It is the same on all ranks. `layers` are those of `Reading`; `taken` tells for every rank how many of its
samples it has used of each worker's stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.stream_reader import StreamLayer
from paceline.errors import UsageError

__all__ = ["FORMAT", "StreamState"]

FORMAT = 1


@dataclass(frozen=True)
class StreamState:
    """A place in an epoch of a stream.

    Attributes:
        epoch, step: how many are done.
        over: whether nothing is left of the epoch.
        workers: that read, each a stream of its own; 0: the rank itself.
        layers: what was done before; the last one is under way.
    """

    epoch: int
    step: int
    over: bool
    workers: int
    layers: list[StreamLayer]

    @property
    def own(self) -> bool:
        """Whether every rank has its own stream."""
        return self.layers[-1].shares is None

    @property
    def ranks(self) -> int:
        """How many ranks there were last."""
        return len(self.layers[-1].taken)

    def plain(self) -> dict[str, Any]:
        """Return the place as numbers, strings and lists."""
        return {
            "format": FORMAT,
            "kind": "stream",
            "epoch": self.epoch,
            "step": self.step,
            "over": self.over,
            "workers": self.workers,
            "layers": [_plain(layer) for layer in self.layers],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StreamState:
        """Return the place that `state` tells.

        Raises:
            UsageError: it is of another kind or format, or tells no place that could be.
        """
        if not isinstance(state, Mapping) or (state.get("kind"), state.get("format")) != ("stream", FORMAT):
            raise UsageError(
                "this is not the state of a loader of an iterable dataset",
                remedy=f"pass what state_dict() of such a loader gave (format {FORMAT})",
            )
        try:
            epoch, step, workers = (_whole(state[name]) for name in ("epoch", "step", "workers"))
            layers = [_layer(each, workers) for each in state["layers"]]
            found = cls(epoch, step, bool(state["over"]), workers, layers)
            if any((each.shares is None) != found.own for each in layers) or (
                found.own and any(len(each.taken) != found.ranks for each in layers)
            ):
                raise ValueError("layers of different kinds")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"a loader's state that is incomplete or damaged: {error!r}",
                remedy="pass what Loader.state_dict() gave",
            ) from error
        return found


def _plain(layer: StreamLayer) -> dict[str, Any]:
    return {
        "parts": None if layer.shares is None else list(layer.shares.parts),
        "block": layer.block,
        "scheme": layer.scheme,
        "seed": layer.seed,
        "taken": [[list(pair) for pair in sorted(each.items())] for each in layer.taken],
    }


def _layer(plain: Mapping[str, Any], workers: int) -> StreamLayer:
    """Return the layer that `plain` tells; raises KeyError, TypeError or ValueError where it is damaged."""
    parts, scheme, seed = plain["parts"], plain["scheme"], plain["seed"]
    taken = tuple({_whole(worker): _whole(count) for worker, count in each} for each in plain["taken"])
    if (
        type(seed) is not int
        or not taken
        or any(worker >= max(1, workers) for each in taken for worker in each)
    ):
        raise ValueError(f"taken {plain['taken']} of {workers} workers, seed {seed!r}")
    shares = None if parts is None else RankShares(tuple(_whole(part) for part in parts))
    block = dispatch_blocks(0, len(taken), block=plain["block"], scheme=scheme, shares=shares).block
    return StreamLayer(shares, block, scheme, seed, taken)


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number is due")
    return value
