"""Model states in closed form: what is known of a training's memory where its steps can't be traced.

ZeRO's table (Rajbhandari et al., arXiv 1910.02054 §3 and §5; `sharded` is its P_os beside whole gradients, `full-shard`
its P_os+g+p) in the bytes that torch uses. Activations, gathered units and messages come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import unknown

__all__ = ["States", "states_of"]

_NUMBERS_OF_OPTIMIZER = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
_SHARDED = {"alone": (), "naive": (), "flat": (), "overlap": (), "bucketed": (), "sharded": ("optimizer",)}
_SHARDED |= {"full-shard": ("parameters", "gradients", "optimizer")}


@dataclass(frozen=True)
class States:
    """Bytes of a device's model states."""

    parameter_nbytes: float
    gradient_nbytes: float
    optimizer_nbytes: float

    @property
    def nbytes(self) -> float:
        """All of them."""
        return self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes


def states_of(parameter_nbytes: int, strategy: str, ranks: int, optimizer: str = "adamw") -> States:
    """Return a device's model states.

    Args:
        parameter_nbytes: of the whole model; gradients and the optimizer's numbers are of the same type.
        strategy: its name. ranks: devices.
        optimizer: ``adamw``, ``sgd-momentum`` or ``sgd``.

    Raises:
        UsageError: an unknown strategy or optimizer.

    Example:
        >>> states_of(4_000_000, "full-shard", 8).nbytes / 1e6  # 16 bytes a parameter, an eighth of them
        2.0
    """
    if strategy not in _SHARDED:
        raise unknown("strategy", strategy, _SHARDED)
    if optimizer not in _NUMBERS_OF_OPTIMIZER:
        raise unknown("optimizer", optimizer, _NUMBERS_OF_OPTIMIZER)

    def share(kind: str) -> float:
        return parameter_nbytes / (ranks if kind in _SHARDED[strategy] else 1)

    return States(
        share("parameters"), share("gradients"), _NUMBERS_OF_OPTIMIZER[optimizer] * share("optimizer")
    )
