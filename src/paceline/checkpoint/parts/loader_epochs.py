"""Serves the epochs of a loader, and continues the one in which a checkpoint was saved.

[Note: random numbers] An iterator of torch's DataLoader draws a seed for its workers when it is created, from the
loader's generator or the global one. In the middle of an epoch the run that was saved has drawn it already, so a
resumed one must not draw it again: what follows, such as dropout, would get other numbers. A StatefulDataLoader creates
the iterator that continues in `state_dict` too, and iter() returns it then. Others get a copy of the generator until
they have served a batch: Mosaic's creates the iterator only then.

[Note: ends of epochs] A state that was saved at the end of an epoch may be one with no batch left, such as that of a
StreamingDataLoader, or of a StatefulDataLoader with a StatefulDistributedSampler. The epoch after it then begins with
the next iteration. A state that was saved after the last batch, before the end of the epoch was known, has no batch
left of this epoch. In both cases torchdata.nodes.Loader would begin the next epoch itself: in the second one that is
not counted, and in version 0.11 its state then stays that of the epoch before.

[Note: states that stay] Hugging Face's datasets keep a loaded state, and begin later epochs with it again unless
`set_epoch` was called in between; a StatefulDataLoader's persistent workers, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.checkpoint.parts.loader_states import (
    check_savable,
    continues_with_dataset,
    is_hugging_face_stream,
    is_paceline_loader,
)
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.data.leaf_random import cpu_generator_states, preserved_generators, restore_cpu_generators
from paceline.errors import UsageError

__all__ = ["LoaderEpochs", "with_loader"]

log = logging.getLogger("paceline.checkpoint")

_END = object()


def with_loader(objects: NamedObjects, loader: Any, *, loaded: bool) -> NamedObjects:
    """Return the objects of a checkpoint with a loader that is about to serve, unless it is one of them.

    Args:
        objects: of the checkpoint.
        loader: any iterable. Without a state, it is left out with a warning.
        loaded: a checkpoint was looked for already, so that it is too late.

    Raises:
        UsageError: another object is called ``"loader"``, or the state can't be requested.
    """
    others = objects.others
    if any(each is loader for each in others.values()) or continues_with_dataset(loader, others.values()):
        return objects
    if not hasattr(loader, "state_dict"):
        if not loaded:
            log.warning(
                "a %s has no state_dict(): a resumed run repeats its epoch from the start; paceline.Loader continues "
                "with the next batch",
                type(loader).__qualname__,
            )
        return objects
    if loaded:
        log.warning(
            "the loader was not part of the checkpoint when load() was called, so it is not saved: a resumed run "
            "repeats its epoch from the start; pass it to paceline.Checkpoint too"
        )
        return objects
    if "loader" in others:
        raise UsageError(
            f"resume() got another loader than the {type(others['loader']).__qualname__} that is called 'loader'",
            remedy="name both: paceline.Checkpoint(folder, …, loader=…, other_loader=…)",
        )
    check_savable("loader", loader)
    return objects.with_other("loader", loader)


class LoaderEpochs:
    """Epochs of the loaders of a run.

    Attributes:
        between: an epoch has ended, and no batch was served since.
    """

    def __init__(self) -> None:
        self.between = False
        self._resumed = False  # a checkpoint was loaded, and no epoch has begun since
        self._stays = False  # the loader may keep the loaded state; see [Note: states that stay]

    def resume(self, *, between: bool) -> None:
        """Continue with a loaded state, which was saved with this value of `between`."""
        self.between, self._resumed = between, True

    def batches(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch; after `resume`, its remaining ones.

        Args:
            loader: any iterable.
            epoch: its number, for a `set_epoch` of the loader.
        """
        resumed, self._resumed = self._resumed, False
        served: Iterable[Any] = loader
        if not is_paceline_loader(loader):
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            served = self._served(loader, resumed)
        elif resumed and hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)  # which may have no batches left; it counts later ones itself
        for batch in served:
            self.between = False
            yield batch
        self.between = True

    def _served(self, loader: Any, resumed: bool) -> Iterable[Any]:
        """Return what serves the batches of a loader of another library."""
        if self._stays or (resumed and self.between):
            self._stays = False
            if _forget_state(loader):
                return loader
        if not resumed or not any(
            hasattr(each, "state_dict") for each in (loader, getattr(loader, "dataset", None))
        ):
            return loader
        self._stays = True
        return self._continued(loader)

    def _continued(self, loader: Any) -> Iterator[Any]:
        """Yield what a loader serves after its state was loaded; see the notes."""
        states = cpu_generator_states()
        with _without_restart(loader):
            if self.between:
                _open_quietly(loader)
                iterator = iter(loader)
                first = next(iterator, _END)
            else:
                with _copied_generator(loader):
                    _open_quietly(loader)
                    with preserved_generators():
                        iterator = iter(loader)
                    first = next(iterator, _END)
        if first is not _END:
            yield first
            yield from iterator
        elif self.between:
            restore_cpu_generators(states)
            yield from loader


def _open_quietly(loader: Any) -> None:
    """Let a loader create the iterator that continues after a loaded state, if `state_dict` does; draw no numbers."""
    if hasattr(loader, "state_dict"):
        with preserved_generators(), _copied_generator(loader):
            loader.state_dict()


@contextmanager
def _copied_generator(loader: Any) -> Iterator[None]:
    """Let a DataLoader draw from a copy of its generator, or of the global one, in this block."""
    if not isinstance(loader, DataLoader):
        yield
        return
    generator = loader.generator
    state = torch.get_rng_state() if generator is None else generator.get_state()
    loader.generator = torch.Generator()
    loader.generator.set_state(state)
    try:
        yield
    finally:
        loader.generator = generator
        if generator is not None:  # a sampler may have drawn from it
            generator.set_state(state)


@contextmanager
def _without_restart(loader: Any) -> Iterator[None]:
    """Keep a torchdata.nodes.Loader from beginning the next epoch where nothing is left of this one."""
    restarts = getattr(loader, "restart_on_stop_iteration", False)
    if restarts:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = True


def _forget_state(loader: Any) -> bool:
    """Make one of Hugging Face's datasets forget a loaded state; return whether `loader` is or reads one."""
    dataset: Any = loader if is_hugging_face_stream(loader) else getattr(loader, "dataset", None)
    if not is_hugging_face_stream(dataset):
        return False
    nested = dataset is not loader and hasattr(loader, "load_state_dict")
    if nested:
        _open_quietly(loader)  # with the state that waits for that
        loader.load_state_dict({})  # next time, start anew, with other workers
    dataset.load_state_dict({})
    if nested and getattr(loader, "persistent_workers", False):
        _open_quietly(loader)  # such workers draw one seed for all epochs
    return True
