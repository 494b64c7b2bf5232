"""Random numbers with virtual ranks: they depend on seed, epoch, step and leaf only, on any number of ranks.

A *leaf* is the micro-batch of one virtual rank in one step. While it serves a leaf, the loader owns the global
generators of the process (torch's on the CPU and accelerators, ``random``, numpy's legacy one), and seeds them

    before a leaf's batch is fetched      by `fetch_seed`: for the dataset and the collate function, in any process
    before it is served                   by `leaf_seed`: for the training step, however much fetching has drawn
    after a step's last leaf of a rank    by `between_steps_seed`: the same on all ranks, for what happens between steps
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline._core.keyed_random import derive_key
from paceline.world.accelerator import used_accelerator

__all__ = [
    "LeafPlace",
    "between_steps_seed",
    "cpu_generator_states",
    "fetch_seed",
    "leaf_seed",
    "preserved_generators",
    "restore_cpu_generators",
    "seed_between_steps",
    "seed_generators",
    "seed_leaf",
]

_FETCH, _LEAF, _BETWEEN_STEPS = 7, 8, 9  # purposes of keys; the assignment of samples uses those below


class LeafPlace(NamedTuple):
    """Place of a leaf in a training run.

    Attributes:
        seed: of the loader.
        epoch: number of the epoch.
        step: number of the step, counted from 0 since the epoch began or its remaining samples were redistributed.
        leaf: the virtual rank.
        redistributions: how often the remaining samples of the epoch were redistributed before.
    """

    seed: int
    epoch: int
    step: int
    leaf: int
    redistributions: int = 0


def leaf_seed(seed: int, epoch: int, step: int, leaf: int, redistributions: int = 0) -> int:
    """Return the seed of the random numbers of a training step's leaf.

    Args:
        seed, epoch, step, leaf, redistributions: as in `LeafPlace`.
    """
    return derive_key(seed, epoch, redistributions, step, leaf, _LEAF)


def fetch_seed(seed: int, epoch: int, step: int, leaf: int, redistributions: int = 0) -> int:
    """Return the seed of the random numbers with which a leaf's batch is fetched.

    Args:
        seed, epoch, step, leaf, redistributions: as in `LeafPlace`.
    """
    return derive_key(seed, epoch, redistributions, step, leaf, _FETCH)


def between_steps_seed(seed: int, epoch: int, step: int, redistributions: int = 0) -> int:
    """Return the seed of the random numbers that all ranks have in common after `step`.

    Args:
        seed, epoch, step, redistributions: as in `LeafPlace`.
    """
    return derive_key(seed, epoch, redistributions, step, _BETWEEN_STEPS)


def seed_leaf(seed: int, epoch: int, step: int, leaf: int, redistributions: int = 0) -> None:
    """Seed the global generators for a training step's leaf.

    Args:
        seed, epoch, step, leaf, redistributions: as in `LeafPlace`.

    Example:
        >>> seed_leaf(seed=0, epoch=0, step=3, leaf=1)
        >>> first = torch.rand(2)
        >>> seed_leaf(seed=0, epoch=0, step=3, leaf=1)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    seed_generators(leaf_seed(seed, epoch, step, leaf, redistributions))


def seed_between_steps(seed: int, epoch: int, step: int, redistributions: int = 0) -> None:
    """Seed the global generators for what happens after `step`, the same on all ranks.

    Args:
        seed, epoch, step, redistributions: as in `LeafPlace`.
    """
    seed_generators(between_steps_seed(seed, epoch, step, redistributions))


def seed_generators(seed: int) -> None:
    """Seed the global generators of this process: torch's on all devices, ``random``, numpy's legacy one.

    The last two are the same algorithm, and would draw the same numbers from the same seed.

    Args:
        seed: from 0 to 2^64 − 1.
    """
    if (
        torch.accelerator.current_accelerator() is None
    ):  # this torch is built for none: a hundred times faster
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(derive_key(1, after=seed))
    of_numpy = derive_key(2, after=seed)
    np.random.seed([of_numpy & 0xFFFFFFFF, of_numpy >> 32])  # noqa: NPY002 - datasets draw from this one


def cpu_generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators except those of accelerators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def restore_cpu_generators(states: tuple[Any, ...]) -> None:
    """Restore what `cpu_generator_states` returned."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    torch.set_rng_state(of_torch)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators, on an accelerator those of the current device, after this block."""
    states, used = cpu_generator_states(), used_accelerator()
    device = None if used is None else torch.get_device_module(used)
    on_device = None if device is None else device.get_rng_state()
    try:
        yield
    finally:
        restore_cpu_generators(states)
        if device is not None:
            device.set_rng_state(on_device)
