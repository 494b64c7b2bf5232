"""A worker's session with a hub (no clock, no network, no model).

    disconnected   repeats hello while training continues
    connected      sends updates; receives acknowledgements and global parameters. Until all share parameters it keeps
                   saying hello, since the messages that lead there are sent once: the hub repeats its request for a
                   worker's parameters, and reports the start again

One exchange per fragment at a time: an update is sent and stays in the outbox until the hub has it on disk; then the
hub sends the global parameters, as late as they can be in time, so that they are as new as possible. An update says
when that is; where it was repeated, the parameters are fetched. A message without a reply is repeated after a timeout,
or when the hub has lost the session because one of the two restarted. The hub recognises a round that it has, so
nothing counts twice.

Its driver passes received envelopes, sends what `pump` returns, and reports when a message was sent.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from paceline.async_dp.protocol.hub_messages import (
    PROTOCOL_VERSION,
    HubMessage,
    meta_count,
    meta_number,
    meta_text,
)
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.wal.worker_outbox import Outbox, PendingUpdate
from paceline.async_dp.worker.fragment_exchanges import FragmentExchanges
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState, packet_limit
from paceline.async_dp.worker.outbox_writer import OutboxWriter
from paceline.async_dp.worker.session_state import FragmentExchange, HelloTimer, HubStatus, SessionRequest
from paceline.errors import DamagedEnvelope, UsageError
from paceline.transport.envelope import Envelope
from paceline.transport.transport_interface import HUB

__all__ = ["HubSession"]

log = logging.getLogger("paceline.async_dp")

_HEARTBEAT_SECONDS = 2.0
_POSTPONED_SECONDS = 60.0  # after which it asks again


class HubSession:
    """One worker's session with one hub.

    Args:
        worker: number of the worker.
        name: for people.
        layout: of its model.
        replicas: of the fragments that this hub serves, by number.
        outbox: stores updates until they are acknowledged.
        run: that the worker wants to join; empty: any.
        hello_meta: sent with hello: every, delay, rate.
        new_session_id: returns a new number for each session.

    Attributes:
        hub_status: last report of the hub.
        connected: whether the hub has answered hello.
        requests: of the training thread, carried out in order.
        adopted: parameters of another worker to adopt, by fragment.
        heartbeat: sent every `heartbeat_seconds`; if empty, only where nothing else is sent.
        session_id: changes when the connection is lost.
        acknowledged: rounds that were merged.
        refused: rounds that were refused.
        exchanges: updates and fetches in progress.
        reply_timeout: measures replies.
        postponed: updates that the hub has no memory for now: kind, round and fragment; the driver stops sending them.
    """

    def __init__(
        self,
        worker: int,
        name: str,
        layout: ParameterLayout,
        replicas: Mapping[int, FragmentReplica],
        outbox: Outbox,
        *,
        run: str = "",
        hello_meta: Mapping[str, Any],
        new_session_id: Callable[[], int],
    ) -> None:
        self.worker, self.name, self.layout, self.replicas = worker, name, layout, replicas
        self._outbox = OutboxWriter(outbox, name)
        self.hub_status, self.connected = HubStatus(run=run), False
        self.acknowledged = self.refused = 0
        self.heartbeat: Mapping[str, Any] = {}
        self.heartbeat_seconds = _HEARTBEAT_SECONDS
        self.requests: deque[SessionRequest] = deque()
        self._hello_meta, self._new_session_id = dict(hello_meta), new_session_id
        self.session_id, self.exchanges = new_session_id(), FragmentExchanges()
        self.reply_timeout = self.exchanges.reply_timeout
        self._adopting: dict[int, HubMessage] = {}
        self.adopted: dict[int, HubMessage] | None = None
        self._never_fetched = set(replicas)
        self._gave_params = False  # the global parameters began as this worker's: the delta rule holds
        self._assembler = MessageAssembler(lambda header: packet_limit(replicas, header))
        self._hello, self._heartbeat_at = HelloTimer(), -math.inf
        self.postponed: list[tuple[str, int, int]] = []
        self._outgoing: list[HubMessage] = []

    # ------------------------------------------------------------------ called by the driver

    def receive(self, envelope: Envelope, now: float) -> None:
        """Handle an envelope from the hub."""
        header = envelope.header
        if header.target != self.worker or header.source != HUB:
            return
        message = self._assembler.add(envelope)
        if message is None:
            return
        handler = _HANDLERS.get(message.kind)
        if handler is not None:
            handler(self, message, now)

    def pump(self, now: float) -> list[HubMessage]:
        """Do what is due, and return the messages to send."""
        if self.hub_status.refusal:
            return []
        if not self.connected:
            self._say_hello(now)
        else:
            while self.requests:
                self._carry_out(self.requests.popleft(), now)
            for update in self._outbox.retry(now):
                self._begin_update(update)
            if self.hub_status.phase != "together":
                self._say_hello(now)
            elif self._never_fetched:
                self._fetch_first(now)
            if now >= self.exchanges.due:
                self._send_overdue(now)
            if now >= self._heartbeat_at:
                self._heartbeat_at = now + self.heartbeat_seconds
                self._send("beat", self.heartbeat)
            elif self._outgoing and not self.heartbeat:
                # Any message shows that the worker is alive.
                self._heartbeat_at = now + self.heartbeat_seconds
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def message_sent(self, message: HubMessage, now: float) -> None:
        """Record that all frames of a message were sent."""
        self.exchanges.on_sent(message, now)

    def reachable(self, now: float) -> None:
        """Record that the hub, or another, can be reached."""
        if not self.connected:
            self._hello.restart(now)

    def disconnected(self, now: float) -> None:
        """Record that the hub can't be reached."""
        if self.connected:
            self._restart(None, now)

    def bye(self) -> HubMessage:
        """Return the last message."""
        return HubMessage("bye", self.worker, HUB)

    def next_due(self) -> float:
        """Return when `pump` has something to do next."""
        if self.hub_status.refusal:
            return math.inf
        if not self.connected:
            return self._hello.due
        due = min(self.exchanges.due, self._heartbeat_at, self._outbox.due)
        return due if self.hub_status.phase == "together" else min(due, self._hello.due)

    @property
    def idle(self) -> bool:
        """Whether no exchange is in progress or requested."""
        return not self.exchanges and not self.requests

    def _send(
        self, kind: str, meta: Mapping[str, Any], fragment: int = 0, round: int = 0, **content: Any
    ) -> None:
        self._outgoing.append(HubMessage(kind, self.worker, HUB, round, fragment, meta, **content))

    # ------------------------------------------------------------------ connecting

    def _say_hello(self, now: float) -> None:
        if not self._hello.begin(now):
            return
        term = self.hub_status.term.meta() if self.hub_status.term.term else {}
        meta = {"version": PROTOCOL_VERSION, "name": self.name, **self._hello_meta, **term}
        self._send("hello", meta, payload=self.layout.pack())

    def _restart(self, message: HubMessage | None, now: float) -> None:
        """Start a new session: the hub has lost this one, or is gone."""
        if self.connected:
            self.session_id = self._new_session_id()
        self.connected = False
        self._hello.restart(now)

    def _on_welcome(self, message: HubMessage, now: float) -> None:
        meta, status = message.meta, self.hub_status
        if meta.get("yours") != self.session_id or not status.admits(meta):
            return
        run = meta_text(meta, "run")
        try:
            if not self._outbox.bind(run):
                return
        except UsageError as error:
            status.refusal = str(error)
            return
        status.run, status.phase = run, meta_text(meta, "phase")
        status.slot, status.slots = meta_count(meta, "slot"), meta_count(meta, "slots", 1)
        status.update(meta)
        was_connected, self.connected = self.connected, True
        self._hello.slow_down(now)
        if was_connected:
            return
        for update in self._outbox.pending():
            if update.fragment in self.replicas:
                self._send_update(update)
        for fragment, exchange in self.exchanges:
            exchange.measurable = False
            if exchange.stage == "params":
                self._fetch(fragment, exchange, now)

    def _on_standby(self, message: HubMessage, now: float) -> None:
        if message.meta.get("yours") == self.session_id and not self.connected:
            self.hub_status.is_other_wanted = True

    def _on_refusal(self, message: HubMessage, now: float) -> None:
        if message.meta.get("yours") == self.session_id:
            self.hub_status.refusal = meta_text(message.meta, "why") or "the hub gave no reason"

    def _fetch_first(self, now: float) -> None:
        """Fetch fragments that were never fetched, to overwrite the worker's unless they began as its own."""
        for fragment in self._never_fetched - self.exchanges.busy:
            replica = self.replicas[fragment]
            if replica.state is FragmentState.IDLE:
                replica.state, replica.overwrite = FragmentState.EXCHANGING, not self._gave_params
                self._carry_out(SessionRequest(fragment, "fetch", now), now)

    # ------------------------------------------------------------------ updates

    def _carry_out(self, request: SessionRequest, now: float) -> None:
        if request.kind == "score":
            self._send("score", request.meta)
            return
        fragment = request.fragment
        replica = self.replicas[fragment]
        if request.kind == "parameters":
            self._send("parameters", {}, fragment, payload=replica.pack_params(), dtype="fp32")
            self.hub_status.params_sent_at = now
            replica.state = FragmentState.IDLE
            return
        exchange = self.exchanges.begin(request, now)
        if request.kind == "fetch":
            self._schedule_fetch(fragment, exchange, now)
            return
        packet = replica.pack()
        meta = {**request.meta, "base": replica.revision, "layout": self.layout.hash}
        values = {"meta": meta, "dtype": replica.codec.codec.name}
        update = self._outbox.put(fragment, values, packet, now)
        if update is not None:
            exchange.fetch_after = max(0.0, self.reply_timeout.fetch_at(request.by) - now)
            self._begin_update(update, {"fetch_after": exchange.fetch_after})

    def _begin_update(self, update: PendingUpdate, meta: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.replicas[update.fragment].round = update.round
        self._send_update(update, meta)

    def _send_update(self, update: PendingUpdate, more: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Send an update; it is repeated until it is acknowledged."""
        meta, dtype = {**update.values["meta"], **more}, update.values["dtype"]
        self._send("update", meta, update.fragment, update.round, payload=update.payload, dtype=dtype)
        self.exchanges.update_queued(update.fragment)

    def _on_later(self, message: HubMessage, now: float) -> None:
        """Send an update again once the hub has memory for it."""
        fragment = message.fragment
        update = self._outbox.get(fragment) if self.exchanges.awaits_ack(fragment) else None
        if message.meta.get("what") != "update" or update is None or update.round != message.round:
            return
        self.exchanges.mark_repeated(fragment)
        if message.meta.get("ready"):
            self._send_update(update)
        else:
            self.postponed.append(("update", message.round, fragment))
            self.exchanges.postpone(fragment, now + _POSTPONED_SECONDS)

    def _on_ack(self, message: HubMessage, now: float) -> None:
        self.hub_status.update(message.meta)
        fragment = message.fragment
        exchange = self._acknowledge(message, message.round, now)
        if exchange is None:
            return
        self.exchanges.measure_update(exchange, now)
        if message.meta.get("planned") and exchange.measurable:
            exchange.stage = "params"
            self.exchanges.wait(exchange, max(now, exchange.fetched) + self.reply_timeout.seconds())
        else:
            self._schedule_fetch(fragment, exchange, now)

    def _acknowledge(self, message: HubMessage, round: int, now: float) -> FragmentExchange | None:
        """Take the decision about an update; return its exchange if that waits for it."""
        fragment = message.fragment
        if not self._outbox.acknowledge(round, fragment):
            return None
        self.exchanges.acknowledged(fragment)
        why = meta_text(message.meta, "why")
        if why:
            self.refused += 1
            log.warning("worker %s: the hub refused round %d: %s", self.name, round, why)
        else:
            self.acknowledged += 1
        self.reply_timeout.on_reply()
        replica, exchange = self.replicas[fragment], self.exchanges.get(fragment)
        if exchange is None or exchange.stage != "ack" or replica.round != round:
            return None
        if why:
            replica.note_refusal(why)
        return exchange

    # ------------------------------------------------------------------ global parameters

    def _schedule_fetch(self, fragment: int, exchange: FragmentExchange, now: float) -> None:
        """Fetch the global parameters, now or as late as they can be in time."""
        exchange.stage, exchange.measurable = "fetch", True
        due = self.reply_timeout.fetch_at(exchange.request.by)
        if due <= now:
            self._fetch(fragment, exchange, now)
        else:
            self.exchanges.wait(exchange, due)

    def _fetch(self, fragment: int, exchange: FragmentExchange, now: float) -> None:
        exchange.stage, exchange.fetched, exchange.due = "params", now, math.inf
        self._send("fetch", {"have": self.replicas[fragment].revision}, fragment)

    def _send_overdue(self, now: float) -> None:
        """Send fetches that are due, and repeat messages without a reply."""
        updates, fetches = self.exchanges.overdue(now)
        for fragment in updates:
            self._send_update(self._outbox.get(fragment))
        for fragment, exchange in fetches:
            self._fetch(fragment, exchange, now)
        self.exchanges.refresh()

    def _on_global_params(self, message: HubMessage, now: float) -> None:
        self.hub_status.update(message.meta)
        fragment = message.fragment
        acked = message.meta.get("acked")
        if type(acked) is int:
            acknowledged = self._acknowledge(message, acked, now)
            if acknowledged is not None:
                self.exchanges.measure_update(acknowledged, acknowledged.sent)
                acknowledged.stage = "params"
        exchange = self.exchanges.get(fragment)
        if exchange is None or exchange.stage == "ack":
            return
        self._never_fetched.discard(fragment)
        self.exchanges.end(fragment, now)
        try:
            self.replicas[fragment].receive(message.round, message.dtype, message.payload)
        except DamagedEnvelope:
            self._fetch(fragment, exchange, now)
            self.exchanges.resume(fragment, exchange)

    # ------------------------------------------------------------------ before all share parameters

    def _on_ask(self, message: HubMessage, now: float) -> None:
        self.hub_status.on_ask(message.round, now)

    def _on_adopt(self, message: HubMessage, now: float) -> None:
        """Pass another worker's parameters to the training thread once all fragments are here."""
        self._adopting[message.fragment] = message
        if self._adopting.keys() == self.replicas.keys():
            self.adopted, self._adopting = self._adopting, {}
            why = meta_text(message.meta, "why")
            log.info("worker %s takes another worker's parameters: %s", self.name, why)

    def _on_together(self, message: HubMessage, now: float) -> None:
        self.hub_status.phase = "together"
        self._gave_params = meta_number(message.meta, "best") == self.worker


_HANDLERS: Mapping[str, Callable[[HubSession, HubMessage, float], None]] = {
    "welcome": HubSession._on_welcome,
    "standby": HubSession._on_standby,
    "refusal": HubSession._on_refusal,
    "who": HubSession._restart,
    "later": HubSession._on_later,
    "ack": HubSession._on_ack,
    "global_params": HubSession._on_global_params,
    "ask": HubSession._on_ask,
    "adopt": HubSession._on_adopt,
    "together": HubSession._on_together,
}
