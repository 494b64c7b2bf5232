"""Addresses of hubs: parsing, reachability, refused input."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.transport.hub_address import HubAddress, parse_alternatives, parse_hub_address


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("tcp://127.0.0.1:7000", HubAddress("tcp", "127.0.0.1", 7000)),
        ("tcp://*:7000", HubAddress("tcp", "*", 7000)),
        ("tcp://10.0.0.1:*", HubAddress("tcp", "10.0.0.1", None)),
        ("tcp://[::1]:7000", HubAddress("tcp", "::1", 7000)),
        ("tcp://hub.example:65535", HubAddress("tcp", "hub.example", 65535)),
        ("ipc:///tmp/hub", HubAddress("ipc", "/tmp/hub", 0)),
    ],
)
def test_an_address_round_trips(text, parsed):
    assert parse_hub_address(text, bind=True) == parsed
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "7000", "tcp://", "tcp://host", "tcp://host:", "tcp://:7000", "udp://host:7000", "host:7000",
        "tcp://host:0x10", "tcp://host:65536", "tcp://host:-1", "tcp://host:٣", "tcp://ho st:7000",
        "tcp://::1:7000", "tcp://[10.0.0.1]:7000", "tcp://host:7000/", "ipc://", "ipc://*", "tcp://-:7000",
        "tcp://host:999999999999999999999", "ipc://" + "x" * 200,
    ],
)  # fmt: skip
def test_an_invalid_address_is_refused_with_an_example(text):
    for bind in (False, True):
        with pytest.raises(UsageError, match="tcp://"):
            parse_hub_address(text, bind=bind)


@pytest.mark.parametrize("text", ["tcp://*:7000", "tcp://0.0.0.0:7000", "tcp://[::]:7000", "tcp://host:*"])
def test_an_address_to_bind_only_is_refused_for_connecting(text):
    parse_hub_address(text, bind=True)
    with pytest.raises(UsageError):
        parse_hub_address(text, bind=False)


@pytest.mark.thorough
@settings(deadline=None)
@given(st.text(max_size=40), st.sampled_from(["", "tcp://", "ipc://"]), st.booleans())
def test_any_text_is_an_address_or_a_usage_error(text, begin, bind):
    try:
        parse_hub_address(begin + text, bind=bind)
    except UsageError:
        return


@pytest.mark.parametrize(
    "local",
    ["tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://localhost:*", "tcp://[::1]:1", "tcp://[::ffff:127.0.0.1]:1", "ipc://x"],
)  # fmt: skip
def test_an_address_that_only_this_machine_reaches_is_local(local):
    assert parse_hub_address(local, bind=True).is_local


@pytest.mark.parametrize(
    "open_to_others",
    ["tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://128.0.0.1:1", "tcp://localhost.org:1", "tcp://127.1:1"],
)  # fmt: skip
def test_an_address_that_other_machines_may_reach_is_not_local(open_to_others):
    assert not parse_hub_address(open_to_others, bind=True).is_local


def test_hub_and_standby_are_two_addresses_of_one_hub():
    found = parse_alternatives("tcp://a:7000 | ipc:///tmp/hub|tcp://[::1]:7000")
    assert [str(each) for each in found] == ["tcp://a:7000", "ipc:///tmp/hub", "tcp://[::1]:7000"]
    for wrong, message in (("tcp://a:7000|", "is not a hub address"), ("tcp://a:1|tcp://a:1", "twice")):
        with pytest.raises(UsageError, match=message):
            parse_alternatives(wrong)
