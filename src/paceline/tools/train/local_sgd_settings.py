"""Training apart, as ``--every`` asks for it: local steps, and parameters synchronised every so many of them.

What doesn't fit is refused here, without torch; the loop itself is `paceline.parallel.local_sgd.local_sgd`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from paceline.errors import UsageError, unknown
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.local_sgd.outer_optimizers import Nesterov, SlowMomentum
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

if TYPE_CHECKING:
    import torch

    from paceline.parallel.data_parallel import DataParallel
    from paceline.parallel.local_sgd.outer_loop import OuterLoop

__all__ = ["NO_COMPRESSION", "OUTERS", "Apart", "Outer", "layers_of_gpt"]

Outer = Literal["average", "diloco", "slowmo"]
OUTERS: tuple[str, ...] = get_args(Outer)
NO_COMPRESSION = "none"
_USUAL = {"average": "int8", "diloco": "int4", "slowmo": "int8"}


def layers_of_gpt(blocks: int) -> int:
    """Return into how many layers a GPT of `blocks` blocks can be cut: embedding, blocks, last norm and head."""
    return blocks + 3


@dataclass(frozen=True)
class Apart:
    """How parameters are synchronised every H steps.

    Attributes:
        every: H, local steps between two synchronisations of a parameter.
        outer: what becomes of the ranks' mean: ``"average"`` takes it (LocalSGD), ``"diloco"`` gives it a Nesterov
            step, ``"slowmo"`` a slow momentum.
        lr: of the outer step; None: its usual one. momentum: likewise.
        fragments: parts of the model that are sent in turn. delay: local steps from sending to merging.
        warmup: local steps before the outer momentum starts.
        compression: of what is sent; None: the usual one of `outer`; ``"none"``: none.

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
        if self.outer not in OUTERS:
            raise unknown("outer", self.outer, OUTERS)
        _ = SyncSchedule(self.every, self.fragments, self.delay)
        if type(self.warmup) is not int or self.warmup < 0:
            raise UsageError(f"warmup_outer={self.warmup!r}, must be a whole number of 0 or more")
        if self.outer == "average":
            rates = {"outer_lr": self.lr, "outer_momentum": self.momentum}
            self._refuse("has none", **rates, warmup_outer=self.warmup or None)
        elif self.outer == "diloco":
            _ = Nesterov(**self._given())
        else:
            _ = SlowMomentum(**self._given())
            several = self.fragments if self.fragments > 1 else None
            self._refuse("sends all at once", fragments=several, delay=self.delay or None)
        if self.squeezed == "powersgd":
            raise UsageError(
                f"compression='powersgd' with every={self.every}: it follows a gradient from step to step",
                remedy="use int4 or int8: pseudo-gradients are sent rarely; or leave --every out",
            )
        _ = Compression.of(self.squeezed)

    def _refuse(self, why: str, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                raise UsageError(
                    f"{name}={value!r} with outer={self.outer!r}, which {why}",
                    remedy=f"leave --{name.replace('_', '-')} out, or use --outer diloco",
                )

    def _given(self) -> dict[str, float]:
        """Return learning rate and momentum of the outer step, as far as they were asked for."""
        pairs = {"lr": self.lr, "momentum": self.momentum}
        return {name: value for name, value in pairs.items() if value is not None}

    def check_layers(self, blocks: int) -> None:
        """Raise unless a GPT of `blocks` blocks can be cut into so many fragments.

        Raises:
            UsageError: it has fewer layers.
        """
        if self.fragments > layers_of_gpt(blocks):
            raise UsageError(
                f"fragments={self.fragments}, but the model has {layers_of_gpt(blocks)} layers",
                remedy=f"give at most {layers_of_gpt(blocks)} fragments",
            )

    @property
    def squeezed(self) -> str | None:
        """Name of the compression that is used; None: none."""
        return named(_USUAL[self.outer] if self.compression is None else self.compression)

    @property
    def told(self) -> str:
        """The same in a few words."""
        ways = {"average": "averaged", "diloco": "DiLoCo", "slowmo": "SlowMo"}
        parts = [f"{ways[self.outer]} every {self.every} steps"]
        parts += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        parts += [f"{self.delay} step{'s' * (self.delay > 1)} late"] if self.delay else []
        return ", ".join([*parts, self.squeezed or "not compressed"])

    def loop(self, model: DataParallel, optimizer: torch.optim.Optimizer) -> OuterLoop:
        """Return the block to train in; all ranks call this.

        Raises: as `paceline.LocalSGD`.
        """
        from paceline.parallel.local_sgd.local_sgd import DiLoCo, LocalSGD, SlowMo

        place: tuple[Any, ...] = (model, optimizer, self.every)
        options: dict[str, Any] = {"compression": self.squeezed}
        if self.outer != "slowmo":
            options |= {"fragments": self.fragments, "delay": self.delay}
        if self.outer == "average":
            return LocalSGD(*place, **options)
        prefix, kind = ("slow", SlowMo) if self.outer == "slowmo" else ("outer", DiLoCo)
        options |= {f"{prefix}_{name}": value for name, value in self._given().items()}
        return kind(*place, warmup=self.warmup, **options)


def named(compression: str | None) -> str | None:
    """Return the name of a compression; None for ``"none"``."""
    return None if compression == NO_COMPRESSION else compression
