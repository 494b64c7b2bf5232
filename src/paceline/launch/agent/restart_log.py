"""The record of a run's restarts: one line each on the terminal and in ``restarts.jsonl``."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from paceline.launch.agent.rank_failure import RankFailure
from paceline.launch.agent.world_agreement import WorldAgreement

__all__ = ["RestartLog", "log_line"]


def log_line(text: str) -> None:
    """Write one line about the run itself on the terminal."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


class RestartLog:
    """Where this host writes down why worlds ended.

    Args:
        log_dir: the folder for ``restarts.jsonl``; None: only the terminal is told.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._file = log_dir / "restarts.jsonl" if log_dir else None

    def restarted(self, verdict: WorldAgreement) -> None:
        """Note a restart, or that there will be none."""
        if verdict.decision.action != "end":
            log_line(str(verdict))
        record = {
            "event": "end" if verdict.decision.action == "end" else "restart",
            "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
            "written_by": socket.gethostname(),
            "restart": verdict.restart,
            "action": verdict.decision.action,
            "why": verdict.decision.why,
            "ranks_before": verdict.ranks_before,
            "ranks_after": verdict.ranks_after,
            "hosts_before": verdict.hosts_before,
            "hosts_after": verdict.hosts_after,
            "first": verdict.first and _told(verdict.first),
            "after": [{**_told(one), "lines": one.lines[-1:]} for one in verdict.after],
            "lost": verdict.lost,
            "joined": verdict.joined,
        }
        self._write(record)

    def _write(self, record: dict[str, object]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _told(failure: RankFailure) -> dict[str, object]:
    record = asdict(failure) | {"how": failure.how, "seconds": round(failure.seconds, 3)}
    del record["member"]
    return record
