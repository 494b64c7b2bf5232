"""Queue of outgoing messages: order, fairness and rate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_token_bucket import most_in_any

from paceline.errors import UsageError
from paceline.transport.envelope import Envelope
from paceline.transport.header_layout import Header
from paceline.transport.paced_queue import PacedQueue, wire_nbytes
from paceline.transport.token_bucket import ENVELOPE_OVERHEAD_NBYTES, TokenBucket


def envelope(target, sequence, nbytes, **meta):
    return Envelope(Header("run", "frame", 0, target, sequence, meta=meta), bytes(nbytes))


def keys(envelopes):
    return [(each.header.target, each.header.sequence) for each in envelopes]


LONG, SHORT = 100_000, 100


def put(paced, *envelopes):
    for each in envelopes:
        paced.add(each.header.target, iter([each]), short=len(each.payload) <= 4096)


class FakeTransport:
    """Accepts up to `room` envelopes, except those for `blocked` targets."""

    def __init__(self, room=math.inf):
        self.taken, self.blocked, self.room = [], set(), room

    def __call__(self, given):
        if given.header.target in self.blocked or self.room < 1:
            return False
        self.room -= 1
        self.taken.append(given)
        return True


def test_without_a_bucket_everything_is_sent_at_once_interleaved_and_in_order():
    paced, transport = PacedQueue(), FakeTransport()
    for target in (1, 2, 3):
        for sequence in range(target):
            put(paced, envelope(target, sequence, LONG))
    assert paced.pump(0.0, transport) == math.inf
    assert keys(transport.taken) == [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (3, 2)]
    assert paced.pump(0.0, transport) == math.inf, "nothing is left"


def test_short_envelopes_go_first():
    paced, transport = PacedQueue(), FakeTransport()
    put(paced, envelope(1, 0, LONG))
    put(paced, envelope(1, 1, 4097))
    put(paced, envelope(2, 0, LONG))
    put(paced, envelope(1, 2, 4096))
    put(paced, envelope(2, 1, 0))
    paced.pump(0.0, transport)
    assert keys(transport.taken) == [(1, 2), (2, 1), (1, 0), (2, 0), (1, 1)]


def test_targets_go_on_in_turn_where_the_bucket_stopped():
    bucket = TokenBucket(rate=1e6, burst=1.5 * LONG, now=0.0)
    paced, transport, now = PacedQueue(bucket=bucket), FakeTransport(), 0.0
    for sequence in range(3):
        for target in (1, 2, 3):
            put(paced, envelope(target, sequence, LONG))
    while (wait := paced.pump(now, transport)) < math.inf:
        assert wait > 0
        now += wait
    assert keys(transport.taken) == [(target, sequence) for sequence in range(3) for target in (1, 2, 3)]
    assert now == pytest.approx((9 * (LONG + ENVELOPE_OVERHEAD_NBYTES) - 1.5 * LONG) / 1e6)


def test_a_long_envelope_is_not_overtaken_by_those_that_would_fit():
    paced, transport = (
        PacedQueue(bucket=TokenBucket(rate=1e6, burst=LONG + ENVELOPE_OVERHEAD_NBYTES, now=0.0)),
        FakeTransport(),
    )
    for target, nbytes in ((1, LONG), (2, LONG), (3, 5000)):
        put(paced, envelope(target, 0, nbytes))
    wait = paced.pump(0.0, transport)
    assert keys(transport.taken) == [(1, 0)]
    put(paced, envelope(4, 0, SHORT))
    assert paced.pump(wait / 2, transport) > 0
    assert keys(transport.taken) == [(1, 0), (4, 0)], "a short one goes first: it costs the long ones little"


def test_a_target_with_its_own_bucket_delays_no_other():
    paced, transport = PacedQueue(), FakeTransport()
    paced.limit(1, TokenBucket(rate=1e5, burst=LONG + ENVELOPE_OVERHEAD_NBYTES, now=0.0))
    for sequence in range(3):
        put(paced, envelope(1, sequence, LONG))
        put(paced, envelope(2, sequence, LONG))
    wait = paced.pump(0.0, transport)
    assert keys(transport.taken) == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert wait == pytest.approx((LONG + ENVELOPE_OVERHEAD_NBYTES) / 1e5)
    assert paced.pump(wait * 0.9, transport) == pytest.approx(wait * 0.1)
    paced.pump(wait, transport)
    assert keys(transport.taken)[-1] == (1, 1)
    paced.limit(1, None)
    assert paced.pump(wait, transport) == math.inf


def test_a_blocked_peer_delays_no_other_and_keeps_its_place():
    paced, transport = PacedQueue(), FakeTransport()
    transport.blocked.add(1)
    for sequence in range(3):
        put(paced, envelope(1, sequence, LONG if sequence else SHORT))
        put(paced, envelope(2, sequence, LONG))
    assert 0 < paced.pump(0.0, transport) < 0.1
    assert keys(transport.taken) == [(2, 0), (2, 1), (2, 2)]
    transport.blocked.clear()
    assert paced.pump(0.01, transport) == math.inf
    assert keys(transport.taken[3:]) == [(1, 0), (1, 1), (1, 2)]


def test_an_envelope_that_is_not_accepted_uses_no_tokens():
    bucket = TokenBucket(rate=1e6, burst=1e6, now=0.0)
    paced, transport = PacedQueue(bucket=bucket), FakeTransport(room=0)
    put(paced, envelope(1, 0, LONG))
    paced.pump(0.0, transport)
    assert bucket.available(0.0) == 1_000_000


def test_messages_are_made_only_as_they_can_be_sent():
    paced, transport, made = PacedQueue(), FakeTransport(room=5), []

    def message(target):
        for sequence in range(1000):
            made.append(target)
            yield envelope(target, sequence, LONG)

    for target in range(1, 41):
        paced.add(target, message(target), short=False)
    paced.pump(0.0, transport)
    assert len(made) == 45, "one per target is held, and five were sent"


def test_a_peer_without_room_is_tried_ever_more_rarely():
    paced, transport, pumped = PacedQueue(), FakeTransport(), 0
    transport.blocked.add(1)
    put(paced, envelope(1, 0, LONG))
    now = 0.0
    while now < 10.0:
        now += paced.pump(now, transport)
        pumped += 1
    assert 100 < pumped < 200
    transport.blocked.clear()
    assert paced.pump(now, transport) == math.inf


def test_a_target_that_is_forgotten_gets_nothing():
    paced, transport = PacedQueue(), FakeTransport()
    put(paced, envelope(1, 0, LONG), envelope(1, 1, SHORT), envelope(2, 0, SHORT))
    paced.forget(1)
    paced.forget(1)
    paced.pump(0.0, transport)
    assert keys(transport.taken) == [(2, 0)]


def test_an_unsendable_message_raises_once():
    paced, transport = PacedQueue(), FakeTransport()
    wrong = envelope(1, 0, LONG)

    def send(given):
        if given is wrong:
            raise UsageError("it can't be")
        return transport(given)

    put(paced, wrong)
    put(paced, envelope(1, 1, LONG))
    with pytest.raises(UsageError, match="it can't be"):
        paced.pump(0.0, send)
    assert paced.pump(0.0, send) == math.inf
    assert keys(transport.taken) == [(1, 1)]
    assert paced.pump(0.0, send) == math.inf, "nothing is left"


def test_long_texts_in_a_header_count():
    plain = envelope(1, 0, SHORT)
    annotated = Envelope(replace(plain.header, meta={"text": "x" * 8000, "score": 0.5}), plain.payload)
    assert wire_nbytes(annotated) >= wire_nbytes(plain) + 8000


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, SHORT, 5000, 20_000, LONG])), max_size=40),
    st.randoms(use_true_random=False),
)
def test_every_envelope_is_sent_once_in_order_at_the_rate(requests, draw):
    rate, burst = 1e6, LONG + ENVELOPE_OVERHEAD_NBYTES
    paced, now, left = PacedQueue(bucket=TokenBucket(rate, burst, 0.0)), 0.0, []

    def send(given):
        if draw.random() < 0.2:
            return False
        left.append((now, given))
        return True

    for sequence, (target, nbytes) in enumerate(requests):
        put(paced, envelope(target, sequence, nbytes))
    while (wait := paced.pump(now, send)) < math.inf:
        now += wait
    assert sorted(each.header.sequence for _, each in left) == list(range(len(requests)))
    for target in range(1, 5):
        for is_long in (False, True):
            mine = [
                each.header.sequence
                for _, each in left
                if each.header.target == target and (len(each.payload) > 4096) == is_long
            ]
            assert mine == sorted(mine)
    assert most_in_any(1.0, [(at, wire_nbytes(each)) for at, each in left]) <= rate + burst + 1
    assert paced.pump(now, send) == math.inf, "nothing is left"
