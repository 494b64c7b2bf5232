"""The store that `paceline run` gives its ranks: named by a variable, used by `paceline.init` and by torch's env://.

[Note: env] A program that knows nothing of Paceline calls ``init_process_group()``, which reads MASTER_ADDR and
MASTER_PORT and would make rank 0 serve torch's store there, to everybody. Where Paceline is installed, torch loads its
backends (entry point ``torch.backends``), and that replaces the handler of ``env://`` in ranks that have the variable.
A program that sets MASTER_PORT itself, or starts ranks of its own, means another rendezvous and gets torch's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from paceline._core.job_key import JobKey

__all__ = [
    "STORE_VARIABLE",
    "file_store_variable",
    "has_launched_store",
    "open_launched_store",
    "replace_env_rendezvous",
    "server_store_variable",
]

STORE_VARIABLE = "PACELINE_STORE"
"""Variable with the address of the store, and the MASTER_ADDR and MASTER_PORT for which it stands."""


def file_store_variable(path: Path, master: str) -> dict[str, str]:
    """Return the variable for a store in a file that only this user can reach.

    Args:
        path: of the file.
        master: HOST:PORT, as in MASTER_ADDR and MASTER_PORT.
    """
    return {STORE_VARIABLE: f"{path.as_uri()}?{urlencode({'master': master})}"}


def server_store_variable(host: str, port: int, space: str, master: str) -> dict[str, str]:
    """Return the variable for a space of keys on a server, see `file_store_variable`."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return {STORE_VARIABLE: f"tcp://{place}/{quote(space, safe='')}?{urlencode({'master': master})}"}


def has_launched_store(environ: Mapping[str, str]) -> bool:
    """Return whether the variable stands for the present MASTER_ADDR and MASTER_PORT.

    Example:
        >>> variable = file_store_variable(Path("/private/store"), "127.0.0.1:4711")
        >>> has_launched_store(variable | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"})
        True
        >>> has_launched_store(variable | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
        False
    """
    master = parse_qs(urlsplit(environ.get(STORE_VARIABLE, "")).query).get("master", [""])[0]
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return bool(master) and master in (f"{host}:{port}", f"[{host}]:{port}")


def open_launched_store(environ: Mapping[str, str], timeout: float) -> Any:
    """Return the store that the variable names.

    Args:
        environ: with the variable and the job's key.
        timeout: seconds that a call waits for a key.

    Raises:
        UsageError: the job's key is malformed.
    """
    import torch.distributed as dist

    parts = urlsplit(environ[STORE_VARIABLE])
    if parts.scheme == "file":
        store = dist.FileStore(unquote(parts.path))
        store.set_timeout(timedelta(seconds=timeout))
        return store
    from paceline.world.store.authenticated_store import AuthenticatedStore

    assert parts.hostname is not None, "set by server_store_variable"
    assert parts.port is not None, "set by server_store_variable"
    space = unquote(parts.path.removeprefix("/"))
    return AuthenticatedStore(
        parts.hostname, parts.port, JobKey.from_environment(environ), space, timeout=timeout
    )


def replace_env_rendezvous() -> None:
    """Make torch's env:// use the store of `paceline run` in its ranks; see [Note: env]."""
    if STORE_VARIABLE not in os.environ:
        return
    # torch.distributed has a function of this name.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    of_torch = handlers["env"]

    def rendezvous_by_environment(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if not has_launched_store(os.environ):
            return of_torch(url, **options)
        return _rendezvous(url, **options)

    handlers["env"] = rendezvous_by_environment


def _rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and world size once, as torch's handlers do."""
    query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    rank, size = (int(query.get(name.lower()) or os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    yield open_launched_store(os.environ, timeout.total_seconds()), rank, size
    raise RuntimeError("env:// can't rendezvous a second time")
