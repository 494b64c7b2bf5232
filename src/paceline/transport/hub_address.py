"""Addresses of hubs: ``tcp://host:port`` and ``ipc://path`` (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from paceline.errors import UsageError

__all__ = ["HubAddress", "parse_alternatives", "parse_hub_address"]

_NAME = re.compile(r"[0-9A-Za-z]([0-9A-Za-z_.-]*[0-9A-Za-z])?")
_PATH_LIMIT = 100  # the kernel accepts 107 bytes: sun_path in <sys/un.h>
_REMEDY = "write tcp://HOST:PORT such as tcp://192.168.1.5:7000, or ipc://PATH"
_BIND_REMEDY = f"{_REMEDY}; tcp://*:7000 is every interface, and port * any free one"


@dataclass(frozen=True)
class HubAddress:
    """Address that a hub binds and its workers connect to.

    Attributes:
        transport: ``"tcp"`` or ``"ipc"``.
        host: name or IP address without brackets, ``"*"`` for every interface; the path for ``ipc``.
        port: None for any free port; 0 for ``ipc``.
    """

    transport: str
    host: str
    port: int | None

    def __str__(self) -> str:
        """Return the address as it is written."""
        if self.transport == "ipc":
            return f"ipc://{self.host}"
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"tcp://{host}:{'*' if self.port is None else self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return self.transport == "tcp" and ":" in self.host

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it, judging by the text."""
        if self.transport == "ipc" or self.host.lower() == "localhost":
            return True
        try:
            number = ip_address(self.host)
        except ValueError:
            return False  # another name, or every interface
        if isinstance(number, IPv6Address) and number.ipv4_mapped is not None:
            return number.ipv4_mapped.is_loopback
        return number.is_loopback


def parse_hub_address(text: str, *, bind: bool) -> HubAddress:
    """Parse an address.

    Args:
        text: ``tcp://host:port`` or ``ipc://path``.
        bind: for a hub, which may leave interface and port open: ``tcp://*:*``.

    Raises:
        UsageError: the address is invalid.

    Example:
        >>> parse_hub_address("tcp://[::1]:7000", bind=False)
        HubAddress(transport='tcp', host='::1', port=7000)
    """
    remedy = _BIND_REMEDY if bind else _REMEDY
    transport, mark, rest = text.partition("://")
    if mark and transport == "ipc":
        if not 0 < len(rest.encode()) <= _PATH_LIMIT or "\0" in rest or rest == "*":
            raise UsageError(f"{text!r} needs a path of 1 to {_PATH_LIMIT} bytes", remedy=remedy)
        return HubAddress("ipc", rest, 0)
    host, colon, port = rest.rpartition(":")
    if not mark or transport != "tcp" or not colon:
        raise UsageError(f"{text!r} is not a hub address", remedy=remedy)
    return HubAddress("tcp", _parse_host(text, host, bind, remedy), _parse_port(text, port, bind, remedy))


def parse_alternatives(text: str) -> list[HubAddress]:
    """Parse the addresses of a hub and of its standbys, of which one is active: ``tcp://a:7000|tcp://b:7000``.

    Raises:
        UsageError: an address is invalid, or given twice.

    Example:
        >>> [str(each) for each in parse_alternatives("tcp://pc1:7000|tcp://pc2:7000")]
        ['tcp://pc1:7000', 'tcp://pc2:7000']
    """
    found = [parse_hub_address(each.strip(), bind=False) for each in text.split("|")]
    if len(set(found)) < len(found):
        raise UsageError(
            f"{text!r} has an address twice", remedy="give hub and standby once each, with | in between"
        )
    return found


def _parse_host(text: str, host: str, bind: bool, remedy: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        number = ip_address(bare)
    except ValueError:
        number = None
    if host != bare and not isinstance(number, IPv6Address):
        raise UsageError(f"{text!r}: {bare!r} in brackets is not an IPv6 address", remedy=remedy)
    if host == bare and isinstance(number, IPv6Address):
        raise UsageError(f"{text!r}: an IPv6 address needs brackets", remedy=f"write tcp://[{host}]:…")
    every = bare == "*" or (number is not None and number.is_unspecified)
    if every and not bind:
        raise UsageError(
            f"{text!r} means every interface of a hub; workers can't connect to it", remedy=remedy
        )
    if not every and number is None and not _NAME.fullmatch(bare):
        raise UsageError(f"{text!r}: {bare!r} is not a host name", remedy=remedy)
    return bare


def _parse_port(text: str, port: str, bind: bool, remedy: str) -> int | None:
    if port in ("*", "0") and bind:
        return None
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535 and len(port) <= 5):
        raise UsageError(f"{text!r}: {port!r} is not a port from 1 to 65535", remedy=remedy)
    return int(port)
