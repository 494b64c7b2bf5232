"""Loaders of other libraries for the tests of checkpoints, for each rank of a world of `size`.

A rank gets 16 samples per epoch, in 4 batches. With another rank's state most would not continue right: that rank has
used up more or less of its source, or shuffles with another seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

__all__ = ["BATCHES", "FOREIGN_LOADERS", "Countdown", "make_loader"]

SAMPLES, BATCH = 16, 4
BATCHES = SAMPLES // BATCH


class Countdown:
    """An iterable whose state after an epoch is that nothing is left of it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.served, self.skipped = rank, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        first, self.skipped = self.skipped, 0
        for number in range(first, BATCHES):
            self.served = number + 1
            yield [100 * self.rank + BATCH * number + each for each in range(BATCH)]

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank, "served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank
        self.skipped = state["served"]


def numbers(rows: list[Any]) -> list[int]:
    """Return the numbers of samples, and one that is drawn in this process, as an augmentation would; in a worker 0."""
    drawn = int(torch.randint(1000, ())) if get_worker_info() is None else 0
    return [*(row["x"] if isinstance(row, dict) else row for row in rows), drawn]


def of_rank(rank: int) -> list[int]:
    """Return the samples of a rank."""
    return [100 * rank + number for number in range(SAMPLES)]


def stateful(rank: int, size: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(rank)
    options |= {"shuffle": True, "generator": generator, "collate_fn": numbers}
    return StatefulDataLoader(of_rank(rank), BATCH, **options)


def sampled(rank: int, size: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    samples = list(range(size * SAMPLES))
    sampler = StatefulDistributedSampler(samples, size, rank, seed=3)
    return StatefulDataLoader(samples, BATCH, sampler=sampler, collate_fn=numbers, **options)


def rows_of(shards: list[int]) -> Iterator[dict[str, int]]:
    """Yield the rows of some shards, 12 each."""
    for shard in shards:
        yield from ({"x": 100 * shard + number} for number in range(12))


def kept(row: dict[str, int]) -> bool:
    """Keep 8 rows of each shard: the first ones of those with even numbers, the last ones of others."""
    shard, number = divmod(row["x"], 100)
    return number < 8 if shard % 2 == 0 else number >= 4


def hugging_face(rank: int, size: int) -> Any:
    """An IterableDataset of two shards for each rank, which are in another order in each epoch."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    stream = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(2 * size))})
    return split_dataset_by_node(stream.filter(kept), rank, size)


def hugging_face_batches(rank: int, size: int) -> Any:
    return hugging_face(rank, size).batch(BATCH)


def hugging_face_stateful(rank: int, size: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(hugging_face(rank, size), BATCH, collate_fn=numbers, **options)


def hugging_face_plain(rank: int, size: int) -> Any:
    """A DataLoader, which has no state; its data set has."""
    return DataLoader(hugging_face(rank, size), BATCH, collate_fn=numbers)


def nodes(rank: int, size: int) -> Any:
    from torchdata import nodes

    samples = of_rank(rank)
    sampler = DistributedSampler(samples, 1, 0, seed=rank)
    return nodes.Loader(nodes.Batcher(nodes.MapStyleWrapper(samples, sampler), BATCH))


FOREIGN_LOADERS: dict[str, Callable[..., Any]] = {
    "StatefulDataLoader": stateful,
    "StatefulDistributedSampler": sampled,
    "IterableDataset": hugging_face_batches,
    "IterableDataset in a StatefulDataLoader": hugging_face_stateful,
    "IterableDataset in a DataLoader": hugging_face_plain,
    "torchdata.nodes": nodes,
    "Countdown": lambda rank, size: Countdown(rank),
}


def make_loader(kind: str, rank: int, size: int, **options: Any) -> Any:
    """Return a rank's loader; `options` are those of torch's DataLoader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls a deprecated function of torch
        return FOREIGN_LOADERS[kind](rank, size, **options)
