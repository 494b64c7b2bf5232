"""Token bucket: no second exceeds the rate for any clock; shares of a link."""

from __future__ import annotations

import math
import os
import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.transport.token_bucket import (
    ENVELOPE_OVERHEAD_NBYTES,
    TokenBucket,
    make_token_bucket,
    max_frame_nbytes,
    parse_share,
    set_kernel_pacing,
)

PACKET, CARRIED = 1514, 1448


def most_in_any(seconds, left):
    """Return the most bytes in a window, of pairs of time and bytes in the order of time."""
    most, first, nbytes = 0, 0, 0
    for time, size in left:
        nbytes += size
        while left[first][0] < time - seconds:
            nbytes -= left[first][1]
            first += 1
        most = max(most, nbytes)
    return most


@settings(deadline=None)
@given(
    st.floats(1e3, 1e9),
    st.floats(0.01, 2.0),
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0.001, 1.0)), min_size=1, max_size=60),
)
def test_no_second_has_more_than_the_rate_and_the_burst(rate, burst_seconds, requests):
    burst = rate * burst_seconds
    bucket, now, left = TokenBucket(rate, burst, 0.0), 0.0, []
    for pause, part in requests:
        now += pause
        nbytes = part * burst
        now += bucket.seconds_until(nbytes, now)
        assert bucket.seconds_until(nbytes, now) == 0.0
        bucket.take(nbytes, now)
        left.append((now, nbytes))
    assert most_in_any(1.0, left) <= (rate + burst) * (1 + 1e-6) + 1


def test_available_bytes_are_those_accrued():
    bucket = TokenBucket(1000, 100, now=5.0)
    assert (bucket.available(5.0), bucket.seconds_until(100, 5.0)) == (100, 0.0)
    bucket.take(100, 5.0)
    assert bucket.available(5.0) == 0
    assert bucket.seconds_until(1, 5.0) == pytest.approx(0.001)
    assert bucket.available(5.05) == 50
    assert bucket.seconds_until(100, 5.05) == pytest.approx(0.05)
    assert bucket.available(99.0) == 100


def test_an_oversized_envelope_is_sent_when_the_bucket_is_full_and_repaid():
    bucket = TokenBucket(1000, 100, now=0.0)
    assert bucket.seconds_until(350, 0.0) == 0.0
    bucket.take(350, 0.0)
    assert bucket.seconds_until(350, 0.0) == pytest.approx(0.35)
    assert (bucket.available(0.25), bucket.available(0.3)) == (0, 50)


def test_after_the_reported_wait_the_bytes_are_available():
    bucket, now = TokenBucket(1e9 / 3, 1e5, 0.0), 1e6
    for _ in range(1000):
        bucket.take(77_777, now)
        for _ in range(3):
            now += bucket.seconds_until(77_777, now)
        assert bucket.seconds_until(77_777, now) == 0.0


def test_a_clock_that_is_put_back_neither_stops_the_bucket_nor_fills_it():
    bucket = TokenBucket(1000, 100, now=1000.0)
    bucket.take(100, 1000.0)
    assert bucket.available(3.0) == 0
    assert bucket.seconds_until(100, 3.0) == pytest.approx(0.1)
    assert bucket.available(3.05) == 50


def test_a_clock_that_leaps_ahead_fills_the_bucket_and_no_more():
    bucket = TokenBucket(1000, 100, now=0.0)
    bucket.take(1_000, 0.0)
    assert bucket.available(1e12) == 100
    assert bucket.available(0.0) == 100


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_a_bucket_without_rate_or_end_is_refused(value):
    for rate, burst in ((value, 1.0), (1.0, value)):
        with pytest.raises(UsageError, match="is not positive and finite"):
            TokenBucket(rate, burst, 0.0)
    with pytest.raises(UsageError):
        make_token_bucket(value, 0.0)


@pytest.mark.parametrize("rate", [40e3, 375e3, 7.5e6, 125e6])
def test_with_all_headers_no_second_has_a_tenth_more_than_the_share(rate):
    draw = random.Random(5)
    bucket, now, left = make_token_bucket(rate, 0.0), 0.0, []
    size = max_frame_nbytes(rate)
    while now < 4.0:
        if draw.random() < 0.05:
            now += draw.random()  # nothing to send for a while, or a thread that is late
        nbytes = size if draw.random() < 0.7 else draw.randrange(1, size)
        now += bucket.seconds_until(nbytes + ENVELOPE_OVERHEAD_NBYTES, now)
        bucket.take(nbytes + ENVELOPE_OVERHEAD_NBYTES, now)
        comm = (nbytes + 300) * PACKET / CARRIED + PACKET - CARRIED  # 300: of an envelope's own, measured
        left.append((now, comm))
    assert most_in_any(1.0, left) <= 1.1 * rate


def test_a_sender_that_is_called_late_loses_little():
    rate, now, sent = 7.5e6, 0.0, 0
    bucket, size = make_token_bucket(rate, 0.0), max_frame_nbytes(rate)
    while now < 10.0:
        while bucket.seconds_until(size + ENVELOPE_OVERHEAD_NBYTES, now) == 0:
            bucket.take(size + ENVELOPE_OVERHEAD_NBYTES, now)
            sent += size
        now += 0.03
    assert sent * PACKET / CARRIED > 0.9 * 10 * rate


def test_a_frame_fits_into_the_bucket_of_its_rate():
    for rate in (40e3, 1e5, 1e6, 7.5e6, 1e9):
        assert max_frame_nbytes(rate) + ENVELOPE_OVERHEAD_NBYTES <= make_token_bucket(rate, 0.0).burst
    assert max_frame_nbytes(None) == max_frame_nbytes(1e9) == 256 << 10
    assert max_frame_nbytes(1.0) > 0


@pytest.mark.parametrize(
    ("text", "link", "rate"),
    [
        ("40MB/s", None, 40e6),
        ("300Mbit/s", None, 37.5e6),
        ("300Mbit/s", 125e6, 37.5e6),
        ("30%", 125e6, 37.5e6),
        (" 30 % ", 100.0, 30.0),
        ("0.5%", 1e6, 5e3),
        ("100%", 125e6, 125e6),
        ("30% of 200Mbit/s", None, 7.5e6),
        ("30% of 200Mbit/s", 125e6, 7.5e6),
        ("125MB/s", 125e6, 125e6),
    ],
)
def test_a_share_is_a_rate(text, link, rate):
    assert parse_share(text, link) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "link", "message"),
    [
        ("30%", None, "whose rate is not known\n.*30% of 200Mbit/s"),
        ("0%", 1e6, "more than 0 %"),
        ("-5%", 1e6, "more than 0 %"),
        ("100.1%", 1e6, "at most 100 %"),
        ("nan%", 1e6, "more than 0 %"),
        ("inf%", 1e6, "more than 0 %"),
        ("%", 1e6, "is not a share"),
        ("a third", 1e6, "is no rate"),
        ("", 1e6, "is no rate"),
        ("30", 1e6, "unknown unit"),
        ("0MB/s", None, "is zero"),
        ("1e400MB/s", None, "is no rate"),
        ("2MB/s", 1e6, "more than the link's 1 MB/s"),
        ("30% of 2MB/s of 3", None, "unknown unit|is no rate"),
        ("30% of", None, "."),
        ("30% of 200MB/s", 1e6, "more than the link's"),
        ("5MB/s of 200MB/s", None, "'5MB/s' is not a share"),
        ("30% of 30%", 1e6, "is no rate|unknown unit"),
    ],
)
def test_an_impossible_share_is_a_usage_error(text, link, message):
    with pytest.raises(UsageError, match=message):
        parse_share(text, link)


@settings(deadline=None)
@given(st.text(alphabet="0123456789.%e -+ofMBits/knainf", max_size=24), st.none() | st.floats(1.0, 1e12))
def test_any_text_is_a_rate_or_a_usage_error(text, link):
    try:
        rate = parse_share(text, link)
    except UsageError:
        return
    assert 0 < rate < math.inf
    assert link is None or rate <= link * 1.001


def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def pacing_rate(connection):
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, 47, 4), "little")


def test_the_kernel_holds_a_connection_to_a_rate():
    one, other = connected()
    with one, other:
        assert set_kernel_pacing(one.fileno(), 5e6)
        assert pacing_rate(one) == 5_000_000
        assert set_kernel_pacing(one.fileno(), 6e6, port=other.getsockname()[1])
        assert pacing_rate(one) == 6_000_000
        assert set_kernel_pacing(one.fileno(), 1e12), "the highest rate"
        assert one.send(b"still open")


def test_the_kernel_holds_nothing_that_is_not_that_connection():
    one, other = connected()
    with one, other:
        before = pacing_rate(one)
        ports = {one.getsockname()[1], other.getsockname()[1]}
        assert not set_kernel_pacing(
            one.fileno(), 5e6, port=next(port for port in range(1, 9) if port not in ports)
        )
        assert pacing_rate(one) == before
        number = one.fileno()
    assert not set_kernel_pacing(number, 5e6)
    assert not set_kernel_pacing(-1, 5e6)
    with open("/dev/null") as file:
        before = len(os.listdir("/proc/self/fd"))
        assert not set_kernel_pacing(file.fileno(), 5e6)
        assert len(os.listdir("/proc/self/fd")) == before, "no descriptor of it stays"
    left, right = socket.socketpair()
    with left, right:
        assert not set_kernel_pacing(left.fileno(), 5e6)
    with pytest.raises(UsageError):
        set_kernel_pacing(0, 0.0)
