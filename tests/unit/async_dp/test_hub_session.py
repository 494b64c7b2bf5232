"""A worker's conversation: what is not answered is said again, after a patience that follows the network."""

import math
from typing import Any

import torch

from hub_conversation import LAYOUT, PACKING, RUN
from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import split_message
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.session_state import SessionRequest
from paceline.transport.transport_interface import HUB

ME = 7


class Conversation:
    """A spoke whose hub is this test; virtual time is `now`."""

    def __init__(self) -> None:
        net = torch.nn.Linear(4, 3)
        (fragment,) = LAYOUT.fragments
        self.replica = FragmentReplica(fragment, dict(net.named_parameters()), UpdateCodec(fragment, "fp32"))
        sessions = iter(range(1, 10**6))
        self.session = HubSession(
            ME,
            "w",
            LAYOUT,
            {0: self.replica},
            Outbox(None, ME),
            hello_meta={},
            new_session_id=lambda: next(sessions),
        )
        self.session.heartbeat_seconds = math.inf
        self.now, self._sequence = 0.0, 0

    def hear(self, kind: str, payload: Any = b"", round: int = 0, **told: Any) -> None:
        dtype = "fp32" if payload else ""
        for envelope in split_message(
            HubMessage(kind, HUB, ME, round, 0, told, payload, dtype), RUN, self._sequence
        ):
            self.session.receive(envelope, self.now)
        self._sequence += 1

    def said(self) -> list[str]:
        """Return the kinds of what is said now; all of it leaves at once."""
        out = self.session.pump(self.now)
        for message in out:
            self.session.message_sent(message, self.now)
        return [message.kind for message in out if message.kind != "beat"]

    def wait(self) -> tuple[float, list[str]]:
        """Let time pass until something is due; return how long that was, and what is said then."""
        began, self.now = self.now, self.session.next_due()
        return self.now - began, self.said()

    def welcome(self) -> None:
        self.hear(
            "welcome", run=RUN, phase="together", slot=0, slots=1, workers=1, yours=self.session.session_id
        )

    def begin(self) -> None:
        """Get in touch, and fetch the first centre; every answer takes 0.05 s."""
        assert self.said() == ["hello"]
        self.welcome()
        assert self.said() == ["fetch"]
        self.now += 0.05
        self.hear("centre", bytes(PACKING.pack(torch.zeros(LAYOUT.numel))), round=1)
        self.replica.apply_received()

    def offer(self) -> None:
        self.replica.snapshot()
        self.replica.state = FragmentState.EXCHANGING
        self.session.requests.append(SessionRequest(0, "update", self.now, {"samples": 1.0, "steps": 1}))
        assert self.said() == ["update"]


def test_an_unanswered_update_is_repeated_with_growing_timeouts() -> None:
    talk = Conversation()
    talk.begin()
    talk.offer()
    pauses = []
    for _ in range(6):
        pause, said = talk.wait()
        assert said == ["update"]
        pauses.append(round(pause, 6))
    assert pauses == [1.2, 2.4, 4.8, 9.6, 19.2, 19.2]
    assert talk.session.resent == 6


def test_a_reply_resets_the_timeout_and_one_after_a_repetition_is_not_measured() -> None:
    talk = Conversation()
    talk.begin()
    talk.offer()
    talk.wait()
    talk.now += 1.0
    talk.hear("ack", round=talk.replica.round)
    assert (
        talk.session.reply_timeout.update_seconds == 0.0
    )  # the first or the second one was answered: nobody knows
    assert talk.said() == ["fetch"] or talk.wait()[1] == ["fetch"]
    pause, said = talk.wait()
    assert (round(pause, 6), said) == (1.2, ["fetch"])
    talk.hear("centre", bytes(PACKING.pack(torch.zeros(LAYOUT.numel))), round=2)
    assert round(talk.session.reply_timeout.fetch_seconds, 6) == 0.05


def test_the_time_of_an_absent_hub_is_not_measured() -> None:
    talk = Conversation()
    talk.begin()
    talk.offer()
    talk.now += 0.1
    talk.session.disconnected(talk.now)
    assert talk.said() == ["hello"]
    talk.now += 300.0
    talk.welcome()
    assert talk.said() == ["update"]
    talk.hear("ack", round=talk.replica.round)
    assert talk.session.reply_timeout.update_seconds == 0.0
    assert talk.session.acknowledged == 1


def test_global_parameters_are_fetched_as_late_as_possible() -> None:
    talk = Conversation()
    talk.begin()
    talk.replica.snapshot()
    talk.replica.state = FragmentState.EXCHANGING
    talk.session.requests.append(SessionRequest(0, "update", talk.now + 5.0, {"samples": 1.0, "steps": 1}))
    (update,) = [each for each in talk.session.pump(talk.now) if each.kind == "update"]
    talk.hear("ack", round=update.round)
    pause, said = talk.wait()
    assert (round(pause, 6), said) == (round(5.0 - 1.3 * 0.05, 6), ["fetch"])


def test_hello_is_repeated_until_all_share_parameters() -> None:
    talk = Conversation()

    def welcome(phase: str) -> None:
        talk.hear("welcome", run=RUN, phase=phase, slot=0, slots=1, workers=1, yours=talk.session.session_id)

    assert talk.said() == ["hello"]
    welcome("empty")
    assert talk.said() == []
    for _ in range(3):  # whose answers are lost
        pause, said = talk.wait()
        assert (pause, said) == (10.0, ["hello"])
    welcome("together")
    assert talk.said() == ["fetch"]
