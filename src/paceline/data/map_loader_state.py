"""Position of a loader in an epoch; as plain JSON it suffices to serve each remaining sample exactly once.

    {"format": 2, "samples": 50000, "seed": 0, "shuffle": "samples", "shuffle_block": 1, "epoch": 3,
     "done":  [{"samples": …, "parts": […], "block": …, "scheme": …, "seed": …, "taken": […]}, …],
     "dealt":  {"samples": …, "parts": […], "block": …, "scheme": …, "seed": …},
     "batch_size": 64, "uneven": "join", "step": 117}

It is the same on all ranks. `done` are the layers of `EpochPlan`, `dealt` is its present assignment, and `step` the
number of its steps that are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from paceline._core.json_codec import decode
from paceline._core.keyed_random import derive_key
from paceline.data.resumable_batch_indices import (
    EpochLayer,
    EpochPlan,
    SampleOrder,
    ShuffleMode,
    remaining_samples,
)
from paceline.data.sampling.block_dispatch import BlockDispatch, DispatchScheme
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import RankPortions, UnevenPolicy
from paceline.errors import UsageError

__all__ = ["FORMAT", "DispatchSettings", "LoaderPosition", "decode_state"]

FORMAT = 2

T = TypeVar("T")


@dataclass(frozen=True)
class DispatchSettings:
    """How the samples of an epoch are assigned and cut into batches.

    Attributes:
        shares: of the ranks.
        block, scheme: as in `BlockDispatch`.
        batch_size, uneven: as in `RankPortions`.
    """

    shares: RankShares
    block: int
    scheme: DispatchScheme
    batch_size: int
    uneven: UnevenPolicy


@dataclass(frozen=True)
class LoaderPosition:
    """A position in an epoch.

    Attributes:
        epoch: its batches.
        step: number of steps that are done.
    """

    epoch: EpochPlan
    step: int = 0

    @classmethod
    def start(cls, order: SampleOrder, settings: DispatchSettings) -> LoaderPosition:
        """Return the start of an epoch."""
        return cls(_plan(order, (), settings))

    @property
    def remaining(self) -> int:
        """Number of remaining steps."""
        return self.epoch.portions.steps - self.step

    def redistribute(self, settings: DispatchSettings, *, anew: bool = False) -> LoaderPosition:
        """Return this position with the remaining samples assigned by `settings`; itself if they are unchanged.

        Args:
            settings: the new ones.
            anew: assign them even if the settings are unchanged.

        Raises:
            UsageError: no samples remain, or the settings do not fit.
        """
        if settings == self.settings and not (anew and self.step):
            return self
        epoch = self.epoch
        layers = (*epoch.layers, epoch.after(self.step)) if self.step else epoch.layers
        return LoaderPosition(_plan(epoch.order, layers, settings))

    @property
    def settings(self) -> DispatchSettings:
        """The present settings."""
        dispatch, portions = self.epoch.dispatch, self.epoch.portions
        return DispatchSettings(
            dispatch.shares, dispatch.block, dispatch.scheme, portions.batch_size, portions.policy
        )

    # ------------------------------------------------------------------ as JSON

    def state(self) -> dict[str, Any]:
        """Return the position as numbers, strings and lists."""
        order, portions = self.epoch.order, self.epoch.portions
        return {
            "format": FORMAT,
            "samples": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "shuffle_block": order.block,
            "epoch": order.epoch,
            "done": [
                {**_dispatch_state(layer.dispatch), "taken": list(layer.taken)} for layer in self.epoch.layers
            ],
            "dealt": _dispatch_state(self.epoch.dispatch),
            "batch_size": portions.batch_size,
            "uneven": portions.policy,
            "step": self.step,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> LoaderPosition:
        """Return the position with this `state`.

        Raises:
            UsageError: it has another format, or is invalid.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise UsageError(
                f"a loader's state of format {found!r}", remedy=f"this version reads format {FORMAT}"
            )
        read = decode_state(state, _PositionState)
        order = SampleOrder(read.samples, read.shuffle, read.shuffle_block, read.seed, read.epoch)
        layers = tuple(EpochLayer(layer.dispatch(), layer.taken) for layer in read.done)
        dispatch = read.dealt.dispatch()
        portions = RankPortions(dispatch.counts, read.batch_size, read.uneven)
        if not 0 <= read.step <= portions.steps:
            raise UsageError(f"a loader's state at step {read.step} of {portions.steps}")
        return cls(EpochPlan(order, layers, dispatch, portions), read.step)


@dataclass(frozen=True)
class _DispatchState:
    samples: int
    parts: tuple[int, ...]
    block: int
    scheme: DispatchScheme
    seed: int

    def dispatch(self) -> BlockDispatch:
        return BlockDispatch(self.samples, RankShares(self.parts), self.block, self.scheme, self.seed)


@dataclass(frozen=True)
class _LayerState(_DispatchState):
    taken: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = self.dispatch().counts
        if len(self.taken) != len(counts) or any(
            not 0 <= taken <= count for taken, count in zip(self.taken, counts, strict=True)
        ):
            raise ValueError(f"taken {self.taken} of {counts}")


@dataclass(frozen=True, kw_only=True)
class _PositionState:
    samples: int
    seed: int
    shuffle: ShuffleMode
    shuffle_block: int
    epoch: int
    done: list[_LayerState]
    dealt: _DispatchState
    batch_size: int
    uneven: UnevenPolicy
    step: int


def decode_state(state: object, kind: type[T]) -> T:
    """Return a loader's state as a value of type `kind`.

    Raises:
        UsageError: a field is missing or invalid.
    """
    try:
        return decode(state, kind, "the loader's state")
    except UsageError as error:
        problem = str(error).partition("\n")[0]
        raise UsageError(problem, remedy="pass a state that Loader.state_dict() returned") from error


def _dispatch_state(dispatch: BlockDispatch) -> dict[str, Any]:
    return {
        "samples": dispatch.samples,
        "parts": list(dispatch.shares.parts),
        "block": dispatch.block,
        "scheme": dispatch.scheme,
        "seed": dispatch.seed,
    }


def _plan(order: SampleOrder, layers: tuple[EpochLayer, ...], settings: DispatchSettings) -> EpochPlan:
    remaining = remaining_samples(order, layers)
    if not remaining:
        raise UsageError("no samples remain to assign", remedy="start the next epoch")
    seed = _dispatch_seed(order, len(layers)) if settings.scheme == "random" else 0
    return EpochPlan(order, layers, *_assign(remaining, settings, seed))


def _dispatch_seed(order: SampleOrder, layer: int) -> int:
    """Return the seed of a random assignment; of the first one the loader's seed itself, as in a forecast."""
    return derive_key(order.seed, order.epoch, layer, 6) if order.epoch or layer else order.seed


@lru_cache(maxsize=8)  # with round-robin, every epoch is assigned alike
def _assign(samples: int, settings: DispatchSettings, seed: int) -> tuple[BlockDispatch, RankPortions]:
    block = min(settings.block, samples)
    dispatch = BlockDispatch(samples, settings.shares, block, settings.scheme, seed)
    return dispatch, RankPortions(dispatch.counts, settings.batch_size, settings.uneven)
