"""What is measured and simulated, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import paceline

__all__ = ["ALONE", "STRATEGIES", "Strategy"]

ALONE = "computing alone"


@dataclass(frozen=True)
class Strategy:
    """One way to synchronise.

    Attributes:
        name: of the simulator. bucket_mib: of a bucket.
    """

    name: str
    bucket_mib: float

    @property
    def sync(self) -> paceline.Sync:
        """The same for `paceline.DataParallel`."""
        return paceline.Sync.of("flat") if self.name == "flat" else paceline.Sync(bucket_mib=self.bucket_mib)


STRATEGIES: dict[str, Strategy | None] = {
    ALONE: None,
    "flat": Strategy("flat", math.inf),
    "bucketed, 1 MiB": Strategy("bucketed", 1.0),
    "bucketed, 5 MiB": Strategy("bucketed", 5.0),
}
