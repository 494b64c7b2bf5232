"""The hub: merges updates in the order in which they arrive, and answers (no clock, no network).

    receive   an update is unpacked, screened and merged; the journal has it before anything is answered
    commit    one fdatasync for all envelopes that arrived together; only then are answers returned

There is one writer, so the journal is the whole truth: a hub that is killed and restarted continues from its last
snapshot and the updates after it, to the bit, and workers notice no more than a pause.

Its driver (`HubServer` in real time, `paceline.tools.simulate` in virtual time) passes envelopes with the time of their
arrival, calls `commit` when there are no more, and sends what that returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline._core import __version__
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.hub.journal_replay import replay_records, restore_snapshot, snapshot_facts
from paceline.async_dp.hub.membership import HubCounters, HubMember, HubMembership, PendingFetches
from paceline.async_dp.hub.population import InitialParamsCoordinator
from paceline.async_dp.hub.update_merging import GlobalParams
from paceline.async_dp.hub.update_screening import UpdateScreen
from paceline.async_dp.protocol.hub_messages import (
    BULK_KINDS,
    PROTOCOL_VERSION,
    HubMessage,
    UpdateHeader,
    meta_count,
    meta_number,
    meta_text,
)
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.errors import CheckpointError, DamagedEnvelope, EnvelopeError
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.header_layout import Header
from paceline.transport.transport_interface import HUB

__all__ = ["Hub"]

_LAYOUT_LIMIT_NBYTES = 4 << 20
_EXPIRY_SECONDS = 1.0
_MAX_SUMMARY_WORKERS = 256


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
        storage_error: why nothing is answered, such as a full disk; empty if nothing is wrong.
    """

    def __init__(
        self, run: str, rules: HubRules, journal: HubJournal | MemoryJournal, wall: Callable[[], float]
    ) -> None:
        self.run, self.rules, self._journal, self._wall = run, rules, journal, wall
        self.params: GlobalParams | None = None
        self.members = HubMembership(rules.silent_after)
        self.counters, self.refused, self.loss = HubCounters(), Counter[str](), math.nan
        self._fetches = PendingFetches(self.members, rules.staleness)
        self.phase, self.storage_error = "empty", ""
        self._screen = UpdateScreen(rules.screen)
        self._outgoing: list[HubMessage] = []
        self._coordinator = InitialParamsCoordinator(
            rules.population, self._outgoing.append, self._record, self._start
        )
        self._assembler = MessageAssembler(self._max_nbytes, refused=self.refused)
        self._expired_at = -math.inf
        self._updates_since_snapshot = 0
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
            self._updates_since_snapshot = replay_records(found.records, params, *state)

    @property
    def updates(self) -> int:
        """Number of merged updates."""
        return self.counters.updates

    def quarantined(self, now: float) -> int:
        """Return the number of workers in quarantine."""
        return self._screen.quarantined(now)

    # ------------------------------------------------------------------ called by the driver

    def receive(self, envelope: Envelope, now: float) -> None:
        """Handle an envelope from a worker; `now` is in seconds of a monotonic clock."""
        header = envelope.header
        if header.kind == "hello":
            self._on_hello(envelope, now)
            return
        member = self.members.get(header.source)
        if header.run != self.run or header.target != HUB or header.kind not in self._handlers:
            self.refused["foreign"] += 1
        elif member is None or not member.session_id or member.session_id != header.meta.get("session"):
            self.refused["not in session"] += 1
            if header.frame == 0:
                self._send("who", header.source)
        elif not member.window.admit(header.sequence):
            self.refused["repeated"] += 1
        else:
            member.received_nbytes += header.nbytes
            if self.members.mark_seen(member, now):
                self._record("back", worker=member.number)
            message = self._assembler.add(envelope)
            if message is not None:
                try:
                    self._handlers[message.kind](message, member, now)
                except EnvelopeError as error:
                    self.refused[type(error).__name__] += 1

    def commit(self, now: float) -> list[HubMessage]:
        """Return the messages to send, once all that they confirm is on disk; call after each batch of envelopes."""
        if not self._expired_at <= now < self._expired_at + _EXPIRY_SECONDS:
            self._expired_at = now
            for member in self.members.expire(now):
                self._record("silent", worker=member.number)
                self._coordinator.on_leave(member.number)
            if self.phase == "empty" and self.params is not None:
                self._coordinator.request_next(self.members.alive)
        self._answer_fetches()
        try:
            self._journal.commit()
            if self._updates_since_snapshot >= self.rules.snapshot_every:
                self.snapshot()
        except CheckpointError as error:
            self.storage_error = str(error)  # nothing is lost, and nothing is answered before it is on disk
            return []
        self.storage_error = ""
        outgoing = self._outgoing.copy()
        self._outgoing.clear()
        return outgoing

    def record_traffic(self, sent: int, received: int, seconds: float) -> None:
        """Write bytes that passed in a time, and the workers' speeds, to the ledger."""
        values = {"sent": sent, "received": received, "seconds": round(seconds, 3)}
        alive, workers = len(self.members.alive), self.members.summary(_MAX_SUMMARY_WORKERS)
        self._record("traffic", **values, bandwidth=self.rules.bandwidth, alive=alive, workers=workers)

    def snapshot(self) -> None:
        """Write a snapshot, so that recovery need not replay the journal before it."""
        if self.params is not None and self.phase == "together":
            facts = snapshot_facts(self.run, self.params, self.members, self.counters)
            self._journal.snapshot(self.params.revision, self.params.tensors(), facts)
            self._updates_since_snapshot = 0

    def _send(self, kind: str, target: int, round: int = 0, fragment: int = 0, **meta: Any) -> None:
        self._outgoing.append(HubMessage(kind, HUB, target, round, fragment, meta))

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
        mismatch = self._mismatch(header, envelope.payload)
        if mismatch:
            self.refused["unfit"] += 1
            self._send("refusal", worker, why=mismatch[:1000], yours=session_id)
            return
        member = self.members.get_or_add(worker)
        is_new = session_id != member.session_id
        if not member.start_session(session_id):
            self.refused["repeated"] += 1
            return
        member.window.admit(header.sequence)
        member.name = meta_text(meta, "name") or str(worker)
        member.every, member.delay = meta_count(meta, "every"), meta_count(meta, "delay")
        rate = meta_number(meta, "rate")
        member.rate = float(rate) if rate is not None and rate > 0 else None
        self.members.mark_seen(member, now)
        if is_new:
            self._assembler.forget(worker)
            self._record("join", worker=worker, name=member.name, every=member.every, delay=member.delay)
        self._welcome(member)

    def _mismatch(self, header: Header, payload: Bytes) -> str:
        """Return why a worker can't take part, empty if it can; the first worker defines the layout."""
        if header.run not in ("", self.run):
            return f"this hub serves run {self.run!r}, the worker requests run {header.run!r}"
        version = header.meta.get("version")
        if version != PROTOCOL_VERSION:
            return f"the worker has protocol version {version!r}, the hub {PROTOCOL_VERSION}"
        try:
            layout = ParameterLayout.unpack(payload)
        except DamagedEnvelope as error:
            return str(error)
        if self.params is None:
            hubs = self.rules.shard.count
            if len(layout.fragments) < hubs:
                return f"its model has {len(layout.fragments)} fragments, too few for {hubs} hubs"
            self._make_params(layout)
            return ""
        difference = self.params.layout.difference(layout)
        return f"its model differs from the hub's: {difference}" if difference else ""

    def _make_params(self, layout: ParameterLayout) -> GlobalParams:
        shard = self.rules.shard
        served = range(shard.index, len(layout.fragments), shard.count)
        self.params = GlobalParams(layout, self.rules.outer, self.rules.down, served)
        self._assembler.max_nbytes = 64 * layout.numel + (64 << 20)
        if self.phase == "empty" and self.rules.population is not None:
            self.phase = "population"
        return self.params

    def _welcome(self, member: HubMember) -> None:
        alive = sorted(self.members.alive)
        self._send(
            "welcome",
            member.number,
            run=self.run,
            version=__version__,
            phase=self.phase,
            slot=alive.index(member.number),
            slots=len(alive),
            yours=member.session_id,
            **self._shared_meta(),
        )
        if self.phase != "together":
            self._coordinator.on_join(member.number, self.members.alive)

    def _shared_meta(self) -> dict[str, Any]:
        """Return the metadata of most answers: number of live workers, and each one's share of the bandwidth."""
        alive, rate = len(self.members.alive), self.rules.bandwidth
        return {"workers": alive} if rate is None else {"workers": alive, "rate": rate / max(1, alive)}

    def _on_heartbeat(self, message: HubMessage, member: HubMember, now: float) -> None:
        meta = message.meta
        member.every = meta_count(meta, "every", member.every)
        member.delay = meta_count(meta, "delay", member.delay)
        member.steps = meta_count(meta, "steps")
        member.samples = float(meta_number(meta, "samples") or 0.0)
        member.speed = float(meta_number(meta, "speed") or 0.0)
        loss = meta_number(meta, "loss")
        member.loss = member.loss if loss is None else float(loss)

    def _on_bye(self, message: HubMessage, member: HubMember, now: float) -> None:
        self.members.leave(member)
        self._coordinator.on_leave(member.number)
        self._assembler.forget(member.number)
        self._record("leave", worker=member.number)

    # ------------------------------------------------------------------ updates and fetches

    def _on_update(self, message: HubMessage, member: HubMember, now: float) -> None:
        fragment, params = message.fragment, self.params
        if params is None or self.phase != "together":
            self.refused["too early"] += 1
            return
        if self.storage_error:
            self.refused["not stored"] += 1  # nor acknowledged, so the worker sends it again
            return
        latest, why = member.rounds.get(fragment, (-1, ""))
        if message.round <= latest:
            self.refused["repeated"] += 1
            self._acknowledge(member, message, why if message.round == latest else "", now)
            return
        header = UpdateHeader.parse(message.meta)
        workers = max(1, len(self.members.alive))
        staleness = (params.fragments[fragment].revision - header.base) / workers
        delta, norm = params.unpack(fragment, message.dtype, message.payload)
        why = self._screened(message, header, norm, staleness, now)
        values = {"worker": member.number, "fragment": fragment, "round": message.round, "norm": norm}
        if why:
            member.refused += 1
            self.refused[why.partition(":")[0]] += 1
            self._record("refuse", **values, why=why, until=self._quarantine_left(member, now))
        else:
            self.counters.add(member, header.samples, staleness)
            weight = self.members.share(member, header.rate) * self.rules.staleness.weight(staleness)
            params.fragments[fragment].merge(delta, weight, workers)
            values |= {"revision": params.fragments[fragment].revision, **vars(header)}
            values |= {"dtype": message.dtype, "weight": weight, "workers": workers, "staleness": staleness}
            self._record("update", message.payload, **values)
            self._updates_since_snapshot += 1
        member.score = member.score if header.score is None else float(header.score)
        member.rounds[fragment] = message.round, why
        self._acknowledge(member, message, why, now)

    def _screened(
        self, message: HubMessage, header: UpdateHeader, norm: float, staleness: float, now: float
    ) -> str:
        """Return why an update is refused, empty if it is merged."""
        assert self.params is not None
        if not header.is_plausible(self.params.fragments[message.fragment].revision):
            return "implausible revision, samples or steps"
        why = self._screen.check(message.source, message.fragment, norm, header, now)
        if not why and self.rules.staleness.weight(staleness) == 0.0:
            return f"stale: {staleness:.1f} rounds old"
        return why

    def _quarantine_left(self, member: HubMember, now: float) -> float:
        return round(self._screen.quarantine_left(member.number, now), 1)

    def _acknowledge(self, member: HubMember, message: HubMessage, why: str, now: float) -> None:
        meta = {"why": why[:200], "quarantine": self._quarantine_left(member, now), **self._shared_meta()}
        self._send("ack", member.number, message.round, message.fragment, **meta)

    def _on_fetch(self, message: HubMessage, member: HubMember, now: float) -> None:
        params = self.params
        if params is not None and message.fragment in params.fragments and self.phase == "together":
            self._fetches.add(member.number, message.fragment)

    def _answer_fetches(self) -> None:
        params = self.params
        if params is None or not self._fetches:
            return
        for member, fragment in self._fetches.pop_ready(params.revisions):
            revision, codec, packet = params.pack(fragment)
            member.sent_nbytes += len(packet)
            meta = {"samples": self.counters.samples, "updates": self.updates, **self._shared_meta()}
            self._outgoing.append(
                HubMessage("global_params", HUB, member.number, revision, fragment, meta, packet, codec)
            )

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
        self._journal.commit()
        self.snapshot()
        for worker in self.members.alive:
            self._send("together", worker, best=member.number)
