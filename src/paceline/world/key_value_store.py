"""The key-value store where the ranks of a world meet, and its address, the init method.

``file:///path`` is a file, ``tcp://host:port`` a server of rank 0, ``env://`` that of `paceline run` or torchrun. With
a job key in the environment rank 0's server admits only who holds it. Without one it is torch's, which admits everybody
who reaches it: on one host only from there, as it then listens on loopback alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from paceline._core.job_key import JobKey
from paceline._core.network_interfaces import is_loopback
from paceline.errors import MissingRanks, WorldError
from paceline.world.store.launched_store import has_launched_store, open_launched_store

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["first_host", "is_own_address", "open_store", "path_of", "resolve_init_method", "split_tcp"]

_TORCH_PORT = 29500  # torchrun's default

_VALID = "valid: file:///absolute/path, tcp://host:port, env:// (MASTER_ADDR and MASTER_PORT)"

# ---------------------------------------------------------------------- store


def open_store(init_method: str, rank: int, size: int, timeout: float) -> Store:
    """Return the key-value store where the ranks of a world meet.

    Args:
        init_method: its address; of a TCP store, rank 0 is the server.
        rank: of this process.
        size: the world size.
        timeout: seconds to wait for rank 0.

    Raises:
        MissingRanks: rank 0 can't be reached.
        WorldError: the file can't be written, rank 0 can't serve at the address, or it is not an address.
    """
    import torch.distributed as dist

    if init_method.startswith("file://"):
        return _file_store(path_of(init_method))
    if init_method == "env://" and has_launched_store(os.environ):
        return open_launched_store(os.environ, timeout)
    if init_method == "env://":
        query = f"env://?rank={rank}&world_size={size}"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _wait_for_server(host, port, "the torchrun agent's store", timeout)
        store, _, _ = next(dist.rendezvous(query, timeout=timedelta(seconds=timeout)))
        return store
    host, port = split_tcp(init_method)
    if rank != 0:
        timeout -= _wait_for_server(host, port, "rank 0's store", timeout)
    timeout = max(timeout, 1.0)
    key = JobKey.from_environment(os.environ)
    try:
        if key is not None:
            return _authenticated_store(host, port, key, timeout, serve=rank == 0)
        handle = _loopback_listener(host, port) if rank == 0 else None
        return dist.TCPStore(
            host,
            port,
            size,
            rank == 0,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=handle,
        )
    except (dist.DistError, OSError) as error:
        raise _server_error(host, port, rank, error) from error


def _authenticated_store(host: str, port: int, key: JobKey, timeout: float, *, serve: bool) -> Store:
    """Return the store that only processes with the job's key can use; rank 0 serves it."""
    from paceline.world.store.authenticated_store import AuthenticatedStore
    from paceline.world.store.key_value_state import KEY_VALUE_SERVICE, KeyValueState
    from paceline.world.store.request_server import RequestServer

    if serve:
        address = _loopback_address(host)
        if address is None and not is_own_address(host, port):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        RequestServer(address or "*", port, key, {KEY_VALUE_SERVICE: KeyValueState()})
    return AuthenticatedStore(host, port, key, "init", timeout)


def _loopback_listener(host: str, port: int) -> int | None:
    """Return a socket that listens on this machine only, None if `host` is reachable from others.

    torch's own listens at all addresses, whatever the host.
    """
    address = _loopback_address(host)
    if address is None:
        return None
    with socket.create_server(
        (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
    ) as server:
        return server.detach()


def _loopback_address(host: str) -> str | None:
    """Return the loopback address that `host` is; None: it is another one."""
    return "127.0.0.1" if host == "localhost" else host if is_loopback(host) else None


def is_own_address(host: str, port: int) -> bool:
    """Return whether `host` is an address of this machine, or a name of one."""
    try:
        found = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    for family, _, _, _, where in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((where[0], 0, *where[2:]))
            return True
    return False


def _file_store(path: str) -> Store:
    """Return the store in a file, which stays when the world is left and may be used again.

    torch would remove the file when the last of `size` stores on it is closed, even if a rank of the next world has
    just opened it. Without a size it leaves the file alone.
    """
    import torch.distributed as dist

    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise WorldError(
            f"the ranks can't meet in the file {path}: {error.strerror}",
            remedy="name a new file in an existing folder to which all ranks can write",
        ) from None
    return dist.FileStore(path)


def _wait_for_server(host: str, port: int, what: str, timeout: float) -> float:
    """Return the seconds until `host` accepted connections at `port`."""
    start = time.monotonic()
    reason = "no answer"
    while True:
        left = start + timeout - time.monotonic()
        if left <= 0:
            raise MissingRanks(
                f"{what} at {host}:{port} could not be reached within {timeout:g} s: {reason}",
                remedy="check that rank 0 runs, that this is its host, and that no firewall is in between",
            )
        try:
            socket.create_connection((host, port), timeout=left).close()
            return time.monotonic() - start
        except UnicodeError:
            raise WorldError(f"{host!r} is not a host name", remedy="name the host of rank 0") from None
        except OSError as error:
            reason = str(error)
            time.sleep(min(0.1, left))


def _server_error(host: str, port: int, rank: int, error: Exception) -> WorldError:
    if rank != 0:
        return MissingRanks(f"rank 0's store at {host}:{port} was lost: {error}", rank=rank)
    text = str(error)
    reason, remedy = text, f"{host} must be an address of the host on which rank 0 runs"
    if os.strerror(errno.EADDRINUSE).lower() in text.lower() or "EADDRINUSE" in text:
        reason, remedy = "the port is in use", "choose a free port"
    return WorldError(f"rank 0 can't serve at {host}:{port}: {reason}", rank=0, remedy=remedy)


# ---------------------------------------------------------------------- address


def resolve_init_method(
    env: Mapping[str, str],
    init_method: str | None,
    launcher: str,
    *,
    rank: int,
    size: int,
    local_size: int | None,
    nodes: int | None,
) -> str | None:
    """Return the address where the ranks meet; None for a world of one without a rendezvous.

    The argument takes precedence over ``PACELINE_INIT_METHOD``, that over ``MASTER_ADDR`` and ``MASTER_PORT``, and
    those over what Slurm's node list and job number, or an mpirun on a single node, imply.

    Raises:
        WorldError: no source gives the address, or one is malformed.
    """
    given = init_method or env.get("PACELINE_INIT_METHOD") or None
    if given is not None and given != "env://":
        _check(given, "init_method" if init_method else "PACELINE_INIT_METHOD")
        return given
    if size == 1 and given is None and (launcher != "torchrun" or not env.get("MASTER_ADDR")):
        return None
    if has_launched_store(env):
        return "env://"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _master(env, required=True)
        return "env://"
    host, port = _master(env, required=given is not None)
    if host is None:
        host = _implied_host(env, launcher, size, local_size, nodes)
    if port is None and host is not None:
        port = _implied_port(env, launcher)
    if host is not None and port is not None:
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    raise WorldError(
        f"rank {rank} of {size} does not know where to meet the others: {' and '.join(missing)} not set",
        remedy="set MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there), "
        "or PACELINE_INIT_METHOD=file:///path/on/a/shared/disk",
    )


def split_tcp(url: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``.

    Example:
        >>> split_tcp("tcp://[::1]:4000")
        ('::1', 4000)
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def path_of(url: str) -> str:
    """Return the path of ``file:///path``.

    Example:
        >>> path_of("file:///tmp/a%20b")
        '/tmp/a b'
    """
    return unquote(urlsplit(url).path)


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list.

    Example:
        >>> first_host("gpu[007-009,12],cpu3"), first_host("pc1,pc2"), first_host("r[1-2]n[08-16]")
        ('gpu007', 'pc1', 'r1n08')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _check(url: str, source: str) -> None:
    """Raise unless `url` is a file or TCP address."""
    shown = f"{source} is {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise WorldError(f"{shown}: {error}", remedy=_VALID) from None
    if parts.scheme == "file":
        if parts.netloc or len(parts.path) < 2:
            raise WorldError(
                f"{shown}, which has no absolute path", remedy="write three slashes: file:///path/to/file"
            )
        return
    if parts.scheme != "tcp":
        raise WorldError(f"{shown}, which is not an init method", remedy=_VALID)
    if not parts.hostname or not port:
        missing = "host" if not parts.hostname else "port"
        raise WorldError(
            f"{shown}, which has no {missing}",
            remedy="write tcp://host:port, for example tcp://10.0.0.1:4000",
        )
    if parts.query or parts.path:
        raise WorldError(f"{shown}; nothing may follow the port", remedy="pass rank= and size= as arguments")


def _master(env: Mapping[str, str], *, required: bool) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT, each None if it is not set."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if required and not env.get(name):
            raise WorldError(
                f"{name} is not set, and env:// needs it", remedy="set MASTER_ADDR and MASTER_PORT"
            )
    text = env.get("MASTER_PORT") or None
    if text is not None and not (text.isdecimal() and 0 < int(text) < 65536):
        raise WorldError(
            f"MASTER_PORT={text!r} is not a port", remedy="set MASTER_PORT to a number from 1 to 65535"
        )
    return env.get("MASTER_ADDR") or None, int(text) if text else None


def _implied_host(
    env: Mapping[str, str], launcher: str, size: int, local_size: int | None, nodes: int | None
) -> str | None:
    if launcher not in ("Slurm", "MPICH", "Open MPI"):
        return None
    if size == local_size or nodes == 1:
        return "127.0.0.1"
    if launcher != "Slurm":
        return None
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return first_host(env[name])
    return env.get("SLURM_LAUNCH_NODE_IPADDR") or None


def _implied_port(env: Mapping[str, str], launcher: str) -> int | None:
    """Return a port that all tasks of a Slurm step agree on and other steps rarely share; torch's for MPI.

    It is below 32768, where Linux begins to give ports to connections.
    """
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "0")
    if launcher == "Slurm" and job.isdecimal():
        return 20000 + (int(job) * 31 + (int(step) if step.isdecimal() else 0)) % 12000
    return _TORCH_PORT if launcher in ("MPICH", "Open MPI") else None
