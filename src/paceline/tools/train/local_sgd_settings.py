"""Settings of local SGD (``paceline train --every``): local steps, and parameters synchronised every H of them.

Invalid combinations are refused here, without torch; `paceline.parallel.local_sgd.local_sgd` holds the loop itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline._core.format import plural
from paceline.errors import UsageError, unknown
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.local_sgd.outer_optimizers import Nesterov, SlowMomentum
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

if TYPE_CHECKING:
    import torch

    from paceline.parallel.data_parallel import DataParallel
    from paceline.parallel.local_sgd.outer_loop import OuterLoop

__all__ = [
    "NO_COMPRESSION",
    "OUTER_NAMES",
    "LocalSgdSettings",
    "compression_or_none",
    "gpt_layers",
]

OUTER_NAMES = ("average", "diloco", "slowmo")
NO_COMPRESSION = "none"
_DEFAULT_COMPRESSION = {"average": "int8", "diloco": "int4", "slowmo": "int8"}


def gpt_layers(blocks: int) -> int:
    """Return the number of layers that a GPT of `blocks` blocks can be split into: embedding, blocks, norm and head."""
    return blocks + 3


def compression_or_none(compression: str | None) -> str | None:
    """Return the name of a compression; None for ``"none"``."""
    return None if compression == NO_COMPRESSION else compression


@dataclass(frozen=True, kw_only=True)
class LocalSgdSettings:
    """How parameters are synchronised every H steps.

    Attributes:
        every: H, local steps between two synchronisations of a parameter.
        outer: how the mean over ranks is applied: ``"average"`` takes it (LocalSGD), ``"diloco"`` makes a Nesterov
            step towards it, ``"slowmo"`` a step with slow momentum.
        lr: learning rate of the outer step; None: the default of `outer`.
        momentum: momentum of the outer step; None: the default of `outer`.
        fragments: parts of the model that are synchronised in turn.
        delay: local steps from sending a fragment to merging it; what is learnt in them is kept.
        warmup: local steps before the outer momentum starts.
        compression: of the pseudo-gradients; None: the default of `outer`; ``"none"``: uncompressed.

    Raises:
        UsageError: a value is out of range, or has no meaning with this `outer`.
    """

    every: int
    outer: str = "average"
    lr: float | None = None
    momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    warmup: int = 0
    compression: str | None = None

    def __post_init__(self) -> None:
        if self.outer not in OUTER_NAMES:
            raise unknown("outer", self.outer, OUTER_NAMES)
        _ = SyncSchedule(self.every, self.fragments, self.delay)
        if type(self.warmup) is not int or self.warmup < 0:
            raise UsageError(f"outer_warmup_steps={self.warmup!r}, must be a whole number of 0 or more")
        if self.outer == "average":
            rates = {"outer_lr": self.lr, "outer_momentum": self.momentum}
            self._refuse("has none", **rates, outer_warmup_steps=self.warmup or None)
        elif self.outer == "diloco":
            _ = Nesterov(**self._outer_options())
        else:
            _ = SlowMomentum(**self._outer_options())
            fragments = self.fragments if self.fragments > 1 else None
            self._refuse("sends everything at once", fragments=fragments, delay=self.delay or None)
        if self.active_compression == "powersgd":
            raise UsageError(
                f"compression='powersgd' with every={self.every}: it follows a gradient from step to step",
                remedy="use int4 or int8: pseudo-gradients are sent rarely; or leave --every out",
            )
        _ = Compression.of(self.active_compression)

    def _refuse(self, why: str, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                raise UsageError(
                    f"{name}={value!r} with outer={self.outer!r}, which {why}",
                    remedy=f"leave --{name.replace('_', '-')} out, or use --outer diloco",
                )

    def _outer_options(self) -> dict[str, float]:
        """Return learning rate and momentum of the outer step, without those that are left at their defaults."""
        pairs = {"lr": self.lr, "momentum": self.momentum}
        return {name: value for name, value in pairs.items() if value is not None}

    def check_layers(self, blocks: int) -> None:
        """Check that a GPT of `blocks` blocks has enough layers for the fragments.

        Raises:
            UsageError: it has fewer.
        """
        layers = gpt_layers(blocks)
        if self.fragments > layers:
            raise UsageError(
                f"fragments={self.fragments}, but the model has {layers} layers",
                remedy=f"give at most {layers} fragments",
            )

    @property
    def active_compression(self) -> str | None:
        """Name of the compression in use; None: uncompressed."""
        default = _DEFAULT_COMPRESSION[self.outer]
        return compression_or_none(default if self.compression is None else self.compression)

    @property
    def summary(self) -> str:
        """These settings in a few words."""
        ways = {"average": "averaged", "diloco": "DiLoCo", "slowmo": "SlowMo"}
        parts = [f"{ways[self.outer]} every {self.every} steps"]
        parts += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        parts += [f"{plural(self.delay, 'step')} late"] if self.delay else []
        return ", ".join([*parts, self.active_compression or "not compressed"])

    def build_loop(self, model: DataParallel, optimizer: torch.optim.Optimizer) -> OuterLoop:
        """Return the context manager to train in; collective. Raises as `paceline.LocalSGD` does."""
        from paceline.parallel.local_sgd.local_sgd import DiLoCo, LocalSGD, SlowMo

        positional: tuple[Any, ...] = (model, optimizer, self.every)
        options: dict[str, Any] = {"compression": self.active_compression}
        if self.outer != "slowmo":
            options |= {"fragments": self.fragments, "delay": self.delay}
        if self.outer == "average":
            return LocalSGD(*positional, **options)
        prefix, kind = ("slow", SlowMo) if self.outer == "slowmo" else ("outer", DiLoCo)
        if self.outer == "diloco":
            options["keep_local_steps"] = True
        options |= {f"{prefix}_{name}": value for name, value in self._outer_options().items()}
        return kind(*positional, warmup=self.warmup, **options)
