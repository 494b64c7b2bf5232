"""Network of a lab as data: rates, names and addresses of hosts, and the commands that build and change it (pure).

The network is a star: every host has a veth pair to a switch. Its own end is eth0; the other one is port<k> of a bridge
in the switch's namespace. All devices are created inside namespaces, so no name is visible outside, and labs are
isolated from each other.

A token bucket (tbf) at both ends limits the rate: the host's end shapes what it sends, the switch's end what it
receives.

[Note: the bucket's size] After a pause, a full bucket passes at once, so a large one makes short messages too fast; a
small one loses tokens whenever the kernel's timer is late, which makes the link slower than its rate. 1 ms of the rate
keeps both errors small, also on a busy machine. The kernel segments packets larger than the bucket into single frames
(0.3 to 0.5 of a core at 200 Mbit/s, against 0.1), so the host's packets are limited to half of it (gso_max_size).
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

INTERFACE = "eth0"  # the host's end of its link
MAX_HOSTS = 250
SWITCH = -1

_NETWORK = "10.77.0."  # private (RFC 1918); no other network is reachable from inside, so it can't clash
_MIN_RATE = 1000.0  # bytes per second: below, one packet takes more than a second
_BURST_SECONDS = 1e-3
_MIN_BURST = 4096  # more than two packets of 1500 bytes
_MAX_PACKET = 65536  # the kernel's own limit
_MAX_QUEUEING = "100ms"  # packets that would wait longer are dropped


@dataclass(frozen=True)
class LabNetwork:
    """Hosts around a switch.

    Attributes:
        rates: of each host's link, per direction, in bytes per second; None: unlimited.
        delay: seconds added to every packet from one host to another.
    """

    rates: tuple[float | None, ...]
    delay: float = 0.0

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.rates)


def plan_network(
    hosts: int,
    rate: str | float | None = None,
    slow: Mapping[int, str | float] | None = None,
    delay: str | float = 0.0,
) -> LabNetwork:
    """Return the network with these hosts and rates.

    Args:
        hosts: number of hosts, 1 to 250.
        rate: of every link, such as ``"1Gbit/s"`` or bytes per second; None: unlimited.
        slow: rates of links that differ from it, by host number.
        delay: added to every packet from host to host, such as ``"1ms"`` or seconds.

    Raises:
        UsageError: an invalid number of hosts, host, rate or delay.

    Example:
        >>> plan_network(3, "1Gbit/s", slow={2: "100Mbit/s"}).rates
        (125000000.0, 125000000.0, 12500000.0)
    """
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(
            f"hosts={hosts!r}: a lab has 1 to {MAX_HOSTS} hosts", remedy="give an integer, such as 4"
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
        raise UsageError(f"delay={delay!r} is not a network delay", remedy="give 0 to 10 s, such as 1ms")
    return LabNetwork(tuple(rates), seconds)


def parse_link_rate(rate: str | float) -> float:
    """Return the rate of a link in bytes per second.

    Raises:
        UsageError: `rate` is invalid, or too slow for packets.
    """
    value = parse_rate(rate)
    if not _MIN_RATE <= value < math.inf:
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
        >>> host_address(0), host_address(3)
        ('10.77.0.1', '10.77.0.4')
    """
    return f"{_NETWORK}{host + 1}"


def hosts_file(hosts: int) -> str:
    """Return the text of /etc/hosts on every host.

    The mapped addresses are those of clients as an IPv6 server sees them; torch's store looks up their names.
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


@dataclass(frozen=True)
class NetworkCommand:
    """Line for ``ip -batch`` or ``tc -batch``, and the host in whose namespace it runs (−1: the switch)."""

    host: int
    tool: Literal["ip", "tc"]
    line: str


def build_network(network: LabNetwork, pids: Sequence[int], *, ipv6: bool = True) -> list[NetworkCommand]:
    """Return the commands that connect namespaces to a star.

    Args:
        network: to build.
        pids: of one process in each host's network namespace.
        ipv6: whether the kernel supports IPv6, which then has to be kept quiet.
    """
    bridge = "link add name switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
    commands = [NetworkCommand(SWITCH, "ip", bridge), *_bring_up(SWITCH, "switch", ipv6)]
    for host, pid in enumerate(pids):
        port = switch_port(host)
        commands += [
            NetworkCommand(SWITCH, "ip", f"link add name {port} type veth peer name {INTERFACE} netns {pid}"),
            NetworkCommand(SWITCH, "ip", f"link set dev {port} master switch"),
            *_bring_up(SWITCH, port, ipv6),
        ]
    for host in range(network.hosts):
        commands += [
            NetworkCommand(host, "ip", "link set dev lo up"),
            *_bring_up(host, INTERFACE, ipv6),
            NetworkCommand(host, "ip", f"address add {host_address(host)}/24 dev {INTERFACE}"),
        ]
    for host, rate in enumerate(network.rates):
        if rate is not None or network.delay:
            commands += change_link_rate(host, rate, network.delay)
    return commands


def change_link_rate(host: int, rate: float | None, delay: float = 0.0) -> list[NetworkCommand]:
    """Return the commands that set the rate (bytes per second; None: unlimited) and delay (seconds) of a host's link.

    The delay is added where a packet leaves the host, so it counts once on the way to another host.
    """
    packet = _MAX_PACKET if rate is None else packet_nbytes(rate)
    commands = [NetworkCommand(host, "ip", f"link set dev {INTERFACE} gso_max_size {packet}")]
    for node, device in ((host, INTERFACE), (SWITCH, switch_port(host))):
        lines = _queueing_disciplines(device, rate, delay if node == host else 0.0)
        commands += [NetworkCommand(node, "tc", line) for line in lines]
    return commands


def set_link_state(host: int, state: Literal["up", "down"]) -> list[NetworkCommand]:
    """Return the command that connects or cuts a host's link, at the switch."""
    return [NetworkCommand(SWITCH, "ip", f"link set dev {switch_port(host)} {state}")]


def burst_nbytes(rate: float) -> int:
    """Return the token bucket's size for a rate in bytes per second, see [Note: the bucket's size]."""
    return max(_MIN_BURST, round(rate * _BURST_SECONDS))


def packet_nbytes(rate: float) -> int:
    """Return the size of the largest packet a host passes to its link, before segmentation into frames."""
    return min(_MAX_PACKET, burst_nbytes(rate) // 2)


def _bring_up(node: int, device: str, ipv6: bool) -> list[NetworkCommand]:
    """Return the commands that bring up a device without an IPv6 address and its traffic."""
    quiet = [NetworkCommand(node, "ip", f"link set dev {device} addrgenmode none")] if ipv6 else []
    return [*quiet, NetworkCommand(node, "ip", f"link set dev {device} up")]


def _queueing_disciplines(device: str, rate: float | None, delay: float) -> list[str]:
    if rate is None:
        lines, parent = [f"qdisc replace dev {device} root pfifo_fast"], "root"
    else:
        shape = f"rate {round(rate * 8)}bit burst {burst_nbytes(rate)} latency {_MAX_QUEUEING}"
        lines, parent = [f"qdisc replace dev {device} root handle 1: tbf {shape}"], "parent 1:1"
    if delay:
        netem = f"netem delay {delay * 1e6:.0f}us limit 100000"
        lines.append(f"qdisc replace dev {device} {parent} handle 10: {netem}")
    return lines


def switch_port(host: int) -> str:
    """Return the name of the switch's end of a host's link."""
    return f"port{host}"
