"""Where a loader stands, as plain JSON: enough to serve every sample that is left exactly once.

    {"format": 2, "samples": 50000, "seed": 0, "shuffle": "samples", "shuffle_block": 1, "epoch": 3,
     "done":  [{"samples": …, "parts": […], "block": …, "scheme": …, "seed": …, "taken": […]}, …],
     "dealt":  {"samples": …, "parts": […], "block": …, "scheme": …, "seed": …},
     "batch_size": 64, "uneven": "join", "step": 117}

It is the same on all ranks. `done` are the layers of `EpochPlan`, `dealt` is the dealing under way, `step` how
many of its steps are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline._core.keyed_random import derive_key
from paceline.data.epoch_plan import EpochLayer, EpochPlan, SampleOrder, left_of
from paceline.data.sampling.block_dispatch import BlockDispatch, DispatchScheme
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import RankPortions, UnevenPolicy
from paceline.errors import UsageError

__all__ = ["FORMAT", "DispatchSettings", "LoaderPosition"]

FORMAT = 2


@dataclass(frozen=True)
class DispatchSettings:
    """How an epoch, or what is left of one, is dealt and cut.

    Attributes:
        shares: of the ranks; their number is the number of ranks.
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
    """A place in an epoch.

    Attributes:
        epoch: its batches.
        step: how many of them are done.
    """

    epoch: EpochPlan
    step: int = 0

    @classmethod
    def start(cls, row: SampleOrder, recipe: DispatchSettings) -> LoaderPosition:
        """Return the beginning of the epoch `row`."""
        return cls(_dealt(row, (), recipe))

    @property
    def left(self) -> int:
        """Steps that are left."""
        return self.epoch.portions.steps - self.step

    def dealt_again(self, recipe: DispatchSettings) -> LoaderPosition:
        """Return this place, with what is left dealt anew by `recipe`; the same where nothing changes.

        Raises:
            UsageError: nothing is left, or it can't be dealt so.
        """
        if recipe == self.recipe:
            return self
        epoch = self.epoch
        layers = (*epoch.layers, epoch.after(self.step)) if self.step else epoch.layers
        return LoaderPosition(_dealt(epoch.row, layers, recipe))

    @property
    def recipe(self) -> DispatchSettings:
        """How what is left is dealt and cut."""
        dealing, portions = self.epoch.dealing, self.epoch.portions
        return DispatchSettings(
            dealing.shares, dealing.block, dealing.scheme, portions.batch_size, portions.policy
        )

    # ------------------------------------------------------------------ as JSON

    def state(self) -> dict[str, Any]:
        """Return the place as numbers, strings and lists."""
        row, portions = self.epoch.row, self.epoch.portions
        return {
            "format": FORMAT,
            "samples": row.samples,
            "seed": row.seed,
            "shuffle": row.shuffle,
            "shuffle_block": row.block,
            "epoch": row.epoch,
            "done": [{**_plain(layer.dealing), "taken": list(layer.taken)} for layer in self.epoch.layers],
            "dealt": _plain(self.epoch.dealing),
            "batch_size": portions.batch_size,
            "uneven": portions.policy,
            "step": self.step,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> LoaderPosition:
        """Return the place that `state` tells.

        Raises:
            UsageError: it is of another format, or tells no place that could be.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise UsageError(
                f"a loader's state of format {found!r}", remedy=f"this version reads format {FORMAT}"
            )
        try:
            row = SampleOrder(
                _whole(state["samples"]),
                state["shuffle"],
                _whole(state["shuffle_block"]),
                seed=_whole(state["seed"]),
                epoch=_whole(state["epoch"]),
            )
            layers = tuple(_layer(each) for each in state["done"])
            dealing = _dealing(state["dealt"])
            portions = RankPortions(dealing.counts, _whole(state["batch_size"]), state["uneven"])
            step = _whole(state["step"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"a loader's state that is incomplete or damaged: {error!r}",
                remedy="pass what Loader.state_dict() gave",
            ) from error
        if not 0 <= step <= portions.steps:
            raise UsageError(f"a loader's state at step {step} of {portions.steps}")
        return cls(EpochPlan(row, layers, dealing, portions), step)


def _dealt(row: SampleOrder, layers: tuple[EpochLayer, ...], recipe: DispatchSettings) -> EpochPlan:
    left = left_of(row, layers)
    if not left:
        raise UsageError("no samples are left to deal", remedy="begin the next epoch")
    return EpochPlan(
        row, layers, *_cut(left, recipe, _seed(row, len(layers)) if recipe.scheme == "random" else 0)
    )


def _seed(row: SampleOrder, layer: int) -> int:
    """Return what decides a dealing by chance; the first one's is the seed itself, as in a forecast."""
    return derive_key(row.seed, row.epoch, layer, 6) if row.epoch or layer else row.seed


@lru_cache(maxsize=8)  # dealt in turns, every epoch is cut alike
def _cut(samples: int, recipe: DispatchSettings, seed: int) -> tuple[BlockDispatch, RankPortions]:
    dealing = BlockDispatch(samples, recipe.shares, min(recipe.block, samples), recipe.scheme, seed)
    return dealing, RankPortions(dealing.counts, recipe.batch_size, recipe.uneven)


def _plain(dealing: BlockDispatch) -> dict[str, Any]:
    return {
        "samples": dealing.samples,
        "parts": list(dealing.shares.parts),
        "block": dealing.block,
        "scheme": dealing.scheme,
        "seed": dealing.seed,
    }


def _dealing(plain: Mapping[str, Any]) -> BlockDispatch:
    shares = RankShares(tuple(_whole(part) for part in plain["parts"]))
    samples, block, seed = (_whole(plain[name]) for name in ("samples", "block", "seed"))
    return BlockDispatch(samples, shares, block, plain["scheme"], seed)


def _layer(plain: Mapping[str, Any]) -> EpochLayer:
    dealing, taken = _dealing(plain), tuple(_whole(each) for each in plain["taken"])
    if len(taken) != dealing.ranks or any(
        not 0 <= each <= count for each, count in zip(taken, dealing.counts, strict=True)
    ):
        raise ValueError(f"taken {taken} of {dealing.counts}")
    return EpochLayer(dealing, taken)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} where a whole number is due")
    return value
