"""A dataset of consecutive numbers, and the contents of batches."""

from __future__ import annotations

from torch.utils.data import IterableDataset, get_worker_info


class Numbers(IterableDataset):
    """The numbers from 0 on, divided among workers."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


def batches_of(batches):
    """Return the samples of each batch."""
    return [batch.tolist() for batch in batches]


def samples_of(batches):
    """Return the samples of all batches."""
    return [sample for batch in batches for sample in batch.tolist()]
