"""What commands that write a profile share: the file is checked first, then gains their entries."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from paceline.cli.writable import check_writable
from paceline.plan.profile import Profile

__all__ = ["load_or_new", "now"]


def load_or_new(path: Path) -> Profile:
    """Return the profile in a file that will be written, or a new one if it is not there yet.

    Raises:
        UsageError: it can't be written, or holds something else.
    """
    check_writable(path, "--profile", make_folder=True)
    return Profile.load(path) if path.exists() else Profile()


def now() -> str:
    """Return the time of day as a profile says it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
