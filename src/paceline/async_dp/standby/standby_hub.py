"""A standby hub: copies an active hub's folder until that hub is gone, then takes over.

It takes over once all of this holds; none of it proves that the active hub is dead, see docs/hub-failures.md:

    it was in sync      nothing had been acknowledged to a worker that is not in its copy
    silence             it has heard nothing from the active hub for a while
    a worker            that can't reach the active hub either has come here since
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from paceline._core import __version__
from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.async_dp.protocol.hub_messages import HubMessage, meta_count, meta_text
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.standby.mirror_source import CHUNK_NBYTES, MirrorChunk
from paceline.async_dp.standby.mirror_target import MirrorTarget
from paceline.async_dp.standby.term_proof import hub_proof
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.hub_term import HubTerm, StandbyMark
from paceline.errors import CheckpointError, DamagedEnvelope, UsageError
from paceline.transport.envelope import Envelope
from paceline.transport.header_layout import Header
from paceline.transport.transport_interface import HUB, Exchange

__all__ = ["StandbyHub", "WorkerRefusal", "begin_term", "term_of"]

log = logging.getLogger("paceline.async_dp")

_POLL_SECONDS = 0.1
_ATTACH_SECONDS = 1.0
_LOST_SECONDS = 3.0  # of silence after which it connects again


class StandbyHub:
    """Follows an active hub; used by one thread.

    Args:
        folder: for the copy.
        active: exchange with the active hub.
        workers: exchange with workers, who are sent back to the active hub.
        number: of this standby in the exchange with the active hub.
        secret: the hub's secret key; empty: it has none.
        address: at which workers reach this hub.
        silent_after: seconds of silence after which it may take over.

    Attributes:
        state: what it is doing, for people.
        run: name of the run; empty before the active hub was reached.

    Raises:
        UsageError, DamagedCheckpoint: the folder can't be used.
    """

    def __init__(
        self,
        folder: Path,
        active: Exchange,
        workers: Exchange,
        *,
        number: int,
        secret: str,
        address: str,
        silent_after: float,
    ) -> None:
        self._target = MirrorTarget(folder)
        self._active, self._workers, self._number, self._secret = active, workers, number, secret
        self._address, self._silent_after = address, silent_after
        self._session, self._attached = secrets.randbits(48) + 1, False
        self._stale = False  # the mark on disk is no longer true
        self._attach_at = self._heard_at = -math.inf
        self._worker_at = -math.inf  # when one came since the active hub is silent
        self._to_active = FrameSender(active, lambda: self.run, lambda: self._session)
        self._refusal = WorkerRefusal(workers, lambda: self.run)
        self._assembler = MessageAssembler(_max_nbytes)
        self.state = "connecting"

    @property
    def run(self) -> str:
        """Name of the run; empty before the active hub was reached."""
        return self._target.mark.run

    def follow(self, stop: Callable[[], bool], on_turn: Callable[[], object] = lambda: None) -> bool:
        """Copy the active hub; return True once this hub must take over, False when `stop` returned True.

        The folder is released when this returns.

        Raises:
            UsageError: the active hub does not accept this standby, or serves another run.
        """
        try:
            while not stop():
                if self.turn(self._active.poll(_POLL_SECONDS), self._workers.poll(), time.monotonic()):
                    return True
                on_turn()
            return False
        finally:
            self._target.close()

    def turn(self, from_active: list[Envelope], from_workers: list[Envelope], now: float) -> bool:
        """Handle what arrived; return whether this hub must take over."""
        if self._heard_at == -math.inf:
            self._heard_at = now  # the active hub has the full time to answer
        for envelope in from_active:
            message = self._assembler.add(envelope)
            if message is not None:
                self._heard_at, self._worker_at = now, -math.inf
                self._on_active(message, envelope.header.run)
        silence = now - self._heard_at
        if silence > _LOST_SECONDS and self._attached:
            self._attached, self.state = False, "the active hub is silent"
            self._session = secrets.randbits(48) + 1
        if not self._attached and now - self._attach_at > _ATTACH_SECONDS:
            self._attach_at = now
            self._attach()
        if self._refusal.answer(from_workers, self.state, now) and silence > self._silent_after / 2:
            self._worker_at = now
        self._to_active.pump(now)
        return (
            silence > self._silent_after
            and now - self._worker_at < self._silent_after
            and self._may_take_over()
        )

    def _may_take_over(self) -> bool:
        if self._target.mark.in_sync and not self._stale:
            return True
        self.state = "the active hub is gone, and this copy lacks something that it acknowledged"
        return False

    def _attach(self) -> None:
        files = {name: (each.nbytes, each.digest) for name, each in self._target.copied().items()}
        meta = {
            "hub": hub_proof(self._secret, "attach", self._number, self._session),
            "address": self._address,
            "version": __version__,
        }
        payload = msgspec.json.encode(files)
        self._to_active.forget(HUB)
        self._to_active.enqueue(HubMessage("attach", self._number, HUB, meta=meta, payload=payload))

    def _on_active(self, message: HubMessage, run: str) -> None:
        meta, mark = message.meta, self._target.mark
        if meta.get("yours") != self._session:
            return
        if message.kind == "attached":
            self._attached, self.state = True, "copying"
            self._describe(run, meta_count(meta, "term"), False)
        elif message.kind == "detached":
            self._attached, self.state = False, f"not admitted: {meta_text(meta, 'why')}"
            log.warning("the active hub dropped this standby: %s", meta_text(meta, "why"))
            self._describe(mark.run, mark.term, False)
            self._session = secrets.randbits(48) + 1
        elif self._attached and message.kind == "mirror_beat":
            in_sync = meta.get("in_sync") is True
            self.state = "in sync" if in_sync else "copying"
            self._describe(mark.run, mark.term, in_sync)
            self._confirm("", 0)
        elif self._attached and message.kind == "mirror":
            self._on_mirror(message)

    def _describe(self, run: str, term: int, in_sync: bool) -> None:
        """Store what is known of the active hub; if the disk is full, remember that the copy may lack something."""
        try:
            self._target.describe(run, term, in_sync=in_sync)
            self._stale = False
        except CheckpointError as error:
            self._stale = True
            log.warning("%s", " ".join(str(error).split()))

    def _on_mirror(self, message: HubMessage) -> None:
        meta = message.meta
        chunk = MirrorChunk(
            meta_text(meta, "name"),
            meta_count(meta, "offset"),
            bytes(message.payload),
            meta.get("complete") is True,
        )
        try:
            self._target.write(chunk)
        except (CheckpointError, DamagedEnvelope) as error:
            log.warning("the copy is interrupted: %s", " ".join(str(error).split()))
            self.state = "the copy is interrupted"
            self._describe(self.run, self._target.mark.term, False)
            self._attached, self._session = False, secrets.randbits(48) + 1  # connects again and continues
            return
        self._confirm(chunk.name, chunk.offset + len(chunk.payload))

    def _confirm(self, name: str, end: int) -> None:
        meta = {"name": name, "end": end}
        self._to_active.enqueue(HubMessage("mirrored", self._number, HUB, meta=meta))


class WorkerRefusal:
    """Sends workers back to the active hub.

    Args:
        exchange: with the workers.
        run: returns the name of the run.
    """

    def __init__(self, exchange: Exchange, run: Callable[[], str]) -> None:
        self._exchange, self._sender = exchange, FrameSender(exchange, run)

    def answer(self, envelopes: Iterable[Envelope], why: str, now: float) -> bool:
        """Answer the workers that say hello; return whether there were any."""
        hellos = [each.header for each in envelopes if each.header.kind == "hello"]
        for header in hellos:
            meta = {"yours": header.meta.get("session"), "why": why}
            self._sender.enqueue(HubMessage("standby", HUB, header.source, meta=meta))
        self._sender.pump(now)
        for target in self._sender.targets.difference(self._exchange.peers()):
            self._sender.forget(target)
        return bool(hellos)


def begin_term(journal: HubJournal, wall: Callable[[], float]) -> HubTerm:
    """Begin the term of a hub that takes over; it is on disk when this returns.

    Raises:
        CheckpointError: it can't be written.
    """
    folder = journal.folder.path
    term, mark = HubTerm.read(folder), StandbyMark.read(folder)
    number = 1 + max(term.number, term.superseded_by, 0 if mark is None else mark.term)
    since = journal.append({"kind": "term", "t": wall(), "term": number})
    journal.commit()
    begun = HubTerm(number, since)
    begun.write(folder)
    StandbyMark.remove(folder)
    return begun


def term_of(folder: Path) -> HubTerm:
    """Return the term of the hub in a folder, which may serve.

    Raises:
        UsageError: another hub has taken over, or the folder is a standby's copy.
    """
    term = HubTerm.read(folder)
    anyway = "to continue from this folder nevertheless, and give up the other hub's work: --standby shared"
    if term.superseded_by:
        raise UsageError(
            f"the run in {str(folder)!r} continued elsewhere: a hub of term {term.superseded_by} took over",
            remedy=f"serve that hub's folder; {anyway}",
        )
    if StandbyMark.read(folder) is not None:
        raise UsageError(
            f"{str(folder)!r} is a standby's copy of another hub's folder",
            remedy=f"start it with --standby ADDRESS; {anyway}",
        )
    return term


def _max_nbytes(header: Header) -> int | None:
    return CHUNK_NBYTES if header.kind == "mirror" else 0
