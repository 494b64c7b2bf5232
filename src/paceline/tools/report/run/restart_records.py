"""Records of ``logs/restarts.jsonl``: restarts, and what changed while the other ranks trained on (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline._core.json_codec import NonNegative, Whole, decode
from paceline.errors import UsageError

__all__ = [
    "DepartureRecord",
    "HostChangeRecord",
    "LiveRecord",
    "RecoveryRecord",
    "RestartRecord",
    "parse_restart_log",
]

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")  # added by torch to error messages


@dataclass(frozen=True)
class RestartRecord:
    """A failure after which the ranks were restarted or the run ended.

    Attributes:
        number: number of failures so far.
        time: its time (ISO 8601).
        reason: the first failure and its cause.
        ranks_before: world size before it.
        ranks_after: world size after it; 0 if the run ended.
    """

    number: int
    time: str
    reason: str
    ranks_before: int
    ranks_after: int


@dataclass(frozen=True, kw_only=True)
class DepartureRecord:
    """A rank that ended while the others trained on.

    Attributes:
        restart: number of restarts before.
        time: its time (ISO 8601).
        host: name of its host.
        rank: with which its process was started.
        how: how it ended, such as ``"was ended by SIGKILL"``.
        replaced: whether another process was started in its place.
    """

    restart: Whole
    time: str
    host: str
    rank: Whole
    how: str
    replaced: bool


@dataclass(frozen=True, kw_only=True)
class HostChangeRecord:
    """A host that left, was lost or joined while the others trained on.

    Attributes:
        restart: number of restarts before.
        time: its time (ISO 8601).
        host: its name.
        how: ``"left"``, ``"was lost"`` or ``"joined"``.
        seconds: that the world had run, the same in the records of all hosts.
    """

    restart: Whole
    time: str
    host: str
    how: str
    seconds: NonNegative


@dataclass(frozen=True, kw_only=True)
class RecoveryRecord:
    """Ranks that train on in a new world of the same processes, joiners among them.

    Attributes:
        restart: number of restarts before.
        time: its time (ISO 8601).
        epoch: number of the new world since that restart.
        members: ids of its processes, in rank order.
        step: steps done, after which they go on.
        repeated: whether the next step had been begun before.
        seconds: that recovery took.
    """

    restart: Whole
    time: str
    epoch: Whole
    members: tuple[str, ...]
    step: Whole
    repeated: bool
    seconds: NonNegative


LiveRecord = DepartureRecord | HostChangeRecord | RecoveryRecord

_KINDS: dict[object, type[LiveRecord]] = {
    "departure": DepartureRecord,
    "change": HostChangeRecord,
    "recovery": RecoveryRecord,
}


def parse_restart_log(
    records: Iterable[Mapping[str, Any]], notes: list[str]
) -> tuple[tuple[RestartRecord, ...], tuple[LiveRecord, ...]]:
    """Return the restarts, and the live records, each in order; invalid ones are skipped and reported in `notes`.

    What several hosts have written of one event is returned once.
    """
    restarts: list[RestartRecord] = []
    written: dict[str, set[object]] = {}  # hosts that have written each restart
    live: dict[object, LiveRecord] = {}
    invalid: list[str] = []
    for record in records:
        kind = _KINDS.get(record.get("event"))
        if kind is None and all(
            isinstance(record.get(size), int) for size in ("ranks_before", "ranks_after")
        ):
            same = {name: value for name, value in record.items() if name not in ("time", "written_by")}
            hosts = written.setdefault(json.dumps(same, sort_keys=True), set())
            if not hosts or record.get("written_by") in hosts:  # a host writes every restart once
                restarts.append(_restart(record))
                hosts.clear()
            hosts.add(record.get("written_by"))
            continue
        try:
            if kind is None:
                raise UsageError(f"event {record.get('event')!r} is unknown")
            found = decode(record, kind, str(record["event"]))
        except UsageError as error:
            invalid.append(str(error).partition("\n")[0])
        else:
            live.setdefault(_identity(found), found)
    if invalid:
        notes.append(f"restarts.jsonl: skipped {len(invalid)} invalid record(s), the first: {invalid[0]}.")
    return tuple(restarts), tuple(live.values())


def _identity(record: LiveRecord) -> object:
    """Return what is the same in the records that several hosts write of one event."""
    match record:
        case RecoveryRecord():
            return record.restart, record.epoch, record.members
        case HostChangeRecord():
            return record.restart, record.host, record.how, record.seconds
    return record


def _restart(record: Mapping[str, Any]) -> RestartRecord:
    after = 0 if record.get("event") == "end" else record["ranks_after"]
    time = str(record.get("time", ""))
    return RestartRecord(int(record["restart"]), time, _reason(record), record["ranks_before"], after)


def _reason(record: Mapping[str, Any]) -> str:
    """Return a description of the first failure from the fields that the line has."""
    first, parts = record.get("first"), []
    if isinstance(first, Mapping):
        who = (
            f"rank {first['rank']} on {first.get('host')}"
            if first.get("rank") is not None
            else first.get("host")
        )
        lines = [line for line in first.get("lines") or () if isinstance(line, str)]
        parts.append(f"{who} {first.get('how')}" + (f": {_RANK_PREFIX.sub('', lines[-1])}" if lines else ""))
    for names, word in (("lost", "lost"), ("joined", "joined")):
        if isinstance(hosts := record.get(names), list) and hosts:
            parts.append(f"{', '.join(map(str, hosts))} {word}")
    if record.get("why"):
        parts.append(str(record["why"]))
    return "; ".join(parts) or "unknown"
