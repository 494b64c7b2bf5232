"""The active hub's side of failover: copies the journal to a standby, and gives way to a hub of a higher term.

    detached   no standby: answers leave at once
    copying    a standby has connected and lacks something: answers leave at once
    in sync    an answer leaves once the standby has the records that it confirms on disk too

A standby in sync that confirms nothing for 5 s is dropped: answers leave again, and what is acknowledged from then on
may be missing in the standby until it is in sync again. The ledger has every change, as records of kind ``standby``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paceline._core import __version__
from paceline._core.format import plural
from paceline.async_dp.protocol.hub_messages import HubMessage, meta_count, meta_text
from paceline.async_dp.standby.mirror_source import CopiedFile, MirrorSource
from paceline.async_dp.standby.term_proof import TermProof, hub_proof
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.hub_term import HubTerm
from paceline.errors import CheckpointError, UsageError
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.transport_interface import HUB

__all__ = ["StandbyLink"]

log = logging.getLogger("paceline.async_dp")

_CONFIRM_SECONDS, _SILENT_SECONDS = 5.0, 15.0
_BEAT_SECONDS = 1.0
_WINDOW = 8  # unconfirmed chunks
_MAX_LISTED = 20


@dataclass(slots=True)
class _Standby:
    number: int
    session: int
    address: str  # at which workers reach it
    source: MirrorSource
    heard_at: float
    confirmed: tuple[str, int] = ("", 0)  # file of records and place in it
    unconfirmed: int = 0  # chunks
    in_sync: bool = False
    beat_at: float = -math.inf
    chunks: int = 0
    held: deque[tuple[tuple[str, int], float, list[HubMessage]]] = field(default_factory=deque)


class StandbyLink:
    """Handles the messages of a standby, holds answers for it, and recognises a higher term.

    Args:
        journal: of the hub.
        run: its name.
        term: of the hub.
        secret: the hub's secret key; empty: it has none.
        wall: returns the time of day.
    """

    def __init__(
        self, journal: HubJournal, run: str, term: HubTerm, secret: str, wall: Callable[[], float]
    ) -> None:
        self._journal, self._run, self._term, self._secret, self._wall = journal, run, term, secret, wall
        self._proof = TermProof.make(secret, run, term.number, term.since)
        self._standby: _Standby | None = None
        self._outgoing: list[HubMessage] = []

    @property
    def standby(self) -> str:
        """Address of the standby that is in sync; empty without one."""
        return self._standby.address if self._standby is not None and self._standby.in_sync else ""

    @property
    def proof(self) -> TermProof:
        """Proof of this hub's term."""
        return self._proof

    def welcome_meta(self) -> dict[str, Any]:
        """Return the metadata by which a worker recognises older hubs, and finds the standby."""
        address = self._standby.address if self._standby is not None else ""
        return {**self._proof.meta(), "standby": address}

    # ------------------------------------------------------------------ called by the server

    def take(self, envelopes: Iterable[Envelope], now: float) -> list[Envelope]:
        """Handle the messages between hubs, and return the others.

        Raises:
            UsageError: a hub with a higher term has taken over.
        """
        rest = []
        for envelope in envelopes:
            header = envelope.header
            if header.kind in ("hello", "attach", "superseded") and "proof" in header.meta:
                self._check_term(header.meta)
            if header.kind == "attach":
                self._on_attach(envelope, now)
            elif header.kind == "mirrored":
                self._on_mirrored(envelope, now)
            elif header.kind != "superseded":
                rest.append(envelope)
        return rest

    def release(self, answers: list[HubMessage], now: float) -> list[HubMessage]:
        """Return what may be sent now: answers whose records the standby has, and messages to it."""
        standby = self._standby
        if standby is None:
            return self._taken() + answers
        if standby.in_sync:
            if answers:
                standby.held.append((self._position(), now, answers))
            ready: list[HubMessage] = []
            while standby.held and standby.held[0][0] <= standby.confirmed:
                ready += standby.held.popleft()[2]
            answers = ready
        overdue = bool(standby.held) and now - standby.held[0][1] > _CONFIRM_SECONDS
        if overdue or now - standby.heard_at > _SILENT_SECONDS:
            answers += self._drop("it confirms nothing")
        else:
            self._copy(standby, now)
        return self._taken() + answers

    def _taken(self) -> list[HubMessage]:
        taken, self._outgoing = self._outgoing, []
        return taken

    def _position(self) -> tuple[str, int]:
        path, nbytes = self._journal.position
        return path.name, nbytes

    # ------------------------------------------------------------------ the standby

    def _on_attach(self, envelope: Envelope, now: float) -> None:
        header, meta = envelope.header, envelope.header.meta
        number, session = header.source, meta_count(meta, "session")
        expected = hub_proof(self._secret, "attach", number, session)
        if not compare_digest(meta_text(meta, "hub").encode(), expected.encode()):
            self._send("detached", number, session, why="it does not have the hub's secret key (--keys)")
            return
        if meta.get("version") != __version__:
            other = meta_text(meta, "version")
            self._send("detached", number, session, why=f"it is Paceline {other}, the hub {__version__}")
            return
        if self._standby is not None and self._standby.number != number:
            self._send(
                "detached", number, session, why=f"the standby at {self._standby.address} is connected"
            )
            return
        if self._standby is not None:
            self._outgoing += self._drop("it connected again")
        try:
            source = MirrorSource(self._journal, _copied_files(envelope.payload))
        except (CheckpointError, OSError, msgspec.MsgspecError) as error:
            self._send("detached", number, session, why=str(error).partition("\n")[0])
            return
        self._standby = _Standby(number, session, meta_text(meta, "address"), source, now)
        self._send("attached", number, session, term=self._term.number)
        self._note("copying")

    def _on_mirrored(self, envelope: Envelope, now: float) -> None:
        standby, meta = self._standby, envelope.header.meta
        if standby is None or (envelope.header.source, meta.get("session")) != (
            standby.number,
            standby.session,
        ):
            return
        standby.heard_at = now
        name, end = meta_text(meta, "name"), meta_count(meta, "end")
        if not name:
            return  # the answer to a beat
        standby.unconfirmed = max(0, standby.unconfirmed - 1)
        if name.startswith("journal"):
            standby.confirmed = max(standby.confirmed, (name, end))

    def _copy(self, standby: _Standby, now: float) -> None:
        """Send what the standby lacks, as far as it confirms it."""
        try:
            while standby.unconfirmed < _WINDOW and (chunk := standby.source.next_chunk()) is not None:
                standby.unconfirmed += 1
                standby.chunks += 1
                meta = {"name": chunk.name, "offset": chunk.offset, "complete": chunk.complete}
                meta["yours"] = standby.session
                self._outgoing.append(
                    HubMessage("mirror", HUB, standby.number, standby.chunks, 0, meta, chunk.payload)
                )
        except OSError as error:
            self._outgoing += self._drop(f"a file can't be read: {error.strerror}")
            return
        if not standby.in_sync and standby.source.in_sync and self._position() <= standby.confirmed:
            standby.in_sync = True
            self._note("in sync")
            log.info("the standby at %s has everything: answers wait for it from now on", standby.address)
            standby.beat_at = -math.inf
        if now - standby.beat_at >= _BEAT_SECONDS:
            standby.beat_at = now
            self._send("mirror_beat", standby.number, standby.session, in_sync=standby.in_sync)

    def _drop(self, why: str) -> list[HubMessage]:
        """Stop waiting for the standby, and return the answers that were held for it."""
        standby, self._standby = self._standby, None
        if standby is None:
            return []
        self._send("detached", standby.number, standby.session, why=why)
        if standby.in_sync:
            log.warning("dropped the standby at %s: %s; answers no longer wait for it", standby.address, why)
        self._note("dropped", why=why)
        return [message for _, _, messages in standby.held for message in messages]

    def _send(self, kind: str, target: int, session: int, **meta: Any) -> None:
        self._outgoing.append(HubMessage(kind, HUB, target, meta={**meta, "yours": session}))

    def _note(self, state: str, **values: Any) -> None:
        """Add a record to the ledger."""
        if not self._journal.problem:
            self._journal.append({"kind": "standby", "t": self._wall(), "state": state, **values})

    # ------------------------------------------------------------------ a higher term

    def _check_term(self, meta: Mapping[str, Any]) -> None:
        """Raise if a hub with a higher term exists."""
        found = TermProof.parse(meta)
        if found.term <= self._term.number or not found.is_valid(self._secret, self._run):
            return
        listed = self._updates_since(found.since)
        record = {"kind": "superseded", "t": self._wall(), "term": found.term, "since": found.since}
        with suppress(CheckpointError):  # it stops in any case
            HubTerm(self._term.number, self._term.since, found.term).write(self._journal.folder.path)
            self._journal.append({**record, "updates": len(listed)})
            self._journal.commit()
        more = ", …" if len(listed) > _MAX_LISTED else ""
        lost = f": {', '.join(listed[:_MAX_LISTED])}{more}" if listed else ""
        raise UsageError(
            f"another hub has taken over run {self._run!r} (term {found.term} from record {found.since} on; this is "
            f"term {self._term.number}), so this one stops. {plural(len(listed), 'update')} that it merged since "
            f"{'is' if len(listed) == 1 else 'are'} not in the other's parameters, unless sent there again{lost}",
            remedy="to follow the other hub, start this one with --standby ADDRESS and an empty folder",
        )

    def _updates_since(self, record: int) -> list[str]:
        """Return the updates that were merged with a record number or a later one."""
        found = read_ledger(self._journal.folder.path)
        return [
            f"worker {each['worker']} fragment {each['fragment']} round {each['round']}"
            for each in found
            if each["kind"] == "update" and each["n"] >= record
        ]


def _copied_files(payload: Bytes) -> dict[str, CopiedFile]:
    """Return the files that a standby has; raises a MsgspecError if the list is invalid."""
    files = msgspec.json.decode(bytes(payload), type=dict[str, tuple[Annotated[int, Meta(ge=0)], str]])
    return {name: CopiedFile(*found) for name, found in files.items()}
