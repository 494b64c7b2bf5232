"""Messages between watchdogs: round trips, frames cut anywhere, and malformed input."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.health.heartbeat import (
    LARGEST_NBYTES,
    NOTICE_KINDS,
    FailureNotice,
    FrameParser,
    Heartbeat,
    MalformedFrame,
    clip_text,
    encode_frame,
)

HEARTBEAT = Heartbeat(
    1,
    5,
    step=20,
    phase="backward",
    task="eval",
    bucket=3,
    waiting=True,
    age=0.25,
    still=1.5,
    rounds=19,
    busy_seconds=12.5,
    sees_waiting=False,
    stopped=(0, 2),
)
NOTICE = FailureNotice(
    "raised",
    2,
    2,
    0.5,
    name="ValueError: no",
    text="Traceback …\n",
    step=20,
    phase="forward",
    others=(0,),
)


def parse_frames(data, *cuts):
    parser, found, start = FrameParser(), [], 0
    for end in [*sorted(cuts), len(data)]:
        found += parser.feed(data[start:end])
        start = end
    return found


def test_heartbeats_and_notices_round_trip():
    heartbeat, note = parse_frames(encode_frame(HEARTBEAT.message()) + encode_frame(NOTICE.message()))
    assert Heartbeat.parse(heartbeat["row"], 4) == HEARTBEAT
    assert FailureNotice.parse(note["note"], 4) == NOTICE


@given(st.lists(st.integers(0, 600), max_size=8))
def test_frames_may_arrive_in_any_pieces(cuts):
    data = (
        encode_frame(HEARTBEAT.message())
        + encode_frame(NOTICE.message())
        + encode_frame({"ack": ["raised", "1", "1", ""]})
    )
    assert len(parse_frames(data, *(min(cut, len(data)) for cut in cuts))) == 3


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_malformed(data):
    try:
        for message in FrameParser().feed(data):
            assert isinstance(message, dict)
    except MalformedFrame:
        pass


@pytest.mark.parametrize(
    "body", [b"[]", b"1", b"{", b"\xff\xff", b"", b"nonsense", b"[" * 50_000, b'{"row": [1], "row"}']
)
def test_a_body_that_is_no_json_object_is_malformed(body):
    with pytest.raises(MalformedFrame):
        list(FrameParser().feed(struct.pack(">I", len(body)) + body))


def test_a_huge_length_is_refused_before_the_body_arrives():
    with pytest.raises(MalformedFrame, match="a message of"):
        list(FrameParser().feed(struct.pack(">I", LARGEST_NBYTES + 1)))


WRONG_HEARTBEATS = {
    "rank": [-1, 4, 1.0, "1", None, True],
    "sequence": ["x", 1.5, None, 1 << 80],
    "step": [None, [], 0.5],
    "phase": [None, 3, "x" * 41],
    "task": [0],
    "bucket": ["0"],
    "waiting": [0, 1, None],
    "age": [math.nan, math.inf, "1", None, True],
    "still": [-math.inf],
    "rounds": [None],
    "busy_seconds": [[]],
    "sees_waiting": ["yes"],
    "stopped": [None, 3, [9], ["1"], [[0]]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in WRONG_HEARTBEATS.items() for v in values]
)
def test_a_heartbeat_with_an_invalid_field_is_malformed(name, value):
    values = json.loads(json.dumps(HEARTBEAT.message()))["row"]
    values[list(WRONG_HEARTBEATS).index(name)] = value
    with pytest.raises(MalformedFrame):
        Heartbeat.parse(values, 4)


@pytest.mark.parametrize("values", [None, [], {}, [0] * 12, [0] * 14, "row"])
def test_a_heartbeat_of_another_shape_is_malformed(values):
    with pytest.raises(MalformedFrame):
        Heartbeat.parse(values, 4)


WRONG_NOTICES = {
    "kind": [None, "unknown", 3, []],
    "rank": [4, -2, "0", None],
    "by": [-1, 4],
    "ago": [None, math.nan],
    "name": [None, "x" * 201],
    "text": [3, ["a"]],
    "code": ["1", 1.5],
    "step": [None],
    "phase": [None],
    "bucket": [1.5],
    "others": [None, [7], 3],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_NOTICES.items() for v in values])
def test_a_notice_with_an_invalid_field_is_malformed(name, value):
    with pytest.raises(MalformedFrame):
        FailureNotice.parse(json.loads(json.dumps(NOTICE.message()))["note"] | {name: value}, 4)


@pytest.mark.parametrize("found", [None, [], {}, {"kind": "raised"}])
def test_a_notice_of_another_shape_is_malformed(found):
    with pytest.raises(MalformedFrame):
        FailureNotice.parse(found, 4)
    with pytest.raises(MalformedFrame):
        FailureNotice.parse(NOTICE.message()["note"] | {"more": 1}, 4)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=20)
)
def test_any_other_json_is_malformed(value):
    for make in (Heartbeat.parse, FailureNotice.parse):
        with pytest.raises(MalformedFrame):
            make(value, 4)


def test_a_time_beyond_float64_is_malformed():
    values = json.loads(json.dumps(HEARTBEAT.message()))["row"]
    values[list(WRONG_HEARTBEATS).index("age")] = 10**400
    with pytest.raises(MalformedFrame, match="age"):
        Heartbeat.parse(values, 4)


def test_negative_times_become_zero():
    values = json.loads(json.dumps(HEARTBEAT.message()))["row"]
    values[list(WRONG_HEARTBEATS).index("age")] = -3.0
    assert Heartbeat.parse(values, 4).age == 0.0


def test_an_attribution_may_name_no_single_rank():
    (message,) = parse_frames(encode_frame(FailureNotice("verdict", -1, 0).message()))
    assert FailureNotice.parse(message["note"], 4).rank == -1


@pytest.mark.parametrize("kind", NOTICE_KINDS)
def test_notices_differ_by_kind_rank_and_reporter(kind):
    one, other = FailureNotice(kind, 1, 0, name="a"), FailureNotice(kind, 1, 0, name="b")
    assert one.key == other.key
    assert one.key != FailureNotice(kind, 2, 0, name="a").key
    assert one.key != FailureNotice(kind, 1, 2, name="a").key


@given(st.text(max_size=50) | st.just("é\ud800\x00" * 20_000))
def test_any_clipped_text_fits_into_a_message(text):
    notice = FailureNotice("raised", 0, 0, text=clip_text(text))
    (found,) = parse_frames(encode_frame(notice.message()))
    assert FailureNotice.parse(found["note"], 4) == notice


def test_clipping_keeps_beginning_and_end():
    text = "begin " + "x" * 100_000 + " end"
    short = clip_text(text)
    assert short.startswith("begin")
    assert short.endswith(" end")
    assert "characters left out" in short
    assert len(short) < 17_000
    assert clip_text("short") == "short"


def test_frames_hold_plain_json():
    data = encode_frame(HEARTBEAT.message())
    assert json.loads(data[4:]) == json.loads(json.dumps(HEARTBEAT.message()))
