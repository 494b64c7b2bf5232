"""Addresses of a rendezvous: parsing, name resolution and reachability (sockets, but no torch)."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from paceline.errors import MissingRanks, UsageError
from paceline.world.key_value_store import is_own_address

__all__ = [
    "RendezvousAddress",
    "check_port_free",
    "free_port",
    "is_local",
    "is_port_taken",
    "parse_rendezvous_address",
    "reachable_address",
    "wait_for_server",
]

_DEFAULT_PORT = 29400  # torchrun's for c10d
_QUIET_SECONDS = 2.0  # before it is logged that the server is missing


@dataclass(frozen=True)
class RendezvousAddress:
    """Host and port of a rendezvous."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_rendezvous_address(text: str) -> RendezvousAddress:
    """Parse HOST or HOST:PORT; an IPv6 address needs brackets.

    Raises:
        UsageError: the address is invalid.

    Example:
        >>> parse_rendezvous_address("pc1:4000"), str(parse_rendezvous_address("[::1]"))
        (RendezvousAddress(host='pc1', port=4000), '[::1]:29400')
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+))(?::(\d+))?", text.strip())
    if found is None:
        raise UsageError(
            f"{text!r} is not a rendezvous address", remedy="write HOST:PORT, for example pc1:29400"
        )
    port = int(found[3] or _DEFAULT_PORT)
    if not 0 < port < 65536:
        raise UsageError(f"{text!r} has the invalid port {port}", remedy="valid: 1 to 65535")
    return RendezvousAddress(found[1] or found[2], port)


def is_local(address: RendezvousAddress) -> bool:
    """Return whether `address` belongs to this machine.

    Raises:
        UsageError: the host name does not resolve.
    """
    _resolve(address)
    return is_own_address(address.host, address.port)


def check_port_free(address: RendezvousAddress) -> None:
    """Raise unless a server can listen at `address`.

    Raises:
        UsageError: it belongs to another machine, or the port is taken or not allowed.
    """
    if not is_local(address):
        raise UsageError(
            f"can't serve at {address}: {address.host} is not an address of this machine",
            remedy="give an address of this machine that the other hosts can reach",
        )
    error = _bind_error(address.port)
    if error is not None:
        taken = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"can't serve at {address}: {'the port is taken' if taken else error.strerror}",
            remedy="choose another port" if taken else "choose a port above 1023",
        )


def free_port() -> int:
    """Return a port at which nothing listens now on this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_port_taken(port: int) -> bool:
    """Return whether something listens at `port` of this machine."""
    error = _bind_error(port)
    return error is not None and error.errno == errno.EADDRINUSE


def reachable_address(toward: RendezvousAddress, *, serving: bool) -> str:
    """Return the address of this machine that is reachable for hosts that can reach the rendezvous.

    Args:
        toward: address of the rendezvous.
        serving: whether it is served here. Then its own address is returned, or its host name if that resolves to
            loopback here.
    """
    family, _, _, _, where = _resolve(toward)[0]
    if serving:
        address = str(where[0])
        return toward.host if ip_address(address.partition("%")[0]).is_loopback else address
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(where)
        return str(probe.getsockname()[0])


def wait_for_server(address: RendezvousAddress, seconds: float, log: Callable[[str], None]) -> None:
    """Wait until something listens at `address`.

    Args:
        address: of the server.
        seconds: maximum time to wait.
        log: called with a line for the user if it takes long.

    Raises:
        MissingRanks: nothing was reachable in time; says why.
        UsageError: the host name does not resolve.
    """
    _resolve(address)
    start, logged = time.monotonic(), False
    while True:
        left = start + seconds - time.monotonic()
        try:
            socket.create_connection((address.host, address.port), timeout=max(0.1, min(left, 5.0))).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if left <= 0:
            raise MissingRanks(
                f"no rendezvous at {address} within {seconds:g} s: {reason}",
                remedy=f"start the same command on {address.host}, or `paceline run --serve {address}` there; "
                "check the address, and firewalls in between",
            )
        if not logged and time.monotonic() - start > _QUIET_SECONDS:
            logged = True
            log(f"waiting for the rendezvous at {address} ({reason})")
        time.sleep(min(0.2, max(left, 0.0)))


def _bind_error(port: int) -> OSError | None:
    """Return why nothing can listen at `port` of all addresses, None if it is free."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return None  # no IPv6 here
        return error
    return None


def _resolve(address: RendezvousAddress) -> list[tuple]:
    try:
        return socket.getaddrinfo(address.host, address.port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the rendezvous host {address.host!r} does not resolve: {error}",
            remedy="give its IP address, or add the name to /etc/hosts on every host",
        ) from None
