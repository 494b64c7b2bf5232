"""A worker's side of the conversation with a hub (no clock, no network, no model of its own).

    out        not in touch: says hello, again and again, while training goes on
    in         updates leave, acknowledgements and centres come; until all share a centre it goes on saying hello, since
               what leads there is said once: whoever was asked for parameters is asked again, and told if all is over

For each fragment, one exchange at a time: an update goes out and stays in the outbox until the hub says that it is on
its disk; then the centre is asked for, as late as it may be to come in time, so that it is as new as can be. What gets
lost is sent once more when nothing came for a while, or when the hub has forgotten this worker because one of the two
was started anew. The hub knows a round that it has, so nothing counts twice.

Whoever drives it gives it what comes, sends what it returns, and tells it when a message has left.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.async_dp.protocol.hub_messages import BULK_KINDS, PROTOCOL_VERSION, HubMessage, meta_number, meta_text, meta_count
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS
from paceline.async_dp.worker.session_state import SessionRequest, HubStatus
from paceline.async_dp.wal.worker_outbox import Outbox, PendingUpdate
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState
from paceline.async_dp.worker.reply_timeout import ReplyTimeout, FragmentExchange
from paceline.errors import DamagedEnvelope, UsageError
from paceline.transport.envelope_header import Header
from paceline.transport.transport_interface import HUB, Envelope

__all__ = ["HubSession"]

log = logging.getLogger("paceline.async_dp")

_HELLO_SECONDS, _LONGEST_HELLO_SECONDS = 1.0, 10.0
_BEAT_SECONDS = 2.0
_HARMFUL = ("not finite", "exploding", "worse", "in quarantine", "it tells")
"""Why an update was refused when the worker takes the centre for its own, without what it has learnt since."""

_KEEPS_STATE = ("worse", "it tells")
"""Of these, those that say nothing against the optimizer's state."""


class HubSession:
    """One worker's conversation with one hub.

    Args:
        me: number of the worker. name: for people. layout: of its model.
        sides: the fragments that this hub keeps, by number.
        outbox: keeps what is not acknowledged.
        run: that it wants to be in; empty: whichever the hub serves.
        facts: what hello tells beside: every, delay.
        new_session: returns a new number whenever the conversation begins anew.

    Attributes:
        terms: what the hub told last. connected: whether it is in touch.
        orders: of the training thread, carried out in their order.
        adopted: another's parameters that are to be taken, by fragment.
        beat, beat_seconds: what the hub is told now and then, and how often; if that is nothing, only where nothing
            else is said.
        session: a new one whenever the conversation begins anew.
        acknowledged: rounds that were taken in. refused: that were not. resent: messages that were said again.
        patience: how long answers take.
    """

    def __init__(
        self,
        me: int,
        name: str,
        layout: ParameterLayout,
        sides: Mapping[int, FragmentReplica],
        outbox: Outbox,
        *,
        run: str = "",
        facts: Mapping[str, Any],
        new_session: Callable[[], int],
    ) -> None:
        self.me, self.name, self.layout, self.sides, self._outbox = me, name, layout, sides, outbox
        self.terms = HubStatus(run=run)
        self.connected = False
        self.acknowledged, self.refused, self.resent = 0, 0, 0
        self.beat: Mapping[str, Any] = {}
        self.beat_seconds = _BEAT_SECONDS
        self.orders: deque[SessionRequest] = deque()
        self._facts, self._new_session = dict(facts), new_session
        self.session, self.sequence = new_session(), 0
        self._under: dict[int, FragmentExchange] = {}
        # By fragment: when its letter is to be said again, infinity as long as it has not left.
        self._again: dict[int, float] = {}
        self._due = math.inf  # no later than what is due first of these, and of what is under way
        self._adopting: dict[int, HubMessage] = {}
        self.adopted: dict[int, HubMessage] | None = None
        self._never = set(sides)  # fragments whose centre was never here
        self._gave = False  # the centre began from this worker's snapshot, so the delta rule holds
        self._assembler = MessageAssembler(self._limit)
        self._hello_at, self._hello_pause, self._beat_at = -math.inf, _HELLO_SECONDS, -math.inf
        self.patience = ReplyTimeout()
        self._out: list[HubMessage] = []

    # ------------------------------------------------------------------ driving it

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take in an envelope that came whole from the hub."""
        header = envelope.header
        if header.target != self.me or header.source != HUB:
            return
        message = self._assembler.take(envelope)
        if message is None:
            return
        handler = _HANDLERS.get(message.kind)
        if handler is not None:
            handler(self, message, now)

    def pump(self, now: float) -> list[HubMessage]:
        """Do what is due, and return what is to be sent."""
        if self.terms.refusal:
            return []
        if not self.connected:
            self._greet(now)
        else:
            while self.orders:
                self._begin(self.orders.popleft(), now)
            if self.terms.phase != "together":
                self._greet(now)
            elif self._never:
                self._join(now)
            if now >= self._due:
                self._repeat(now)
            if now >= self._beat_at:
                self._beat_at = now + self.beat_seconds
                self._say("beat", **self.beat)
            elif self._out and not self.beat:
                self._beat_at = now + self.beat_seconds  # what is said tells as much
        out, self._out = self._out, []
        return out

    def left(self, message: HubMessage, now: float) -> None:
        """Note that a message has left whole."""
        again = now + self.patience.seconds()
        if message.kind == "update" and message.fragment in self._again:
            self._again[message.fragment] = again
        elif message.kind == "fetch" and message.fragment in self._under:
            self._under[message.fragment].due = again
        else:
            return
        if again < self._due:
            self._due = again

    def lost(self, now: float) -> None:
        """Note that the hub can't be reached."""
        if self.connected:
            self._forgotten(None, now)

    def goodbye(self) -> HubMessage:
        """Return the last message."""
        return HubMessage("bye", self.me, HUB)

    def wants(self) -> float:
        """Return when something is due next."""
        if self.terms.refusal:
            return math.inf
        if not self.connected:
            return self._hello_at
        due = self._due if self._due < self._beat_at else self._beat_at
        return due if self.terms.phase == "together" else min(due, self._hello_at)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under and not self.orders

    def _say(self, kind: str, **meta: Any) -> None:
        self._out.append(HubMessage(kind, self.me, HUB, meta=meta))

    def _limit(self, header: Header) -> int | None:
        if header.kind not in BULK_KINDS:
            return 0
        side = self.sides.get(header.meta.get("fragment", -1))
        if side is None or header.dtype not in UPDATE_CODECS:
            return None
        return side.packing_by(header.dtype).nbytes

    # ------------------------------------------------------------------ getting in touch

    def _greet(self, now: float) -> None:
        if now < self._hello_at:
            return
        self._hello_at = now + self._hello_pause
        self._hello_pause = min(2 * self._hello_pause, _LONGEST_HELLO_SECONDS)
        meta = {"version": PROTOCOL_VERSION, "name": self.name, **self._facts}
        self._out.append(HubMessage("hello", self.me, HUB, meta=meta, payload=self.layout.packed()))

    def _forgotten(self, message: HubMessage | None, now: float) -> None:
        """Begin anew: the hub does not know this session any more, or is gone."""
        if self.connected:
            self.session = self._new_session()
        self.connected = False
        self._hello_at, self._hello_pause = now, _HELLO_SECONDS

    def _welcomed(self, message: HubMessage, now: float) -> None:
        meta, terms = message.meta, self.terms
        if meta.get("yours") != self.session:
            return
        run = meta_text(meta, "run")
        try:
            self._outbox.bind(run)
        except UsageError as error:
            terms.refusal = str(error)
            return
        terms.run, terms.phase = run, meta_text(meta, "phase")
        terms.slot, terms.slots = meta_count(meta, "slot"), meta_count(meta, "slots", 1)
        self._listen(meta)
        was, self.connected = self.connected, True
        self._hello_at, self._hello_pause = now + _LONGEST_HELLO_SECONDS, _LONGEST_HELLO_SECONDS
        if was:
            return
        for letter in self._outbox.pending():
            if letter.fragment in self.sides:
                self._post(letter)
        for fragment, under in self._under.items():
            under.once = False
            if under.stage == "come":
                self._ask(fragment, under, now)

    def _turned_away(self, message: HubMessage, now: float) -> None:
        if message.meta.get("yours") == self.session:
            self.terms.refusal = meta_text(message.meta, "why") or "no reason was told"

    def _listen(self, meta: Mapping[str, Any]) -> None:
        """Take over what the hub tells time and again."""
        terms = self.terms
        terms.workers = meta_count(meta, "workers", terms.workers)
        rate = meta_number(meta, "rate")
        terms.rate = float(rate) if rate else None
        samples = meta_number(meta, "samples")
        if samples is not None:
            terms.samples = float(samples)

    def _join(self, now: float) -> None:
        """Fetch what has never been fetched, to be taken whole unless it began here."""
        for fragment in self._never - self._under.keys() - self._again.keys():
            side = self.sides[fragment]
            if side.state is FragmentState.HERE:
                side.state, side.whole = FragmentState.OUT, not self._gave
                self._begin(SessionRequest(fragment, "fetch", now), now)

    # ------------------------------------------------------------------ updates

    def _begin(self, order: SessionRequest, now: float) -> None:
        """Carry out an order."""
        if order.kind == "score":
            self._say("score", **order.meta)
            return
        side = self.sides[order.fragment]
        if order.kind == "parameters":
            packet = side.pack_whole()
            self._out.append(HubMessage("parameters", self.me, HUB, 0, order.fragment, {}, packet, "fp32"))
            side.state = FragmentState.HERE
            return
        under = self._under[order.fragment] = FragmentExchange(order, "acknowledge", now)
        if order.kind == "fetch":
            self._await_time(order.fragment, under, now)
            return
        packet = side.pack()
        side.round = self._outbox.next_round(order.fragment)
        meta = {**order.meta, "base": side.revision, "layout": self.layout.hash}
        values = {"meta": meta, "dtype": side.packing.codec.name}
        self._outbox.put(side.round, order.fragment, values, packet)
        self._post(self._outbox.letter(order.fragment))

    def _post(self, letter: PendingUpdate) -> None:
        """Send a letter; it is said again until it is acknowledged."""
        meta, dtype = letter.values["meta"], letter.values["dtype"]
        self._out.append(
            HubMessage("update", self.me, HUB, letter.round, letter.fragment, meta, letter.payload, dtype)
        )
        self._again[letter.fragment] = math.inf

    def _acknowledged(self, message: HubMessage, now: float) -> None:
        self._listen(message.meta)
        round, fragment = message.round, message.fragment
        if not self._outbox.acknowledge(round, fragment):
            return
        del self._again[fragment]
        self._due = self._first_due()
        why = meta_text(message.meta, "why")
        if why:
            self.refused += 1
            log.warning("worker %s: round %d was refused: %s", self.name, round, why)
        else:
            self.acknowledged += 1
        self.patience.answered()
        side, under = self.sides[fragment], self._under.get(fragment)
        if under is None or under.stage != "acknowledge" or side.round != round:
            return
        if under.once:
            self.patience.update_seconds = now - under.begun
        if why.startswith(_HARMFUL):
            side.whole, side.anew = True, not why.startswith(_KEEPS_STATE)
        self._await_time(fragment, under, now)

    # ------------------------------------------------------------------ centres

    def _await_time(self, fragment: int, under: FragmentExchange, now: float) -> None:
        """Ask for the centre, or wait until it is time to."""
        under.stage, under.once, under.due = "wait", True, self.patience.ask_at(under.order.by)
        if under.due <= now:
            self._ask(fragment, under, now)
        else:
            self._due = min(self._due, under.due)

    def _ask(self, fragment: int, under: FragmentExchange, now: float) -> None:
        under.stage, under.asked, under.due = "come", now, math.inf
        have = self.sides[fragment].revision
        self._out.append(HubMessage("fetch", self.me, HUB, 0, fragment, {"have": have}))

    def _repeat(self, now: float) -> None:
        """Ask when it is time, and say again what was not answered."""
        resent = self.resent
        for fragment, again in self._again.items():
            if now >= again:
                self.resent += 1
                if fragment in self._under:
                    self._under[fragment].once = False
                self._post(self._outbox.letter(fragment))
        for fragment, under in self._under.items():
            if now >= under.due:
                if under.stage == "come":
                    self.resent += 1
                    under.once = False
                self._ask(fragment, under, now)
        if self.resent > resent:
            self.patience.repeated()
        self._due = self._first_due()

    def _first_due(self) -> float:
        """Return when the first of what is under way is to be said again."""
        first = math.inf
        for again in self._again.values():
            first = again if again < first else first
        for under in self._under.values():
            first = under.due if under.due < first else first
        return first

    def _centre(self, message: HubMessage, now: float) -> None:
        self._listen(message.meta)
        under = self._under.get(message.fragment)
        if under is None or under.stage != "come":
            return
        self.patience.answered()
        if under.once:
            self.patience.fetch_seconds = now - under.asked
        self._never.discard(message.fragment)
        del self._under[message.fragment]
        self._due = self._first_due()
        side = self.sides[message.fragment]
        try:
            side.arrive(message.round, message.dtype, message.payload)
        except DamagedEnvelope:
            self._ask(message.fragment, under, now)
            self._under[message.fragment] = under

    # ------------------------------------------------------------------ populations

    def _asked(self, message: HubMessage, now: float) -> None:
        self.terms.wanted = True

    def _adopt(self, message: HubMessage, now: float) -> None:
        """Hand another's parameters to the training thread when those of all fragments are here."""
        self._adopting[message.fragment] = message
        if self._adopting.keys() == self.sides.keys():
            self.adopted, self._adopting = self._adopting, {}
            log.info("worker %s is replaced: %s", self.name, meta_text(message.meta, "why"))

    def _together(self, message: HubMessage, now: float) -> None:
        self.terms.phase = "together"
        self._gave = meta_number(message.meta, "best") == self.me


_HANDLERS: Mapping[str, Callable[[HubSession, HubMessage, float], None]] = {
    "welcome": HubSession._welcomed,
    "refusal": HubSession._turned_away,
    "who": HubSession._forgotten,
    "ack": HubSession._acknowledged,
    "centre": HubSession._centre,
    "ask": HubSession._asked,
    "adopt": HubSession._adopt,
    "together": HubSession._together,
}
