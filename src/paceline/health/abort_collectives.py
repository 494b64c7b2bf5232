"""Ends waits in collectives for ranks that will not answer, so that the training thread can raise.

    paceline   the group is abandoned with a reason: pending calls raise it within 0.1 s
    gloo       only the end of a connection ends a wait (its abort() does not, torch 2.13), so the connections to
               other ranks are shut down, and waits fail as if those processes had died. A wait for a send with
               unsent bytes does not end: gloo does not report the end to it
    NCCL       the communicators are aborted; likewise XCCL and others of accelerators, where they can be
    mpi4py     as paceline while it waits for a rank to arrive; not while MPI moves data

In a thread that is not in a collective, an exception is raised as soon as it runs Python. If it runs none either, the
process ends with a message and `EXIT_CODE`.

[Note: connections of gloo] gloo watches its connections with epoll, and so do asyncio, gRPC and torch's store, whose
connections must not end. What distinguishes them: with each descriptor epoll keeps a pointer to the object that handles
its events, and a C++ object begins with the address of a table from which its class name can be read (Itanium C++ ABI,
"Virtual Table Layout"). Other users of epoll keep numbers or objects of other classes there. The memory is read through
/proc/self/mem, which returns an error where there is none. A descriptor may be closed and its number reused at any
time, so the socket is duplicated first, and is the right one if it has the inode that epoll recorded.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from paceline.backends.process_group_base import GroupBase
from paceline.errors import PeerFailed
from paceline.world.accelerator import find_accelerator
from paceline.world.group_devices import queues_on_streams

__all__ = ["EXIT_CODE", "abort_groups", "end_process", "gloo_sockets", "raise_in_thread"]

EXIT_CODE = 70
"""Exit code of a process whose training thread could not be freed (EX_SOFTWARE in sysexits.h)."""

_GLOO_CLASSES = b"N4gloo9transport3tcp"  # mangled: gloo::transport::tcp, and what is nested in it (tls)
_WATCHED = re.compile(r"^tfd: *(\d+) .*\bdata: *([0-9a-f]+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_POINTER_NBYTES = struct.calcsize("P")


def abort_groups(reason: PeerFailed) -> None:
    """Make pending and future calls on all process groups fail.

    Args:
        reason: raised by calls on Paceline's own groups; others raise their own errors.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        if isinstance(group, GroupBase):
            group.interrupt(reason)
        if find_accelerator() is not None:
            threading.Thread(
                target=_abort_on_streams, args=(group,), name="paceline abort", daemon=True
            ).start()
    for connection in gloo_sockets():
        with connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _abort_on_streams(group: dist.ProcessGroup) -> None:
    """Abort a group's communicators of accelerators (NCCL's, for example), if it has any; may block for long."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            backend: Any = group._get_backend(device)
            if queues_on_streams(backend.name()):
                backend.abort()


def gloo_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each connection of gloo in this process, to be closed; see [Note: connections of gloo]."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for fd, handler, inode in _watched_descriptors():
            if _class_name(memory, handler).startswith(_GLOO_CLASSES):
                connection = _duplicate(fd, inode)
                if connection is not None:
                    yield connection
    finally:
        os.close(memory)


def _watched_descriptors() -> Iterator[tuple[int, int, int]]:
    """Yield descriptor, data and inode of everything that an epoll instance of this process watches (proc(5))."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as file:
                text = file.read()
        except OSError:
            continue
        for fd, data, inode in _WATCHED.findall(text):
            yield int(fd), int(data, 16), int(inode, 16)


def _class_name(memory: int, address: int) -> bytes:
    """Return the mangled class name of the C++ object at `address`; empty if there is none."""
    try:
        (table,) = struct.unpack("P", os.pread(memory, _POINTER_NBYTES, address))
        (type_info,) = struct.unpack("P", os.pread(memory, _POINTER_NBYTES, table - _POINTER_NBYTES))
        (name,) = struct.unpack("P", os.pread(memory, _POINTER_NBYTES, type_info + _POINTER_NBYTES))
        return os.pread(memory, len(_GLOO_CLASSES), name)
    except (OSError, OverflowError, ValueError, struct.error):
        return b""


def _duplicate(fd: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a descriptor if it still is the connection with this inode."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return None
    status = os.fstat(duplicate)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
        os.close(duplicate)
        return None
    found = socket.socket(fileno=duplicate)
    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.close()
        return None
    return found


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
