"""Between a launcher and a rank that can recover in place: variables, the rank's file, and marks of ended ranks.

The launcher gives every process of a live world an id (a *member*) and the name of a file. The rank creates the file
once it can recover in place when others end, keeps the present world in it, and removes it when it no longer can. When
a process of such a world ends, the launcher of its host marks it, so that the others know for certain:

    on the same host    the file MEMBER.dead beside the rank's own file
    on other hosts      the key elastic/dead/MEMBER in the store of the job

When a host is lost, the launchers of the others set elastic/lost/MEMBER for each of its processes: nobody can reach it,
and if it runs on, its launcher ends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline._core.json_codec import Whole

__all__ = [
    "JOINER_VARIABLE",
    "LEFT_EXIT_CODE",
    "LIVE_FILE_VARIABLE",
    "MEMBER_VARIABLE",
    "VARIABLES",
    "LiveFile",
    "LiveWorld",
    "dead_key",
    "dead_marker",
    "is_of_agent",
    "lost_key",
    "member_id",
]

MEMBER_VARIABLE = "PACELINE_MEMBER"
"""Id of a process, unique in its world: agent/local rank/incarnation."""

LIVE_FILE_VARIABLE = "PACELINE_LIVE_FILE"
"""Names the file to a rank."""

JOINER_VARIABLE = "PACELINE_JOINER"
"""Set to 1 for a process that joins a world which runs already."""

VARIABLES = (MEMBER_VARIABLE, LIVE_FILE_VARIABLE, JOINER_VARIABLE)
"""All of them, for a launcher that removes those of an outer one."""

LEFT_EXIT_CODE = 75
"""Exit code of a rank that left its world in order (EX_TEMPFAIL); it is not replaced."""


@dataclass(frozen=True)
class LiveWorld:
    """Present world of a rank.

    Attributes:
        epoch: its number.
        members: ids in rank order.
        step: at which it began.
        repeats: whether this rank had begun that step before, and repeats it.
        seconds: from the end of training in the world before; 0 in the first one.
    """

    epoch: Whole
    members: tuple[str, ...]
    step: Whole
    repeats: bool = False
    seconds: float = 0.0


class LiveFile:
    """File of a rank that can recover in place.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LiveFile | None:
        """Return the file of this rank; None: its launcher does not recover in place."""
        name = environ.get(LIVE_FILE_VARIABLE)
        return cls(Path(name)) if name else None

    def write(self, world: LiveWorld) -> None:
        """Report that this rank can recover in place, and its present world.

        Raises:
            OSError: the file can't be written.
        """
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_bytes(msgspec.json.encode(world))
        part.replace(self.path)

    def remove(self) -> None:
        """Report that this rank can't recover in place any more."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def exists(self) -> bool:
        """Return whether the rank can recover in place."""
        return self.path.exists()

    def read(self) -> LiveWorld | None:
        """Return the present world of the rank; None: it has none, or the file is damaged."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=LiveWorld)
        except (OSError, msgspec.DecodeError):
            return None


def member_id(agent: str, local_rank: int, incarnation: int) -> str:
    """Return the id of a process.

    Example:
        >>> member_id("1f0c77aa0d6b4e2f", 2, 0)
        '1f0c77aa/2/0'
    """
    return f"{agent[:8]}/{local_rank}/{incarnation}"


def is_of_agent(member: str, agent: str) -> bool:
    """Return whether a process was started by an agent.

    Example:
        >>> is_of_agent("1f0c77aa/2/0", "1f0c77aa0d6b4e2f")
        True
    """
    return member.startswith(f"{agent[:8]}/")


def dead_key(member: str) -> str:
    """Return the key that exists in the store of the job once a process of another host has ended.

    Example:
        >>> dead_key("1f0c77aa/2/0")
        'elastic/dead/1f0c77aa/2/0'
    """
    return f"elastic/dead/{member}"


def lost_key(member: str) -> str:
    """Return the key that exists in the store of the job once the host of a process is lost.

    Example:
        >>> lost_key("1f0c77aa/2/0")
        'elastic/lost/1f0c77aa/2/0'
    """
    return f"elastic/lost/{member}"


def dead_marker(folder: Path, member: str) -> Path:
    """Return the file that exists once a process of this host has ended.

    Args:
        folder: of the rank's own file.
        member: id of the process.
    """
    return folder / f"{member.replace('/', '-')}.dead"
