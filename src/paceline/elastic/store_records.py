"""Keys and values of an elastic world in the store of the job, and which keys a member waits for (pure).

view/E            the view of epoch E; by compare_set, once
change/E          a change to epoch E is under way
report/E/MEMBER   a member's report for epoch E
formed/E/MEMBER   a member has formed the world of epoch E
dead/MEMBER       a process has ended; written by the agent of its host
lost/MEMBER       its host is lost; written by the agents of the others
alive/MEMBER      a member's sign of life, which changes
joiner/SLOT       a newcomer that is ready, in the first free slot; by compare_set
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from paceline._core.json_codec import decode, encode
from paceline.elastic.member import Member
from paceline.elastic.member_events import (
    ChangeSeen,
    Died,
    Event,
    FormedSeen,
    JoinerSeen,
    ReportSeen,
    ViewSeen,
    WriteChange,
    WriteFormed,
    WriteReport,
)
from paceline.elastic.view import Report, View
from paceline.errors import UsageError

__all__ = [
    "dead_key",
    "event_of",
    "joiner_key",
    "lost_key",
    "records_of",
    "view_key",
    "view_value",
    "watched_keys",
]

T = TypeVar("T")


def view_key(epoch: int) -> str:
    """Return the key of the view of an epoch."""
    return f"view/{epoch}"


def view_value(view: View) -> bytes:
    """Return the value of a view's key."""
    return json.dumps(encode(view)).encode()


def dead_key(member: str) -> str:
    """Return the key that exists once a process has ended."""
    return f"dead/{member}"


def lost_key(member: str) -> str:
    """Return the key that exists once the host of a process is lost."""
    return f"lost/{member}"


def joiner_key(slot: int) -> str:
    """Return the key of a slot of the list of joiners; its value is the id of the newcomer."""
    return f"joiner/{slot}"


def records_of(action: WriteReport | WriteChange | WriteFormed, me: str) -> dict[str, bytes]:
    """Return the keys and values that an action writes.

    Example:
        >>> records_of(WriteFormed(3), "a/0/0")
        {'formed/3/a/0/0': b''}
    """
    match action:
        case WriteReport(report):
            return {f"report/{report.epoch}/{me}": json.dumps(encode(report)).encode()}
        case WriteChange(epoch):
            return {f"change/{epoch}": b""}
        case WriteFormed(epoch):
            return {f"formed/{epoch}/{me}": b""}


def watched_keys(member: Member) -> Iterator[str]:
    """Yield the keys whose appearance is an event for a member in its present state."""
    view = member.view
    upcoming = view.epoch + 1
    yield view_key(upcoming)
    if member.phase == "joining":
        return
    yield joiner_key(member.slots)
    yield from (dead_key(each) for each in (*view.participants, *member.joiners) if each not in member.dead)
    if member.phase == "reported":
        known = {report.member for report in member.reports}
        yield from (f"report/{upcoming}/{each}" for each in view.participants if each not in known)
    else:
        yield f"change/{upcoming}"
    if member.phase in ("forming", "formed"):
        yield from (f"formed/{view.epoch}/{each}" for each in view.members if each not in member.formed)


def event_of(key: str, value: bytes) -> Event:
    """Return the event that a key of `watched_keys` and its value are.

    Raises:
        UsageError: the value is not valid.

    Example:
        >>> event_of("formed/3/a/0/0", b"")
        FormedSeen(epoch=3, member='a/0/0')
    """
    kind, _, rest = key.partition("/")
    epoch, _, member = rest.partition("/")
    match kind:
        case "view":
            return ViewSeen(_decode(value, View, key))
        case "change":
            return ChangeSeen(int(epoch))
        case "report":
            return ReportSeen(_decode(value, Report, key))
        case "dead":
            return Died(rest)
        case "joiner":
            return JoinerSeen(int(rest), value.decode())
        case "formed":
            return FormedSeen(int(epoch), member)
        case _:
            raise UsageError(
                f"{key!r} is not a key of an elastic world", remedy="pass keys of `watched_keys`"
            )


def _decode(value: bytes, kind: type[T], key: str) -> T:
    record: Any = json.loads(value)
    return decode(record, kind, key)
