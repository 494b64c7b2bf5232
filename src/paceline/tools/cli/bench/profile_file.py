"""The profile file that measuring commands add their entries to."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from paceline.cost_model.profile import Profile

__all__ = ["load_or_new", "now"]


def load_or_new(path: Path) -> Profile:
    """Return the profile in a file that will be written, or a new one if it is not there yet.

    Raises:
        UsageError: it can't be written, or holds something else.
    """
    from paceline.cost_model.profile import Profile

    check_writable(path, "--profile", make_folder=True)
    return Profile.load(path) if path.exists() else Profile()


def now() -> str:
    """Return the time of day as a profile says it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
