"""Envelopes received in parts: any damage gives the sent one or an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DamagedEnvelope, EnvelopeError, ForeignEnvelope, TruncatedEnvelope
from paceline.transport.envelope import (
    add_checksum,
    check_route,
    decode_envelope,
    decode_parts,
    encode,
    encode_checksummed,
)
from paceline.transport.header_layout import Header

PLAIN = Header("run", "frame", source=7, target=0, sequence=3, meta={"base": 5, "score": 0.5})
LIMIT = 10_000


def parts_of(header, payload):
    return [bytes(part) for part in encode(header, payload)]


def turned(data, at, bit):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@settings(deadline=None)
@given(st.binary(max_size=9000))
def test_a_sent_envelope_is_decoded(payload):
    parts = parts_of(PLAIN, payload)
    for received in (decode_parts(parts, limit=LIMIT), decode_envelope(b"".join(parts), limit=LIMIT)):
        assert bytes(received.payload) == payload
        assert received.header == add_checksum(PLAIN, payload)


@st.composite
def mutations(draw):
    """Return sent parts, and the received ones after random damage."""
    payload = draw(st.binary(max_size=200))
    sent = parts_of(replace(PLAIN, sequence=draw(st.integers(0, 3))), payload)
    other = parts_of(replace(PLAIN, sequence=draw(st.integers(0, 3))), draw(st.binary(max_size=200)))
    received = list(sent)
    for _ in range(draw(st.integers(1, 3))):
        if not received:
            break
        at = draw(st.integers(0, len(received) - 1))
        part = received[at]
        way = draw(
            st.sampled_from(
                ["flip", "cut", "longer", "drop", "twice", "swap", "other", "noise", "empty", "join"]
            )
        )
        if way == "flip" and part:
            received[at] = turned(part, draw(st.integers(0, len(part) - 1)), draw(st.integers(0, 7)))
        elif way == "cut":
            received[at] = part[: draw(st.integers(0, len(part)))]
        elif way == "longer":
            received[at] = part + draw(st.binary(max_size=20))
        elif way == "drop":
            del received[at]
        elif way == "twice":
            received.insert(at, part)
        elif way == "swap":
            received.append(received.pop(at))
        elif way == "other":
            received[at] = other[min(at, 2)]
        elif way == "noise":
            received[at] = draw(st.binary(max_size=300))
        elif way == "empty":
            received[at] = b""
        elif way == "join" and at:
            received[at - 1 : at + 1] = [received[at - 1] + part]
    return sent, received, other


@settings(deadline=None)
@given(mutations())
def test_a_changed_envelope_is_refused_or_equals_the_sent_one(made):
    sent, received, other = made
    try:
        opened = decode_parts(received, limit=LIMIT)
    except EnvelopeError:
        return
    again = [bytes(part) for part in encode_checksummed(opened.header, opened.payload)]
    assert again == received
    assert again in (sent, other)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_too_few_and_too_many_parts_are_refused(count):
    parts = (parts_of(PLAIN, b"hello") * 2)[:count]
    with pytest.raises(TruncatedEnvelope if count < 3 else DamagedEnvelope, match="parts"):
        decode_parts(parts, limit=LIMIT)


def test_a_payload_may_be_as_long_as_the_limit_and_no_longer():
    decode_parts(parts_of(PLAIN, bytes(LIMIT)), limit=LIMIT)
    with pytest.raises(DamagedEnvelope, match=f"the limit is {LIMIT}"):
        decode_parts(parts_of(PLAIN, bytes(LIMIT + 1)), limit=LIMIT)


def test_bytes_after_the_head_are_not_part_of_it():
    head, payload, tail = parts_of(PLAIN, b"hello")
    with pytest.raises(DamagedEnvelope, match=r"envelope 3 .* has a head of .* bytes, expected"):
        decode_parts([head + b"x", payload, tail], limit=LIMIT)


def test_a_long_payload_is_not_copied_and_a_short_one_holds_nothing_else():
    parts = parts_of(PLAIN, bytes(8000))
    assert decode_parts(parts, limit=LIMIT).payload.obj is parts[1]
    big = memoryview(bytearray(1 << 20))
    head, payload, tail = parts_of(PLAIN, b"short")
    big[: len(payload)] = payload
    received = decode_parts([head, big[: len(payload)], tail], limit=LIMIT)
    assert received.payload == b"short"
    assert isinstance(received.payload, bytes)


@pytest.mark.parametrize(
    ("changes", "carried_from", "what"),
    [
        ({}, 8, "was sent by 8"),
        ({}, None, "was sent by an unknown sender"),
        ({"source": 0}, 7, "was sent by 7"),
        ({"run": "other"}, 7, "is of run 'other', this is run 'run'"),
        ({"target": 5}, 7, "was delivered to 0"),
    ],
)
def test_envelopes_of_another_run_source_or_target_are_foreign(changes, carried_from, what):
    check_route(PLAIN, me=0, run="run", carried_from=7)
    with pytest.raises(ForeignEnvelope, match=what):
        check_route(replace(PLAIN, **changes), me=0, run="run", carried_from=carried_from)


def test_without_a_run_envelopes_of_any_are_taken():
    check_route(PLAIN, me=0, run="", carried_from=7)
