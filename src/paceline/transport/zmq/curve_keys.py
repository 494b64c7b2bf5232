"""Curve25519 keys that authenticate workers to a hub and encrypt their connections (CURVE).

    FOLDER/hub.key                keys of the hub; the file stays where the hub runs
    FOLDER/WORKER.key             keys of a worker, and the hub's public key; given to the worker
    FOLDER/workers/WORKER.pub     public keys that the hub admits: add or remove files while it runs

A file has one ``name = value`` per line; keys are Z85 text. Files with a secret key are readable by their owner only
(0600), and so is the folder (0700).

Where hub and workers share a `JobKey`, they derive their keys from it, and there are no files.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from paceline._core.files import fsync
from paceline._core.job_key import JobKey
from paceline.errors import UsageError

__all__ = ["JOB_KEY_NAME", "HubKeys", "WorkerKeys", "make_keys", "read_public_key"]

JOB_KEY_NAME = "job key"
"""Name of the key that all workers of a job share."""

_HUB_FILE, _WORKERS = "hub.key", "workers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_LENGTH, _FILE_LIMIT_NBYTES = 40, 4096
_OTHERS = 0o077
_REMEDY = "make one: paceline hub keygen FOLDER"
_JOB_HUB, _JOB_WORKER = "hub", "hub worker"

_KEYS_OF_KIND = {"hub": ("public", "secret"), "worker": ("public", "secret", "hub"), "public": ("public",)}
_KIND_NAMES = {"hub": "a hub's key", "worker": "a worker's key", "public": "a public key of a worker"}


@dataclass(frozen=True)
class HubKeys:
    """Keys of a hub and of the workers that it admits.

    Attributes:
        public: of the hub; keys are Z85 text.
        secret: of the hub.
        workers: folder of the workers' public keys; None: the workers share a key.
        shared: public key that all workers share; empty: each has its own.
    """

    public: str
    secret: str = field(repr=False)
    workers: Path | None
    shared: str = ""

    @staticmethod
    def of_job(job: JobKey) -> HubKeys:
        """Return the keys of the hub of a job; see `WorkerKeys.of_job`.

        Raises:
            UsageError: pyzmq was built without encryption.
        """
        public, secret = (each.decode() for each in job.curve_pair(_JOB_HUB))
        shared, _ = job.curve_pair(_JOB_WORKER)
        return HubKeys(public, secret, None, shared.decode())

    @staticmethod
    def read(path: str | Path) -> HubKeys:
        """Read the keys that `make_keys` wrote.

        Args:
            path: the file, or its folder.

        Raises:
            UsageError: the file is not a hub's key, can't be read, or is readable by others.
        """
        path = Path(path)
        if path.is_dir():
            path = path / _HUB_FILE
        values = _read(path, "hub")
        return HubKeys(values["public"], values["secret"], path.parent / _WORKERS)

    def as_client(self) -> WorkerKeys:
        """Return the keys by which a hub connects to another one with the same keys, as its standby does."""
        return WorkerKeys("hub", self.public, self.public, self.secret)


@dataclass(frozen=True)
class WorkerKeys:
    """Name and keys of a worker, and the public key of its hub; keys are Z85 text."""

    name: str
    hub: str
    public: str
    secret: str = field(repr=False)

    @staticmethod
    def read(path: str | Path) -> WorkerKeys:
        """Read the keys that `make_keys` wrote.

        Raises:
            UsageError: the file is not a worker's key, can't be read, or is readable by others.
        """
        values = _read(Path(path), "worker")
        return WorkerKeys(values["name"], values["hub"], values["public"], values["secret"])

    @staticmethod
    def of_job(job: JobKey) -> WorkerKeys:
        """Return the keys of any worker of a job.

        All share one pair. A pair per worker number would keep nobody out, since the job's key yields all of them; and
        a hub, which authenticates a connection before it learns the number, could not verify it.

        Raises:
            UsageError: pyzmq was built without encryption.
        """
        hub, _ = job.curve_pair(_JOB_HUB)
        public, secret = (each.decode() for each in job.curve_pair(_JOB_WORKER))
        return WorkerKeys(JOB_KEY_NAME, hub.decode(), public, secret)


def read_public_key(path: Path) -> tuple[str, str]:
    """Return name and public key of an admitted worker.

    Raises:
        UsageError: the file is not a worker's public key, or can't be read.
    """
    values = _read(path, "public")
    return values["name"], values["public"]


def make_keys(folder: str | Path, worker: str = "worker") -> Path:
    """Make a worker's keys, and the hub's if it has none; return the file to be given to the worker.

    Args:
        folder: of the hub's keys; created if missing.
        worker: name of the worker; workers that share a file are the same to the hub.

    Raises:
        UsageError: the worker already has keys, the folder is open to others or not writable, or the name is invalid.

    Example:
        >>> make_keys("keys", "alice").name  # doctest: +SKIP
        'alice.key'
    """
    if not _NAME.fullmatch(worker) or f"{worker}.key" == _HUB_FILE:
        raise UsageError(
            f"{worker!r} is not a valid name for a worker's keys",
            remedy="give 1 to 64 letters, digits, dots, dashes or underscores; not hub",
        )
    folder = Path(folder)
    for each in (folder, folder / _WORKERS):
        _make_private_folder(each)
    key, record = folder / f"{worker}.key", folder / _WORKERS / f"{worker}.pub"
    for path in (key, record):
        if os.path.lexists(path):
            raise _exists(path)
    public, secret = _new_pair()
    own = {"name": worker, "public": public}
    hub = _hub_keys(folder).public
    if not _write(record, {"kind": "public", **own}, f"{worker} may connect to this hub"):
        raise _exists(record)
    try:
        given = {"kind": "worker", **own, "secret": secret, "hub": hub}
        if not _write(key, given, f"for {worker} and nobody else"):
            raise _exists(key)
    except BaseException:
        record.unlink()  # its secret key is lost
        raise
    return key


def _hub_keys(folder: Path) -> HubKeys:
    """Return the hub's keys; they are made if missing, here or by a concurrent process."""
    path = folder / _HUB_FILE
    if not os.path.lexists(path):
        public, secret = _new_pair()
        _write(path, {"kind": "hub", "public": public, "secret": secret}, "the hub's own: give it to nobody")
    return HubKeys.read(path)


def _new_pair() -> tuple[str, str]:
    if not zmq.has("curve"):
        raise UsageError(
            "this pyzmq was built without encryption",
            remedy="pip install --force-reinstall --only-binary :all: pyzmq",
        )
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _make_private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise UsageError(f"{folder} can't be made: {error.strerror}", remedy="give another folder") from error
    if mode & _OTHERS:
        raise UsageError(f"{folder} is open to others, so it can't hold keys", remedy=f"chmod 700 {folder}")


def _write(path: Path, values: Mapping[str, str], comment: str) -> bool:
    """Write a file atomically unless it exists; return whether it was written."""
    lines = [f"# Paceline: {comment}", *(f"{name} = {value}" for name, value in values.items())]
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as file:  # 0600
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)
        fsync(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(
            f"{path} can't be written: {error.strerror}", remedy="free some space, or give another folder"
        ) from error
    return True


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"{path} already exists", remedy="give the worker another name; keys are never overwritten"
    )


def _read(path: Path, kind: str) -> dict[str, str]:
    """Return the values of a key file of this kind, all of them valid."""
    try:
        with open(path, encoding="ascii") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(_FILE_LIMIT_NBYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{path} can't be read as a {kind} key: {reason}", remedy=_REMEDY) from error
    if "secret" in _KEYS_OF_KIND[kind] and mode & _OTHERS:
        raise UsageError(f"{path} holds a secret key that others can read", remedy=f"chmod 600 {path}")
    lines = [line.partition(" = ") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    values = {name.strip(): value.strip() for name, _, value in lines}
    found = values.get("kind")
    if found not in _KEYS_OF_KIND:
        raise UsageError(f"{path} is not a key file", remedy=_REMEDY)
    if found != kind:
        raise UsageError(
            f"{path} is {_KIND_NAMES[found]}, not {_KIND_NAMES[kind]}",
            remedy="the hub reads hub.key, which stays with it; a worker is given a file with its own name",
        )
    _check(path, values)
    return values


def _check(path: Path, values: Mapping[str, str]) -> None:
    """Raise unless the keys in a file are valid and match."""
    invalid = [name for name in _KEYS_OF_KIND[values["kind"]] if not _is_key(values.get(name, ""))]
    if values["kind"] != "hub" and not _NAME.fullmatch(values.get("name", "")):
        invalid.append("name")
    if invalid:
        raise UsageError(f"{path} is damaged: no valid {invalid[0]}", remedy="copy it again")
    secret = values.get("secret")
    if secret is not None and zmq.curve_public(secret.encode()).decode() != values["public"]:
        raise UsageError(f"{path} is damaged: its keys don't match", remedy="copy it again")


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_LENGTH and bool(z85.decode(text))
    except (KeyError, ValueError, struct.error):
        return False
