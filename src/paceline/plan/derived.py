"""A figure with its derivation: what it is, the formula with numbers put in, why, and what people get wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Derived"]


@dataclass(frozen=True)
class Derived:
    """A figure, and where it comes from.

    Attributes:
        key: its name in JSON, with its unit, such as ``"devices"`` or ``"state_nbytes"``.
        what: in words.
        formula: with the numbers put in.
        value: the result.
        shown: the result for people, with its unit.
        why: the reason for the formula; empty if it says enough.
        wrong: what is often written instead, and what that would give; empty if nothing is.
    """

    key: str
    what: str
    formula: str
    value: float
    shown: str
    why: str = ""
    wrong: str = ""

    def facts(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)
