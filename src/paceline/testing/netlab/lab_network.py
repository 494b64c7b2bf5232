"""What a lab shall be: hosts in a star around one switch, each at the end of a link of its own (pure).

Bytes that a host of the lab has sent and received.

The commands that build and change a lab's network, as data (pure).

Every host has a veth pair: its own end is called eth0, the other one is port<k> of a bridge in the switch's
namespace. All devices are made within those namespaces, so no name is ever seen outside and labs can't meet.

Rates are kept by a token bucket (tbf) at both ends: the host's end shapes what it sends, the switch's end what it
receives.

[Note: the bucket's size] What fits into the bucket passes at once after a pause, so a large one makes short messages
too fast; a small one loses tokens whenever the kernel's timer is late, and then the link is slower than asked.
1 ms of the rate keeps both errors small, on a busy machine too. The kernel cuts packets larger than the bucket into
frames one by one (0.3 to 0.5 of a core at 200 Mbit/s, against 0.1), so the host is told to make none larger than half
of it (gso_max_size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline._core.network_interfaces import InterfaceBytes, read_interface_bytes
from paceline._core.units import parse_rate, parse_seconds
from paceline.errors import UsageError

__all__ = [
    "INTERFACE",
    "MAX_HOSTS",
    "SWITCH",
    "InterfaceBytes",
    "LabNetwork",
    "NetworkCommand",
    "build_network",
    "burst_nbytes",
    "change_link_rate",
    "host_address",
    "host_name",
    "hosts_file",
    "packet_nbytes",
    "parse_link_rate",
    "parse_traffic",
    "plan_network",
    "set_link_state",
    "switch_port",
]

INTERFACE = "eth0"  # the link's end at the host


MAX_HOSTS = 250


_NETWORK = "10.77.0."  # private (RFC 1918); no other network is reachable from within, so none can clash


_SLOWEST = 1000.0  # bytes per second: below, one packet takes more than a second


@dataclass(frozen=True)
class LabNetwork:
    """Hosts around a switch.

    Attributes:
        rates: of each host's link, in each direction, in bytes per second; None: unlimited.
        delay: seconds that every packet takes longer from one host to another.
    """

    rates: tuple[float | None, ...]
    delay: float = 0.0

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return len(self.rates)


def plan_network(
    hosts: int,
    rate: str | float | None = None,
    slow: Mapping[int, str | float] | None = None,
    delay: str | float = 0.0,
) -> LabNetwork:
    """Return the star that is asked for.

    Args:
        hosts: how many, 1 to 250.
        rate: of every link, such as ``"1Gbit/s"`` or bytes per second; None: unlimited.
        slow: the rates of those hosts whose link has another, by number of host.
        delay: what a packet takes longer from host to host, such as ``"1ms"`` or seconds.

    Raises:
        UsageError: a number of hosts, host, rate or delay that can't be.

    Example:
        >>> plan_network(3, "1Gbit/s", slow={2: "100Mbit/s"}).rates
        (125000000.0, 125000000.0, 12500000.0)
    """
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(
            f"hosts={hosts!r}: a lab has 1 to {MAX_HOSTS} hosts", remedy="give a whole number, such as 4"
        )
    rates = [None if rate is None else parse_link_rate(rate)] * hosts
    for host, other in (slow or {}).items():
        if host not in range(hosts):
            raise UsageError(
                f"slow names host {host!r}, but there are {hosts} hosts", remedy=f"valid: 0 to {hosts - 1}"
            )
        rates[host] = parse_link_rate(other)
    seconds = parse_seconds(delay)
    if not 0 <= seconds <= 10:
        raise UsageError(f"delay={delay!r} is no delay of a network", remedy="give 0 to 10 s, such as 1ms")
    return LabNetwork(tuple(rates), seconds)


def parse_link_rate(rate: str | float) -> float:
    """Return the rate of a link in bytes per second.

    Raises:
        UsageError: `rate` is no rate, or too slow for packets.
    """
    value = parse_rate(rate)
    if not _SLOWEST <= value < math.inf:
        raise UsageError(
            f"rate={rate!r}: a link carries at least 8 kbit/s", remedy="give a rate such as 100Mbit/s"
        )
    return value


def host_name(host: int) -> str:
    """Return the host name of host number `host`."""
    return f"host{host}"


def host_address(host: int) -> str:
    """Return the IP address of host number `host`.

    Example:
        >>> address_of(0), address_of(3)
        ('10.77.0.1', '10.77.0.4')
    """
    return f"{_NETWORK}{host + 1}"


def hosts_file(hosts: int) -> str:
    """Return the text of /etc/hosts, by which the hosts find each other.

    The mapped addresses are those that a server for IPv6 sees its clients at; torch's store asks for their names.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in range(hosts):
        lines += [
            f"{host_address(host)} {host_name(host)}",
            f"::ffff:{host_address(host)} {host_name(host)}.lab",
        ]
    return "\n".join(lines) + "\n"


def parse_traffic(table: str, interface: str = INTERFACE) -> InterfaceBytes:
    """Return the counters of one interface from the text of /proc/net/dev."""
    found = read_interface_bytes(table)
    assert interface in found, f"no interface {interface} in\n{table}"
    return found[interface]


SWITCH = -1


_BURST_SECONDS = 1e-3


_LEAST_BURST = 4096  # more than two packets of 1500 bytes


_LARGEST_PACKET = 65536  # the kernel's own limit


_QUEUE = "100ms"  # what waits longer is dropped


@dataclass(frozen=True)
class NetworkCommand:
    """One line for ``ip -batch`` or ``tc -batch``, and the host in whose network it is said (−1: the switch)."""

    host: int
    tool: Literal["ip", "tc"]
    line: str


def build_network(star: LabNetwork, pids: Sequence[int], *, ipv6: bool = True) -> list[NetworkCommand]:
    """Return the steps that connect namespaces to a star.

    Args:
        star: what shall be.
        pids: of a process in each host's network namespace.
        ipv6: whether the kernel knows IPv6, and so has to be told not to use it.
    """
    steps = [
        NetworkCommand(
            SWITCH, "ip", "link add name switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        ),
        *_bring_up(SWITCH, "switch", ipv6),
    ]
    for host, pid in enumerate(pids):
        steps += [
            NetworkCommand(
                SWITCH, "ip", f"link add name {switch_port(host)} type veth peer name {INTERFACE} netns {pid}"
            ),
            NetworkCommand(SWITCH, "ip", f"link set dev {switch_port(host)} master switch"),
            *_bring_up(SWITCH, switch_port(host), ipv6),
        ]
    for host in range(star.hosts):
        steps += [
            NetworkCommand(host, "ip", "link set dev lo up"),
            *_bring_up(host, INTERFACE, ipv6),
            NetworkCommand(host, "ip", f"address add {host_address(host)}/24 dev {INTERFACE}"),
        ]
    for host, rate in enumerate(star.rates):
        if rate is not None or star.delay:
            steps += change_link_rate(host, rate, star.delay)
    return steps


def change_link_rate(host: int, rate: float | None, delay: float = 0.0) -> list[NetworkCommand]:
    """Return the steps that give a host's link a rate (bytes per second; None: unlimited) and a delay (seconds).

    The delay is added where the packet leaves the host, so that it counts once on the way to another host.
    """
    steps = []
    for place, device in ((host, INTERFACE), (SWITCH, switch_port(host))):
        steps += [
            NetworkCommand(place, "tc", line)
            for line in _queue(device, rate, delay if place == host else 0.0)
        ]
    packet = _LARGEST_PACKET if rate is None else packet_nbytes(rate)
    return [NetworkCommand(host, "ip", f"link set dev {INTERFACE} gso_max_size {packet}"), *steps]


def set_link_state(host: int, state: Literal["up", "down"]) -> list[NetworkCommand]:
    """Return the step that connects or cuts a host's link, at the switch."""
    return [NetworkCommand(SWITCH, "ip", f"link set dev {switch_port(host)} {state}")]


def burst_nbytes(rate: float) -> int:
    """Return the size of the token bucket for a rate in bytes per second, see [Note: the bucket's size]."""
    return max(_LEAST_BURST, round(rate * _BURST_SECONDS))


def packet_nbytes(rate: float) -> int:
    """Return the largest packet that a host hands to its link, before it is cut into frames."""
    return min(_LARGEST_PACKET, burst_nbytes(rate) // 2)


def _bring_up(place: int, device: str, ipv6: bool) -> list[NetworkCommand]:
    """Return the steps that put a device to use, without the address and the chatter that IPv6 gives it by itself."""
    quiet = [NetworkCommand(place, "ip", f"link set dev {device} addrgenmode none")] if ipv6 else []
    return [*quiet, NetworkCommand(place, "ip", f"link set dev {device} up")]


def _queue(device: str, rate: float | None, delay: float) -> list[str]:
    lines, parent = [], "root"
    if rate is not None:
        shape = f"rate {round(rate * 8)}bit burst {burst_nbytes(rate)} latency {_QUEUE}"
        lines.append(f"qdisc replace dev {device} root handle 1: tbf {shape}")
        parent = "parent 1:1"
    else:
        lines.append(f"qdisc replace dev {device} root pfifo_fast")
    if delay:
        lines.append(
            f"qdisc replace dev {device} {parent} handle 10: netem delay {delay * 1e6:.0f}us limit 100000"
        )
    return lines


def switch_port(host: int) -> str:
    """Return the name of the switch's end of a host's link."""
    return f"port{host}"
