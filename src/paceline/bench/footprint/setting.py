"""How a model is trained, as far as memory depends on it: plain values for a prediction or a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.errors import UsageError, unknown

__all__ = ["ALONE", "BACKENDS", "STRATEGY_NAMES", "Setting"]

ALONE = "alone"
"""Plain torch on one device, without Paceline."""

STRATEGY_NAMES = (ALONE, "naive", "flat", "overlap", "bucketed", "sharded", "full-shard")
BACKENDS = ("gloo", "nccl", "paceline")
_AUTOCASTS = ("off", "bf16", "fp16")


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        strategy: one of `STRATEGY_NAMES`.
        ranks: devices, each with a whole batch of its own.
        batch: samples of a device's micro-batch.
        context: tokens of a sample, for models that read tokens.
        optimizer: ``adamw``, ``sgd``, ``sgd-momentum``, or the import path of an optimizer's class.
        autocast: ``off``, ``bf16`` or ``fp16``.
        gather: ``off`` or ``bf16``: the type in which full-shard gathers parameters and computes.
        checkpointing: run the members of every ``ModuleList`` or ``Sequential`` again in backward.
        accumulate: micro-batches of a step.
        backend: whose collectives: ``gloo``, ``nccl`` or ``paceline``.
        device: ``cpu`` or ``cuda``: whose defaults the optimizer has.
        bucket_mib: of strategies with buckets; None: the strategy's own.

    Raises:
        UsageError: a value is unknown or out of range.
    """

    strategy: str = "bucketed"
    ranks: int = 1
    batch: int = 1
    context: int = 128
    optimizer: str = "adamw"
    autocast: str = "off"
    gather: str = "off"
    checkpointing: bool = False
    accumulate: int = 1
    backend: str = "gloo"
    device: str = "cpu"
    bucket_mib: float | None = None

    def __post_init__(self) -> None:
        for kind, given, valid in (
            ("strategy", self.strategy, STRATEGY_NAMES),
            ("backend", self.backend, BACKENDS),
            ("autocast", self.autocast, _AUTOCASTS),
            ("gather", self.gather, ("off", "bf16")),
            ("device", self.device, ("cpu", "cuda")),
        ):
            if given not in valid:
                raise unknown(kind, given, valid)
        for name in ("ranks", "batch", "context", "accumulate"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}", remedy="give 1 or more")
        if self.strategy == ALONE and self.ranks > 1:
            raise UsageError(f"strategy 'alone' on {self.ranks} devices", remedy="give 1 device")
        if self.gather != "off" and self.strategy not in ("full-shard", ALONE):
            raise UsageError(
                f"strategy {self.strategy!r} gathers no parameters", remedy="use full-shard, or autocast"
            )
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(f"bucket_mib={self.bucket_mib}", remedy="give more than 0")

    @property
    def name(self) -> str:
        """The setting in words."""
        words = [self.strategy, f"{self.ranks} device{'s' if self.ranks > 1 else ''}", self.optimizer]
        words += [] if self.autocast == "off" else [f"{self.autocast} autocast"]
        words += [] if self.gather == "off" else [f"gathered in {self.gather}"]
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the setting for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Setting:
        """Return the setting that `to_json` wrote."""
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})
