"""What a profile holds: costs of collectives, what a call costs, and rates of one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import unknown
from paceline.plan.fit import Fit, Prediction

__all__ = ["RATES", "CallCost", "CollectiveCost", "Rate", "Source"]

RATES = {"copy": "B/s", "add": "B/s", "matmul": "FLOP/s"}
"""Kinds of rates and their units: bytes read and written per second, floating-point operations per second."""


@dataclass(frozen=True)
class Source:
    """How an entry was made.

    Attributes:
        command: what reproduces it.
        date: when, ISO 8601.
        machine: facts that bear on times, as `paceline.bench.facts.machine_record` returns them.
        versions: of the packages that took part, by name.
    """

    command: str
    date: str
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveCost:
    """The fitted cost of one operation on one backend and network.

    Attributes:
        backend: such as ``"gloo"``.
        network: what carries it, such as ``"loopback"``.
        fit: α, β, and their errors.
        source: how it was made.
    """

    backend: str
    network: str
    fit: Fit
    source: Source

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it one entry of a profile: backend, operation, network."""
        return self.backend, self.fit.op, self.network

    def predict(self, nbytes: float, ranks: int, *, extrapolate: bool = False) -> Prediction:
        """Return what the operation will take; see `paceline.plan.fit.Fit.predict`."""
        return self.fit.predict(nbytes, ranks, extrapolate=extrapolate)


@dataclass(frozen=True)
class CallCost:
    """What a call costs that moves next to nothing.

    Attributes:
        backend, network: where.
        op: such as ``"all-reduce"``.
        ranks: how many took part.
        nbytes: size of the message.
        seconds: median.
        source: how it was made.
    """

    backend: str
    network: str
    op: str
    ranks: int
    nbytes: int
    seconds: float
    source: Source

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes it one entry of a profile: backend, operation, network, ranks."""
        return self.backend, self.op, self.network, self.ranks


@dataclass(frozen=True)
class Rate:
    """What one machine reaches by itself.

    Attributes:
        kind: ``"copy"`` (bytes read and written per second), ``"add"`` (the same, for a += b), ``"matmul"`` (FLOP/s).
        device: ``"cpu"``, or the name of a GPU.
        dtype: such as ``"float32"``.
        threads: of the CPU; 0 on a GPU.
        value: median of the repetitions, in the unit that `RATES` says.
        low, high: the slowest and the fastest repetition.
        shape: what was worked on, such as ``"64 MiB"`` or ``"2048"``.
        source: how it was made.
    """

    kind: str
    device: str
    dtype: str
    threads: int
    value: float
    low: float
    high: float
    shape: str
    source: Source

    def __post_init__(self) -> None:
        if self.kind not in RATES:
            raise unknown("rate", self.kind, RATES)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes it one entry of a profile: kind, device, dtype, threads."""
        return self.kind, self.device, self.dtype, self.threads
