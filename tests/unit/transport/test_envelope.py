"""Envelopes: round trip without copies, no unverified size is trusted, and invalid values are refused."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from paceline.errors import DamagedEnvelope, ForeignEnvelope, TruncatedEnvelope, UsageError
from paceline.transport import envelope, header_layout
from paceline.transport.envelope import decode, decode_head, encode
from paceline.transport.header_layout import Header

PLAIN = Header("run", "frame", source=1, target=2, sequence=3)

whole = st.integers(0, 2**63 - 1)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
)
headers = st.builds(
    Header,
    run=st.text(max_size=40),
    kind=st.text(max_size=20),
    source=whole,
    target=whole,
    sequence=whole,
    round=whole,
    dtype=st.sampled_from(["", "int32", "<f4"]),
    shape=st.lists(whole, max_size=5).map(tuple),
    meta=st.dictionaries(st.text(max_size=20), plain, max_size=8),
)


def forged(*values, begin=envelope.BEGIN):
    """Return an envelope with valid checksums and any header."""
    packed = msgpack.packb(values[0] if len(values) == 1 else list(values))
    head = begin + envelope._SIZES.pack(len(packed), len(packed) ^ 0xFFFF) + packed
    checksum = envelope._CHECKSUM.pack(xxh3_64_intdigest(head))
    return head + checksum + checksum + envelope.END


@given(headers, st.binary(max_size=2000))
def test_encode_and_decode_are_inverse(sent, payload):
    received, got = decode(b"".join(encode(sent, payload)))
    assert bytes(got) == payload
    assert received == replace(
        sent, nbytes=len(payload), total_nbytes=len(payload), checksum=xxh3_64_intdigest(payload)
    )


@given(st.integers(1, 60), st.binary(min_size=1, max_size=60))
def test_a_message_in_frames_is_put_together_again(frame_nbytes, message):
    frames = -(-len(message) // frame_nbytes)
    whole_message = bytearray(len(message))
    for frame in range(frames):
        offset = frame * frame_nbytes
        frame_header = replace(PLAIN, frame=frame, frames=frames, offset=offset, total_nbytes=len(message))
        received, payload = decode(b"".join(encode(frame_header, message[offset : offset + frame_nbytes])))
        whole_message[received.offset : received.offset + received.nbytes] = payload
    assert whole_message == message


def test_neither_encoding_nor_decoding_copies_the_payload():
    payload = bytearray(8 << 20)
    head, body, tail = encode(PLAIN, payload)
    assert body.obj is payload
    data = b"".join([head, body, tail])
    tracemalloc.start()
    try:
        encode(PLAIN, payload)
        _, received = decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert received.obj is data
    assert peak < 1_000_000


def test_a_payload_that_is_not_bytes_is_sent_as_the_bytes_it_is():
    numbers = memoryview(bytearray(40)).cast("i")
    received, payload = decode(b"".join(encode(PLAIN, numbers)))
    assert (received.nbytes, payload.nbytes) == (40, 40)


@pytest.mark.parametrize("frames", [1, 5])
def test_no_memory_is_allocated_for_an_unverified_size(frames):
    huge = 2**62
    huge_header = replace(PLAIN, frames=frames, nbytes=huge, total_nbytes=huge)
    values = [getattr(huge_header, name) for name in header_layout._NAMES]
    values[header_layout._NAMES.index("meta")] = {}
    data = forged(header_layout.SCHEMA, *values)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedEnvelope, match=f"payload of {huge} bytes; the limit is 1000"):
            decode_head(data, limit=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_list_of_absurd_length_in_a_header_takes_no_memory():
    head = envelope.BEGIN + envelope._SIZES.pack(5, 5 ^ 0xFFFF) + b"\xdd\xff\xff\xff\xff"
    data = head + envelope._CHECKSUM.pack(xxh3_64_intdigest(head))
    with pytest.raises(DamagedEnvelope, match="header can't be decoded"):
        decode_head(data)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([999, 1, 2], ForeignEnvelope, "has schema 999"),
        ([1, 2, 3], DamagedEnvelope, "has 2 fields"),
        ([], DamagedEnvelope, "not a list of values"),
        ({"run": "x"}, DamagedEnvelope, "not a list of values"),
        ([1, 5, *["x"] * 14], DamagedEnvelope, "run is 5"),
    ],
)
def test_header_fields_are_validated_despite_a_valid_checksum(values, error, message):
    with pytest.raises(error, match=message):
        decode(forged(values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": -1}, "source is -1"),
        ({"sequence": 2**63}, "sequence is"),
        ({"sequence": True}, "sequence is True"),
        ({"run": "x" * 201}, "run is"),
        ({"shape": (1, -1)}, "shape is"),
        ({"frame": 1}, "frame 1 of 1"),
        ({"frames": 2, "offset": 9, "total_nbytes": 12}, "ends at byte 14 of 12"),
        ({"meta": {"weights": [1, 2]}}, "is a list"),
        ({"meta": {"big": 2**64}}, "more than 64 bits"),
        ({"meta": {"text": "x" * 20_000}}, "header has"),
    ],
)
def test_an_invalid_header_is_not_sent(changes, message):
    with pytest.raises(UsageError, match=message):
        encode(replace(PLAIN, **changes), b"hello")


def test_bytes_after_an_envelope_are_not_part_of_it():
    with pytest.raises(DamagedEnvelope, match="followed by 1 extra bytes") as caught:
        decode(b"".join(encode(PLAIN, b"hello")) + b"x")
    assert (caught.value.source, caught.value.sequence) == (1, 3)


def test_nothing_is_a_truncated_envelope():
    with pytest.raises(TruncatedEnvelope, match="got 0") as caught:
        decode(b"")
    assert caught.value.part == "begin mark"
