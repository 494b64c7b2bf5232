"""Reads the leaves of a stream that all ranks share: once per process, whatever the number of leaves it serves.

A process reads the whole stream, and collects the samples of each of its leaves into batches. These arrive in the
order in which they fill up, and wait in memory until their step. So that the leaf's next batch does not depend on the
other leaves of the process, `LeafBatches` takes each leaf's batches from the workers in turns.

Random numbers that the stream draws depend on seed, epoch and worker only: it is read in the same order on every rank,
and its generators' states are kept while it waits. Those of the collate function depend on the batch's first sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from paceline._core.keyed_random import derive_key
from paceline.data.iterable_sharding import RankReader, StreamBatch, StreamLayer, sample_checksum
from paceline.data.leaf_random import cpu_generator_states, restore_cpu_generators, seed_generators

__all__ = ["CollateLeaves", "LeafBatches", "LeafSamples", "LeafStream"]

_STREAM = 10  # purpose of a key, like those in `leaf_random`


@dataclass(frozen=True)
class LeafSamples:
    """The samples of a batch of a leaf.

    Attributes:
        leaf: the virtual rank; None: this marks the end of the worker's stream.
        worker: that has read them.
        first: see `RankStream`.
        seed: of the random numbers of the collate function.
        samples: one or more; none at the end.
    """

    leaf: int | None
    worker: int
    first: int
    seed: int
    samples: list[Any]


class LeafStream(IterableDataset):
    """Yields `LeafSamples` of some leaves of an iterable dataset, then the mark of its end.

    Args:
        dataset: the stream.
        layers: earlier assignments; the last one is the present one.
        leaves: whose samples are kept.
        batch_size: samples of a full batch.
        drop_last: whether short batches at the end are left out.
        seed: of the loader.
        epoch: a number for the epoch, in shared memory: persistent workers read many.
    """

    def __init__(
        self,
        dataset: Any,
        layers: list[StreamLayer],
        leaves: range,
        *,
        batch_size: int,
        drop_last: bool,
        seed: int,
        epoch: Tensor,
    ) -> None:
        self.dataset, self._layers, self._leaves = dataset, layers, leaves
        self._batch_size, self._drop_last, self._seed, self._epoch = batch_size, drop_last, seed, epoch

    def __iter__(self) -> Iterator[LeafSamples]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        key = derive_key(self._seed, int(self._epoch), worker, _STREAM)
        user_of_next, first = RankReader(self._leaves.start, self._layers).users(worker), 0
        collected: dict[
            int, tuple[int, list[Any]]
        ] = {}  # by leaf: number of the first sample, and all of them
        seed_generators(key)
        for number, sample in enumerate(self.dataset):
            if not number:
                first = sample_checksum(sample)
            leaf = user_of_next()
            if leaf not in self._leaves:
                continue
            begin, samples = collected.setdefault(leaf, (number, []))
            samples.append(sample)
            if len(samples) == self._batch_size:
                del collected[leaf]
                states = cpu_generator_states()
                yield LeafSamples(leaf, worker, first, derive_key(begin, after=key), samples)
                restore_cpu_generators(states)
        if not self._drop_last:
            for leaf, (begin, samples) in collected.items():
                yield LeafSamples(leaf, worker, first, derive_key(begin, after=key), samples)
        yield LeafSamples(None, worker, first, key, [])


@dataclass(frozen=True)
class CollateLeaves:
    """Collates what `LeafStream` yields, with random numbers of its own."""

    collate_fn: Callable[[list[Any]], Any] | None

    def __call__(self, read: LeafSamples) -> StreamBatch:
        batch = None
        if read.samples:
            seed_generators(read.seed)
            batch = (self.collate_fn or default_collate)(read.samples)
        return StreamBatch(read.worker, read.first, len(read.samples), batch, read.leaf)


class LeafBatches:
    """The batches of each leaf in an order that does not depend on the other leaves: from the workers in turns.

    It is the turn of the worker from which the leaf has got the fewest batches: known after a resume too.

    Args:
        fetched: batches of all `leaves`, in any order, and the mark of each worker's end.
        leaves: those that this process serves.
        workers: number of workers that read, 1 or more.
        layer: the present assignment, with what each leaf has used of each worker's stream.
        batch_size: samples of a full batch.
    """

    def __init__(
        self,
        fetched: Iterator[StreamBatch],
        leaves: range,
        workers: int,
        layer: StreamLayer,
        batch_size: int,
    ) -> None:
        self._fetched, self._reads = fetched, [True] * workers
        self._waiting = {leaf: [deque[StreamBatch]() for _ in range(workers)] for leaf in leaves}
        self._served = {
            leaf: [-(-layer.taken[leaf].get(worker, 0) // batch_size) for worker in range(workers)]
            for leaf in leaves
        }

    def next_of(self, leaf: int) -> StreamBatch | None:
        """Return the next batch of `leaf`; None if all workers' streams have ended."""
        waiting, served = self._waiting[leaf], self._served[leaf]
        for _, worker in sorted((number, worker) for worker, number in enumerate(served)):
            while not waiting[worker] and self._reads[worker]:
                self._fetch_one()
            if waiting[worker]:
                served[worker] += 1
                return waiting[worker].popleft()
        return None

    def _fetch_one(self) -> None:
        batch = next(self._fetched, None)
        if batch is None:
            self._reads = [False] * len(self._reads)
        elif batch.leaf is None:
            self._reads[batch.worker] = False
        else:
            self._waiting[batch.leaf][batch.worker].append(batch)
