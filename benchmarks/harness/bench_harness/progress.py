"""Progress of a loop that measures."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

from paceline.tools.bench.progress_bar import ProgressBar

__all__ = ["progress"]

T = TypeVar("T")


def progress(title: str, items: Collection[T]) -> Iterator[T]:
    """Yield the items, and show how many of them are done."""
    with ProgressBar(title, len(items)) as tick:
        for item in items:
            yield item
            tick()
