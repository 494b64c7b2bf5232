"""Random bits for stochastic rounding: a generator per rank, whose state is saved.

[Note: stochastic rounding] Rounding to the nearest level loses, every time, what is small compared with a level.
Rounding up with a probability equal to the fraction that is cut off keeps the mean (Gupta et al., arXiv 1502.02551,
section 3.2). 16 random bits per number suffice: exactly for bfloat16, which cuts off 16 bits, and to 2⁻¹⁷ of a level
for integers. Each rank draws its own bits, so that the errors of the ranks average out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError

__all__ = ["RoundingBits", "make_rounding_bits"]


class RoundingBits:
    """Source of the random bits of one rank, with a state; see [Note: stochastic rounding].

    Args:
        seed: of the run.
        rank: other ranks draw other bits.
    """

    def __init__(self, seed: int = 0, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank
        self._generator: torch.Generator | None = None
        self._loaded: dict[str, Any] = {}

    def bits(self, numel: int, device: torch.device) -> Tensor:
        """Return `numel` uniform int16 numbers."""
        words = torch.empty(-(-numel // 4), dtype=torch.int64, device=device)
        words.random_(-(2**63), None, generator=self._on(device))
        return words.view(torch.int16)[:numel]

    def state_dict(self) -> dict[str, Any]:
        state = {"seed": self.seed, "rank": self.rank}
        if self._generator is None:
            return self._loaded or state
        return state | {"device": self._generator.device.type, "bits": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; on another type of device, from the start of its seed."""
        self.seed, self.rank = state["seed"], state["rank"]
        self._generator, self._loaded = None, dict(state)

    def _on(self, device: torch.device) -> torch.Generator:
        """Return the generator, which is created once the device is known."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device=device)
            self._generator.manual_seed((self.seed * 1_000_003 + self.rank * 7_919 + 17) % 2**63)
            if self._loaded.get("device") == device.type:
                self._generator.set_state(self._loaded["bits"].cpu())
            self._loaded = {}
        return self._generator


def make_rounding_bits(rounding: str, seed: int, rank: int) -> RoundingBits | None:
    """Return the source of random bits for a rounding mode; None for ``"nearest"``.

    Raises:
        UsageError: an unknown rounding mode.
    """
    if rounding not in ("nearest", "stochastic"):
        raise UsageError(f"rounding={rounding!r}", remedy="choose one of 'nearest', 'stochastic'")
    return RoundingBits(seed, rank) if rounding == "stochastic" else None
