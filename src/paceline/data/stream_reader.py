"""What one rank reads of an iterable dataset: its own samples, each with the worker that read it.

Every worker of torch's DataLoader reads a stream of its own; of that, a rank keeps all (each rank has its own
stream) or its blocks (all ranks read the same stream). To resume, the stream is read again from its beginning
and what was used before is passed over: a pile of layers as in `epoch`, but counted while the stream runs,
since nobody knows its length.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, cycle, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from paceline._core.keyed_random import derive_key, keyed_hash
from paceline.data.sampling.block_dispatch import DispatchScheme
from paceline.data.sampling.rank_shares import RankShares, TurnOrder

__all__ = ["Collated", "Collating", "PrepareWorker", "RankReader", "Stream", "StreamLayer", "checksum"]

_AT_ONCE = 1024


@dataclass(frozen=True)
class StreamLayer:
    """How a stream is dealt, and how much of it every rank has used.

    Attributes:
        shares: of the ranks; None: every rank has its own stream, and keeps all of it.
        block: samples dealt together.
        scheme, seed: as in `Dealing`.
        taken: per rank and worker, how many of its own samples it has used.
    """

    shares: RankShares | None
    block: int
    scheme: DispatchScheme
    seed: int
    taken: tuple[dict[int, int], ...]

    def now(self) -> StreamLayer:
        """Return a copy that later counts do not change."""
        return replace(self, taken=tuple(dict(each) for each in self.taken))

    def owners(self, rank: int) -> Iterator[int]:
        """Yield whose each sample of a worker's stream is, without end; `rank` reads it."""
        if self.shares is None:
            return repeat(rank)
        blocks = (
            cycle(TurnOrder.of(self.shares).owners.tolist()) if self.scheme != "random" else self._drawn()
        )
        return chain.from_iterable(repeat(owner, self.block) for owner in blocks)

    def _drawn(self) -> Iterator[int]:
        """Yield an owner for each block, drawn with the shares as chances."""
        assert self.shares is not None, "there is only one owner otherwise"
        ends, key = np.cumsum(self.shares.parts), derive_key(self.seed, 6)
        for first in count(0, _AT_ONCE):
            drawn = keyed_hash(np.arange(first, first + _AT_ONCE, dtype=np.uint64), key) >> np.uint64(32)
            places = drawn * np.uint64(self.shares.whole) >> np.uint64(32)
            yield from np.searchsorted(ends, places, side="right").tolist()


@dataclass
class RankReader:
    """Which samples of its streams a rank reads.

    Attributes:
        rank: this rank.
        layers: what was done before; the last one is under way.
    """

    rank: int
    layers: list[StreamLayer]

    def mine(self, worker: int) -> Callable[[], bool]:
        """Return a function that tells of each next sample of a worker's stream whether it is this rank's."""
        last = len(self.layers) - 1
        owners = [layer.owners(self.rank) for layer in self.layers]
        taken = [[of_worker.get(worker, 0) for of_worker in layer.taken] for layer in self.layers]

        def next_is_mine() -> bool:
            for at, left in enumerate(taken):
                owner = next(owners[at])
                if left[owner]:
                    left[owner] -= 1
                    return False  # it was used before
                if at == last:
                    return owner == self.rank
            raise AssertionError("there is a layer under way")

        return next_is_mine


class Stream(IterableDataset):
    """A user's iterable dataset, of which a rank's own samples are yielded as (worker, first, sample).

    `first` tells the first sample that the worker saw, of whichever rank: a checksum, 0 where it has none.
    """

    def __init__(self, dataset: Any, reading: RankReader) -> None:
        self.dataset, self.reading = dataset, reading

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        is_mine, first = self.reading.mine(worker), None
        for sample in self.dataset:
            if first is None:
                first = checksum(sample)
            if is_mine():
                yield worker, first, sample


class _ByContent(pickle.Pickler):
    """Writes tensors by what is in them: torch's own way writes addresses, which differ between processes."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how `thing` is written; never read again."""
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        flat = thing.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        told = flat.view(torch.uint8).numpy().tobytes()
        return torch.Tensor, (str(thing.dtype), tuple(thing.shape), told)


def checksum(sample: Any) -> int:
    """Return a number that tells `sample`, the same in every process; 0 where it can't be told."""
    written = io.BytesIO()
    pickler = _ByContent(written)
    pickler.fast = True  # whether two equal strings are one object is no part of the sample
    try:
        pickler.dump(sample)
    except Exception:  # noqa: BLE001 - a sample may be anything, and this is but a hint
        return 0
    return zlib.crc32(written.getvalue())


@dataclass(frozen=True)
class Collated:
    """A batch of a stream.

    Attributes:
        worker: who read it.
        first: see `Stream`.
        samples: how many.
        batch: what the collate function made of them.
    """

    worker: int
    first: int
    samples: int
    batch: Any

    def pin_memory(self) -> Collated:
        """Return the same with its batch in pinned memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Collated(self.worker, self.first, self.samples, pin_memory(self.batch))


@dataclass(frozen=True)
class Collating:
    """Makes a batch of what `Stream` yields."""

    collate_fn: Callable[[list[Any]], Any] | None

    def __call__(self, read: list[tuple[int, int, Any]]) -> Collated:
        worker, first, _ = read[0]
        collate = self.collate_fn or default_collate
        return Collated(worker, first, len(read), collate([sample for _, _, sample in read]))


@dataclass(frozen=True)
class PrepareWorker:
    """Shows a worker the user's dataset as its own, then runs the user's `worker_init_fn`."""

    worker_init_fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Stream):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
