"""torch's DataLoader, as both kinds of loader use it: options, seeds for workers, errors that say where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline._core.keyed_random import derive_key
from paceline.errors import DataError

__all__ = ["BatchFetcher", "LoaderOptions"]


@dataclass(frozen=True)
class LoaderOptions:
    """How samples become batches: options of ``torch.utils.data.DataLoader``, under its names."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False


class BatchFetcher:
    """A DataLoader that is run through once an epoch or more often, with workers that may stay.

    Args:
        dataset: what torch's DataLoader reads.
        options: its options.
        rank: this rank; its workers draw other random numbers than those of other ranks.
        seed: of the loader.
        more: further arguments for the DataLoader.
    """

    def __init__(self, dataset: Any, options: LoaderOptions, rank: int, seed: int, **more: Any) -> None:
        self._rank, self._seed = rank, seed
        self._generator = torch.Generator()
        self._loader = DataLoader(dataset, **vars(options), generator=self._generator, **more)

    def run(self, place: tuple[int, ...], step: int, contents: Callable[[int], str]) -> Iterator[Any]:
        """Yield batches, the first of which is that of `step`.

        Args:
            place: the epoch, and how often it was dealt again.
            step: of the first batch; with the place, the seed and the rank it decides the workers' random numbers.
            contents: says for a step which samples its batch is of, for the message.

        Raises:
            DataError: the dataset, the collate function or a worker raised; names rank, epoch, batch, samples.
        """
        epoch = place[0]
        self._generator.manual_seed(derive_key(self._seed, *place, step, self._rank, 5) >> 1)
        try:
            for batch in self._loader:
                yield batch
                step += 1
        except Exception as error:
            if self._loader.num_workers:  # what a worker raised holds itself in torch, and all workers
                error.__traceback__ = None
            raise self._failed(error, f"batch {step} of epoch {epoch}", contents(step)) from error

    def _failed(self, error: Exception, batch: str, contents: str) -> DataError:
        if self._loader.num_workers and _worker_is_gone(error):  # at which sample, nobody knows
            return DataError(
                f"a worker ended while {batch} was waited for: {_told(error)}",
                rank=self._rank,
                remedy="with num_workers=0 the cause can be seen; a worker that was killed may have lacked memory",
            )
        return DataError(
            f"{batch} can't be loaded: {_told(error)}{contents}",
            rank=self._rank,
            remedy="the exception above this one is the cause: mend the dataset or collate_fn",
        )


def _worker_is_gone(error: Exception) -> bool:
    if isinstance(error, ConnectionError | EOFError | FileNotFoundError):  # while its tensors were fetched
        return not _of_worker(error)
    return str(error).startswith("DataLoader worker")


def _of_worker(error: Exception) -> bool:
    """Tell whether a worker raised this, and not torch here."""
    return "Original Traceback" in str(error)


def _told(error: Exception) -> str:
    """Return the exception in one line; a worker's comes as a text that ends with it."""
    lines = str(error).strip().splitlines()
    if _of_worker(error):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
