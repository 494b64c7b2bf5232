"""Where the watcher of a rank is reached by those of other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from paceline.machine.network import host_address, interfaces, is_loopback

__all__ = ["listen", "own_address"]

LOOPBACK = "127.0.0.1"


def own_address(env: Mapping[str, str] | None = None) -> str:
    """Return the address at which other hosts reach this one: that of the process group, as far as it can be told.

    It is that of the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names; else what this host's name resolves
    to, as for gloo; else the one from which rank 0's host is reached.
    """
    env = os.environ if env is None else env
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = env.get(variable, "").split(",")[0]
        for interface in interfaces() if named else ():
            if interface.name == named:
                return min(interface.addresses, key=lambda address: ":" in address)
    address = host_address()
    if address and not is_loopback(address):
        return address
    return _towards(env.get("MASTER_ADDR", "")) or LOOPBACK


def _towards(host: str) -> str:
    """Return the address of this host from which `host` is reached, empty if it is not, or is this one."""
    if not host:
        return ""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if is_loopback(address) else address


def listen(address: str) -> socket.socket:
    """Return a socket that is dialled at `address`, at a port that is free.

    Raises:
        OSError: this host has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
