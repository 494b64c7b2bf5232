"""Profile file that measuring commands add their entries to."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.tools.result_files import check_writable, machine_record, paceline_command, versions

if TYPE_CHECKING:
    from paceline.cost_model.profile import Profile
    from paceline.cost_model.profile_entries import Source

__all__ = ["load_or_new_profile", "measurement_source"]


def load_or_new_profile(path: Path) -> Profile:
    """Return the profile in a file that will be written, or a new one if the file does not exist.

    Raises:
        UsageError: the file can't be written, or has other content.
    """
    from paceline.cost_model.profile import Profile

    check_writable(path, "--profile", make_folder=True)
    return Profile.load(path) if path.exists() else Profile()


def measurement_source(command: str | None = None, machine: Mapping[str, Any] | None = None) -> Source:
    """Return the source of a profile's entries, with the present time and versions.

    Args:
        command: the command line that reproduces the measurement; None: this process's.
        machine: where it was measured; None: this machine.
    """
    from paceline.cost_model.profile_entries import Source

    return Source(
        command or paceline_command(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine_record() if machine is None else dict(machine),
        versions(["paceline", "torch"]),
    )
