"""The hub: merges updates in the order in which they arrive, and answers (no clock, no network).

    receive   an update is unpacked, screened, journaled and merged
    commit    one fdatasync for all envelopes that arrived together; only then are answers returned
    sent      the driver reports what was sent, so that no worker is sent more than one packet at a time

There is one writer, so the journal is the whole truth: a hub that is killed and restarted continues from its last
snapshot and the updates after it, to the bit, and workers notice no more than a pause.

Its driver (`HubServer` in real time, `paceline.tools.simulate` in virtual time) passes envelopes with the time of their
arrival, calls `commit` when there are no more, and sends what that returns.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline._core import __version__
from paceline.async_dp.hub.admission import layout_or_refusal
from paceline.async_dp.hub.answers import HubAnswers
from paceline.async_dp.hub.durable_commit import DurableCommit
from paceline.async_dp.hub.fetch_queue import FetchQueue
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.hub.journal_replay import replay_records, restore_snapshot, snapshot_facts
from paceline.async_dp.hub.membership import HubCounters, HubMember, HubMembership
from paceline.async_dp.hub.offence_log import OffenceLog
from paceline.async_dp.hub.population import InitialParamsCoordinator
from paceline.async_dp.hub.update_intake import UpdateIntake
from paceline.async_dp.hub.update_merging import GlobalParams
from paceline.async_dp.protocol.hub_messages import (
    BULK_KINDS,
    HubMessage,
    meta_count,
    meta_number,
    meta_text,
)
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.errors import CheckpointError, EnvelopeError
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.header_layout import Header
from paceline.transport.transport_interface import HUB

__all__ = ["Hub"]

_LAYOUT_LIMIT_NBYTES = 4 << 20
_EXPIRY_SECONDS = 1.0
_MAX_SUMMARY_WORKERS = 256
_PARTIAL_NBYTES_PER_NUMBER, _PARTIAL_NBYTES = 64, 64 << 20  # most bytes of messages that are being received


class Hub:
    """Serves the fragments of a model; see the module.

    Args:
        run: its name; envelopes of other runs are refused.
        rules: how it screens, merges and answers.
        journal: stores its decisions; those of an earlier hub are recovered.
        wall: returns the time of day, for the journal's readers.

    Attributes:
        params: the global parameters; None until a worker has sent its layout.
        members: the workers.
        phase: ``"empty"``, ``"population"`` or ``"together"``.
        counters: totals of merged updates.
        refused: counts of refused messages, by reason.
        loss: last reported score of the global parameters.
        merging: merges updates by quorum.
        reset: workers with a new session; messages for the one before must not be sent any more.
        welcome_meta: returns further metadata of a welcome: term, standby.
    """

    def __init__(
        self, run: str, rules: HubRules, journal: HubJournal | MemoryJournal, wall: Callable[[], float]
    ) -> None:
        self.run, self.rules, self._journal, self._wall = run, rules, journal, wall
        self.params: GlobalParams | None = None
        self.members = HubMembership(rules.silent_after)
        self.counters, self.refused, self.loss = HubCounters(), Counter[str](), math.nan
        self.welcome_meta: Callable[[], dict[str, Any]] = dict
        self.phase = "empty"
        self._intake = UpdateIntake(
            rules, self.members, self.counters, self.refused, self._record, self._acknowledge
        )
        self.merging = self._intake.merging
        self._fetches = FetchQueue(self.members, rules.staleness, self.merging.holds)
        self._storage = DurableCommit(
            journal, self.snapshot, lambda: self._intake.since_snapshot, rules.snapshot_every
        )
        self.reset: set[int] = set()
        self._answers = HubAnswers(rules, self.members, self.counters, self._fetches)
        self._coordinator = InitialParamsCoordinator(
            rules.population, self._answers.add, self._record, self._start
        )
        self._assembler = MessageAssembler(self._max_nbytes, refused=self.refused)
        self._offences = OffenceLog(self._record, self._intake.screen)
        self._expired_at = -math.inf
        self._handlers: dict[str, Callable[[HubMessage, HubMember, float], None]] = {
            "update": self._on_update,
            "fetch": self._on_fetch,
            "parameters": self._on_params,
            "score": self._on_score,
            "beat": self._on_heartbeat,
            "bye": self._on_bye,
        }
        found = self._journal.recovered()
        if found.tensors is not None:
            state = self.members, self.counters
            params = restore_snapshot(found.facts, found.tensors, self._make_params, *state)
            self.phase = "together"
            self._intake.since_snapshot = replay_records(found.records, params, *state)
            self.merging.restore(params)

    @property
    def updates(self) -> int:
        """Number of merged updates."""
        return self.counters.updates

    @property
    def storage_error(self) -> str:
        """Why nothing is answered, such as a full disk; empty if nothing is wrong."""
        return self._storage.error

    def quarantined(self, now: float) -> int:
        """Return the number of workers in quarantine."""
        return self._intake.screen.quarantined(now)

    # ------------------------------------------------------------------ called by the driver

    def receive(self, envelope: Envelope, now: float) -> None:
        """Handle an envelope from a worker; `now` is in seconds of a monotonic clock.

        Nothing that a worker sends raises: it is answered, refused, or counts as an offence of that worker.
        """
        header = envelope.header
        try:
            if self._storage.paused:
                self.refused["not stored"] += 1  # nor answered, so the worker sends it again
                self.members.keep_alive(header.source, now)
            elif header.kind == "hello":
                self._on_hello(envelope, now)
            else:
                self._receive(envelope, now)
        except CheckpointError as error:  # the journal can't take it: its sender repeats it
            self.refused["not stored"] += 1
            self._storage.fail(error, now)
        except EnvelopeError as error:
            self.refused[type(error).__name__] += 1
            self._offence(header, str(error), now)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the hub
            self.refused["invalid"] += 1
            self._offence(header, repr(error), now, exc_info=True)

    def _receive(self, envelope: Envelope, now: float) -> None:
        header = envelope.header
        member = self.members.get(header.source)
        if header.run != self.run or header.target != HUB or header.kind not in self._handlers:
            self.refused["foreign"] += 1
            if header.run == self.run and header.target == HUB:
                self._offence(header, "there is no such message", now)
        elif member is None or not member.session_id or member.session_id != header.meta.get("session"):
            self.refused["not in session"] += 1
            if header.frame == 0:
                self._answers.send("who", header.source)
        elif not member.window.admit(header.sequence):
            self.refused["repeated"] += 1
        else:
            member.received_nbytes += header.nbytes
            self._mark_seen(member, now)
            message = self._assembler.add(envelope, now)
            if message is not None:
                self._handlers[message.kind](message, member, now)
            elif self._assembler.problem and header.kind != "parameters":  # these may be late
                self._offence(header, f"it is {self._assembler.problem}", now)

    def _offence(self, header: Header, why: str, now: float, *, exc_info: bool = False) -> None:
        with contextlib.suppress(CheckpointError):  # which `commit` reports
            self._offences.add(self.members.get(header.source), header, why, now, exc_info=exc_info)

    def commit(self, now: float) -> list[HubMessage]:
        """Return the messages to send, once all that they confirm is on disk; call after each batch of envelopes."""
        try:
            if not self._storage.paused and not self._expired_at <= now < self._expired_at + _EXPIRY_SECONDS:
                self._expire(now)
            if self.params is not None and not self._storage.paused:
                self.merging.merge_due(self.params, now)
        except CheckpointError as error:
            self._storage.fail(error, now)
        if not self._storage.commit(now):
            return []
        for notice in self._assembler.notices(now):
            source, kind, round, fragment = notice.key
            self._answers.send("later", source, round, fragment, what=kind, ready=notice.ready)
        return self._answers.take(self.params, now)

    def next_due(self, now: float) -> float:
        """Return when `commit` has something to do even if nothing arrives; infinity: never."""
        return math.inf if self.storage_error else min(self.merging.next_due(now), self._fetches.next_due)

    def has_answers(self) -> bool:
        """Return whether a worker whose packet was sent meanwhile can be sent the next."""
        return self._fetches.released and not self._storage.paused

    def sent(self, message: HubMessage) -> None:
        """Record that a message was sent, or can't be."""
        if message.kind == "global_params":
            self._fetches.sent(message.target)

    def unreachable(self, worker: int) -> None:
        """Record that a worker is not connected: what was in transit to it is lost."""
        self._fetches.forget(worker)

    def add_absence(self, seconds: float) -> None:
        """Discount a time in which the hub did not listen: the driver was stopped, or busy with something else."""
        self.members.add_absence(seconds)

    def _expire(self, now: float) -> None:
        self._expired_at = now
        for member in self.members.silent(now):
            self._record("silent", worker=member.number)
            self.members.mark_dead(member)
            self._forget_messages(member.number)
            self._coordinator.on_leave(member.number)
        if self.phase == "empty" and self.params is not None:
            self._coordinator.request_next(self.members.alive)

    def record_traffic(self, sent: int, received: int, seconds: float) -> None:
        """Write bytes that passed in a time, and the workers' speeds, to the ledger."""
        values = {"sent": sent, "received": received, "seconds": round(seconds, 3)}
        alive, workers = len(self.members.alive), self.members.summary(_MAX_SUMMARY_WORKERS)
        if not self._storage.paused:
            with contextlib.suppress(CheckpointError):  # which `commit` reports
                self._record(
                    "traffic", **values, bandwidth=self.rules.bandwidth, alive=alive, workers=workers
                )

    def snapshot(self) -> None:
        """Write a snapshot, so that recovery need not replay the journal before it."""
        if self.params is not None and self.phase == "together":
            facts = snapshot_facts(self.run, self.params, self.members, self.counters)
            self._journal.snapshot(self.params.revision, self.params.tensors(), facts)
            self._intake.since_snapshot = 0

    def _record(self, kind: str, payload: Any = b"", **values: Any) -> None:
        self._journal.append({"kind": kind, "t": self._wall(), **values}, payload)

    def _max_nbytes(self, header: Header) -> int | None:
        """Return the size limit of a message, None if it is not expected; see `MessageAssembler`."""
        if header.kind not in BULK_KINDS:
            return 0
        fragment, params = header.meta.get("fragment"), self.params
        if params is None or fragment not in params.fragments:
            return None
        if header.kind == "parameters":
            return (
                params.packet_nbytes(fragment, "fp32") if self._coordinator.expects(header.source) else None
            )
        return params.packet_nbytes(fragment, header.dtype) if header.dtype in UPDATE_CODECS else None

    # ------------------------------------------------------------------ membership

    def _on_hello(self, envelope: Envelope, now: float) -> None:
        header = envelope.header
        meta, worker = header.meta, header.source
        session_id = meta.get("session")
        if header.frames != 1 or header.nbytes > _LAYOUT_LIMIT_NBYTES or type(session_id) is not int:
            self.refused["unexpected"] += 1
            return
        params = self.params
        expected = None if params is None else params.layout
        layout = layout_or_refusal(
            header, envelope.payload, run=self.run, members=self.members, expected=expected, rules=self.rules
        )
        if isinstance(layout, str):
            self.refused["unfit"] += 1
            self._answers.send("refusal", worker, why=layout[:1000], yours=session_id)
            return
        if params is None:
            self._make_params(layout)
        member = self.members.get_or_add(worker)
        is_new = session_id != member.session_id
        if not member.start_session(session_id):
            self.refused["repeated"] += 1
            return
        member.window.admit(header.sequence)
        member.name, member.key = meta_text(meta, "name") or str(worker), envelope.key
        member.every, member.delay = meta_count(meta, "every"), meta_count(meta, "delay")
        rate = meta_number(meta, "rate")
        member.rate = None if rate is None else float(rate)
        if is_new:
            self.reset.add(worker)
            self._forget_messages(worker)
            self._record("join", worker=worker, **member.terms())
        self._mark_seen(member, now, record=not is_new)
        self._welcome(member)

    def _mark_seen(self, member: HubMember, now: float, record: bool = True) -> None:
        if record and member.number not in self.members.alive:
            self._record("back", worker=member.number)
        self.members.mark_seen(member, now)

    def _forget_messages(self, worker: int) -> None:
        self._assembler.forget(worker)
        self._fetches.forget(worker)

    def _make_params(self, layout: ParameterLayout) -> GlobalParams:
        shard = self.rules.shard
        served = range(shard.index, len(layout.fragments), shard.count)
        self.params = GlobalParams(layout, self.rules.outer, self.rules.down, served)
        self._journal.reserve(sum(tensor.nbytes for tensor in self.params.tensors().values()))
        self._assembler.max_nbytes = _PARTIAL_NBYTES_PER_NUMBER * layout.numel + _PARTIAL_NBYTES
        if self.phase == "empty" and self.rules.population is not None:
            self.phase = "population"
        return self.params

    def _welcome(self, member: HubMember) -> None:
        self._answers.send(
            "welcome",
            member.number,
            run=self.run,
            version=__version__,
            phase=self.phase,
            slot=self.members.slot(member) if self.rules.merge.on == "arrival" else 0,  # or all at once
            slots=len(self.members.alive),
            yours=member.session_id,
            **self.welcome_meta(),
            **self._answers.shared_meta(),
        )
        if self.phase != "together":
            self._coordinator.on_join(member.number, self.members.alive)

    def _on_heartbeat(self, message: HubMessage, member: HubMember, now: float) -> None:
        member.report(message.meta)

    def _on_bye(self, message: HubMessage, member: HubMember, now: float) -> None:
        self._record("leave", worker=member.number)
        self.members.leave(member)
        self._coordinator.on_leave(member.number)
        self._forget_messages(member.number)
        self._intake.screen.forget(member.number)

    # ------------------------------------------------------------------ updates and fetches

    def _on_update(self, message: HubMessage, member: HubMember, now: float) -> None:
        params = self.params
        if params is None or self.phase != "together":
            self.refused["too early"] += 1
        else:
            self._intake.on_update(message, member, params, now)

    def _acknowledge(self, member: HubMember, message: HubMessage, why: str, now: float, first: bool) -> None:
        self._answers.acknowledge(message, why, self._intake.quarantine_left(member, now), now, first=first)

    def _on_fetch(self, message: HubMessage, member: HubMember, now: float) -> None:
        params = self.params
        if params is not None and message.fragment in params.fragments and self.phase == "together":
            self._fetches.add(member.number, message.fragment)

    # ------------------------------------------------------------------ scores and initial parameters

    def _on_score(self, message: HubMessage, member: HubMember, now: float) -> None:
        score, revision = meta_number(message.meta, "score"), meta_number(message.meta, "revision")
        if score is None:
            return
        if revision is not None:
            self.loss = float(score)
            self._record("global_score", worker=member.number, revision=revision, score=score)
            return
        member.score = float(score)
        if self.phase == "population":
            self._coordinator.on_score(message, member, self.members.alive)

    def _on_params(self, message: HubMessage, member: HubMember, now: float) -> None:
        if self.params is not None:
            self._coordinator.on_params(message, member, self.params.fragments)

    def _start(self, packets: Mapping[int, Bytes], member: HubMember) -> None:
        """Make a worker's parameters the global ones."""
        params = self.params
        if params is None or self.phase == "together":
            return
        for fragment, packet in packets.items():
            row, norm = params.unpack(fragment, "fp32", packet)
            if not math.isfinite(norm):
                self.refused["not finite"] += 1
                return
            params.start(fragment, row)
        self.phase = "together"
        self._coordinator.clear()
        self._record("begin", worker=member.number, run=self.run, numbers=params.layout.numel)
        self._storage.begun = True
        for worker in self.members.alive:
            self._answers.send("together", worker, best=member.number)
