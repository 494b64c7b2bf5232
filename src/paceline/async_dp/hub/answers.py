"""Messages that a hub has for its workers, until its driver takes them.

An update says when its worker will want parameters. Sent then, they carry the acknowledgement of the update, unless
that is long after it, or they have to wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.async_dp.hub.fetch_queue import FetchQueue, ParamsPacket
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.hub.membership import HubCounters, HubMember, HubMembership
from paceline.async_dp.hub.update_merging import GlobalParams
from paceline.async_dp.protocol.hub_messages import HubMessage, meta_number
from paceline.transport.transport_interface import HUB

__all__ = ["HubAnswers"]

_ACK_SECONDS, _MAX_PLAN_SECONDS = 2.0, 3600.0  # an acknowledgement waits for parameters that are sent so soon
_GATHER_SECONDS = 0.001  # parameters include the updates that arrive so soon after a worker's own


class HubAnswers:
    """Messages for workers, in order.

    Args:
        rules: of the hub.
        members: the workers.
        counters: totals of merged updates.
        fetches: requests for parameters.
    """

    def __init__(
        self, rules: HubRules, members: HubMembership, counters: HubCounters, fetches: FetchQueue
    ) -> None:
        self._rate, self._members, self._counters = rules.bandwidth, members, counters
        self._fetches = fetches
        self._messages: list[HubMessage] = []

    def add(self, message: HubMessage) -> None:
        """Add a message."""
        self._messages.append(message)

    def send(self, kind: str, worker: int, round: int = 0, fragment: int = 0, **meta: Any) -> None:
        """Add a message without a payload."""
        self._messages.append(HubMessage(kind, HUB, worker, round, fragment, meta))

    def shared_meta(self) -> dict[str, Any]:
        """Return the metadata of most messages: number of live workers, and each one's share of the bandwidth."""
        alive, rate = len(self._members.alive), self._rate
        return {"workers": alive} if rate is None else {"workers": alive, "rate": rate / max(1, alive)}

    def acknowledge(
        self, message: HubMessage, why: str, quarantine: float, now: float, *, first: bool
    ) -> None:
        """Acknowledge an update, now or with the parameters that its worker wants.

        Args:
            message: the update.
            why: it was refused; empty if it was accepted.
            quarantine: seconds that its worker stays in quarantine.
            now: seconds of the driver's clock.
            first: whether it came for the first time; for one that is repeated the worker fetches parameters itself.
        """
        worker, fragment = message.source, message.fragment
        ack: dict[str, Any] = {"acked": message.round, "why": why[:200], "quarantine": quarantine}
        after = meta_number(message.meta, "fetch_after") if first else None
        if after is None or not 0 <= after <= _MAX_PLAN_SECONDS:
            self._send_ack(worker, fragment, ack, planned=False)
            return
        carried = after <= _ACK_SECONDS
        at = now + max(after, _GATHER_SECONDS)
        self._fetches.plan(worker, fragment, at, ack if carried else None)
        if not carried:
            self._send_ack(worker, fragment, ack, planned=True)

    def take(self, params: GlobalParams | None, now: float) -> list[HubMessage]:
        """Return all messages, with the answers to requests that can be given now."""
        if params is not None:
            for answer in self._fetches.pop_ready(params, now):
                if answer.packet is None:
                    self._send_ack(answer.member.number, answer.fragment, answer.ack or {}, planned=True)
                else:
                    self._send_params(answer.member, answer.packet, answer.ack or {})
        messages, self._messages = self._messages, []
        return messages

    def _send_ack(self, worker: int, fragment: int, ack: Mapping[str, Any], *, planned: bool) -> None:
        self.send("ack", worker, ack["acked"], fragment, **ack, planned=planned, **self.shared_meta())

    def _send_params(self, member: HubMember, packet: ParamsPacket, ack: Mapping[str, Any]) -> None:
        member.sent_nbytes += len(packet.payload)
        counters = self._counters
        meta = {"samples": counters.samples, "updates": counters.updates, **self.shared_meta(), **ack}
        kind, fragment = "global_params", packet.fragment
        self._messages.append(
            HubMessage(
                kind, HUB, member.number, packet.revision, fragment, meta, packet.payload, packet.codec
            )
        )
