"""Faults injected into envelopes in transit: each is detected, classified, and not delivered."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.errors import (
    DamagedEnvelope,
    EnvelopeError,
    ForeignEnvelope,
    MisplacedEnvelope,
    RepeatedEnvelope,
    TruncatedEnvelope,
)
from paceline.transport.envelope import BEGIN, END, decode, encode
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import ReceiveLedger

FAULTS = 220
ENVELOPES, RUN, ME = 6, "run-1", 0


def send(rng, run=RUN, target=ME, source=1):
    """Return the envelopes that a source sends, each as head, payload and tail."""
    return [
        encode(
            Header(run, "frame", source=source, target=target, sequence=number, meta={"score": rng.random()}),
            rng.randbytes(rng.choice([1, 7, 100, 5000])),
        )
        for number in range(ENVELOPES)
    ]


def spans(parts):
    """Return where each part of an envelope lies: first byte and one past the last."""
    head, payload, tail = map(len, parts)
    begin, sizes = len(BEGIN), len(BEGIN) + 4
    return {
        "begin mark": (0, begin),
        "header size": (begin, sizes),
        "header": (sizes, head - 8),
        "header checksum": (head - 8, head),
        "payload": (head, head + payload),
        "end checksum": (head + payload, head + payload + 8),
        "end mark": (head + payload + 8, head + payload + tail),
    }


PART = {
    "header size": "header",
    "header checksum": "header",
    "end checksum": "end mark",
}  # what a fault there is called, where that is not its own name


def flip(rng, sent, at):
    """Turn over one bit of envelope `at`."""
    place = rng.choice(list(spans(sent[at])))
    low, high = spans(sent[at])[place]
    data = bytearray(b"".join(sent[at]))
    data[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
    return replaced(sent, at, data), DamagedEnvelope, PART.get(place, place)


def flip_payload_checksum(rng, sent, at):
    """Turn over a bit of the payload's checksum, which lies in the header."""
    data = bytearray(b"".join(sent[at]))
    checksum = decode(data)[0].checksum.to_bytes(8, "big")  # as msgpack has it
    found = data.find(checksum)
    assert found > 0
    data[found + rng.randrange(8)] ^= 1 << rng.randrange(8)
    return replaced(sent, at, data), DamagedEnvelope, "header"


def cut(rng, sent, at):
    """Cut envelope `at` off, somewhere in one of its parts, or between two."""
    place = rng.choice(list(spans(sent[at])))
    low, high = spans(sent[at])[place]
    data = b"".join(sent[at])[: rng.choice([low, rng.randrange(low, high)])]
    return replaced(sent, at, data), TruncatedEnvelope, PART.get(place, place)


def repeat(rng, sent, at):
    """Send envelope `at` twice: at once, or later."""
    whole = list(map(b"".join, sent))
    whole.insert(rng.randrange(at + 1, len(whole) + 1), whole[at])
    return whole, RepeatedEnvelope, ""


def foreign(rng, sent, at):
    """Put in an envelope of another run, of an unknown source, or for another target."""
    other = rng.choice([{"run": "run-2"}, {"source": 9}, {"target": 3}])
    return replaced(sent, at, b"".join(send(rng, **other)[at])), ForeignEnvelope, ""


def swap(rng, sent, at):
    """Have envelope `at` and the next one change places."""
    whole = list(map(b"".join, sent))
    at = min(at, ENVELOPES - 2)
    whole[at], whole[at + 1] = whole[at + 1], whole[at]
    return whole, MisplacedEnvelope, ""


def swap_parts(rng, sent, at):
    """Give envelope `at` the payload or the end of another one."""
    other, which = rng.choice([each for each in range(ENVELOPES) if each != at]), rng.choice([1, 2])
    parts = list(sent[at])
    if which == 1:  # of the same size, so that only its checksum differs
        parts[1] = rng.randbytes(len(parts[1]))
        parts[1] = bytes([parts[1][0] ^ (parts[1] == sent[at][1])]) + parts[1][1:]
    else:
        parts[2] = sent[other][2]
    return replaced(sent, at, b"".join(parts)), DamagedEnvelope, "payload" if which == 1 else "end mark"


INJECTORS = (flip, flip, flip, flip_payload_checksum, cut, cut, repeat, foreign, swap, swap_parts)


def replaced(sent, at, data):
    whole = list(map(b"".join, sent))
    whole[at] = bytes(data)
    return whole


def deliver(stream, *, ordered):
    """Return sequence numbers and payloads that were delivered, and the errors."""
    inbox, delivered, errors = ReceiveLedger(RUN, ME, [1], ordered=ordered), [], []
    for data in stream:
        try:
            header, payload = decode(data)
            inbox.accept(header)
            delivered.append((header.sequence, bytes(payload)))
        except EnvelopeError as error:
            errors.append(error)
    return delivered, errors, inbox


def test_every_fault_is_found_named_and_not_delivered():
    rng, kinds = random.Random(4), Counter()
    for number in range(FAULTS):
        inject = INJECTORS[number % len(INJECTORS)]
        sent, at = send(rng), rng.randrange(ENVELOPES)
        stream, wanted, part = inject(rng, sent, at)
        delivered, errors, inbox = deliver(stream, ordered=inject is swap)
        assert errors, (number, inject)
        assert type(errors[0]) is wanted, (number, inject, errors)
        assert errors[0].part == part, (number, inject, errors)
        originals = {(each, bytes(parts[1])) for each, parts in enumerate(sent)}
        assert set(delivered) <= originals, "something was delivered that nobody sent"
        assert len(delivered) == len(set(delivered)), "something was delivered twice"
        if inject not in (repeat, swap):
            assert at not in [each for each, _ in delivered]
            assert len(delivered) == ENVELOPES - 1, "a fault took others with it"
            assert len(errors) == 1
        if wanted in (RepeatedEnvelope, ForeignEnvelope, MisplacedEnvelope):
            assert inbox.counts[wanted.__name__] >= 1
            assert errors[0].sequence is not None
        kinds[wanted.__name__, part] += 1
    assert sum(kinds.values()) == FAULTS
    assert len(kinds) >= 9, f"not every kind was drawn: {kinds}"


def test_without_faults_all_is_delivered():
    sent = send(random.Random(1))
    delivered, errors, inbox = deliver(map(b"".join, sent), ordered=True)
    assert errors == []
    assert [payload for _, payload in delivered] == [bytes(parts[1]) for parts in sent]
    assert inbox.counts == {"delivered": ENVELOPES}
    assert inbox.expected(1) == ENVELOPES


@pytest.mark.parametrize("length", [1, 40])
def test_no_single_bit_can_be_turned_unnoticed(length):
    whole = b"".join(encode(Header("r", "k", source=0, target=0, sequence=0), bytes(length)))
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedEnvelope):
            decode(data)


def test_an_envelope_cut_anywhere_is_truncated():
    whole = b"".join(encode(Header("r", "k", source=0, target=0, sequence=0), b"hello"))
    for length in range(len(whole)):
        with pytest.raises(TruncatedEnvelope):
            decode(whole[:length])


def test_an_inbox_that_keeps_no_order_takes_early_ones_once_each():
    inbox = ReceiveLedger(RUN, ME, [1, 2])
    headers = [Header(RUN, "x", source=1, target=ME, sequence=number) for number in (2, 0, 3)]
    for header in headers:
        inbox.accept(header)
    assert inbox.expected(1) == 1
    with pytest.raises(RepeatedEnvelope, match="was received before"):
        inbox.accept(headers[0])
    inbox.skip(1, 2)
    assert inbox.expected(1) == 2
    inbox.accept(Header(RUN, "x", source=1, target=ME, sequence=4))
    with pytest.raises(ForeignEnvelope, match="was sent by 1"):
        inbox.accept(Header(RUN, "x", source=2, target=ME, sequence=0), carried_from=1)


def test_the_end_mark_is_not_the_begin_mark():
    assert BEGIN != END
    assert len(BEGIN) == len(END) == 8
