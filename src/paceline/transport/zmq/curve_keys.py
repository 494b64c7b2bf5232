"""Keys of a star: who may come to a hub, and that nobody else hears what is said (CURVE, Curve25519).

    FOLDER/hub.key                the hub's own; it stays where the hub is
    FOLDER/WORKER.key             what a worker is given: its own, and the hub's public key
    FOLDER/workers/WORKER.pub     whom the hub admits: add one, or remove one, while it runs

A file has one ``name = value`` a line; keys are Z85 text. Those with a secret are their owner's alone (0600), and so is
the folder (0700).
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
from paceline.errors import UsageError
from paceline.transport.hub_address import parse_hub_address

__all__ = ["HubKeys", "WorkerKeys", "make_keys", "needs_keys", "read_public_key"]

_HUB_FILE, _WORKERS = "hub.key", "workers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_NBYTES = 40  # as text
_FILE_LIMIT_NBYTES = 4096
_OTHERS = 0o077
_MAKE = "make one: paceline hub keygen FOLDER"


@dataclass(frozen=True)
class HubKeys:
    """A hub's own keys, and where those are recorded whom it admits.

    Attributes:
        public, secret: Z85 text.
        workers: the folder of the public keys of its workers.
    """

    public: str
    secret: str = field(repr=False)
    workers: Path

    @staticmethod
    def read(path: str | Path) -> HubKeys:
        """Return what `make_keys` wrote.

        Args:
            path: the file, or its folder.

        Raises:
            UsageError: it is no hub's key, can't be read, or others can read it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / _HUB_FILE
        values = _read(path, "hub", secret=True)
        return HubKeys(values["public"], values["secret"], path.parent / _WORKERS)


@dataclass(frozen=True)
class WorkerKeys:
    """What a worker is given.

    Attributes:
        name: of the worker.
        hub: the hub's public key. public, secret: its own; all are Z85 text.
    """

    name: str
    hub: str
    public: str
    secret: str = field(repr=False)

    @staticmethod
    def read(path: str | Path) -> WorkerKeys:
        """Return what `make_keys` wrote.

        Raises:
            UsageError: it is no worker's key, can't be read, or others can read it.
        """
        values = _read(Path(path), "worker", secret=True)
        return WorkerKeys(values["name"], values["hub"], values["public"], values["secret"])


def make_keys(folder: str | Path, worker: str = "worker") -> Path:
    """Make a worker's keys, and the hub's if there are none yet; return the file that the worker is to be given.

    Args:
        folder: the hub's; it is made if it is not there.
        worker: a name for the worker; workers that are given the same file are the same to the hub.

    Raises:
        UsageError: the worker has keys already, others can enter the folder, nothing can be written there, or
            `worker` is no name.

    Example:
        >>> make_keys("keys", "alice").name  # doctest: +SKIP
        'alice.key'
    """
    if not _NAME.fullmatch(worker) or f"{worker}.key" == _HUB_FILE:
        raise UsageError(
            f"{worker!r} is no name for a worker's keys",
            remedy="give 1 to 64 letters, digits, dots, dashes or underscores; not hub",
        )
    folder = Path(folder)
    for each in (folder, folder / _WORKERS):
        _make_folder(each)
    key, record = folder / f"{worker}.key", folder / _WORKERS / f"{worker}.pub"
    for path in (key, record):
        if os.path.lexists(path):
            raise _there(path)
    public, secret = _pair()
    own = {"name": worker, "public": public}
    given = {"kind": "worker", **own, "secret": secret, "hub": _hub_of(folder).public}
    if not _write(record, {"kind": "public", **own}, f"{worker} may come to this hub"):
        raise _there(record)
    try:
        if not _write(key, given, f"for {worker} and nobody else"):
            raise _there(key)
    except BaseException:
        record.unlink()  # nobody has the key that it is of
        raise
    return key


def needs_keys(address: str) -> bool:
    """Return whether a hub at this address is to admit only whom it knows: others than this machine reach it.

    Raises:
        UsageError: it is no address.

    Example:
        >>> needs_keys("tcp://127.0.0.1:7000"), needs_keys("tcp://*:7000")
        (False, True)
    """
    return not parse_hub_address(address, bind=True).is_local


def read_public_key(path: Path) -> tuple[str, str]:
    """Return name and public key of a worker that is admitted.

    Raises:
        UsageError: the file is no record of one, or can't be read.
    """
    values = _read(path, "public", secret=False)
    return values["name"], values["public"]


def _hub_of(folder: Path) -> HubKeys:
    """Return the hub's keys; they are made if they are not there, here or by another process at this moment."""
    path = folder / _HUB_FILE
    if not os.path.lexists(path):
        public, secret = _pair()
        _write(path, {"kind": "hub", "public": public, "secret": secret}, "the hub's own: give it to nobody")
    return HubKeys.read(path)


def _pair() -> tuple[str, str]:
    if not zmq.has("curve"):
        raise UsageError(
            "this pyzmq can't encrypt", remedy="pip install --force-reinstall --only-binary :all: pyzmq"
        )
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise UsageError(f"{folder} can't be made: {error.strerror}", remedy="give another folder") from error
    if mode & _OTHERS:
        raise UsageError(
            f"{folder} is no place for keys: others than its owner can enter it", remedy=f"chmod 700 {folder}"
        )


def _write(path: Path, values: Mapping[str, str], what: str) -> bool:
    """Write a file, whole once it is there, unless there is one; return whether it was written."""
    lines = [f"# Paceline: {what}", *(f"{name} = {value}" for name, value in values.items())]
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as beside:  # 0600
            beside.write("\n".join(lines) + "\n")
            beside.flush()
            os.fsync(beside.fileno())
            os.link(beside.name, path)
        fsync(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(
            f"{path} can't be written: {error.strerror}", remedy="make room, or give another folder"
        ) from error
    return True


def _there(path: Path) -> UsageError:
    return UsageError(
        f"{path} is there already", remedy="give the worker another name; keys are never overwritten"
    )


def _read(path: Path, kind: str, *, secret: bool) -> dict[str, str]:
    """Return the values of a file of keys of this kind, all of them valid."""
    try:
        with open(path, encoding="ascii") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(_FILE_LIMIT_NBYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} can't be read as a {kind} key: {why}", remedy=_MAKE) from error
    if secret and mode & _OTHERS:
        raise UsageError(f"{path} holds a secret that others can read", remedy=f"chmod 600 {path}")
    lines = [line.partition(" = ") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    values = {name.strip(): value.strip() for name, _, value in lines}
    told = values.get("kind")
    if told not in _FIELDS:
        raise UsageError(f"{path} is no file of keys", remedy=_MAKE)
    if told != kind:
        raise UsageError(
            f"{path} is {_CALLED[told]}, not {_CALLED[kind]}",
            remedy="the hub reads hub.key, which stays with it; a worker is given a file with its own name",
        )
    _check(path, values)
    return values


_FIELDS = {
    "hub": ("public", "secret"),
    "worker": ("public", "secret", "hub"),
    "public": ("public",),
}
_CALLED = {"hub": "a hub's key", "worker": "a worker's key", "public": "a record of whom a hub admits"}


def _check(path: Path, values: Mapping[str, str]) -> None:
    """Raise unless the keys in a file are keys, and belong together."""
    named = values["kind"] == "hub" or _NAME.fullmatch(values.get("name", ""))
    wrong = [name for name in _FIELDS[values["kind"]] if not _is_key(values.get(name, ""))]
    if wrong or not named:
        raise UsageError(f"{path} is damaged: no valid {(wrong or ['name'])[0]}", remedy="copy it once more")
    secret = values.get("secret")
    if secret is not None and zmq.curve_public(secret.encode()).decode() != values["public"]:
        raise UsageError(f"{path} is damaged: its keys don't belong together", remedy="copy it once more")


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_NBYTES and bool(z85.decode(text))
    except (KeyError, ValueError, struct.error):
        return False
