"""What a lab shall be: hosts in a star around one switch, each at the end of a link of its own (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.units import parse_rate, parse_seconds

__all__ = ["INTERFACE", "MAX_HOSTS", "Star", "address_of", "hosts_file", "name_of", "read_rate", "star"]

INTERFACE = "eth0"  # the link's end at the host
MAX_HOSTS = 250
_NETWORK = "10.77.0."  # private (RFC 1918); no other network is reachable from within, so none can clash
_SLOWEST = 1000.0  # bytes per second: below, one packet takes more than a second


@dataclass(frozen=True)
class Star:
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


def star(
    hosts: int,
    rate: str | float | None = None,
    slow: Mapping[int, str | float] | None = None,
    delay: str | float = 0.0,
) -> Star:
    """Return the star that is asked for.

    Args:
        hosts: how many, 1 to 250.
        rate: of every link, such as ``"1Gbit/s"`` or bytes per second; None: unlimited.
        slow: the rates of those hosts whose link has another, by number of host.
        delay: what a packet takes longer from host to host, such as ``"1ms"`` or seconds.

    Raises:
        UsageError: a number of hosts, host, rate or delay that can't be.

    Example:
        >>> star(3, "1Gbit/s", slow={2: "100Mbit/s"}).rates
        (125000000.0, 125000000.0, 12500000.0)
    """
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(
            f"hosts={hosts!r}: a lab has 1 to {MAX_HOSTS} hosts", remedy="give a whole number, such as 4"
        )
    rates = [None if rate is None else read_rate(rate)] * hosts
    for host, other in (slow or {}).items():
        if host not in range(hosts):
            raise UsageError(
                f"slow names host {host!r}, but there are {hosts} hosts", remedy=f"valid: 0 to {hosts - 1}"
            )
        rates[host] = read_rate(other)
    seconds = parse_seconds(delay)
    if not 0 <= seconds <= 10:
        raise UsageError(f"delay={delay!r} is no delay of a network", remedy="give 0 to 10 s, such as 1ms")
    return Star(tuple(rates), seconds)


def read_rate(rate: str | float) -> float:
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


def name_of(host: int) -> str:
    """Return the host name of host number `host`."""
    return f"host{host}"


def address_of(host: int) -> str:
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
        lines += [f"{address_of(host)} {name_of(host)}", f"::ffff:{address_of(host)} {name_of(host)}.lab"]
    return "\n".join(lines) + "\n"
