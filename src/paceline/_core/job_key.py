"""Secret key of a job: a process that holds it belongs to the job, and its other keys are derived from it.

A launcher draws the key and hands it to its processes in the environment, or all hosts read it from a file. Other users
can read neither. It never goes on a command line, into logs, records or a run's folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["KEY_FILE_VARIABLE", "KEY_VARIABLE", "JobKey"]

KEY_VARIABLE = "PACELINE_JOB_KEY"
"""Variable with the key itself, as 64 hexadecimal digits."""

KEY_FILE_VARIABLE = "PACELINE_JOB_KEY_FILE"
"""Variable with the path of a file that holds the key; it counts where `KEY_VARIABLE` is not set."""

_NBYTES = 32
_TEXT = re.compile(r"[0-9a-fA-F]{64}")
_FILE_LIMIT_NBYTES = 4096
_OTHERS = 0o077
_REMEDY = "make a new one: `(umask 077; openssl rand -hex 32 > FILE)`, and copy it to every host"


@dataclass(frozen=True)
class JobKey:
    """Secret of one job, from which its processes derive the keys that authenticate them to each other.

    Attributes:
        secret: 32 random bytes; not part of the repr.

    Raises:
        UsageError: it has another length.

    Example:
        >>> key = JobKey.generate()
        >>> key
        JobKey()
        >>> JobKey.from_environment(key.environment()) == key
        True
        >>> key.derive("store") == key.derive("watchdog")
        False
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != _NBYTES:
            raise UsageError(f"a job key of {len(self.secret)} bytes", remedy=f"give {_NBYTES} random bytes")

    @staticmethod
    def generate() -> JobKey:
        """Return a new random key."""
        return JobKey(secrets.token_bytes(_NBYTES))

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> JobKey | None:
        """Return the key that the environment gives; None: it gives none.

        Args:
            environ: the variables; ``PACELINE_JOB_KEY`` takes precedence over ``PACELINE_JOB_KEY_FILE``.

        Raises:
            UsageError: a variable is malformed, or the file is not a readable key that only this user can read.
        """
        if text := environ.get(KEY_VARIABLE):
            return _parse(text, KEY_VARIABLE)
        if path := environ.get(KEY_FILE_VARIABLE):
            return JobKey.read(path)
        return None

    @staticmethod
    def read(path: str | Path) -> JobKey:
        """Read a key from a file of this user with mode 0600: 64 hexadecimal digits.

        Raises:
            UsageError: it can't be read, is readable by others, belongs to another user, or is not a key.
        """
        try:
            # A named pipe would block until something writes to it.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _check_private(path, os.fstat(handle))
                text = os.read(handle, _FILE_LIMIT_NBYTES)
            finally:
                os.close(handle)
        except OSError as error:
            raise UsageError(f"the job key {path} can't be read: {error.strerror}", remedy=_REMEDY) from None
        return _parse(text.decode("ascii", "replace"), f"the job key {path}")

    def write(self, path: str | Path) -> None:
        """Write the key to a new file with mode 0600, in the form that `read` accepts.

        Raises:
            UsageError: the file exists, or can't be written.
        """
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(handle, "w", encoding="ascii") as file:
                file.write(f"{self.secret.hex()}\n")
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise UsageError(
                f"{path} already exists", remedy="keys are never overwritten: remove it first"
            ) from None
        except OSError as error:
            raise UsageError(
                f"the job key can't be written to {path}: {error.strerror}", remedy="give another path"
            ) from None

    def environment(self) -> dict[str, str]:
        """Return the variables that hand the key to a child process."""
        return {KEY_VARIABLE: self.secret.hex()}

    def derive(self, purpose: str) -> bytes:
        """Return the 32-byte key for one purpose (HMAC-SHA256), which discloses nothing about those of others."""
        return hmac.digest(self.secret, f"paceline/{purpose}".encode(), hashlib.sha256)

    def curve_pair(self, purpose: str) -> tuple[bytes, bytes]:
        """Return the public and the secret CURVE key (Curve25519) for one purpose, each as 40 bytes of Z85 for pyzmq.

        Raises:
            UsageError: pyzmq was built without encryption.
        """
        import zmq
        from zmq.utils import z85

        if not zmq.has("curve"):
            raise UsageError(
                "this pyzmq was built without encryption",
                remedy="pip install --force-reinstall --only-binary :all: pyzmq",
            )
        secret = z85.encode(self.derive(f"curve/{purpose}"))
        return zmq.curve_public(secret), secret


def _check_private(path: str | Path, status: os.stat_result) -> None:
    """Raise unless this is a file that only this user can read."""
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"the job key {path} is not a regular file", remedy=_REMEDY)
    if status.st_uid != os.geteuid():
        raise UsageError(f"the job key {path} belongs to another user (uid {status.st_uid})", remedy=_REMEDY)
    if status.st_mode & _OTHERS:
        raise UsageError(
            f"the job key {path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o})",
            remedy=f"chmod 600 {path}; if others use this machine, {_REMEDY}",
        )


def _parse(text: str, source: str) -> JobKey:
    """Return the key in `text`, which no error message repeats."""
    text = text.strip()
    if not _TEXT.fullmatch(text):
        raise UsageError(f"{source} is not a job key: not {2 * _NBYTES} hexadecimal digits", remedy=_REMEDY)
    return JobKey(bytes.fromhex(text))
