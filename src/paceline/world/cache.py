"""Where Paceline keeps what it found out from run to run."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the user's folder for what can be found out again: ``$XDG_CACHE_HOME/paceline``, or ``~/.cache/paceline``.

    It need not exist. See the XDG Base Directory Specification, 0.8.
    """
    asked = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(asked) if Path(asked).is_absolute() else Path("~/.cache").expanduser()
    return base / "paceline"
