"""Arguments of `Loader` that define who gets which samples, and the checks of how they go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed import ProcessGroup

from paceline.data.measured_shares import MeasuredShares
from paceline.data.rank_place import RankPlace
from paceline.data.sampling.block_dispatch import DispatchScheme, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import UnevenPolicy, check_batching
from paceline.errors import UsageError, unknown

__all__ = [
    "Dealing",
    "check_movable",
    "check_stream",
    "check_unmoved",
    "check_virtual",
    "length_of",
    "measured_shares",
    "stream_shares",
]

_NEEDS_LENGTH = "that needs a dataset with a length; use a map-style one, or leave it out"


@dataclass(frozen=True)
class Dealing:
    """Arguments of `Loader` on who gets which samples."""

    scheme: DispatchScheme
    block: int
    shares: Sequence[float] | Literal["measured"] | None
    uneven: UnevenPolicy
    seed: int
    batch_size: int

    def shares_of(self, samples: int, ranks: int) -> RankShares:
        """Return the shares of `ranks`; before anything is measured, equal ones.

        Raises:
            UsageError: the shares, the block or the scheme is invalid.
        """
        shares = RankShares.equal(ranks) if isinstance(self.shares, str) else self.shares
        return dispatch_blocks(
            samples, ranks, block=self.block, scheme=self.scheme, shares=shares, seed=self.seed
        ).shares


def measured_shares(shares: object, uneven: str, every: int | None) -> MeasuredShares | None:
    """Return what derives shares from throughput; None: they are fixed.

    Args:
        shares: as in `Loader`.
        uneven: the policy.
        every: steps between two updates.

    Raises:
        UsageError: they don't go together, or one is invalid.
    """
    if isinstance(shares, str) and shares != "measured":
        raise unknown("shares", shares, ["measured"])
    if shares != "measured":
        if every is not None:
            raise UsageError(f"redeal_every={every!r} without shares='measured'", remedy="leave it out")
        return None
    if uneven not in ("join", "rebalance"):
        raise UsageError(
            f"shares='measured' with uneven={uneven!r}",
            remedy="measured shares need batch sizes in proportion: leave uneven out, or use 'rebalance'",
        )
    if every is not None and (not isinstance(every, int) or every < 1):
        raise UsageError(f"redeal_every={every!r}", remedy="pass a number of steps, 1 or more, or None")
    return MeasuredShares(every)


def length_of(dataset: Any) -> int:
    """Return the number of samples of a map-style dataset.

    Raises:
        UsageError: it has no length, or no sample.
    """
    try:
        samples = len(dataset)
    except TypeError as error:
        raise UsageError(
            f"a dataset of type {type(dataset).__qualname__} has no length",
            remedy="pass one with __len__ and __getitem__, or a torch.utils.data.IterableDataset",
        ) from error
    if samples < 1:
        raise UsageError("the dataset is empty", remedy="pass one with at least one sample")
    return samples


def check_stream(stream: str | None, dealing: Dealing, place: RankPlace, shuffle: bool | str) -> None:
    """Check the arguments of a loader of an iterable dataset.

    Args:
        stream: ``"own"``, ``"whole"`` or None.
        dealing: the assignment.
        place: the ranks that this process serves.
        shuffle: as in `Loader`.

    Raises:
        UsageError: an option needs a length, or has no effect if each rank reads its own stream.
    """
    if isinstance(dealing.shares, str) or shuffle == "blocks":
        option = "shares='measured'" if isinstance(dealing.shares, str) else "shuffle='blocks'"
        raise UsageError(f"{option} with an iterable dataset", remedy=_NEEDS_LENGTH)
    if stream not in (None, "own", "whole"):
        raise unknown("stream", stream, ["own", "whole"])
    check_batching(dealing.batch_size, dealing.uneven)
    if dealing.uneven == "rebalance":
        raise UsageError("uneven='rebalance' with an iterable dataset", remedy=_NEEDS_LENGTH)
    given = {
        "dispatch": dealing.scheme != "round_robin",
        "block": dealing.block != 1,
        "shares": dealing.shares is not None,
        "virtual_ranks": place.virtual_ranks is not None,
    }
    for name, is_given in given.items():
        if is_given and stream != "whole":
            raise UsageError(
                f"{name} with an iterable dataset of which every rank reads its own stream",
                remedy="let the loader divide one stream that all ranks read (stream='whole'), or leave it out",
            )
    if place.virtual_ranks is not None and dealing.shares is not None:
        raise UsageError(
            "shares of an iterable dataset: batches of large shares would wait in memory for those of small ones",
            remedy="leave shares out, or use a map-style dataset",
        )


def check_movable(group: ProcessGroup | None, iterable: bool, dealing: Dealing, place: RankPlace) -> None:
    """Check that a loader can continue on any number of ranks.

    Args:
        group: of the ranks.
        iterable: the dataset is iterable.
        dealing: the assignment.
        place: the ranks that this process serves.

    Raises:
        UsageError: it can't; names the argument.
    """
    fixed = place.virtual_ranks is None
    if group is not None:
        problem, remedy = "group=", "leave it out: a loader moves to the ranks of the new default group"
    elif iterable:
        problem, remedy = "an iterable dataset", "use a map-style dataset"
    elif fixed and not (dealing.shares is None or isinstance(dealing.shares, str)):
        problem, remedy = (
            "a share for each rank",
            "use shares='measured', or virtual_ranks=, or leave shares out",
        )
    elif fixed and dealing.uneven not in ("join", "rebalance"):
        problem = (
            f"uneven={dealing.uneven!r}, by which what is left may be too little for a step of other ranks"
        )
        remedy = "use 'join' or 'rebalance', or pass virtual_ranks="
    else:
        return
    raise UsageError(f"a Loader with {problem} can't move to other ranks", rank=place.rank, remedy=remedy)


def check_unmoved(place: RankPlace, rank: int, ranks: int) -> None:
    """Check that this process is still the rank that a loader serves, among as many.

    Args:
        place: the ranks that the loader serves.
        rank, ranks: this process, and the number of processes.

    Raises:
        UsageError: it is not; samples would be used twice or never.
    """
    if (rank, ranks) != (place.rank, place.ranks):
        raise UsageError(
            f"this loader was made for rank {place.rank} of {place.ranks}; this process is now rank {rank} of {ranks}",
            remedy="call paceline.init() before creating a Loader; with paceline.Elastic, pass the loader to that",
        )


def check_virtual(shares: object, every: int | None) -> None:
    """Check that the speed of ranks does not decide what a virtual rank gets.

    Args:
        shares: as in `Loader`.
        every: steps between two updates of measured shares.

    Raises:
        UsageError: it would.
    """
    for option, is_given in (
        (f"redeal_every={every!r}", every is not None),
        ("shares='measured'", isinstance(shares, str) and shares == "measured"),
    ):
        if is_given:
            raise UsageError(
                f"{option} with virtual ranks, whose samples must not depend on how fast the ranks are",
                remedy="leave it out, or leave virtual_ranks out",
            )


def stream_shares(dealing: Dealing, ranks: int) -> RankShares:
    """Return the shares of a stream that all ranks read.

    Args:
        dealing: the assignment.
        ranks: number of ranks to which samples are assigned.

    Raises:
        UsageError: the shares are invalid, or the policy requires samples on a rank that gets none.
    """
    found = dealing.shares_of(0, ranks)
    if dealing.uneven in ("truncate", "drop", "pad") and 0 in found.parts:
        rank = found.parts.index(0)
        raise UsageError(
            f"the share of rank {rank} is 0, and uneven={dealing.uneven!r} requires samples on every rank",
            rank=rank,
            remedy="use uneven='join', or a share above 0",
        )
    return found
