"""Ring and all-to-all over an in-process carrier: messages arrive, and every fault is detected and named."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._core.json_codec import decode, encode
from paceline.errors import EnvelopeError, MissingEnvelope, UsageError
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import ReceiveLedger, message_checksum, split_frames
from paceline.transport.mpi_exchange.incoming_messages import IncomingMessage
from paceline.transport.mpi_exchange.message_carrier import MessageTag, ProbedMessage
from paceline.transport.mpi_exchange.outgoing_messages import (
    ENVELOPE_FAULTS,
    OutgoingMessage,
    faulty_frame_order,
    parse_envelope_fault,
)
from paceline.transport.mpi_exchange.ring_and_all_to_all import RingExchange, bytes_view, drive_exchange
from paceline.transport.mpi_exchange.round_reports import ExchangeProblem, RoundReport, gather_reports

KIND = {  # of the first problem that a fault has to lead to
    "flip-begin": "DamagedEnvelope",
    "flip-header": "DamagedEnvelope",
    "flip-payload": "DamagedEnvelope",
    "flip-checksum": "DamagedEnvelope",
    "flip-end": "DamagedEnvelope",
    "drop-end": "TruncatedEnvelope",
    "drop-payload": "TruncatedEnvelope",
    "truncate": "TruncatedEnvelope",
    "repeat": "RepeatedEnvelope",
    "foreign": "ForeignEnvelope",
    "lose": "MissingEnvelope",
    "swap": "MisplacedEnvelope",
}


@dataclass
class FakeRequest:
    """A message that its receiver takes, or has taken, after a few looks."""

    looks: int

    def Test(self):
        self.looks -= 1
        return self.looks < 0


@dataclass
class Wire:
    """Queues between all pairs of ranks; data is copied when it is received, as by MPI."""

    rng: random.Random
    queues: dict = field(default_factory=dict)

    def between(self, source, target):
        return self.queues.setdefault((source, target), deque())


@dataclass
class Carrier:
    comm: Wire
    rank: int
    size: int

    def send(self, buffer, target, tag):
        self.comm.between(self.rank, target).append((tag, buffer))
        return FakeRequest(self.comm.rng.randrange(3))

    def probe(self, source, tag=None):
        queue = self.comm.between(source, self.rank)
        if not queue or self.comm.rng.random() < 0.3:
            return None
        received_tag, buffer = queue.popleft()

        def receive(place):
            memoryview(place)[:] = buffer
            return FakeRequest(self.comm.rng.randrange(3))

        return ProbedMessage(received_tag, memoryview(buffer).nbytes, receive)


class Pair:
    """A message from rank 1 to rank 0, round after round."""

    def __init__(self, seed, nbytes, frame_nbytes=64):
        comm = Wire(random.Random(seed))
        self.sender, self.receiver = Carrier(comm, 1, 2), Carrier(comm, 0, 2)
        self.inbox, self.nbytes, self.frame_nbytes = ReceiveLedger("run", 0, [1]), nbytes, frame_nbytes
        self.sequence = self.round = 0

    def exchange(self, data, fault="", timeout=0.05):
        place = bytearray(self.nbytes)
        header = Header("run", "frame", 1, 0, self.sequence, round=self.round)
        out = OutgoingMessage(self.sender, header, data, self.frame_nbytes, fault)
        into = incoming(self.receiver, self.inbox, memoryview(place), self.round, self.frame_nbytes)
        drive_exchange([out], [into], timeout)
        self.sequence, self.round = out.sequence, self.round + 1
        return out, into, place


def incoming(carrier, ledger, place, round=0, frame_nbytes=64):
    return IncomingMessage(carrier, ledger, source=1, round=round, place=place, frame_nbytes=frame_nbytes)


def kinds(message):
    return [type(each).__name__ for each in message.problems]


@given(st.integers(0, 2**32), st.lists(st.binary(max_size=700), min_size=1, max_size=3), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_messages_arrive_whole_round_after_round(seed, messages, frame_nbytes):
    for message in messages:
        pair = Pair(seed, len(message), frame_nbytes)
        for _ in range(2):
            out, into, place = pair.exchange(message)
            assert into.whole
            assert place == message
            assert out.checksum == into.checksum == into.expected_checksum


@pytest.mark.parametrize("fault", sorted(KIND))
def test_every_fault_is_found_named_and_ends_in_nothing_delivered(fault):
    for seed in range(20):
        rng = random.Random(seed)
        message = rng.randbytes(rng.choice([130, 640, 1000]))
        pair = Pair(seed, len(message))
        _, into, _ = pair.exchange(message, fault)
        assert not into.whole
        assert kinds(into)[0] == KIND[fault]
        assert into.problems[0].source == 1
        assert kinds(into)[1:] in ([], ["MissingEnvelope"])
        assert pair.inbox.counts.total() >= len(into.problems)
        _, after, place = pair.exchange(message)
        assert after.whole, f"the message after {fault} was affected too: {after.problems}"
        assert place == message


class Held:
    """A payload that stays under way until it is let go."""

    held = True

    def Test(self):
        return not Held.held


class SlowCarrier(Carrier):
    """Payloads take long; everything else is received at once."""

    def probe(self, source, tag=None):
        queue = self.comm.between(source, self.rank)
        if not queue:
            return None
        received_tag, buffer = queue.popleft()

        def receive(place):
            memoryview(place)[:] = buffer
            self.posted.append((received_tag, isinstance(place, memoryview)))
            return Held() if received_tag == MessageTag.PAYLOAD else FakeRequest(0)

        return ProbedMessage(received_tag, memoryview(buffer).nbytes, receive)


def test_receives_of_two_envelopes_are_posted_while_the_first_payload_arrives(monkeypatch):
    monkeypatch.setattr(Held, "held", True)
    comm, message, place = Wire(random.Random(1)), random.Random(2).randbytes(150), bytearray(150)
    receiver = SlowCarrier(comm, 0, 2)
    receiver.posted = []
    out = OutgoingMessage(Carrier(comm, 1, 2), Header("run", "frame", 1, 0, 0, round=0), message, 64)
    into = incoming(receiver, ReceiveLedger("run", 0, [1]), memoryview(place))
    for _ in range(10):
        out.advance()
        into.advance()
    head, payload, tail = (MessageTag.HEAD, False), (MessageTag.PAYLOAD, True), (MessageTag.TAIL, False)
    assert receiver.posted[:6] == [head, payload, tail, head, payload, tail]
    assert len(receiver.posted) == 7  # the first head has been taken, which leaves room for one more
    monkeypatch.setattr(Held, "held", False)
    while not into.done:
        out.advance()
        into.advance()
    assert into.whole
    assert place == message
    assert [one for one in receiver.posted if one[0] == MessageTag.PAYLOAD] == [
        payload
    ] * 3  # none was received separately
    comm.between(1, 0).append((MessageTag.HEAD, b"of the next round"))
    into.advance()
    assert len(comm.between(1, 0)) == 1


def test_no_receive_is_posted_after_a_close():
    comm = Wire(random.Random(1))
    receiver = SlowCarrier(comm, 0, 2)
    receiver.posted = []
    for round, message in enumerate((b"first", b"second")):
        out = OutgoingMessage(
            Carrier(comm, 1, 2), Header("run", "frame", 1, 0, 2 * round, round=round), message, 64
        )
        while not out.done:
            out.advance()
    into = incoming(receiver, ReceiveLedger("run", 0, [1]), memoryview(bytearray(5)))
    for _ in range(10):
        into.advance()
    assert [tag for tag, _ in receiver.posted] == [
        MessageTag.HEAD,
        MessageTag.PAYLOAD,
        MessageTag.TAIL,
        MessageTag.CLOSE,
    ]
    assert len(comm.between(1, 0)) == 4


def test_a_sender_that_stops_is_named_with_the_frame_that_is_missing():
    with pytest.raises(MissingEnvelope, match="rank 1 did not send frame 5 of 10") as caught:
        Pair(1, 640).exchange(bytes(640), "stall")
    assert caught.value.source == 1


def test_a_fault_free_message_of_one_frame_can_be_faulty_too():
    for fault in sorted(set(KIND) - {"swap"}):
        _, into, _ = Pair(3, 10).exchange(b"0123456789", fault)
        assert kinds(into)[0] == KIND[fault]


def test_messages_of_another_size_are_foreign_and_say_both_sizes():
    pair = Pair(1, 100)
    _, into, _ = pair.exchange(bytes(200))
    assert kinds(into)[0] == "ForeignEnvelope"
    assert "200 bytes in 4 frames; expected 100 bytes in 2 frames" in str(into.problems[0])


def test_work_continues_while_messages_are_pending_and_is_finished():
    comm = Wire(random.Random(1))
    left, into = [5000], bytearray(10_000)

    def work():
        left[0] -= 1
        return left[0] >= 0

    carriers = Carrier(comm, 1, 2), Carrier(comm, 0, 2)
    out = OutgoingMessage(carriers[0], Header("run", "frame", 1, 0, 0), bytes(10_000), 64)
    received = incoming(carriers[1], ReceiveLedger("run", 0, [1]), memoryview(into))
    under_way = drive_exchange([out], [received], 5.0, work)
    assert received.whole
    assert left[0] == -1
    assert 100 < under_way < 5000


def ring_of_one(fault="", kind=Carrier):
    return RingExchange(
        kind(Wire(random.Random(1)), 0, 1), run="run", timeout=0.05, frame_nbytes=64, fault=fault
    )


def test_after_work_that_raised_no_other_exchange_can_follow():
    def work():
        raise ValueError("a mistake of the program")

    ring = ring_of_one()
    with pytest.raises(ValueError, match="a mistake of the program"):
        ring.exchange(bytes(1000), bytearray(1000), work)
    with pytest.raises(EnvelopeError, match="may still be pending"):
        ring.exchange(bytes(1000), bytearray(1000))


class LostCarrier(Carrier):
    """A carrier whose messages are never received."""

    def send(self, buffer, target, tag):
        request = FakeRequest(10**9)
        self.requests = [*getattr(self, "requests", []), weakref.ref(request)]
        return request


def test_buffers_of_pending_messages_stay_in_memory_when_an_exchange_is_abandoned():
    ring = ring_of_one(kind=LostCarrier)
    outcome = ring.exchange(bytes(1000), bytearray(1000))
    assert [each.kind for each in outcome.problems] == ["MissingEnvelope"]
    gc.collect()
    assert len(ring.carrier.requests) == 6
    assert all(request() is not None for request in ring.carrier.requests), (
        "MPI would write to memory of others"
    )


def test_ranks_that_send_or_receive_no_report_are_named():
    carrier = LostCarrier(Wire(random.Random(1)), 0, 3)
    with pytest.raises(MissingEnvelope, match=r"^rank 1, 2 reported nothing for 0\.05 s") as caught:
        gather_reports(carrier, RoundReport(0), 0.05)
    assert caught.value.source == 1
    for source in (1, 2):
        carrier.comm.between(source, 0).append(
            (MessageTag.VERDICT, json.dumps(encode(RoundReport(source))).encode())
        )
    with pytest.raises(MissingEnvelope, match=r"^rank 1, 2 received no report for 0\.05 s"):
        gather_reports(carrier, RoundReport(0), 0.05)
    gc.collect()
    assert all(request() is not None for request in carrier.requests)


@pytest.mark.parametrize("wrong", [5, "text", np.zeros((3, 4)).T, np.zeros(3, "M8[s]")])
def test_non_contiguous_data_is_refused(wrong):
    with pytest.raises(UsageError, match="can't be exchanged"):
        bytes_view(wrong)


@pytest.mark.parametrize(("nbytes", "frame_nbytes"), [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 1)])
def test_frames_cover_a_message_once(nbytes, frame_nbytes):
    frames = split_frames(nbytes, frame_nbytes)
    assert sum(each.nbytes for each in frames) == nbytes
    assert [each.offset for each in frames] == [each.index * frame_nbytes for each in frames]
    assert max(each.nbytes for each in frames) <= frame_nbytes


@pytest.mark.parametrize("frame_nbytes", [0, -1, 17 << 20])
def test_frames_of_no_or_too_many_bytes_are_refused(frame_nbytes):
    with pytest.raises(UsageError, match="16 MiB"):
        split_frames(10, frame_nbytes)


def test_the_checksum_of_a_message_depends_on_the_order_of_its_frames():
    assert message_checksum([1, 2]) != message_checksum([2, 1])


def test_faults_are_read_with_their_rank_and_unknown_ones_refused():
    assert parse_envelope_fault("swap") == ("swap", 0)
    assert parse_envelope_fault("lose@3") == ("lose", 3)
    with pytest.raises(UsageError, match="did you mean 'repeat'"):
        parse_envelope_fault("repaet")
    with pytest.raises(UsageError, match="'x' is not a rank"):
        parse_envelope_fault("lose@x")
    assert set(ENVELOPE_FAULTS) == set(KIND) | {"stall"}


def test_a_fault_in_the_order_is_in_the_middle():
    assert faulty_frame_order("", 4) == [0, 1, 2, 3]
    assert faulty_frame_order("swap", 4) == [0, 2, 1, 3]
    assert faulty_frame_order("lose", 4) == [0, 1, 3]
    assert faulty_frame_order("stall", 4) == [0, 1]
    assert faulty_frame_order("swap", 1) == [0]


def test_a_report_survives_serialisation():
    problem = ExchangeProblem("DamagedEnvelope", 1, 2, "bad “bits”")
    verdict = RoundReport(1, (problem,), {"closed": True})
    assert decode(json.loads(json.dumps(encode(verdict))), RoundReport, "report") == verdict
    assert str(problem) == "rank 1 found a DamagedEnvelope of rank 2: bad “bits”"
    assert MessageTag.HEAD != MessageTag.VERDICT
