"""Quantities in and out: exact values, round trips, and refusals that name the valid ones."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._core.format import format_bytes, format_count, format_seconds
from paceline._core.units import MIB, parse_bytes, parse_count, parse_rate, parse_seconds, parse_share
from paceline.errors import UsageError

DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
PREFIXES = {"": 1} | DECIMAL | BINARY


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("25MiB", 25 * MIB),
        ("5MB", 5_000_000),
        ("1.5 GiB", 3 * 2**29),
        (" 7 kB ", 7000),
        ("12", 12),
        ("12B", 12),
        ("0", 0),
        ("1e3MB", 10**9),
        ("1_000kB", 10**6),
        ("64mib", 64 * MIB),
        (17, 17),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1Gbit/s", 125e6),
        ("100Mbps", 12.5e6),
        ("40MB/s", 40e6),
        ("1GiB/s", 2.0**30),
        ("800bit/s", 100.0),
        ("5B/s", 5.0),
        (3, 3.0),
        (2.5, 2.5),
    ],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250us", 250e-6),
        ("250µs", 250e-6),
        ("1.5ms", 1.5e-3),
        ("10ns", 1e-8),
        ("2s", 2.0),
        ("5min", 300.0),
        ("0.5h", 1800.0),
        (7, 7.0),
        (0.25, 0.25),
    ],
)
def test_times(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@given(st.integers(0, 10**6), st.sampled_from(sorted(PREFIXES)))
def test_a_size_is_its_number_times_its_prefix(number, prefix):
    assert parse_bytes(f"{number} {prefix}B") == number * PREFIXES[prefix]


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_to_three_digits(nbytes):
    text = format_bytes(nbytes)
    if not text.endswith("PiB"):  # larger than what is read
        assert parse_bytes(text) == pytest.approx(nbytes, rel=0.006)


@given(st.integers(0, 10**6), st.sampled_from(sorted(PREFIXES)))
def test_a_rate_in_bits_is_an_eighth_of_one_in_bytes(number, prefix):
    assert parse_rate(f"{number}{prefix}bit/s") * 8 == pytest.approx(
        parse_rate(f"{number}{prefix}B/s"), rel=1e-12
    )
    assert parse_rate(f"{number}{prefix}bps") == parse_rate(f"{number}{prefix}bit/s")


@given(st.floats(1e-9, 59.9))
def test_a_formatted_time_reads_back_to_three_digits(seconds):
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)


@given(st.integers(60, 10**7))
def test_a_long_time_is_shown_to_the_second_or_minute(seconds):
    parts = re.findall(r"(\d+) (h|min|s)\b", format_seconds(seconds))
    shown = sum(int(number) * {"h": 3600, "min": 60, "s": 1}[unit] for number, unit in parts)
    assert 0 <= seconds - shown < (60 if seconds >= 3600 else 1)


@given(st.floats(0, 1e15))
def test_a_formatted_count_reads_back_to_three_digits(count):
    number, _, prefix = format_count(count).partition(" ")
    assert float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[prefix] == pytest.approx(
        count, rel=0.006
    )


@given(st.floats(0, 1e17))
def test_no_number_is_shown_with_an_exponent(value):
    for text in (format_bytes(value), format_count(min(value, 1e15)), format_seconds(value)):
        assert "e+" not in text


def test_a_value_is_rounded_before_its_unit_is_chosen():
    assert format_bytes(1000 * 1024) == "1000 KiB"
    assert format_bytes(1023.9) == "1 KiB"
    assert format_count(999_700) == "1 M"
    assert format_seconds(0.9996) == "1 s"
    assert format_seconds(59.9996) == "1 min 0 s"


@pytest.mark.parametrize(
    "text",
    ["", "MB", "five MB", "5 XB", "5 M", "-5MB", "5MB/s", "5 MB extra", "nan", "inf", "1e999GB", "9" * 400],
)
def test_an_invalid_size_is_refused(text):
    with pytest.raises(UsageError, match="is no size") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "MiB" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "fast", "5MB", "5", "1 Xbit/s", "1 Gbit/h", "-1Gbit/s", "1e400Gbit/s"])
def test_an_invalid_rate_is_refused(text):
    with pytest.raises(UsageError, match="is no rate"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "soon", "5", "5 days", "-1s", "1MB", "1e400s"])
def test_an_invalid_time_is_refused(text):
    with pytest.raises(UsageError, match="is no time"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (25 * MIB, "25 MiB"), (-MIB, "-1 MiB"), (2.0**50, "1 PiB"),
     (2.0**60, "1024 PiB")],
)  # fmt: skip
def test_sizes_are_formatted(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00025, "250 µs"), (0.0123, "12.3 ms"), (1.0, "1 s"), (59.94, "59.9 s"), (75, "1 min 15 s"), (3600, "1 h 0 min"),
     (5e-9, "5 ns"), (0, "0 s")],
)  # fmt: skip
def test_times_are_formatted(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (12_345_678, "12.3 M"), (1e12, "1 T"), (0, "0"), (1500, "1.5 k")]
)
def test_counts_are_formatted(count, text):
    assert format_count(count) == text


def test_no_parsed_word_is_infinite():
    assert math.isfinite(parse_seconds("1e200d"))
    assert math.isfinite(parse_rate("1e200TiB/s"))


@pytest.mark.parametrize(
    ("text", "count"),
    [("20M", 20_000_000), ("1.5B", 1_500_000_000), ("2 G", 2 * 10**9), ("4_000", 4000), (7, 7)],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("5 %", 0.05), (0.5, 0.5)])
def test_shares(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "many", "20MiB", "-3", "3Q", "10%", "1e400"])
def test_invalid_counts_are_refused(text):
    with pytest.raises(UsageError, match="is no count"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "half", "10 MB", "-3%", "1/2", "10/"])
def test_invalid_shares_are_refused(text):
    with pytest.raises(UsageError, match="is no share"):
        parse_share(text)
