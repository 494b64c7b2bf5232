"""Log of a job's restarts, and of what changes while a world runs: on the terminal and in ``restarts.jsonl``."""

from __future__ import annotations

import json
import socket
import sys
from datetime import datetime
from pathlib import Path

from paceline._core.format import plural
from paceline._core.json_codec import encode
from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.job_messages import WorldChange
from paceline.launch.agent.restart_policy import WorldAgreement
from paceline.world.live_file import LiveWorld

__all__ = ["RestartLog", "log_line"]


def log_line(text: str) -> None:
    """Write a line about the job itself to the terminal."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


class RestartLog:
    """Records why worlds ended.

    Args:
        log_dir: folder for ``restarts.jsonl``; None: terminal only.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._file = log_dir / "restarts.jsonl" if log_dir else None

    def write(self, agreement: WorldAgreement) -> None:
        """Record a restart, or the end of the job."""
        action = agreement.decision.action
        if action != "end":
            log_line(str(agreement))
        self._append(
            "end" if action == "end" else "restart",
            restart=agreement.restart,
            action=action,
            why=agreement.decision.why,
            ranks_before=agreement.ranks_before,
            ranks_after=agreement.ranks_after,
            hosts_before=agreement.hosts_before,
            hosts_after=agreement.hosts_after,
            first=agreement.first and _record(agreement.first),
            after=[{**_record(one), "lines": one.lines[-1:]} for one in agreement.after],
            lost=agreement.lost,
            joined=agreement.joined,
        )

    def write_departure(
        self, world: int, failure: RankFailure, rank: str, *, left: int, replaced: bool
    ) -> None:
        """Record that a rank ended and the others train on.

        Args:
            world: its number.
            failure: how the rank ended.
            rank: id of its process.
            left: number of this host's processes that run on, without one that replaces it.
            replaced: whether another process takes its place.
        """
        log_line(f"{failure}; {'it is replaced, ' if replaced else ''}the others train on")
        self._append(
            "departure", restart=world, **_record(failure), member=rank, left=left, replaced=replaced
        )

    def write_recovery(self, world: int, found: LiveWorld) -> None:
        """Record that ranks of this host train on in a new world of the same processes."""
        repeated = f"step {found.step} repeated" if found.repeats else f"from step {found.step}"
        verb = "trains" if len(found.members) == 1 else "train"
        log_line(f"{plural(len(found.members), 'rank')} {verb} on after {found.seconds:.2f} s, {repeated}")
        self._append(
            "recovery",
            restart=world,
            epoch=found.epoch,
            ranks=len(found.members),
            members=list(found.members),
            step=found.step,
            repeated=found.repeats,
            seconds=found.seconds,
        )

    def write_change(self, world: int, change: WorldChange) -> None:
        """Record that a host left, was lost or joined, and the others train on."""
        how = {"left": "left", "lost": "was lost", "joined": "joined"}[change.kind]
        log_line(f"{change.host} {how} after {change.seconds:.0f} s; the others train on")
        seconds = round(change.seconds, 3)
        self._append("change", restart=world, host=change.host, how=how, seconds=seconds)

    def _append(self, event: str, **fields: object) -> None:
        """Append a record to the file."""
        if self._file is None:
            return
        time = datetime.now().astimezone().isoformat(timespec="milliseconds")
        record = {"event": event, "time": time, "written_by": socket.gethostname(), **fields}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _record(failure: RankFailure) -> dict[str, object]:
    record = encode(failure) | {"how": failure.how, "seconds": round(failure.seconds, 3)}
    del record["member"]
    return record
