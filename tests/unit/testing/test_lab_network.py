"""The lab's network as data: settings, refused input, and the commands that build it. Nothing is run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.testing.netlab.lab_network import (
    MAX_HOSTS,
    SWITCH,
    LabNetwork,
    NetworkCommand,
    build_network,
    burst_nbytes,
    change_link_rate,
    host_address,
    host_name,
    hosts_file,
    packet_nbytes,
    plan_network,
    set_link_state,
)

PIDS = [501, 502, 503]


def lines(steps, host, tool):
    return [step.line for step in steps if (step.host, step.tool) == (host, tool)]


def test_a_lab_network_has_a_rate_per_host():
    assert plan_network(3, "1Gbit/s", {2: "100Mbit/s"}, "1ms") == LabNetwork((125e6, 125e6, 12.5e6), 0.001)
    assert plan_network(2) == LabNetwork((None, None), 0.0)
    assert plan_network(2, slow={0: 1e6}).rates == (1e6, None)
    assert plan_network(MAX_HOSTS).hosts == MAX_HOSTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts=0: a lab has 1 to 250 hosts"),
        ({"hosts": MAX_HOSTS + 1}, "hosts=251"),
        ({"hosts": 2.0}, "hosts=2.0"),
        ({"hosts": True}, "hosts=True"),
        ({"hosts": 2, "rate": "100"}, "'100' is no rate"),
        ({"hosts": 2, "rate": "-1Mbit/s"}, "'-1Mbit/s' is no rate"),
        ({"hosts": 2, "rate": "0Mbit/s"}, "rate='0Mbit/s': a link carries at least 8 kbit/s"),
        ({"hosts": 2, "rate": float("nan")}, "rate=nan"),
        ({"hosts": 2, "rate": float("inf")}, "rate=inf"),
        ({"hosts": 2, "slow": {2: "1Mbit/s"}}, "slow names host 2, but there are 2 hosts\n  → valid: 0 to 1"),
        ({"hosts": 2, "slow": {"host1": "1Mbit/s"}}, "slow names host 'host1'"),
        ({"hosts": 2, "slow": {1: "1 furlong"}}, "'1 furlong' is no rate"),
        ({"hosts": 2, "delay": "soon"}, "'soon' is no time"),
        ({"hosts": 2, "delay": "1h"}, "delay='1h' is not a network delay"),
        ({"hosts": 2, "delay": -1.0}, "delay=-1.0 is not a network delay"),
    ],
)
def test_invalid_values_are_refused(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        plan_network(**arguments)


def test_hosts_have_names_and_addresses_of_their_own():
    assert [host_name(host) for host in (0, 9)] == ["host0", "host9"]
    assert host_address(0) == "10.77.0.1"
    assert len({host_address(host) for host in range(MAX_HOSTS)}) == MAX_HOSTS
    assert host_address(MAX_HOSTS - 1) == "10.77.0.250"


def test_the_list_of_hosts_names_each():
    known = dict(line.split() for line in hosts_file(2).splitlines())
    assert known == {
        "127.0.0.1": "localhost",
        "::1": "localhost",
        "10.77.0.1": "host0",
        "::ffff:10.77.0.1": "host0.lab",
        "10.77.0.2": "host1",
        "::ffff:10.77.0.2": "host1.lab",
    }


def test_the_plan_makes_a_bridge_and_a_link_for_each_host():
    steps = build_network(plan_network(3), PIDS)
    at_switch = lines(steps, SWITCH, "ip")
    assert at_switch[0].startswith("link add name switch type bridge")
    for host, pid in enumerate(PIDS):
        assert f"link add name port{host} type veth peer name eth0 netns {pid}" in at_switch
        assert f"link set dev port{host} master switch" in at_switch
        assert f"link set dev port{host} up" in at_switch
        assert lines(steps, host, "ip") == [
            "link set dev lo up",
            "link set dev eth0 addrgenmode none",
            "link set dev eth0 up",
            f"address add 10.77.0.{host + 1}/24 dev eth0",
        ]
    assert not [step for step in steps if step.tool == "tc"]


def test_the_plan_leaves_ipv6_alone_where_there_is_none():
    assert not [
        step for step in build_network(plan_network(2), PIDS[:2], ipv6=False) if "addrgenmode" in step.line
    ]


def test_the_links_are_there_before_the_hosts_use_them():
    steps = build_network(plan_network(3, "1Gbit/s"), PIDS)
    made = max(place for place, step in enumerate(steps) if "link add" in step.line)
    used = min(place for place, step in enumerate(steps) if step.host != SWITCH)
    assert made < used


def test_both_ends_of_a_link_are_held_to_its_rate():
    steps = build_network(plan_network(2, "1Gbit/s", slow={1: "100Mbit/s"}), PIDS[:2])
    fast = "root handle 1: tbf rate 1000000000bit burst 125000 latency 100ms"
    slow = "root handle 1: tbf rate 100000000bit burst 12500 latency 100ms"
    assert lines(steps, 0, "tc") == [f"qdisc replace dev eth0 {fast}"]
    assert lines(steps, 1, "tc") == [f"qdisc replace dev eth0 {slow}"]
    assert lines(steps, SWITCH, "tc") == [
        f"qdisc replace dev port0 {fast}",
        f"qdisc replace dev port1 {slow}",
    ]
    assert "link set dev eth0 gso_max_size 62500" in lines(steps, 0, "ip")
    assert "link set dev eth0 gso_max_size 6250" in lines(steps, 1, "ip")


def test_a_delay_is_added_once():
    steps = build_network(plan_network(2, "1Gbit/s", delay="1ms"), PIDS[:2])
    netem = [step for step in steps if "netem" in step.line]
    line = "qdisc replace dev eth0 parent 1:1 handle 10: netem delay 1000us limit 100000"
    assert netem == [NetworkCommand(0, "tc", line), NetworkCommand(1, "tc", line)]
    alone = [step.line for step in change_link_rate(0, None, 0.5) if "netem" in step.line]
    assert alone == ["qdisc replace dev eth0 root handle 10: netem delay 500000us limit 100000"]


def test_a_rate_can_be_taken_away():
    assert change_link_rate(2, None) == [
        NetworkCommand(2, "ip", "link set dev eth0 gso_max_size 65536"),
        NetworkCommand(2, "tc", "qdisc replace dev eth0 root pfifo_fast"),
        NetworkCommand(SWITCH, "tc", "qdisc replace dev port2 root pfifo_fast"),
    ]


def test_a_link_is_cut_at_the_switch():
    assert set_link_state(1, "down") == [NetworkCommand(SWITCH, "ip", "link set dev port1 down")]


@given(rate=st.floats(1000, 1e11))
def test_the_bucket_holds_packets_and_about_a_millisecond(rate):
    burst, packet = burst_nbytes(rate), packet_nbytes(rate)
    assert 2 * 1514 < burst <= max(4096, rate / 1000 + 1)
    assert 1514 < packet <= 65536
    assert 2 * packet <= burst
