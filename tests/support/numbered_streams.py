"""Iterable datasets of numbers, and batches from them."""

from __future__ import annotations

from collections import Counter

from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset):
    """The numbers from `first` on, divided among workers; raises at `bad`, from the given time on."""

    def __init__(self, first, size, bad=None, times=0):
        self.first, self.size, self.bad, self.times = first, size, bad, times

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.times -= 1
        for number in range(self.first + worker, self.first + self.size, workers):
            if number == self.bad and self.times < 0:
                raise ValueError("no such file: cat.png")
            yield number


def own(rank, sizes):
    return Stream(1000 * rank, sizes[rank])


def shown(loader):
    return [(batch.tolist(), batch.samples) for batch in loader]


def used(batches_of_rank):
    return Counter(real for batches in batches_of_rank for batch, count in batches if count for real in batch)


def one_length(batches_of_rank):
    (steps,) = {len(batches) for batches in batches_of_rank}
    return steps


def drawn_shares(rng, size):
    parts = [rng.choice([0, 1, 1, 2, 5, 13]) for _ in range(size)]
    return [part / sum(parts) for part in parts] if any(parts) and rng.random() < 0.7 else None
