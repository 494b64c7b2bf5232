"""Network interfaces: their addresses and byte counters, and the address at which gloo listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

__all__ = [
    "Interface",
    "InterfaceBytes",
    "host_address",
    "is_loopback",
    "list_interfaces",
    "read_interface_bytes",
]


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: the system's name, which GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME take.
        addresses: its IP addresses.
        up: whether it is in use.
        bytes_per_second: speed of the link, 0 if unknown.
        mtu: largest packet in bytes.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool
    bytes_per_second: float
    mtu: int

    @property
    def loopback(self) -> bool:
        """Whether it reaches only this machine."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)


def list_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces that have an address, in order of name."""
    found = []
    states = psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        families = (socket.AF_INET, socket.AF_INET6)
        addresses = tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        state = states.get(name)
        if addresses and state is not None:
            speed = 0.0 if state.speed == 65535 else state.speed * 1e6 / 8  # 65535 as 0: unknown
            found.append(Interface(name, addresses, state.isup, speed, state.mtu))
    return tuple(found)


def host_address() -> str:
    """Return the address to which this host's name resolves, empty if there is none.

    gloo listens there unless GLOO_SOCKET_IFNAME names an interface, so other hosts must be able to reach it.
    """
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, proto=socket.IPPROTO_TCP)[0][4][0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class InterfaceBytes:
    """Byte counters of an interface, headers included; the difference of two is the traffic between them.

    Example:
        >>> InterfaceBytes(sent=500, received=80) - InterfaceBytes(sent=200, received=50)
        InterfaceBytes(sent=300, received=30)
    """

    sent: int
    received: int

    def __sub__(self, earlier: InterfaceBytes) -> InterfaceBytes:
        return InterfaceBytes(self.sent - earlier.sent, self.received - earlier.received)


def read_interface_bytes(table: str) -> dict[str, InterfaceBytes]:
    """Return the counters of all interfaces, by name, from the text of /proc/net/dev.

    Source: Linux, proc_net(5): after the name, received bytes are column 1 and sent bytes column 9.
    """
    rows = (line.partition(":") for line in table.splitlines() if ":" in line)
    columns = {name.strip(): numbers.split() for name, _, numbers in rows}
    return {name: InterfaceBytes(sent=int(each[8]), received=int(each[0])) for name, each in columns.items()}
