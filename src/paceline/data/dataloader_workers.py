"""torch's DataLoader for both kinds of datasets: its options, seeds of workers, and errors that name the batch.

With virtual ranks, a batch's random numbers must not depend on the process that fetches it: its seed travels with its
indices (`KeyedDataset`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline._core.keyed_random import derive_key
from paceline._core.processes.warning_signals import WarningSignals
from paceline.data.leaf_random import seed_generators
from paceline.errors import DataError

__all__ = [
    "BatchFetcher",
    "KeyedDataset",
    "KeyedIndices",
    "LoaderOptions",
    "OutliveWarnings",
    "PrepareWorker",
]

_OUTLIVES_SECONDS = 30.0  # a warning; the rank needs batches until its step is done


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


class KeyedIndices(NamedTuple):
    """Indices of a batch's samples, and the seed with which they are fetched."""

    seed: int
    indices: list[int]


class KeyedDataset(Dataset[Any]):
    """A map-style dataset that is read with `KeyedIndices`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: KeyedIndices) -> list[Any]:
        """Return the samples; called by torch's DataLoader, which collates them next."""
        seed_generators(batch.seed)
        at_once: Callable[[list[int]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if at_once:
            return at_once(batch.indices)
        return [self.dataset[index] for index in batch.indices]


@dataclass(frozen=True)
class PrepareWorker:
    """Makes the user's dataset visible in ``get_worker_info()``, then calls the user's `worker_init_fn`."""

    worker_init_fn: Callable[[int], None] | None
    wrapper: type

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if info is not None and isinstance(info.dataset, self.wrapper):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


@dataclass(frozen=True)
class OutliveWarnings:
    """Has a worker serve the rank until that has left, where a launcher warns its whole process group.

    torchrun does, and some schedulers. The first SIGTERM ends a worker only later, a second one, such as torch's
    DataLoader sends, at once; SIGUSR1 has no effect.
    """

    worker_init_fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        WarningSignals(_exit_later, lambda _: os._exit(0)).install([signal.SIGTERM], replace=True)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


def _exit_later(number: int) -> None:
    timer = threading.Timer(_OUTLIVES_SECONDS, os._exit, [0])
    timer.daemon = True
    timer.start()


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
        if options.num_workers:
            options = replace(options, worker_init_fn=OutliveWarnings(options.worker_init_fn))
        self._loader = DataLoader(dataset, **vars(options), generator=self._generator, **more)

    def run(
        self, epoch: tuple[int, ...], step: int, describe: Callable[[int], tuple[int, str]]
    ) -> Iterator[Any]:
        """Yield batches from that of `step` on.

        Args:
            epoch: its number, then how often its samples were redistributed.
            step: of the first batch; with `epoch`, the seed and the rank it seeds the workers.
            describe: returns for the batch with this number, counted from 0, its step and a list of its samples, for
                messages.

        Raises:
            DataError: the dataset, the collate function or a worker raised; names rank, epoch, batch, samples.
        """
        self._generator.manual_seed(derive_key(self._seed, *epoch, step, self._rank, 5) >> 1)
        number = 0
        try:
            for batch in self._loader:
                yield batch
                number += 1
        except Exception as error:
            if self._loader.num_workers:  # the traceback would keep torch's iterator and all workers alive
                error.__traceback__ = None
            at, contents = describe(number)
            raise self._error(error, f"batch {at} of epoch {epoch[0]}", contents) from error

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
