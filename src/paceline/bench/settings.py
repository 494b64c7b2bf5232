"""What `paceline bench step` is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.entries import DDP, DDP_PACELINE, OURS, entries
from paceline.errors import UsageError, unknown
from paceline.lm.sizes import size_of

__all__ = ["BACKENDS", "StepSettings"]

BACKENDS = ("paceline", "gloo", "nccl")
"""What steps can run on."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a measurement of training steps.

    Attributes:
        ranks: processes, 2 or more.
        sizes: names of reference models.
        batch_size: windows of a rank's batch.
        context: tokens of a window.
        steps: steps that a contestant runs in its turn.
        rounds: how often each contestant has its turn.
        bucket_mib: bucket sizes to try, in MiB.
        threads: threads of a rank.
        strategies: who takes part; `no-sync`, `ddp` and peers always do.
        backend: what our strategies run on, a name in `BACKENDS`; None: what fits the device.
        memory: measure peak memory too, each contestant in processes of its own.
        seed: decides initial weights and batches.

    Raises:
        UsageError: a value is out of range or unknown.
    """

    ranks: int = 2
    sizes: Sequence[str] = ("tiny", "mini")
    batch_size: int = 2
    context: int = 64
    steps: int = 10
    rounds: int = 15
    bucket_mib: Sequence[float] = (0.25, 1.0, 5.0, 25.0, float("inf"))
    threads: int = 1
    strategies: Sequence[str] = (*OURS, *DDP, DDP_PACELINE)
    backend: str | None = None
    memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(
                f"--ranks {self.ranks}: one rank has nobody to synchronise with", remedy="give 2 or more"
            )
        for name in ("batch_size", "context", "steps", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}", remedy="give 1 or more")
        if self.backend is not None and self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", remedy="give 0 or more")
        if not self.sizes:
            raise UsageError("no model size given", remedy="for example --size tiny,mini")
        for name in self.sizes:
            size = size_of(name)
            if self.context > size.context:
                raise UsageError(
                    f"--context {self.context}: model size {name!r} sees at most {size.context} tokens",
                    remedy=f"give at most {size.context}, or another --size",
                )
            entries(self.strategies, self.bucket_mib, 4 * size.parameters())

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON, which has no infinity."""
        record = asdict(self)
        return record | {"bucket_mib": ["inf" if size == float("inf") else size for size in self.bucket_mib]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StepSettings:
        """Return the settings that `to_json` wrote."""
        return cls(**{**record, "bucket_mib": tuple(float(size) for size in record["bucket_mib"])})
