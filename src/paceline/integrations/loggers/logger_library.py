"""What loggers share: whether their library is installed, and facts without nesting."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from paceline.errors import UsageError

__all__ = ["flat_facts", "require_library"]


def require_library(module: str, logger: str) -> None:
    """Raise a UsageError if the library of a logger is not installed; it is not imported."""
    if find_spec(module) is None:
        raise UsageError(
            f"{logger} needs {module}, which is not installed", remedy="pip install 'paceline[loggers]'"
        )


def flat_facts(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested facts in one level, their names joined by dots; without those that are None.

    Example:
        >>> flat_facts({"world": {"size": 2, "nodes": 1}, "lr": 0.1, "resumed": None})
        {'world.size': 2, 'world.nodes': 1, 'lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= flat_facts(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat
