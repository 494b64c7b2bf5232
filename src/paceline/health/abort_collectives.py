"""Ends waits in collectives for ranks that will not answer, so that the training thread can raise.

    paceline   the group is abandoned with a reason: pending calls raise it within 0.1 s
    gloo       only the end of a connection ends a wait (its abort() does not, torch 2.13), so the connections to
               other ranks are shut down, and waits fail as if those processes had died. A wait for a send with
               unsent bytes does not end: gloo does not report the end to it
    NCCL       the communicators are aborted
    mpi4py     as paceline while it waits for a rank to arrive; not while MPI moves data

In a thread that is not in a collective, an exception is raised as soon as it runs Python. If it runs none either, the
process ends with a message and `EXIT_CODE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist

from paceline.backends.process_group_base import GroupBase
from paceline.errors import PeerFailed

__all__ = ["EXIT_CODE", "abort_groups", "end_process", "gloo_sockets", "raise_in_thread"]

EXIT_CODE = 70
"""Exit code of a process whose training thread could not be freed (EX_SOFTWARE in sysexits.h)."""


def abort_groups(reason: PeerFailed, own_sockets: Collection[int]) -> None:
    """Make pending and future calls on all process groups fail.

    Args:
        reason: raised by calls on Paceline's own groups; others raise their own errors.
        own_sockets: descriptors that stay open.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        if isinstance(group, GroupBase):
            group.interrupt(reason)
        if torch.cuda.is_available():
            threading.Thread(target=_abort_nccl, args=(group,), name="paceline abort", daemon=True).start()
    for fd in gloo_sockets(own_sockets, _store_port()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _abort_nccl(group: dist.ProcessGroup) -> None:
    """Abort the NCCL communicators of a group, if it has any; may block for long."""
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device("cuda"))
        if isinstance(backend, dist.ProcessGroupNCCL):
            backend.abort()


def gloo_sockets(own_sockets: Collection[int] = (), store_port: int = 0) -> Iterator[int]:
    """Yield the descriptors of connections that an epoll instance of this process watches.

    gloo has one instance per device. torch's store may have one too: its connections are recognised by port.
    """
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                watched = [int(line.split()[1]) for line in file if line.startswith("tfd:")]
        except (OSError, ValueError):
            continue
        yield from (fd for fd in watched if fd not in own_sockets and _is_tcp_connection(fd, store_port))


def _is_tcp_connection(fd: int, store_port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            ports = {found.getsockname()[1], found.getpeername()[1]}
            return found.family in (socket.AF_INET, socket.AF_INET6) and store_port not in ports
    except (OSError, IndexError, TypeError):
        return False  # not a socket, not connected, or of another family


def _store_port() -> int:
    """Return the port of the rendezvous store, 0 if it has none."""
    store = None
    with contextlib.suppress(ValueError, AttributeError):
        store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else 0


def raise_in_thread(ident: int, reason: PeerFailed) -> None:
    """Raise a copy of `reason` in a thread as soon as it runs Python; the interpreter takes only a class."""
    reason = reason

    class Raised(PeerFailed):
        def __init__(self) -> None:
            Exception.__init__(self, str(reason))
            self.__dict__.update(reason.__dict__)

    Raised.__name__ = Raised.__qualname__ = PeerFailed.__name__
    Raised.__module__ = PeerFailed.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Raised))


def end_process(reason: PeerFailed) -> None:
    """Write `reason` and the stacks of all threads to standard error, and end this process at once."""
    with contextlib.suppress(OSError, ValueError):
        os.write(
            2, f"paceline.errors.PeerFailed: {reason}\n(this process could not be freed and ends)\n".encode()
        )
        faulthandler.dump_traceback(2)
        sys.stdout.flush()
    os._exit(EXIT_CODE)
