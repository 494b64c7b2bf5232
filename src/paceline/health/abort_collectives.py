"""Freeing a thread that waits in a collective for ranks that will not come, so that it can raise.

What frees it depends on who waits:

    paceline   the group is abandoned with a reason: a call under way raises it within a tenth of a second
    gloo       nothing in it frees a wait but the end of a connection (its abort() does not, torch 2.13), so the
               connections to other ranks are shut down; the wait ends as if those processes had died. It does not
               end where gloo waits for a send of which some bytes have not left: those it does not tell of the end
    NCCL       the communicators are aborted
    mpi4py     as paceline where it waits for a rank to come; nothing does where MPI moves data

A thread that does not wait in a collective is raised into as soon as it runs Python. If it does not run any either, the
process ends: `EXIT_CODE`, after its message.
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

from paceline.backends.group_base import GroupBase
from paceline.errors import PeerFailed

__all__ = ["EXIT_CODE", "abort_groups", "end_process", "raise_in", "sockets_of_gloo"]

EXIT_CODE = 70
"""Of a process that could not be freed (EX_SOFTWARE in sysexits.h)."""


def abort_groups(reason: PeerFailed, own_files: Collection[int]) -> None:
    """Have every call on every process group, under way or to come, fail.

    Args:
        reason: raised by the calls of our own groups; others raise what they have.
        own_files: descriptors that are to be left alone.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        if isinstance(group, GroupBase):
            group.interrupt(reason)
        if torch.cuda.is_available():
            threading.Thread(target=_abort_nccl, args=(group,), name="paceline abort", daemon=True).start()
    for fd in sockets_of_gloo(own_files, _store_port()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _abort_nccl(group: dist.ProcessGroup) -> None:
    """Abort the communicators of a group, where it has some; may take its time."""
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device("cuda"))
        if isinstance(backend, dist.ProcessGroupNCCL):
            backend.abort()


def sockets_of_gloo(own_files: Collection[int] = (), store_port: int = 0) -> Iterator[int]:
    """Yield the descriptors of connections that some epoll instance of this process looks after.

    gloo has one instance for each device. torch's store may have one too: its port tells its connections.
    """
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                watched = [int(line.split()[1]) for line in file if line.startswith("tfd:")]
        except (OSError, ValueError):
            continue
        yield from (fd for fd in watched if fd not in own_files and _is_connection(fd, store_port))


def _is_connection(fd: int, store_port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            ports = {found.getsockname()[1], found.getpeername()[1]}
            return found.family in (socket.AF_INET, socket.AF_INET6) and store_port not in ports
    except (OSError, IndexError, TypeError):
        return False  # no socket, not connected, or of another kind


def _store_port() -> int:
    """Return the port of the store where the ranks met, 0 if it has none."""
    store = None
    with contextlib.suppress(ValueError, AttributeError):
        store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else 0


def raise_in(ident: int, reason: PeerFailed) -> None:
    """Have a thread raise `reason` (a copy without its own arguments) as soon as it runs Python."""
    told = reason

    class Raised(PeerFailed):
        def __init__(self) -> None:
            Exception.__init__(self, str(told))
            self.__dict__.update(told.__dict__)

    Raised.__name__ = Raised.__qualname__ = PeerFailed.__name__
    Raised.__module__ = PeerFailed.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Raised))


def end_process(reason: PeerFailed) -> None:
    """Write `reason` and where all threads stand to standard error, and end this process at once."""
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"paceline.PeerFailed: {reason}\n(this process could not be freed and ends)\n".encode())
        faulthandler.dump_traceback(2)
        sys.stdout.flush()
    os._exit(EXIT_CODE)
