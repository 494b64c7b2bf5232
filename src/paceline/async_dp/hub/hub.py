"""The hub of a star: takes in what comes, in the order in which it comes, and answers (no clock, no network).

    take in   an update is unpacked, judged, and changes the centre; the journal has it before anybody hears of it
    settle    one wait for the disk for all that came together; only then the answers leave

There is one writer, so the journal is the whole truth: a hub that is killed and started again goes on from its last
snapshot and the updates behind it, to the bit, and workers notice no more than a pause.

Whoever drives it (`serve` in real time, `paceline.tools.simulate` in virtual time) gives it envelopes with the time
at which they came, calls `settle` when it has given all that was there, and sends what that returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline._core.version import __version__
from paceline.async_dp.hub.global_params import GlobalParams
from paceline.async_dp.hub.hub_recovery import HubCounters, snapshot_facts, replay_records, restore_snapshot
from paceline.async_dp.hub.hub_rules import HubRules
from paceline.async_dp.hub.membership import HubMember, HubMembership, PendingFetches
from paceline.async_dp.hub.population import InitialParamsCoordinator
from paceline.async_dp.hub.update_screening import UpdateScreen
from paceline.async_dp.protocol.hub_messages import (
    BULK_KINDS,
    PROTOCOL_VERSION,
    HubMessage,
    UpdateHeader,
    meta_number,
    meta_text,
    meta_count,
)
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.errors import CheckpointError, DamagedEnvelope, EnvelopeError
from paceline.transport.envelope import Bytes
from paceline.transport.envelope_header import Header
from paceline.transport.transport_interface import HUB, Envelope

__all__ = ["Hub"]

_LAYOUT_LIMIT_NBYTES = 4 << 20
_LOOK_SECONDS = 1.0
_MOST_TOLD = 256


class Hub:
    """One fragment server or all of it; see the module.

    Args:
        run: its name; what comes of other runs is refused.
        rules: how it judges, merges and answers.
        journal: where it writes down what it does; what an earlier hub wrote there is taken up.
        wall: returns the time of day, for the journal's readers.

    Attributes:
        centres: what all share; None until a worker has told what its model is.
        members: the workers. phase: ``"empty"``, ``"population"`` or ``"together"``.
        tally: what was taken in. refused: what was not, by reason. loss: the centre's score that was told last.
        trouble: why nothing is answered, such as a full disk; empty if all is well.
    """

    def __init__(
        self, run: str, rules: HubRules, journal: HubJournal | MemoryJournal, wall: Callable[[], float]
    ) -> None:
        self.run, self.rules, self._journal, self._wall = run, rules, journal, wall
        self.centres: GlobalParams | None = None
        self.members = HubMembership(rules.silent_after)
        self.tally, self.refused, self.loss = HubCounters(), Counter[str](), math.nan
        self._fetches = PendingFetches(self.members, rules.staleness)
        self.phase, self.trouble = "empty", ""
        self._screen = UpdateScreen(rules.screen)
        self._leader = InitialParamsCoordinator(rules.population, self._send, self._note, self._begin)
        self._assembler = MessageAssembler(self._limit, refused=self.refused)
        self._out: list[HubMessage] = []
        self._looked = -math.inf  # for workers that fell silent
        self._since_snapshot = 0
        self._handlers: dict[str, Callable[[HubMessage, HubMember, float], None]] = {
            "update": self._update,
            "fetch": self._fetch,
            "parameters": self._parameters,
            "score": self._score,
            "beat": self._beat,
            "bye": self._bye,
        }
        self._recover()

    @property
    def updates(self) -> int:
        """How many were taken in."""
        return self.tally.updates

    # ------------------------------------------------------------------ driving it

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take in an envelope that came whole.

        Args:
            envelope: from a worker. now: seconds of a clock that does not go back.
        """
        header = envelope.header
        if header.kind == "hello":
            self._hello(envelope, now)
            return
        member = self.members.get(header.source)
        if header.run != self.run or header.target != HUB or header.kind not in self._handlers:
            self.refused["foreign"] += 1
        elif member is None or not member.session or member.session != header.meta.get("session"):
            self.refused["not in session"] += 1
            if header.frame == 0:
                self._say("who", header.source)
        elif not member.window.admit(header.sequence):
            self.refused["repeated"] += 1
        else:
            member.received_nbytes += header.nbytes
            if self.members.hear(member, now):
                self._note("back", worker=member.number)
            message = self._assembler.take(envelope)
            if message is not None:
                try:
                    self._handlers[message.kind](message, member, now)
                except EnvelopeError as error:
                    self.refused[type(error).__name__] += 1

    def settle(self, now: float) -> list[HubMessage]:
        """Return what is to be sent, once all that it tells of is on disk; call after each lot of envelopes."""
        if not self._looked <= now < self._looked + _LOOK_SECONDS:
            self._looked = now
            for member in self.members.fall_silent(now):
                self._note("silent", worker=member.number)
                self._leader.lose(member.number)
            if self.phase == "empty" and self.centres is not None:
                self._leader.seek(self.members.alive)
        self._release()
        try:
            self._journal.commit()
            if self._since_snapshot >= self.rules.snapshot_every:
                self.snapshot()
        except CheckpointError as error:
            self.trouble = str(error)  # nothing is lost, and nobody is told before it is on the disk
            return []
        self.trouble = ""
        out, self._out = self._out, []
        return out

    def note_traffic(self, sent: int, received: int, seconds: float) -> None:
        """Write down for readers of the ledger how things are: bytes that passed in so many seconds, and speeds."""
        told = {"sent": sent, "received": received, "seconds": round(seconds, 3)}
        alive, bandwidth = len(self.members.alive), self.rules.bandwidth
        workers = self.members.told(_MOST_TOLD)
        self._note("traffic", **told, bandwidth=bandwidth, alive=alive, workers=workers)

    def snapshot(self) -> None:
        """Write down all numbers, so that the journal before need not be gone through again."""
        if self.centres is not None and self.phase == "together":
            facts = snapshot_facts(self.run, self.centres, self.members, self.tally)
            self._journal.snapshot(self.centres.revision, self.centres.tensors(), facts)
            self._since_snapshot = 0

    def _say(self, kind: str, target: int, **meta: Any) -> None:
        self._send(HubMessage(kind, HUB, target, meta=meta))

    def _send(self, message: HubMessage) -> None:
        self._out.append(message)

    def _note(self, kind: str, payload: Any = b"", **values: Any) -> None:
        """Write down what happened."""
        self._journal.append({"kind": kind, "t": self._wall(), **values}, payload)

    def _limit(self, header: Header) -> int | None:
        """Return how long a message may be, None if it is not expected; see `MessageAssembler`."""
        if header.kind not in BULK_KINDS:
            return 0
        fragment, centres = header.meta.get("fragment"), self.centres
        if centres is None or fragment not in centres.of_fragment:
            return None
        if header.kind == "parameters":
            return centres.nbytes(fragment, "fp32") if self._leader.wants(header.source) else None
        return centres.nbytes(fragment, header.dtype) if header.dtype in UPDATE_CODECS else None

    # ------------------------------------------------------------------ who comes

    def _hello(self, envelope: Envelope, now: float) -> None:
        header = envelope.header
        meta, number_ = header.meta, header.source
        session = meta.get("session")
        if header.frames != 1 or header.nbytes > _LAYOUT_LIMIT_NBYTES or type(session) is not int:
            self.refused["unexpected"] += 1
            return
        wrong = self._unfit(header, envelope.payload)
        if wrong:
            self.refused["unfit"] += 1
            self._say("refusal", number_, why=wrong[:1000], yours=session)
            return
        member = self.members.admit(number_, now)
        new = session != member.session
        if not member.begin(session):
            self.refused["repeated"] += 1
            return
        member.window.admit(header.sequence)
        member.name = meta_text(meta, "name") or str(number_)
        member.every, member.delay = meta_count(meta, "every"), meta_count(meta, "delay")
        rate = meta_number(meta, "rate")
        member.rate = float(rate) if rate is not None and rate > 0 else None
        self.members.hear(member, now)
        if new:
            self._assembler.forget(number_)
            self._note("join", worker=number_, name=member.name, every=member.every, delay=member.delay)
        self._welcome(member)

    def _unfit(self, header: Header, payload: Any) -> str:
        """Return why a worker can't take part, empty if it can; the first one tells what the model is."""
        if header.run not in ("", self.run):
            return f"this hub serves run {self.run!r}, the worker asks for run {header.run!r}"
        if header.meta.get("version") != PROTOCOL_VERSION:
            return (
                f"the worker's messages are of version {header.meta.get('version')!r}, the hub's of {PROTOCOL_VERSION}"
            )
        try:
            layout = ParameterLayout.unpacked(payload)
        except DamagedEnvelope as error:
            return str(error)
        if self.centres is None:
            shard = self.rules.shard
            if len(layout.fragments) < shard.of:
                return f"its model has {len(layout.fragments)} fragments, too few for {shard.of} hubs"
            self._make_centres(layout)
            return ""
        told = self.centres.layout.difference(layout)
        return f"its model differs from the hub's: {told}" if told else ""

    def _make_centres(self, layout: ParameterLayout) -> GlobalParams:
        shard = self.rules.shard
        mine = range(shard.index, len(layout.fragments), shard.of)
        self.centres = GlobalParams(layout, self.rules.outer, self.rules.down, mine)
        self._assembler.most_nbytes = 64 * layout.numel + (64 << 20)
        if self.phase == "empty" and self._leader.leads_population:
            self.phase = "population"
        return self.centres

    def _welcome(self, member: HubMember) -> None:
        alive = sorted(self.members.alive)
        self._say(
            "welcome",
            member.number,
            run=self.run,
            version=__version__,
            phase=self.phase,
            slot=alive.index(member.number),
            slots=len(alive),
            yours=member.session,
            **self._terms(),
        )
        if self.phase != "together":
            self._leader.welcome(member, self.members.alive)

    def _terms(self) -> dict[str, Any]:
        """Return what workers are told time and again: how many they are, and at which rate each may send."""
        alive, rate = len(self.members.alive), self.rules.bandwidth
        return {"workers": alive} if rate is None else {"workers": alive, "rate": rate / max(1, alive)}

    def _beat(self, message: HubMessage, member: HubMember, now: float) -> None:
        meta = message.meta
        member.every, member.delay = meta_count(meta, "every", member.every), meta_count(meta, "delay", member.delay)
        member.steps = meta_count(meta, "steps")
        member.samples = float(meta_number(meta, "samples") or 0.0)
        member.speed = float(meta_number(meta, "speed") or 0.0)
        loss = meta_number(meta, "loss")
        member.loss = member.loss if loss is None else float(loss)

    def _bye(self, message: HubMessage, member: HubMember, now: float) -> None:
        self.members.leave(member)
        self._leader.lose(member.number)
        self._assembler.forget(member.number)
        self._note("leave", worker=member.number)

    # ------------------------------------------------------------------ what is learnt

    def _update(self, message: HubMessage, member: HubMember, now: float) -> None:
        fragment, centres = message.fragment, self.centres
        if centres is None or self.phase != "together":
            self.refused["too early"] += 1
            return
        if self.trouble:
            self.refused["not stored"] += 1  # nor acknowledged, so that it comes again
            return
        latest, why = member.rounds.get(fragment, (-1, ""))
        if message.round <= latest:
            self.refused["repeated"] += 1
            self._acknowledge(member, message, why if message.round == latest else "", now)
            return
        offer = UpdateHeader.of(message.meta)
        workers = max(1, len(self.members.alive))
        staleness = (centres.of_fragment[fragment].revision - offer.base) / workers
        delta, norm = centres.unpacked(fragment, message.dtype, message.payload)
        why = self._judged(message, offer, norm, staleness, now)
        told = {"worker": member.number, "fragment": fragment, "round": message.round, "norm": norm}
        if why:
            member.refused += 1
            self.refused[why.partition(":")[0]] += 1
            self._note("refuse", **told, why=why, until=self._quarantine(member, now))
        else:
            self.tally.count(member, offer.samples, staleness)
            weight = self.members.share(member, offer.rate) * self.rules.staleness.weight(staleness)
            revision = centres.take(fragment, delta, weight, workers)
            told |= {"revision": revision, "base": offer.base, "samples": offer.samples, "steps": offer.steps}
            told |= {"rate": offer.rate, "score": offer.score, "before": offer.before}
            told |= {"dtype": message.dtype, "weight": weight, "workers": workers, "staleness": staleness}
            self._note("update", message.payload, **told)
            self._since_snapshot += 1
        member.score = member.score if offer.score is None else float(offer.score)
        member.rounds[fragment] = message.round, why
        self._acknowledge(member, message, why, now)

    def _judged(
        self, message: HubMessage, offer: UpdateHeader, norm: float, staleness: float, now: float
    ) -> str:
        """Return why an update is refused, empty if it is taken in."""
        assert self.centres is not None
        if not offer.makes_sense(self.centres.of_fragment[message.fragment].revision):
            return "it tells of a revision, samples or steps that can't be"
        why = self._screen.judge(
            message.source, message.fragment, norm, int(offer.steps), offer.score, offer.before, now
        )
        if not why and self.rules.staleness.weight(staleness) == 0.0:
            return f"stale: {staleness:.1f} rounds old"
        return why

    def _quarantine(self, member: HubMember, now: float) -> float:
        return round(self._screen.quarantined(member.number, now), 1)

    def _acknowledge(self, member: HubMember, message: HubMessage, why: str, now: float) -> None:
        """Tell a worker what became of an update; it hears of it when that is on disk."""
        meta = {"why": why[:200], "quarantine": self._quarantine(member, now), **self._terms()}
        self._out.append(HubMessage("ack", HUB, member.number, message.round, message.fragment, meta))

    # ------------------------------------------------------------------ what is asked for

    def _fetch(self, message: HubMessage, member: HubMember, now: float) -> None:
        centres = self.centres
        if centres is not None and message.fragment in centres.of_fragment and self.phase == "together":
            self._fetches.ask(member.number, message.fragment)

    def _release(self) -> None:
        """Send the centre to all who asked and need not wait."""
        centres = self.centres
        if centres is None or not self._fetches.waiting:
            return
        for member, fragment in self._fetches.free(centres.revisions):
            revision, codec, packet = centres.copy(fragment)
            member.sent_nbytes += len(packet)
            meta = {"samples": self.tally.samples, "updates": self.updates, **self._terms()}
            self._send(HubMessage("centre", HUB, member.number, revision, fragment, meta, packet, codec))

    # ------------------------------------------------------------------ scores, and the beginning

    def _score(self, message: HubMessage, member: HubMember, now: float) -> None:
        score, revision = meta_number(message.meta, "score"), meta_number(message.meta, "revision")
        if score is None:
            return
        if revision is not None:
            self.loss = float(score)
            self._note("centre", worker=member.number, revision=revision, score=score)
            return
        member.score = float(score)
        if self.phase == "population":
            self._leader.score(message, member, self.members.alive)

    def _parameters(self, message: HubMessage, member: HubMember, now: float) -> None:
        if self.centres is not None:
            self._leader.parameters(message, member, self.centres.of_fragment)

    def _begin(self, packets: Mapping[int, Bytes], member: HubMember) -> None:
        """Have all share what a worker has told."""
        centres = self.centres
        if centres is None or self.phase == "together":
            return
        for fragment, packet in packets.items():
            numbers, norm = centres.unpacked(fragment, "fp32", packet)
            if not math.isfinite(norm):
                self.refused["not finite"] += 1
                return
            centres.begin(fragment, numbers)
        self.phase = "together"
        self._leader.over()
        self._note("begin", worker=member.number, run=self.run, numbers=centres.layout.numel)
        self._journal.commit()
        self.snapshot()
        for worker in self.members.alive:
            self._say("together", worker, best=member.number)

    # ------------------------------------------------------------------ over a restart

    def _recover(self) -> None:
        """Take up what an earlier hub wrote down."""
        found = self._journal.recovered()
        if found.tensors is not None and found.facts is not None:
            centres = restore_snapshot(found.facts, found.tensors, self._make_centres, self.members, self.tally)
            self.phase = "together"
            self._since_snapshot = replay_records(found.records, centres, self.members, self.tally)
