"""Drives a hub with messages of workers, without a network; virtual time is `now`."""

from typing import Any

import torch
from torch import nn

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.protocol.hub_messages import PROTOCOL_VERSION, HubMessage
from paceline.async_dp.protocol.message_assembly import split_message
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.transport.envelope import Envelope

RUN = "a run"


def net(width: int = 3) -> nn.Module:
    return nn.Linear(4, width)


LAYOUT = ParameterLayout.of(net())
NUMEL = LAYOUT.numel
ONES = torch.ones(NUMEL)
PACKING = UpdateCodec(LAYOUT.fragments[0], "fp32")


class HubDriver:
    """A hub whose messages and clock a test provides."""

    def __init__(self, rules: HubRules | None = None, journal: Any = None) -> None:
        self.journal = MemoryJournal() if journal is None else journal
        self.rules = rules or HubRules()
        self.now = 0.0
        self.sessions: dict[int, int] = {}
        self.keys: dict[int, str] = {}  # of workers, as a hub's exchange adds them
        self._sequence = 0
        self.hub = self.new_hub()

    def new_hub(self) -> Hub:
        return Hub(RUN, self.rules, self.journal, lambda: self.now)

    def envelopes(self, message: HubMessage, run: str = RUN, frame_nbytes: int = 1 << 20) -> list[Envelope]:
        session = self.sessions.get(message.source, 0)
        made = list(split_message(message, run, self._sequence, session, frame_nbytes))
        self._sequence += len(made)
        return made

    def deliver(self, *envelopes: Envelope) -> list[HubMessage]:
        for envelope in envelopes:
            envelope.key = self.keys.get(envelope.header.source, "")
            self.hub.receive(envelope, self.now)
        return self.commit()

    def commit(self) -> list[HubMessage]:
        """Return the answers; they are sent at once."""
        answers = self.hub.commit(self.now)
        for answer in answers:
            self.hub.sent(answer)
        self.hub.reset.clear()
        return answers

    def send(self, kind: str, worker: int, payload: Any = b"", **meta: Any) -> list[HubMessage]:
        """Send a message of a worker, and return the answers."""
        run = meta.pop("run", RUN)
        round, dtype = meta.pop("round", 0), meta.pop("dtype", "")
        return self.deliver(*self.envelopes(HubMessage(kind, worker, 0, round, 0, meta, payload, dtype), run))

    def hello(
        self, worker: int, layout: ParameterLayout = LAYOUT, session: int | None = None, **meta: Any
    ) -> list[HubMessage]:
        self.sessions[worker] = session or self.sessions.get(worker, 100 * worker) + 1
        meta = {"version": PROTOCOL_VERSION, "name": f"w{worker}", "every": 5, "delay": 2, **meta}
        return self.send("hello", worker, layout.pack(), **meta)

    def join(self, *workers: int, numbers: torch.Tensor | None = None) -> None:
        """Connect workers; the first one provides the initial parameters."""
        for worker in workers:
            self.hello(worker)
        start = torch.zeros(NUMEL) if numbers is None else numbers
        self.send("parameters", workers[0], bytes(PACKING.pack(start)), dtype="fp32")

    def update(
        self, worker: int, round: int, delta: torch.Tensor, base: int = 0, **meta: Any
    ) -> list[HubMessage]:
        meta = {"samples": 1.0, "steps": 1, **meta}
        packet = bytes(PACKING.pack(delta))
        return self.send("update", worker, packet, round=round, dtype="fp32", base=base, **meta)

    @property
    def theta(self) -> torch.Tensor:
        assert self.hub.params is not None
        return self.hub.params.fragments[0].theta

    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.journal.ledger()]


def kinds(messages: list[HubMessage]) -> list[str]:
    return [message.kind for message in messages]
