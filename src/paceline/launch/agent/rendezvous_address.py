"""Addresses of a rendezvous: read, looked up, tried, before anything is started (sockets, but no torch)."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from paceline.errors import MissingRanks, UsageError

__all__ = [
    "DEFAULT_PORT",
    "RendezvousAddress",
    "check_port_free",
    "is_local",
    "is_port_taken",
    "parse_rendezvous_address",
    "reachable_address",
    "wait_for_server",
]

DEFAULT_PORT = 29400  # torchrun's for c10d
_VALID = "write HOST:PORT, for example pc1:29400"
_PATIENCE_SECONDS = 2.0  # then it is said what is waited for


@dataclass(frozen=True)
class RendezvousAddress:
    """Where a rendezvous is served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_rendezvous_address(text: str) -> RendezvousAddress:
    """Return the address that `text` says: HOST or HOST:PORT, an IPv6 address in brackets.

    Raises:
        UsageError: it says none.

    Example:
        >>> read_address("pc1:4000"), str(read_address("[::1]"))
        (RendezvousAddress(host='pc1', port=4000), '[::1]:29400')
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+))(?::(\d+))?", text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no address of a rendezvous", remedy=_VALID)
    port = int(found[3] or DEFAULT_PORT)
    if not 0 < port < 65536:
        raise UsageError(f"{text!r} names port {port}", remedy="valid: 1 to 65535")
    return RendezvousAddress(found[1] or found[2], port)


def is_local(address: RendezvousAddress) -> bool:
    """Return whether `address` is one of this machine.

    Raises:
        UsageError: its host's name resolves to nothing.
    """
    for family, _, _, _, where in _resolve(address):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((where[0], 0, *where[2:]))
            except OSError:
                continue
            return True
    return False


def check_port_free(address: RendezvousAddress) -> None:
    """Refuse to serve where it is not possible.

    Raises:
        UsageError: the host is another one, or the port is taken or not allowed.
    """
    if not is_local(address):
        raise UsageError(
            f"can't serve at {address}: {address.host} is no address of this machine",
            remedy="name an address of this machine that the other hosts can reach",
        )
    reason = _refusal(address.port)
    if reason is not None:
        taken = reason.errno == errno.EADDRINUSE
        told = "the port is taken" if taken else reason.strerror
        raise UsageError(
            f"can't serve at {address}: {told}",
            remedy="choose another port" if taken else "choose a port above 1023",
        )


def is_port_taken(port: int) -> bool:
    """Return whether something listens at `port` of this machine."""
    reason = _refusal(port)
    return reason is not None and reason.errno == errno.EADDRINUSE


def reachable_address(toward: RendezvousAddress, *, serving: bool) -> str:
    """Return the address of this machine that hosts can reach which reach the rendezvous.

    Args:
        toward: of the rendezvous.
        serving: whether it is served here: then it is the address that all hosts were given. Its name may mean
            loopback here; then the name itself is returned.
    """
    family, _, _, _, where = _resolve(toward)[0]
    if serving:
        address = str(where[0])
        return toward.host if ip_address(address.partition("%")[0]).is_loopback else address
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(where)
        return str(probe.getsockname()[0])


def wait_for_server(address: RendezvousAddress, seconds: float, say: Callable[[str], None]) -> None:
    """Return when something listens at `address`.

    Args:
        address: where to look.
        seconds: time until it counts as unreachable.
        say: told what is waited for, once it takes long.

    Raises:
        MissingRanks: nothing could be reached in time; the message says how it was tried.
        UsageError: the name of the host resolves to nothing.
    """
    _resolve(address)
    start, told = time.monotonic(), False
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
                "check the address, and that no firewall is between",
            )
        if not told and time.monotonic() - start > _PATIENCE_SECONDS:
            told = True
            say(f"waiting for the rendezvous at {address} ({reason})")
        time.sleep(min(0.2, max(left, 0.0)))


def _refusal(port: int) -> OSError | None:
    """Return why nothing can listen at `port`, None if it can: torch's store listens at all addresses."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT or error.errno == errno.EADDRNOTAVAIL:
            return None  # no IPv6 here: the store will tell
        return error
    return None


def _resolve(address: RendezvousAddress) -> list[tuple]:
    try:
        return socket.getaddrinfo(address.host, address.port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the host {address.host!r} of the rendezvous resolves to nothing: {error}",
            remedy="give its IP address, or add the name to /etc/hosts on every host",
        ) from None
