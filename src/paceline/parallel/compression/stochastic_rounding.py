"""Random numbers that make rounding right on average.

Rounding to the nearest level loses, every time, what is small beside a level. Rounding up with a probability equal to
the part that is cut off keeps the mean instead (Gupta et al., arXiv 1502.02551, section 3.2). 16 random bits a number
are enough: exactly so for bfloat16, which cuts off 16 bits, and to 2⁻¹⁷ of a level for integers. Each rank draws its
own, so that the errors of ranks average out.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError

__all__ = ["ROUNDINGS", "RoundingBits", "rounding_bits_of"]

ROUNDINGS = ("nearest", "stochastic")


class RoundingBits:
    """A source of random bits of one rank, whose state can be kept.

    Args:
        seed: of the run. rank: whose bits they are: other ranks draw others.
    """

    def __init__(self, seed: int = 0, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank
        self._generator: torch.Generator | None = None
        self._loaded: dict[str, Any] = {}

    def bits(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return `numel` random int16 numbers, each of the 65 536 as likely."""
        words = torch.empty(-(-numel // 4), dtype=torch.int64, device=device)
        words.random_(-(2**63), None, generator=self._on(device))
        return words.view(torch.int16)[:numel]

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes to go on from here."""
        state = {"seed": self.seed, "rank": self.rank}
        if self._generator is None:
            return self._loaded or state
        return state | {"device": self._generator.device.type, "bits": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where the state was taken; on another kind of device, from the start of its seed."""
        self.seed, self.rank = state["seed"], state["rank"]
        self._generator, self._loaded = None, dict(state)

    def _on(self, device: torch.device) -> torch.Generator:
        """Return the generator, made when it is known where numbers are."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device=device)
            self._generator.manual_seed((self.seed * 1_000_003 + self.rank * 7_919 + 17) % 2**63)
            if self._loaded.get("device") == device.type:
                self._generator.set_state(self._loaded["bits"].cpu())
            self._loaded = {}
        return self._generator


def rounding_bits_of(rounding: str, seed: int, rank: int) -> RoundingBits | None:
    """Return the source of random bits that a rounding needs: none for ``"nearest"``.

    Raises:
        UsageError: an unknown rounding.
    """
    if rounding not in ROUNDINGS:
        raise UsageError(f"rounding={rounding!r}", remedy=f"choose one of {', '.join(map(repr, ROUNDINGS))}")
    return RoundingBits(seed, rank) if rounding == "stochastic" else None
