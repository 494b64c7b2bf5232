"""Reads a rank's own samples of an iterable dataset.

Every worker of torch's DataLoader reads its own stream. A rank keeps all of it (each rank has its own stream) or its
blocks (all ranks read the same stream). To resume, the stream is read again from its start and used samples are
skipped: a stack of layers as in `batch_assignment`, but counted while reading, since the length is not known.
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

__all__ = [
    "CollateStream",
    "RankReader",
    "RankStream",
    "StreamBatch",
    "StreamLayer",
    "sample_checksum",
]

_CHUNK = 1024

USED = -1  # a sample that some rank has used before


@dataclass(frozen=True)
class StreamLayer:
    """Assignment of a stream to ranks, and how much of it every rank has used.

    Attributes:
        shares: of the ranks; None: every rank has its own stream, and keeps all of it.
        block: samples that are assigned together.
        scheme, seed: as in `BlockDispatch`.
        taken: per rank and worker, how many of its own samples it has used.
    """

    shares: RankShares | None
    block: int
    scheme: DispatchScheme
    seed: int
    taken: tuple[dict[int, int], ...]

    def copy(self) -> StreamLayer:
        """Return a copy with its own counts."""
        return replace(self, taken=tuple(dict(each) for each in self.taken))

    def owners(self, rank: int) -> Iterator[int]:
        """Yield the rank of each sample of a worker's stream, without end; `rank` reads it."""
        if self.shares is None:
            return repeat(rank)
        if self.scheme == "random":
            blocks = self._draw_owners(self.shares)
        else:
            blocks = cycle(TurnOrder.of(self.shares).owners.tolist())
        return chain.from_iterable(repeat(owner, self.block) for owner in blocks)

    def _draw_owners(self, shares: RankShares) -> Iterator[int]:
        """Yield a rank for each block, drawn with the shares as probabilities."""
        ends, key = np.cumsum(shares.parts), derive_key(self.seed, 6)
        for first in count(0, _CHUNK):
            drawn = keyed_hash(np.arange(first, first + _CHUNK, dtype=np.uint64), key) >> np.uint64(32)
            places = drawn * np.uint64(shares.whole) >> np.uint64(32)
            yield from np.searchsorted(ends, places, side="right").tolist()


@dataclass
class RankReader:
    """Finds out which samples of its streams a rank uses.

    Attributes:
        rank: this rank; if all read the same stream, it does not matter.
        layers: earlier assignments; the last one is the present one.
    """

    rank: int
    layers: list[StreamLayer]

    def users(self, worker: int) -> Callable[[], int]:
        """Return a function that returns the rank that uses each next sample of a worker's stream, or `USED`."""
        last = len(self.layers) - 1
        owners = [layer.owners(self.rank) for layer in self.layers]
        taken = [[of_worker.get(worker, 0) for of_worker in layer.taken] for layer in self.layers]

        def user_of_next() -> int:
            for index, left in enumerate(taken):
                owner = next(owners[index])
                if left[owner]:
                    left[owner] -= 1
                    return USED
                if index == last:
                    return owner
            raise AssertionError("there is always a present layer")

        return user_of_next


class RankStream(IterableDataset):
    """Yields a rank's own samples of an iterable dataset as (worker, first, sample).

    `first` is a checksum of the first sample in the worker's stream, of any rank; 0: it has none.
    """

    def __init__(self, dataset: Any, reader: RankReader) -> None:
        self.dataset, self.reader = dataset, reader

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        user_of_next, first = self.reader.users(worker), None
        for sample in self.dataset:
            if first is None:
                first = sample_checksum(sample)
            if user_of_next() == self.reader.rank:
                yield worker, first, sample


class _ContentPickler(pickle.Pickler):
    """Pickles tensors by content: torch's own way includes addresses, which differ between processes."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        flat = obj.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes()
        return torch.Tensor, (str(obj.dtype), tuple(obj.shape), content)


def sample_checksum(sample: Any) -> int:
    """Return a checksum of `sample` that is the same in every process; 0 if it can't be pickled."""
    written = io.BytesIO()
    pickler = _ContentPickler(written)
    pickler.fast = True  # independent of whether two equal strings are the same object
    try:
        pickler.dump(sample)
    except Exception:  # noqa: BLE001 - a sample may be anything, and this is only a hint
        return 0
    return zlib.crc32(written.getvalue())


@dataclass(frozen=True)
class StreamBatch:
    """A batch of a stream.

    Attributes:
        worker: that read it.
        first: see `RankStream`.
        samples: number of samples.
        batch: result of the collate function.
        leaf: the virtual rank that it is for; None: there are none, or this marks the end of the worker's stream.
    """

    worker: int
    first: int
    samples: int
    batch: Any
    leaf: int | None = None

    def pin_memory(self) -> StreamBatch:
        """Return the same with its batch in pinned memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, batch=pin_memory(self.batch))


@dataclass(frozen=True)
class CollateStream:
    """Collates what `RankStream` yields."""

    collate_fn: Callable[[list[Any]], Any] | None

    def __call__(self, read: list[tuple[int, int, Any]]) -> StreamBatch:
        worker, first, _ = read[0]
        collate = self.collate_fn or default_collate
        return StreamBatch(worker, first, len(read), collate([sample for _, _, sample in read]))
