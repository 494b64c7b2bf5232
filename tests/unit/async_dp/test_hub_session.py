"""A worker's session repeats unanswered messages, after a timeout that follows measured times."""

import errno
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hub_driver import LAYOUT, PACKING, RUN
from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import split_message
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.standby.term_proof import TermProof
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.session_state import SessionRequest
from paceline.testing import fault_injection
from paceline.transport.transport_interface import HUB

ME = 7


class SessionDriver:
    """A session whose hub is this test; virtual time is `now`."""

    def __init__(self, outbox: Outbox | None = None) -> None:
        net = torch.nn.Linear(4, 3)
        (fragment,) = LAYOUT.fragments
        self.replica = FragmentReplica(fragment, dict(net.named_parameters()), UpdateCodec(fragment, "fp32"))
        sessions = iter(range(1, 10**6))
        self.session_id = HubSession(
            ME,
            "w",
            LAYOUT,
            {0: self.replica},
            outbox or Outbox(None, ME),
            hello_meta={},
            new_session_id=lambda: next(sessions),
        )
        self.session_id.heartbeat_seconds = math.inf
        self.now, self._sequence = 0.0, 0

    def receive(self, kind: str, payload: Any = b"", round: int = 0, **meta: Any) -> None:
        dtype = "fp32" if payload else ""
        for envelope in split_message(
            HubMessage(kind, HUB, ME, round, 0, meta, payload, dtype), RUN, self._sequence
        ):
            self.session_id.receive(envelope, self.now)
        self._sequence += 1

    def sent(self) -> list[str]:
        """Return the kinds of the messages that are sent now."""
        out = self.session_id.pump(self.now)
        for message in out:
            self.session_id.message_sent(message, self.now)
        return [message.kind for message in out if message.kind != "beat"]

    def advance(self) -> tuple[float, list[str]]:
        """Advance time until the next message is due; return the duration, and the sent messages."""
        began, self.now = self.now, self.session_id.next_due()
        return self.now - began, self.sent()

    def welcome(self, **meta: Any) -> None:
        shared = {"run": RUN, "phase": "together", "slot": 0, "slots": 1, "workers": 1}
        self.receive("welcome", **shared, yours=self.session_id.session_id, **meta)

    def connect(self, **meta: Any) -> None:
        """Connect, and fetch the first global parameters; each answer takes 0.05 s."""
        assert self.sent() == ["hello"]
        self.welcome(**meta)
        assert self.sent() == ["fetch"]
        self.now += 0.05
        self.receive("global_params", bytes(PACKING.pack(torch.zeros(LAYOUT.numel))), round=1)
        self.replica.apply_received()

    def request_update(self) -> None:
        self.replica.snapshot()
        self.replica.state = FragmentState.EXCHANGING
        self.session_id.requests.append(SessionRequest(0, "update", self.now, {"samples": 1.0, "steps": 1}))

    def send_update(self) -> None:
        self.request_update()
        assert self.sent() == ["update"]


def test_an_unanswered_update_is_repeated_with_growing_timeouts() -> None:
    driver = SessionDriver()
    driver.connect()
    driver.send_update()
    pauses = []
    for _ in range(6):
        pause, sent = driver.advance()
        assert sent == ["update"]
        pauses.append(round(pause, 6))
    assert pauses == [1.2, 2.4, 4.8, 9.6, 19.2, 19.2]
    assert driver.session_id.exchanges.resent == 6


def test_a_reply_resets_the_timeout_and_one_after_a_repetition_is_not_measured() -> None:
    driver = SessionDriver()
    driver.connect()
    driver.send_update()
    driver.advance()
    driver.now += 1.0
    driver.receive("ack", round=driver.replica.round)
    assert driver.session_id.reply_timeout.update_seconds == 0.0  # which of the two was answered is unknown
    assert driver.sent() == ["fetch"] or driver.advance()[1] == ["fetch"]
    pause, sent = driver.advance()
    assert (round(pause, 6), sent) == (1.2, ["fetch"])
    driver.receive("global_params", bytes(PACKING.pack(torch.zeros(LAYOUT.numel))), round=2)
    assert round(driver.session_id.reply_timeout.fetch_seconds, 6) == 0.05


def test_the_time_of_an_absent_hub_is_not_measured() -> None:
    driver = SessionDriver()
    driver.connect()
    driver.send_update()
    driver.now += 0.1
    driver.session_id.disconnected(driver.now)
    assert driver.sent() == ["hello"]
    driver.now += 300.0
    driver.welcome()
    assert driver.sent() == ["update"]
    driver.receive("ack", round=driver.replica.round)
    assert driver.session_id.reply_timeout.update_seconds == 0.0
    assert driver.session_id.acknowledged == 1


def test_global_parameters_are_fetched_as_late_as_possible() -> None:
    driver = SessionDriver()
    driver.connect()
    driver.replica.snapshot()
    driver.replica.state = FragmentState.EXCHANGING
    driver.session_id.requests.append(
        SessionRequest(0, "update", driver.now + 5.0, {"samples": 1.0, "steps": 1})
    )
    (update,) = [each for each in driver.session_id.pump(driver.now) if each.kind == "update"]
    driver.receive("ack", round=update.round)
    pause, sent = driver.advance()
    assert (round(pause, 6), sent) == (round(5.0 - 1.3 * 0.05, 6), ["fetch"])


def test_hello_is_repeated_until_all_share_parameters() -> None:
    driver = SessionDriver()

    def welcome(phase: str) -> None:
        driver.receive(
            "welcome", run=RUN, phase=phase, slot=0, slots=1, workers=1, yours=driver.session_id.session_id
        )

    assert driver.sent() == ["hello"]
    welcome("empty")
    assert driver.sent() == []
    for _ in range(3):  # the answers are lost
        pause, sent = driver.advance()
        assert (pause, sent) == (10.0, ["hello"])
    welcome("together")
    assert driver.sent() == ["fetch"]


# ------------------------------------------------------------------ a full disk at the worker


@pytest.fixture
def on_disk(tmp_path):
    yield SessionDriver(Outbox(tmp_path, ME))
    fault_injection.disarm()


@pytest.mark.parametrize("room", [0, 300])
def test_on_a_full_disk_an_update_waits_until_there_is_room(on_disk, caplog, room) -> None:
    """The disk may be full before the round is reserved, or before the update is stored."""
    driver = on_disk
    driver.connect()
    fault_injection.disk_full(after_nbytes=room)
    driver.request_update()
    for _ in range(10):
        assert driver.sent() == []
        assert driver.session_id.next_due() <= driver.now + 1.0
        driver.now += 1.0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "worker w: an update waits, and training goes on: " in record.message
    assert "the disk is full" in record.message
    assert not driver.session_id.idle
    fault_injection.disarm()
    driver.now += 1.0
    assert driver.sent() == ["update"]
    driver.receive("ack", round=driver.replica.round)
    assert driver.session_id.acknowledged == 1
    assert driver.sent() == ["fetch"]


def test_an_update_that_waits_for_room_survives_a_restart_of_the_hub(on_disk) -> None:
    driver = on_disk
    driver.connect()
    fault_injection.disk_full(after_nbytes=0)
    driver.request_update()
    assert driver.sent() == []
    driver.session_id.disconnected(driver.now)
    assert driver.sent() == ["hello"]
    driver.welcome()
    assert driver.sent() == []
    fault_injection.disarm()
    driver.now += 2.0
    assert driver.sent() == ["update"]


def test_on_a_full_disk_a_worker_joins_once_there_is_room(on_disk, caplog) -> None:
    driver = on_disk
    assert driver.sent() == ["hello"]
    fault_injection.disk_full(after_nbytes=0)
    driver.welcome()
    driver.welcome()
    assert not driver.session_id.connected
    assert caplog.text.count("the disk is full") == 1
    fault_injection.disarm()
    driver.now += 2.0
    assert driver.sent() == ["hello"]
    driver.welcome()
    assert driver.session_id.connected


def test_an_acknowledged_update_that_cannot_be_removed_is_removed_later(on_disk, monkeypatch, caplog) -> None:
    driver = on_disk
    driver.connect()
    driver.send_update()
    round = driver.replica.round
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse_to_write)
        driver.receive("ack", round=round)
        assert driver.advance()[1] == ["update"], "the hub acknowledges it again"
        driver.receive("ack", round=round)
    assert caplog.text.count("can't be removed") == 1
    driver.receive("ack", round=round)
    assert driver.session_id.acknowledged == 1
    assert driver.sent() == ["fetch"]


def refuse_to_write(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_an_acknowledgement_of_what_an_earlier_process_sent_may_precede_the_welcome() -> None:
    outbox = Outbox(None, ME)
    outbox.put(outbox.next_round(0), 0, {"meta": {}, "dtype": "fp32"}, b"")
    driver = SessionDriver(outbox)
    assert driver.sent() == ["hello"]
    driver.receive("ack", round=0)
    assert outbox.pending() == []
    driver.welcome()
    assert driver.sent() == ["fetch"]


# ------------------------------------------------------------------ hub and standby


def proven(term: int) -> dict[str, Any]:
    return TermProof.make("secret", RUN, term, 10 * term).meta()


def test_a_worker_refuses_a_hub_of_an_older_term_and_proves_the_newer_one() -> None:
    driver = SessionDriver()
    session = driver.session_id
    driver.connect(**proven(2), standby="tcp://b:7000")
    assert session.hub_status.standby == "tcp://b:7000"
    session.disconnected(driver.now)
    (hello,) = session.pump(driver.now)
    assert {name: hello.meta[name] for name in ("term", "since", "proof")} == proven(2)
    driver.welcome(**proven(1))
    assert not session.connected
    assert session.hub_status.is_other_wanted
    driver.welcome(**proven(3))
    assert session.connected
    assert session.hub_status.term.term == 3


def test_a_worker_leaves_a_standby_and_says_hello_at_once_where_it_arrives() -> None:
    driver = SessionDriver()
    session = driver.session_id
    assert driver.sent() == ["hello"]
    driver.receive("standby", yours=session.session_id, why="copying")
    assert session.hub_status.is_other_wanted
    assert driver.sent() == []
    session.reachable(driver.now)
    assert driver.sent() == ["hello"]


# ------------------------------------------------------------------ the worker's own parameters


def test_a_repeated_request_that_crosses_the_parameters_is_not_answered_again() -> None:
    driver = SessionDriver()
    session = driver.session_id
    driver.connect()
    driver.receive("ask", round=3)
    assert session.hub_status.wants_params
    session.hub_status.take_ask(driver.now)
    driver.receive("ask", round=3)
    assert not session.hub_status.wants_params, "the training thread answers it"
    session.requests.append(SessionRequest(0, "parameters"))
    assert driver.sent() == ["parameters"]
    driver.receive("ask", round=3)
    assert not session.hub_status.wants_params
    driver.receive("ask", round=4)
    assert session.hub_status.wants_params, "another request"
    session.hub_status.wants_params = False
    driver.now += 6.0
    driver.receive("ask", round=4)
    assert session.hub_status.wants_params, "they were lost"
