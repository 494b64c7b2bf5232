"""The key-value store where the ranks of a world meet: a file, a TCP server of rank 0, or torchrun's."""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.errors import MissingRanks, WorldError
from paceline.world.address import path_of, split_tcp

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["open_store"]


def open_store(init_method: str, rank: int, size: int, timeout: float) -> Store:
    """Return the key-value store where the ranks of a world meet.

    Args:
        init_method: ``file:///path``, ``tcp://host:port`` (rank 0 serves there), or ``env://`` for the store
            that a torchrun agent serves.
        rank, size: this process's place in the world.
        timeout: seconds to wait for rank 0.

    Raises:
        MissingRanks: rank 0 can't be reached.
        WorldError: the file can't be written, rank 0 can't serve at the address, or it is no address.
    """
    import torch.distributed as dist

    if init_method.startswith("file://"):
        return _file_store(path_of(init_method))
    if init_method == "env://":
        query = f"env://?rank={rank}&world_size={size}"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _wait_for_server(host, port, "the torchrun agent's store", timeout)
        store, _, _ = next(dist.rendezvous(query, timeout=timedelta(seconds=timeout)))
        return store
    host, port = split_tcp(init_method)
    if rank != 0:
        timeout -= _wait_for_server(host, port, "rank 0's store", timeout)
    try:
        return dist.TCPStore(
            host, port, size, rank == 0, timedelta(seconds=max(timeout, 1.0)), wait_for_workers=False
        )
    except dist.DistError as error:
        raise _server_error(host, port, rank, error) from error


def _file_store(path: str) -> Store:
    """Return the store in a file, which stays when the world is left and may be used again.

    torch would remove the file when the last of `size` stores on it is closed, and does so even if a rank of
    the next world has just opened it. Without a size it leaves the file alone.
    """
    import torch.distributed as dist

    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise WorldError(
            f"the ranks can't meet in the file {path}: {error.strerror}",
            remedy="name a new file in a folder that exists and that all ranks can write",
        ) from None
    return dist.FileStore(path)


def _wait_for_server(host: str, port: int, what: str, timeout: float) -> float:
    """Return the seconds it took until `host` accepted connections at `port`."""
    start = time.monotonic()
    reason = "no answer"
    while True:
        left = start + timeout - time.monotonic()
        if left <= 0:
            raise MissingRanks(
                f"{what} at {host}:{port} could not be reached within {timeout:g} s: {reason}",
                remedy="check that rank 0 runs, that this is its host, and that no firewall is between",
            )
        try:
            socket.create_connection((host, port), timeout=left).close()
            return time.monotonic() - start
        except UnicodeError:
            raise WorldError(f"{host!r} is no host name", remedy="name the host of rank 0") from None
        except OSError as error:
            reason = str(error)
            time.sleep(min(0.1, left))


def _server_error(host: str, port: int, rank: int, error: Exception) -> WorldError:
    if rank != 0:
        return MissingRanks(f"rank 0's store at {host}:{port} was lost: {error}", rank=rank)
    text = str(error)
    if os.strerror(errno.EADDRINUSE).lower() in text.lower() or "EADDRINUSE" in text:
        return WorldError(
            f"rank 0 can't serve at {host}:{port}: the port is in use", rank=0, remedy="choose a free port"
        )
    return WorldError(
        f"rank 0 can't serve at {host}:{port}: {text}",
        rank=0,
        remedy=f"{host} must be an address of the host on which rank 0 runs",
    )
