"""Endpoints of the watchdogs: identity of a rank, and the address at which the others reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline._core.network_interfaces import host_address, is_loopback, list_interfaces

__all__ = ["LOOPBACK", "PeerEndpoint", "open_listener", "watchdog_address"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class PeerEndpoint:
    """Identity of a rank, gathered by all ranks before the watchdogs start.

    Attributes:
        rank: its number.
        host: name of its host.
        host_key: equal for processes of one host only.
        pid: process id.
        start_ticks: start time of the process.
        thread_ident: identifier of the training thread.
        address, port: where its watchdog listens.
        token: rank 0's is part of the key of all connections; empty for others.
    """

    rank: int
    host: str
    host_key: str
    pid: int
    start_ticks: int
    thread_ident: int
    address: str
    port: int
    token: str


def watchdog_address(env: Mapping[str, str] | None = None) -> str:
    """Return the address at which other hosts reach this one, as the process group does.

    In this order: the address of the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, the one that this host's
    name resolves to (as for gloo), the one from which this host reaches rank 0's.
    """
    env = os.environ if env is None else env
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = env.get(variable, "").split(",")[0]
        for interface in list_interfaces() if name else ():
            if interface.name == name:
                return min(interface.addresses, key=lambda address: ":" in address)
    address = host_address()
    if address and not is_loopback(address):
        return address
    return _address_toward(env.get("MASTER_ADDR", "")) or LOOPBACK


def _address_toward(host: str) -> str:
    """Return this host's address on the route to `host`; empty if there is none or `host` is this one."""
    if not host:
        return ""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if is_loopback(address) else address


def open_listener(address: str) -> socket.socket:
    """Return a non-blocking listening socket at a free port of `address`.

    Raises:
        OSError: this host has no such address.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
