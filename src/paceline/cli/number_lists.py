"""Options that list numbers, by commas or another mark."""

from __future__ import annotations

from paceline.errors import UsageError

__all__ = ["numbers_of"]


def numbers_of(option: str, text: str, kind: type, example: str, mark: str = ",") -> list:
    """Return the numbers that the text of an option lists.

    Args:
        option: its name, for messages. text: as it was given. kind: ``int`` or ``float``.
        example: what may be given instead. mark: stands between two numbers.

    Raises:
        UsageError: there is none, or something else is among them.

    Example:
        >>> numbers_of("--block", "2,10", int, "2,10,100")
        [2, 10]
    """
    parts = [part.strip() for part in text.split(mark) if part.strip()]
    try:
        numbers = [kind(part) for part in parts]
    except ValueError as error:
        what = ("whole numbers" if kind is int else "numbers") + " by commas" * (mark == ",")
        raise UsageError(f"{option} {text}: {error}", remedy=f"pass {what}: {example}") from error
    if not numbers:
        raise UsageError(f"{option} names none", remedy=f"pass for example {example}")
    return numbers
