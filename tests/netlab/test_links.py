"""Links of a lab: rate per direction, counters, changes, cut and reconnection."""

from __future__ import annotations

import time

import pytest
from wire import Wire

from paceline.errors import UsageError
from paceline.testing.netlab import InterfaceBytes, Lab, missing

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]

TOLERANCE = 0.1


def near(rate):
    return pytest.approx(rate, rel=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize(("rate", "nbytes"), [("20Mbit/s", 2e6), ("100Mbit/s", 8e6), ("400Mbit/s", 3e7)])
def test_a_link_has_its_rate(lab, wire, rate, nbytes):
    for host in (0, 1):
        lab.rate(host, rate)
    assert wire.measure(0, 1, int(nbytes)) == near(lab.rates[0] * 8)


@pytest.mark.thorough
def test_directions_are_independent(wire):
    there, back = wire.start(0, 1, 6_000_000), wire.start(1, 0, 6_000_000)
    # each direction also carries the acknowledgements of the other
    assert wire.finish(there) == pytest.approx(100e6, rel=2 * TOLERANCE)
    assert wire.finish(back) == pytest.approx(100e6, rel=2 * TOLERANCE)


@pytest.mark.thorough
def test_two_senders_share_the_receiver_s_link(wire):
    first, second = wire.start(0, 2, 4_000_000), wire.start(1, 2, 4_000_000)
    started = time.monotonic()
    wire.finish(first)
    wire.finish(second)
    assert time.monotonic() - started > 8_000_000 * 8 / 100e6 * (1 - TOLERANCE)


def test_a_slow_host_is_slow_and_others_are_not():
    with Lab(hosts=3, rate="200Mbit/s", slow={2: "20Mbit/s"}) as lab:
        assert lab.rates == [25e6, 25e6, 2.5e6]
        wire = Wire(lab)
        assert wire.measure(0, 2, 2_000_000) == near(20e6)
        assert wire.measure(2, 1, 2_000_000) == near(20e6)
        assert wire.measure(1, 0, 10_000_000) == near(200e6)


@pytest.mark.thorough
def test_the_rate_changes_at_run_time(lab, wire):
    transfer = wire.start(0, 1, 6_000_000)  # half a second, were it not for the change
    lab.rate(1, "20Mbit/s")
    assert wire.finish(transfer) < 60e6
    lab.rate(1, "50Mbit/s")
    assert wire.measure(1, 0, 4_000_000) == near(50e6)
    for host in (0, 1):
        lab.rate(host, None)
    assert lab.rates[1] is None
    assert wire.measure(0, 1, 50_000_000) > 300e6


@pytest.mark.thorough
def test_without_a_rate_links_are_as_fast_as_the_machine():
    with Lab(hosts=2) as lab:
        assert lab.rates == [None, None]
        assert Wire(lab).measure(0, 1, 50_000_000) > 300e6


@pytest.mark.thorough
def test_a_short_message_is_not_faster_than_the_link(lab, wire):
    for host in (0, 1):
        lab.rate(host, "10Mbit/s")
    seen = wire.measure(0, 1, 100_000)  # 80 ms at this rate; the bucket holds 4 kB of it
    assert seen < 1.25 * 10e6


@pytest.mark.thorough
def test_bytes_are_those_that_passed(lab, wire):
    before = [lab.bytes(host) for host in range(3)]
    wire.measure(0, 1, 5_000_000)
    passed = [lab.bytes(host) - old for host, old in enumerate(before)]
    assert 5_000_000 < passed[0].sent < 5_000_000 * 1.05
    # Headers of cut packets count once more.
    assert passed[1].received == pytest.approx(passed[0].sent, rel=0.02)
    assert 0 < passed[1].sent < 500_000
    assert passed[2].sent + passed[2].received < 2_000


@pytest.mark.thorough
def test_bytes_are_the_kernel_s_own(lab):
    table = lab.run(["cat", "/proc/net/dev"], on=2)[0].stdout
    (line,) = [line for line in table.splitlines() if "eth0" in line]
    columns = [int(word) for word in line.partition(":")[2].split()]
    assert lab.bytes(2) == InterfaceBytes(sent=columns[8], received=columns[0])


@pytest.mark.thorough
def test_a_disconnected_host_is_unreachable_until_it_is_reconnected(lab, wire):
    server = lab.start(_server(7000), on=1)
    assert wire.reaches(0, lab.addresses[1], 7000, 10.0)
    lab.cut(1)
    assert not wire.reaches(0, lab.addresses[1], 7000)
    assert wire.reaches(1, lab.addresses[1], 7000)  # it can still talk to itself
    assert server.running() == [1]
    lab.mend(1)
    assert wire.reaches(0, lab.addresses[1], 7000, 10.0)


@pytest.mark.thorough
def test_a_transfer_survives_a_short_cut(lab, wire):
    before = lab.bytes(1)
    transfer = wire.start(0, 1, 4_000_000)
    while (lab.bytes(1) - before).received < 500_000:
        time.sleep(0.01)
    lab.cut(0)
    at_the_cut = lab.bytes(1)
    time.sleep(0.3)
    assert (lab.bytes(1) - at_the_cut).received < 200_000  # what was on its way
    lab.mend(0)
    wire.finish(transfer)
    assert (lab.bytes(1) - before).received > 4_000_000


@pytest.mark.thorough
def test_labs_are_isolated_from_each_other(lab, wire):
    server = lab.start(_server(7001), on=0)
    assert wire.reaches(1, lab.addresses[0], 7001, 10.0)
    with Lab(hosts=2, rate="10Mbit/s") as other:
        assert other.addresses == lab.addresses[:2]
        assert not Wire(other).reaches(1, lab.addresses[0], 7001)
        before = lab.bytes(0)
        Wire(other).measure(0, 1, 100_000)
        assert (lab.bytes(0) - before).received < 2_000
    assert server.running() == [0]
    assert wire.reaches(1, lab.addresses[0], 7001)


@pytest.mark.thorough
def test_a_delay_without_netem_is_an_error_that_names_it():
    problem = missing(delay=True)
    if problem is not None:
        assert "netem" in str(problem)
        with pytest.raises(UsageError, match=r"can't delay packets.*\n.*modprobe sch_netem"):
            Lab(hosts=2, delay="1ms")
        return
    with Lab(hosts=2, delay="50ms") as lab:
        started = time.monotonic()
        assert Wire(lab).reaches(0, lab.addresses[1], 9) is False  # refused, after one round trip
        assert time.monotonic() - started > 0.1


def _server(port):
    code = f"import socket; s = socket.create_server(('', {port}))\nwhile True: s.accept()[0].close()"
    return ["python", "-I", "-S", "-c", code]


@pytest.mark.thorough
def test_tcp_is_the_same_on_all_machines(lab):
    names = ["tcp_congestion_control", "tcp_slow_start_after_idle", "tcp_no_metrics_save"]
    results = lab.run(["cat", *(f"/proc/sys/net/ipv4/{name}" for name in names)])
    assert [one.stdout.split() for one in results] == [["reno", "0", "1"]] * lab.hosts
