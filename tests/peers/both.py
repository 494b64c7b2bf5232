"""The same work on two groups of the same ranks: the world on "paceline", and gloo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from backend_scenes import enter

__all__ = ["compare", "max_difference", "on_both", "world"]


@contextmanager
def world(rank: int, size: int, folder: str, seconds: float = 60.0):
    """Enter a world on "paceline" with its rendezvous in `folder`; after an error it is not left."""
    yield enter(folder, rank, size, seconds)
    dist.destroy_process_group()


def on_both(rank: int, size: int, folder: str, work: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return the results of ``work(group, rank, size, *args)`` on "paceline", and on gloo."""
    with world(rank, size, folder) as ours:
        results = []
        for group in (ours, dist.new_group(backend="gloo")):
            torch.manual_seed(0)
            results.append(work(group, rank, size, *args))
    return results[0], results[1]


def max_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Return the largest difference of any element, NaN if there is a NaN; 0 means equal to the bit."""
    assert [each.dtype for each in left] == [each.dtype for each in right]
    gaps = [(a - b).abs().max().double() for a, b in zip(left, right, strict=True) if a.numel()]
    return torch.stack(gaps).max().item()


def compare(pool, tmp_path, size: int, *case: Any) -> None:
    """Hold the parameters of every rank on "paceline" against those on gloo, and against rank 0's.

    On two ranks to the same bits; on more to 1e-6, as the backends add the ranks in different orders.
    """
    results = pool(size).run(on_both, str(tmp_path), *case, world=False)
    for ours, gloos in results:
        assert max_difference(ours, results[0][0]) == 0.0, "the ranks differ"
        assert max_difference(ours, gloos) <= (0.0 if size == 2 else 1e-6)
