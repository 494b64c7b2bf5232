"""torch's DataLoader for both kinds of datasets: its options, seeds of workers, and errors that name the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline._core.keyed_random import derive_key
from paceline.errors import DataError

__all__ = ["BatchFetcher", "LoaderOptions"]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of ``torch.utils.data.DataLoader``, under its names."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool


class BatchFetcher:
    """A DataLoader that is iterated once per epoch or more often, with workers that may persist.

    Args:
        dataset: for torch's DataLoader.
        options: its options.
        rank: this rank; workers of different ranks draw different random numbers.
        seed: of the loader.
        more: further arguments for the DataLoader.
    """

    def __init__(self, dataset: Any, options: LoaderOptions, rank: int, seed: int, **more: Any) -> None:
        self._rank, self._seed = rank, seed
        self._generator = torch.Generator()
        self._loader = DataLoader(dataset, **vars(options), generator=self._generator, **more)

    def run(self, epoch: tuple[int, ...], step: int, contents: Callable[[int], str]) -> Iterator[Any]:
        """Yield batches from that of `step` on.

        Args:
            epoch: its number, then how often its samples were redistributed.
            step: of the first batch; with `epoch`, the seed and the rank it seeds the workers.
            contents: lists the samples in the batch of a step, for messages.

        Raises:
            DataError: the dataset, the collate function or a worker raised; names rank, epoch, batch, samples.
        """
        self._generator.manual_seed(derive_key(self._seed, *epoch, step, self._rank, 5) >> 1)
        try:
            for batch in self._loader:
                yield batch
                step += 1
        except Exception as error:
            if self._loader.num_workers:  # the traceback would keep torch's iterator and all workers alive
                error.__traceback__ = None
            raise self._error(error, f"batch {step} of epoch {epoch[0]}", contents(step)) from error

    def _error(self, error: Exception, batch: str, contents: str) -> DataError:
        if self._loader.num_workers and _is_worker_exit(error):  # at which sample is not known
            return DataError(
                f"a worker ended while {batch} was loaded: {_summarise(error)}",
                rank=self._rank,
                remedy="with num_workers=0 the cause is shown; a worker that was killed may have lacked memory",
            )
        return DataError(
            f"{batch} can't be loaded: {_summarise(error)}{contents}",
            rank=self._rank,
            remedy="the exception above this one is the cause: fix the dataset or collate_fn",
        )


def _is_worker_exit(error: Exception) -> bool:
    if isinstance(error, ConnectionError | EOFError | FileNotFoundError):  # while its tensors were received
        return not _raised_in_worker(error)
    return str(error).startswith("DataLoader worker")


def _raised_in_worker(error: Exception) -> bool:
    return "Original Traceback" in str(error)


def _summarise(error: Exception) -> str:
    """Return the exception in one line; a worker's arrives as a text that ends with it."""
    lines = str(error).strip().splitlines()
    if _raised_in_worker(error):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
