"""What watchers tell each other: there and back, cut anywhere, and whatever else comes in."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.health.heartbeat import (
    KINDS,
    LARGEST_NBYTES,
    FailureNotice,
    FrameParser,
    Heartbeat,
    MalformedFrame,
    clipped,
    pack,
)

ROW = Heartbeat(1, 5, 20, "backward", "eval", 3, True, 0.25, 1.5, 19, 12.5, False, (0, 2))
NOTICE = FailureNotice("raised", 2, 2, 0.5, "ValueError: no", "Traceback …\n", None, 20, "forward", -1, (0,))


def through(data, *cuts):
    inbox, found, start = FrameParser(), [], 0
    for end in [*sorted(cuts), len(data)]:
        found += inbox.feed(data[start:end])
        start = end
    return found


def test_a_row_and_a_notice_come_back_as_they_were():
    row, note = through(pack(ROW.message()) + pack(NOTICE.message()))
    assert Heartbeat.of(row["row"], 4) == ROW
    assert FailureNotice.of(note["note"], 4) == NOTICE


@given(st.lists(st.integers(0, 600), max_size=8))
def test_messages_may_come_in_any_pieces(cuts):
    data = pack(ROW.message()) + pack(NOTICE.message()) + pack({"ack": ["raised", "1", "1", ""]})
    assert len(through(data, *(min(cut, len(data)) for cut in cuts))) == 3


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
def test_what_is_no_object_is_malformed(body):
    with pytest.raises(MalformedFrame):
        list(FrameParser().feed(struct.pack(">I", len(body)) + body))


def test_a_message_that_says_it_is_huge_is_refused_before_it_comes():
    with pytest.raises(MalformedFrame, match="a message of"):
        list(FrameParser().feed(struct.pack(">I", LARGEST_NBYTES + 1)))


WRONG_ROWS = {
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


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_ROWS.items() for v in values])
def test_a_row_with_a_wrong_field_is_malformed(name, value):
    values = json.loads(json.dumps(ROW.message()))["row"]
    values[list(WRONG_ROWS).index(name)] = value
    with pytest.raises(MalformedFrame):
        Heartbeat.of(values, 4)


@pytest.mark.parametrize("values", [None, [], {}, [0] * 12, [0] * 14, "row"])
def test_a_row_of_another_form_is_malformed(values):
    with pytest.raises(MalformedFrame):
        Heartbeat.of(values, 4)


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
def test_a_notice_with_a_wrong_field_is_malformed(name, value):
    with pytest.raises(MalformedFrame):
        FailureNotice.of(json.loads(json.dumps(NOTICE.message()))["note"] | {name: value}, 4)


@pytest.mark.parametrize("found", [None, [], {}, {"kind": "raised"}])
def test_a_notice_of_another_form_is_malformed(found):
    with pytest.raises(MalformedFrame):
        FailureNotice.of(found, 4)
    with pytest.raises(MalformedFrame):
        FailureNotice.of(NOTICE.message()["note"] | {"more": 1}, 4)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=20)
)
def test_any_json_is_a_row_or_malformed(value):
    for make in (Heartbeat.of, FailureNotice.of):
        with pytest.raises(MalformedFrame):
            make(value, 4)


def test_a_time_that_no_float_holds_is_malformed():
    values = json.loads(json.dumps(ROW.message()))["row"]
    values[list(WRONG_ROWS).index("age")] = 10**400
    with pytest.raises(MalformedFrame, match="age="):
        Heartbeat.of(values, 4)


def test_a_time_that_lies_in_the_future_is_now():
    values = json.loads(json.dumps(ROW.message()))["row"]
    values[list(WRONG_ROWS).index("age")] = -3.0
    assert Heartbeat.of(values, 4).age == 0.0


def test_a_verdict_may_be_on_no_single_rank():
    (told,) = through(pack(FailureNotice("verdict", -1, 0).message()))
    assert FailureNotice.of(told["note"], 4).rank == -1


@pytest.mark.parametrize("kind", KINDS)
def test_notices_are_told_apart_by_kind_rank_and_teller_and_stacks_by_name(kind):
    one, other = FailureNotice(kind, 1, 0, name="a"), FailureNotice(kind, 1, 0, name="b")
    assert (one.key == other.key) == (kind != "stack")
    assert one.key != FailureNotice(kind, 2, 0, name="a").key
    assert one.key != FailureNotice(kind, 1, 2, name="a").key


@given(st.text(max_size=50) | st.just("é\ud800\x00" * 20_000))
def test_any_text_fits_into_a_message_once_it_is_clipped(text):
    notice = FailureNotice("raised", 0, 0, text=clipped(text))
    (found,) = through(pack(notice.message()))
    assert FailureNotice.of(found["note"], 4) == notice


def test_clipping_keeps_beginning_and_end():
    text = "begin " + "x" * 100_000 + " end"
    short = clipped(text)
    assert short.startswith("begin")
    assert short.endswith(" end")
    assert "characters left out" in short
    assert len(short) < 17_000
    assert clipped("short") == "short"


def test_what_is_sent_is_json_that_anybody_can_read():
    data = pack(ROW.message())
    assert json.loads(data[4:]) == json.loads(json.dumps(ROW.message()))
