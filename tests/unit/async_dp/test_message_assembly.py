"""Messages are split into frames, and assembled from frames in any order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.async_dp.protocol.hub_messages import HubMessage, meta_number, meta_text
from paceline.async_dp.protocol.message_assembly import MessageAssembler, ReplayWindow, split_message
from paceline.transport.envelope import Envelope, decode, encode


def frames(payload: bytes, *, round: int = 0, source: int = 3, frame_nbytes: int = 4096) -> list[Envelope]:
    message = HubMessage("update", source, 0, round, 0, {"base": 7}, payload, "int4")
    return list(split_message(message, "run", 10, session_id=5, frame_nbytes=frame_nbytes))


@given(
    st.binary(min_size=0, max_size=40_000),
    st.randoms(use_true_random=False),
    st.integers(min_value=4096, max_value=16_384),
)
@settings(max_examples=60, deadline=None)
def test_frames_in_any_order_with_repeats_make_the_message(payload: bytes, drawn, frame_nbytes: int) -> None:
    cuts = frames(payload, frame_nbytes=frame_nbytes)
    dealt = cuts + [drawn.choice(cuts) for _ in range(3)]
    drawn.shuffle(dealt)
    assembler, whole = MessageAssembler(lambda header: 1 << 20), []
    for envelope in dealt:
        header, body = decode(b"".join(bytes(each) for each in encode(envelope.header, envelope.payload)))
        message = assembler.add(Envelope(header, body))
        if message is not None:
            whole.append(message)
    assert whole
    assert all(bytes(each.payload) == payload for each in whole)
    assert whole[0].meta["base"] == 7
    assert (whole[0].round, whole[0].dtype, whole[0].source) == (0, "int4", 3)


def test_sequence_numbers_follow_one_another_over_frames() -> None:
    assert [each.header.sequence for each in frames(bytes(10_000))] == [10, 11, 12]
    assert {each.header.meta["session"] for each in frames(bytes(10_000))} == {5}


def test_an_unexpected_or_too_long_message_takes_no_memory() -> None:
    assembler = MessageAssembler(lambda header: 5000 if header.kind == "update" else None)
    for envelope in frames(bytes(10_000)):
        assert assembler.add(envelope) is None
    other = next(iter(split_message(HubMessage("strange", 3, 0, payload=b"x"), "run", 0)))
    assert assembler.add(other) is None
    assert assembler.refused == {"too long": 3, "unexpected": 1}
    assert assembler.held_nbytes == 0


def test_a_source_has_one_incomplete_message_per_kind_and_fragment() -> None:
    assembler = MessageAssembler(lambda header: 1 << 20)
    for round in range(50):
        assembler.add(frames(bytes(10_000), round=round)[0])
    assert assembler.held_nbytes == 10_000


def test_a_message_without_memory_waits_and_none_that_is_being_received_is_dropped_for_it() -> None:
    assembler = MessageAssembler(lambda header: 1 << 20, max_nbytes=25_000)
    split = {source: frames(bytes(10_000), source=source) for source in range(1, 6)}
    for source in split:
        assert assembler.add(split[source][0]) is None
    assert assembler.held_nbytes == 20_000
    waiting = [(each.key[0], each.ready) for each in assembler.notices()]
    assert waiting == [(3, False), (4, False), (5, False)]
    assert assembler.notices() == []
    for envelope in split[4]:
        assert assembler.add(envelope) is None, "it is not its turn"
    done = [assembler.add(each) for each in split[1][1:]][-1]
    assert done is not None
    assert [(each.key[0], each.ready) for each in assembler.notices()] == [(3, True)]
    assert assembler.add(split[5][0]) is None
    assert [assembler.add(each) for each in split[3]][-1] is not None
    assembler.forget(4)
    assert [(each.key[0], each.ready) for each in assembler.notices()] == [(5, True)]


def test_a_message_that_stalls_makes_room_for_those_that_wait() -> None:
    assembler = MessageAssembler(lambda header: 1 << 20, max_nbytes=10_000)
    assembler.add(frames(bytes(10_000), source=1)[0], now=0.0)
    assembler.add(frames(bytes(10_000), source=2)[0], now=1.0)
    assert [each.ready for each in assembler.notices(30.0)] == [False]
    assert [each.ready for each in assembler.notices(61.0)] == [True]
    assert (assembler.held_nbytes, assembler.refused["stalled"]) == (0, 1)


def test_a_message_beyond_the_limit_is_received_alone() -> None:
    assembler = MessageAssembler(lambda header: 1 << 20, max_nbytes=5_000)
    assert [assembler.add(each) for each in frames(bytes(10_000))][-1] is not None


def test_a_message_of_too_many_frames_is_refused() -> None:
    envelope = frames(bytes(10_000))[0]
    from dataclasses import replace

    header = replace(envelope.header, frames=10**9)
    assembler = MessageAssembler(lambda header: 1 << 20)
    assert assembler.add(Envelope(header, envelope.payload)) is None
    assert assembler.refused == {"too many frames": 1}


def test_forgotten_sources_take_no_memory() -> None:
    assembler = MessageAssembler(lambda header: 1 << 20)
    assembler.add(frames(bytes(10_000))[0])
    assembler.forget(3)
    assembler.forget(4)
    assert assembler.held_nbytes == 0


@given(st.lists(st.integers(min_value=0, max_value=6000), max_size=200))
@settings(max_examples=200, deadline=None)
def test_the_window_admits_every_number_once(numbers: list[int]) -> None:
    window, seen, highest = ReplayWindow(), set[int](), -1
    for each in numbers:
        old = each <= highest - ReplayWindow.SIZE
        assert window.admit(each) is (each not in seen and not old)
        seen.add(each)
        highest = max(highest, each)


def test_values_of_untrusted_meta_are_checked() -> None:
    meta = {"steps": True, "lr": "fast", "score": 2, "name": "a\x1b[31m\nb" + "c" * 300}
    assert meta_number(meta, "steps") is None
    assert meta_number(meta, "lr") is None
    assert meta_number(meta, "score") == 2
    assert meta_text(meta, "name").startswith("a[31mb")
    assert len(meta_text(meta, "name")) <= 200
    assert meta_text(meta, "missing") == ""


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097])
def test_a_short_message_is_one_envelope(nbytes: int) -> None:
    assert len(frames(bytes(nbytes))) == (1 if nbytes <= 4096 else 2)


def test_frames_of_the_lowest_rate_are_accepted() -> None:
    from paceline.transport.token_bucket import max_frame_nbytes

    nbytes = max_frame_nbytes(1000.0)
    cuts = frames(bytes(100_000), frame_nbytes=nbytes)
    assembler = MessageAssembler(lambda header: 1 << 20)
    whole = [message for message in map(assembler.add, cuts) if message is not None]
    assert len(whole) == 1
    assert assembler.refused == {}
