"""Options that list or sweep values: parsed values, and refusals that name the option and the valid form."""

from __future__ import annotations

import math

import pytest

from paceline._core.units import parse_bytes, parse_list, parse_sweep
from paceline.errors import UsageError


def sizes(text):
    return parse_sweep("--bytes", text, parse_bytes, example="1MB", strict=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1MB,10MB,100MB,1024MB", (10**6, 10**7, 10**8, 1_024_000_000)),
        ("64KiB:64MiB:x2", tuple(65536 * 2**step for step in range(11))),
        ("1kB:10kB:x10", (1000, 10_000)),
        ("1kB:9kB:x10", (1000,)),
        ("1kB:2kB:+250B, 4, 1kB", (4, 1000, 1250, 1500, 1750, 2000)),
        ("100:200:x1.5", (100, 150)),
    ],
)
def test_sizes_and_sweeps(text, expected):
    assert sizes(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--bytes '' is empty"),
        ("big", "--bytes 'big': 'big' is no size"),
        ("0", "--bytes '0': 0 is below 1"),
        ("1MB:big:x2", "'1MB:big:x2': 'big' is no size"),
        ("1MB:2MB", "is no sweep"),
        ("1MB:2MB:2", "is no sweep"),
        ("1MB:2MB:x2:x2", "is no sweep"),
        ("2MB:1MB:x2", "2MB:1MB:x2 makes no progress"),
        ("1MB:2MB:x1", "makes no progress"),
        ("1MB:2MB:+0", "makes no progress"),
        ("1MB:2MB:xinf", "makes no progress"),
        ("1MB:2MB:xx", "'x' is no number"),
        ("1:1GB:+1", "more than 200"),
        ("1B:1GB:x1.0001", "more than 200"),
        (",".join(map(str, range(1, 202))), "more than 200"),
    ],
)
def test_sizes_that_are_not_valid_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        sizes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4,2,4", (2, 4)),
        ("1:10", (1, 2, 4, 8, 10)),
        ("3,1:1000:x10", (1, 3, 10, 100, 1000)),
        ("1:10:+4", (1, 5, 9, 10)),
    ],
)
def test_a_sweep_ends_with_its_last_number(text, expected):
    assert parse_sweep("--nnodes", text, int, example="1:10000") == expected


def test_invalid_numbers_are_refused_with_an_example():
    with pytest.raises(
        UsageError, match=r"(?s)--nproc-per-node '2,many': 'many' is no whole number.*--nproc-per-node 2,4,6"
    ):
        parse_sweep("--nproc-per-node", "2,many", int, example="2,4,6")
    with pytest.raises(UsageError, match=r"--nnodes '0:4': 0 is below 1"):
        parse_sweep("--nnodes", "0:4", int, example="1:4")
    with pytest.raises(UsageError, match="'5MiB' is no number"):
        parse_list("--bucket-mib", "1,5MiB", float, example="0.25,inf")


def test_lists_keep_their_order_and_repetitions_unless_they_name_things():
    assert parse_list("--block", "10, 2,10", int, example="2") == (10, 2, 10)
    assert parse_list("--bucket-mib", "0.25,inf", float, example="1") == (0.25, math.inf)
    assert parse_list("--op", "a b", str, example="a", separator=" ") == ("a", "b")
    assert parse_list("--backend", "gloo, paceline,gloo", str, example="gloo", unique=True) == (
        "gloo",
        "paceline",
    )
    for text in ("", ",", " , "):
        with pytest.raises(UsageError, match="is empty"):
            parse_list("--backend", text, str, example="gloo")
