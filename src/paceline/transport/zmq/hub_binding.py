"""Binds the socket of a hub to its address."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from pathlib import Path

import zmq

from paceline.errors import UsageError
from paceline.transport.hub_address import HubAddress

__all__ = ["bind_hub", "remove_socket_file"]

_OTHER_ADDRESS = "give an address of this machine, or tcp://*:PORT for all of them"
_TAKEN = (
    "stop what listens there (`ss -ltnpx` shows it), or give another port or path; port * is any free one"
)
_NOT_ALLOWED = "give a port above 1023, or a folder that you may write to"


def bind_hub(router: zmq.Socket[bytes], wanted: HubAddress, *, private: bool) -> str:
    """Bind a socket, and return the address with its actual port.

    Args:
        router: the socket.
        wanted: its address.
        private: refuse other users at an ``ipc`` address: its file has mode 0600, and the kernel reports who connects.

    Raises:
        UsageError: the address is taken or not of this machine, or others can replace the file of an ``ipc`` address.
    """
    if wanted.transport == "ipc":
        _check_socket_file(Path(wanted.host), private)
        if private and sys.platform.startswith("linux"):
            router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    umask = os.umask(0o177) if private and wanted.transport == "ipc" else None
    try:
        router.bind(str(_resolve_host(wanted)))
    except zmq.ZMQError as error:
        remedies = {zmq.EADDRINUSE: _TAKEN, errno.EACCES: _NOT_ALLOWED}
        raise UsageError(
            f"hub can't bind {wanted}: {error.strerror}",
            remedy=remedies.get(error.errno or 0, _OTHER_ADDRESS),
        ) from error
    finally:
        if umask is not None:
            os.umask(umask)
    return router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def remove_socket_file(address: HubAddress) -> None:
    """Remove the file of an ``ipc`` address, which libzmq leaves behind, unless a hub listens there."""
    if address.transport == "ipc" and not _listens(Path(address.host)):
        Path(address.host).unlink(missing_ok=True)


def _check_socket_file(path: Path, private: bool) -> None:
    """Raise unless a socket file may be made; its folder is made, if only that is missing."""
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise UsageError(
            f"hub can't bind ipc://{path}: {error.strerror}", remedy="give another path"
        ) from error
    if private and mode & 0o022 and not mode & stat.S_ISVTX:
        raise UsageError(
            f"others can write to {folder}, so they could replace the hub's socket",
            remedy=f"chmod go-w {folder}, or give another path",
        )
    if _listens(path):  # libzmq would replace it
        raise UsageError(f"hub can't bind ipc://{path}: Address already in use", remedy=_TAKEN)


def _listens(path: Path) -> bool:
    """Return whether a process accepts connections at a Unix socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(str(path))
        return True
    return False


def _resolve_host(wanted: HubAddress) -> HubAddress:
    """Replace a host name by its IP address, since libzmq does not bind names."""
    if wanted.transport != "tcp" or wanted.host == "*" or wanted.is_ipv6:
        return wanted
    try:
        (*_, address), *_ = socket.getaddrinfo(wanted.host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"hub can't bind {wanted}: the host {wanted.host!r} does not resolve",
            remedy="give an IP address such as 192.168.1.5, or tcp://*:PORT",
        ) from error
    return HubAddress("tcp", str(address[0]), wanted.port)
