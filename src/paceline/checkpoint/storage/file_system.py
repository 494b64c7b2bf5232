"""Calls of a remote file system through fsspec, repeated while it is down for a moment.

An error is permanent if waiting can't help: no permission, no credentials, no such file or bucket, a full disk. All
others (refused and cut connections, time-outs, 500 and 503) are retried until nothing has worked for `RETRY_SECONDS`: a
store may be restarted in between. SFTP and the like get a new connection for that; clients of object stores make their
own, and take long to set up.

Listings never come from fsspec's caches, since other hosts write too. Asynchronous implementations (s3fs, gcsfs, adlfs,
sshfs) have one instance per process, which threads share; others have one per thread. A forked process makes its own:
connections and event loops don't survive a fork.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import posixpath
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from paceline.checkpoint.storage.store_errors import as_os_error, is_permanent
from paceline.errors import UsageError

__all__ = ["RETRY_SECONDS", "Entry", "FileInfo", "FileSystem", "file_info"]

RETRY_SECONDS = 180.0
"""How long a call is repeated while nothing works."""

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 10.0

_CALL_SECONDS = 120.0
"""Limit of a single request: a part of 8 MiB at 0.6 Mbit/s. Without, one that a peer does not read waits for ever."""

_CALLS = ("call_s3", "cat_file", "info", "ls", "makedirs", "mv", "pipe_file", "rm", "rm_file")

_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "tos", "oci"}
"""Protocols of stores without folders, in which making one would make a bucket."""

_PACKAGES = {"sftp": "sshfs", "ssh": "sshfs"}
"""Packages to install where fsspec's own implementation needs another one."""

_VERSION = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
"""What implementations call the version of a file."""

T = TypeVar("T")


class _FileEnds(EOFError):
    """A file is shorter than it was; some clients raise EOFError when a connection is lost."""


class Entry(NamedTuple):
    """What a listing has of a file or folder."""

    is_folder: bool
    nbytes: int


class FileInfo(NamedTuple):
    """Size of a file, and a text that changes when the file is written anew."""

    nbytes: int
    version: str


class FileSystem:
    """A folder of a remote file system; all paths are relative to it. Several threads may use it.

    Every method raises OSError if it fails for good, FileNotFoundError if a file is missing.

    Args:
        url: of the folder, such as ``s3://bucket/run``.
        options: of fsspec's implementation.

    Attributes:
        location: the URL without a password.
        renames: whether it renames files, so that small ones are written elsewhere first.

    Raises:
        UsageError: there is no implementation for the URL, or the package with it is missing.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        protocol, found, rest = url.partition("://")
        shown = re.sub(r"://([^/@:]*):[^/@]*@", r"://\1:…@", url)
        if not found or not rest.strip("/") or "://" in rest:
            raise UsageError(f"{shown!r} is no URL of a folder", remedy="for example s3://bucket/run")
        self.location = shown.rstrip("/")
        implementation = _implementation(protocol, self.location)
        self._url, self._root = url, str(implementation._strip_protocol(url)).rstrip("/")
        self._options = _with_defaults(implementation, options or {})
        self._is_async = bool(getattr(implementation, "async_impl", False))
        self._has_folders = protocol not in _BUCKETS
        self.renames = self._has_folders and _overrides(implementation, "mv")
        prefix = "_" if self._is_async else ""
        self._reads_ranges = _takes(implementation, f"{prefix}cat_file", "start")  # sshfs reads whole files
        self._creates = not self.renames and _takes(implementation, f"{prefix}pipe_file", "mode")
        self._shared: tuple[int, Any] | None = None
        self._of_thread = threading.local()
        self._random = random.Random(uuid.uuid4().int)  # not the program's generator, see `_with_defaults`

    # ------------------------------------------------------------------ calls

    def retry(
        self,
        path: str,
        action: Callable[[Any, str], T],
        *,
        seconds: float | None = None,
        reached: Callable[[], int] = int,
    ) -> T:
        """Return what `action` returns, called again after errors that may pass.

        Args:
            path: of a file or folder.
            action: is passed fsspec's file system and the path in it.
            seconds: after which to give up if nothing works; None: `RETRY_SECONDS`; 0: at once.
            reached: returns how far `action` got; while that grows, it is not given up.

        Raises:
            OSError: it failed for good.
        """
        seconds = RETRY_SECONDS if seconds is None else seconds
        wait, best, failing_since = _FIRST_WAIT_SECONDS, 0, time.monotonic()
        while True:
            instance = None
            try:
                instance = self._instance()
                return action(instance, f"{self._root}/{path}" if path else self._root)
            except _FileEnds:
                raise
            except Exception as error:
                now = time.monotonic()
                permanent = (
                    is_permanent(error) or not threading.main_thread().is_alive()
                )  # see `remote_attempt`
                if self._has_folders and not permanent:
                    self._discard(instance)
                if reached() > best:
                    wait, best, failing_since = _FIRST_WAIT_SECONDS, reached(), now
                if permanent or now - failing_since >= seconds:
                    raise as_os_error(error, f"{self.location}/{path}") from error
            time.sleep(wait * self._random.uniform(0.5, 1))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _instance(self) -> Any:
        """Return this process's, or this thread's, file system."""
        made = self._shared if self._is_async else getattr(self._of_thread, "made", None)
        if made is None or made[0] != os.getpid():
            instance, _ = url_to_fs(self._url, skip_instance_cache=True, **self._options)
            with contextlib.suppress(AttributeError):
                instance.dircache.use_listings_cache = False
            _limit_calls(instance)
            made = os.getpid(), instance
            if self._is_async:
                self._shared = made
            else:
                self._of_thread.made = made
        return made[1]

    def _discard(self, instance: Any) -> None:
        """Forget a file system whose connection may be broken."""
        if self._shared is not None and self._shared[1] is instance:
            self._shared = None
        self._of_thread.made = None

    # ------------------------------------------------------------------ reading

    def list(self, folder: str = "", *, seconds: float | None = None) -> dict[str, Entry]:
        """Return what is in a folder, by name; nothing if it is missing."""

        def action(fs: Any, path: str) -> dict[str, Entry]:
            fs.invalidate_cache()
            rows = [(str(row["name"]).rstrip("/"), row) for row in fs.ls(path, detail=True)]
            return {
                posixpath.basename(name): Entry(row["type"] == "directory", int(row.get("size") or 0))
                for name, row in rows
                if name != path.rstrip("/")  # the mark of a folder in an object store
            }

        try:
            return self.retry(folder, action, seconds=seconds)
        except FileNotFoundError:
            return {}

    def info(self, path: str, *, seconds: float | None = None) -> FileInfo:
        """Return size and version of a file."""
        return self.retry(path, file_info, seconds=seconds)

    def exists(self, path: str, *, seconds: float | None = None) -> bool:
        """Return whether there is a file."""
        try:
            self.info(path, seconds=seconds)
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str, *, seconds: float | None = None) -> bytes:
        """Return a small file."""
        return self.retry(path, lambda fs, full: bytes(fs.cat_file(full)), seconds=seconds)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes start … stop - 1 of a file.

        Raises:
            EOFError: it ends before.
        """

        def action(fs: Any, full: str) -> bytes:
            if self._reads_ranges:
                data = bytes(fs.cat_file(full, start=start, end=stop))
            else:
                with fs.open(full, "rb") as file:
                    file.seek(start)
                    data = bytes(file.read(stop - start))
            if len(data) != stop - start:
                if file_info(fs, full).nbytes < stop:
                    raise _FileEnds(f"it ends before byte {stop}")
                raise OSError(errno.EIO, f"{len(data)} bytes arrived instead of {stop - start}")
            return data

        return self.retry(path, action)

    # ------------------------------------------------------------------ writing

    def write(self, path: str, content: bytes, *, seconds: float | None = None) -> None:
        """Write a small file, atomically."""

        def action(fs: Any, full: str) -> None:
            if not self.renames:
                fs.pipe_file(full, content)
                return
            temporary = f"{full}.part-{uuid.uuid4().hex[:12]}"
            fs.pipe_file(temporary, content)
            fs.mv(temporary, full)

        self.retry(path, self.in_folder(action), seconds=seconds)

    def create(self, path: str, content: bytes, *, seconds: float | None = None) -> None:
        """Write a small file that must not exist; object stores check that atomically.

        Raises:
            FileExistsError: it exists, with another content.
        """
        try:
            if self._creates:
                self.retry(path, lambda fs, full: fs.pipe_file(full, content, mode="create"), seconds=seconds)
                return
            if self.exists(path, seconds=seconds):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # removed since
                if self.read(path, seconds=seconds) == content:
                    return  # by a call whose answer was lost
            raise
        except OSError as error:
            if error.errno != errno.ENOSYS:  # a store of S3's protocol without conditional writes
                raise
        self.write(path, content, seconds=seconds)

    def copy(self, source: str, path: str) -> None:
        """Copy a file without reading it, as object stores do.

        Raises:
            OSError: it can't be copied so.
        """

        def action(fs: Any, full: str) -> None:
            fs.cp_file(f"{self._root}/{source}", full)

        if self.renames:  # no object store: sshfs would need a shell on the server
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self.retry(path, action)

    def in_folder(self, action: Callable[[Any, str], T]) -> Callable[[Any, str], T]:
        """Return an action that also makes the folder for the file that it writes, if that is missing."""

        def with_folder(fs: Any, full: str) -> T:
            try:
                return action(fs, full)
            except FileNotFoundError:
                if not self._has_folders:
                    raise
                fs.makedirs(posixpath.dirname(full), exist_ok=True)
                return action(fs, full)

        return with_folder

    def remove(self, path: str, *, seconds: float | None = None) -> None:
        """Remove a file; it may be missing."""
        with contextlib.suppress(FileNotFoundError):
            self.retry(path, lambda fs, full: fs.rm_file(full), seconds=seconds)

    def remove_folder(self, path: str, *, seconds: float | None = None) -> None:
        """Remove a folder and all that is in it; it may be missing."""

        def action(fs: Any, full: str) -> None:
            fs.invalidate_cache()
            fs.rm(full, recursive=True)

        with contextlib.suppress(FileNotFoundError):
            self.retry(path, action, seconds=seconds)


def file_info(fs: Any, path: str) -> FileInfo:
    """Return size and version of a file; FileNotFoundError: there is none."""
    info = fs.info(path)
    if info["type"] == "directory":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return FileInfo(int(info["size"]), " ".join(str(info[key]) for key in _VERSION if key in info))


def _implementation(protocol: str, location: str) -> Any:
    """Return fsspec's class for a protocol."""
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        known = known_implementations.get(protocol, {}).get("class", "")
        package = _PACKAGES.get(protocol, known.partition(".")[0])
        raise UsageError(
            f"{location!r} needs a package that is not installed: {error}",
            remedy=f"pip install {package}" if package else "install fsspec's implementation of the protocol",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{location!r}: {protocol!r} is no protocol that fsspec knows",
            remedy="write s3://, gs://, abfs://, sftp:// …, or install the package with its implementation",
        ) from error


def _limit_calls(instance: Any) -> None:
    """Limit the time of each request."""
    for name in _CALLS:
        call = getattr(instance, name, None)
        # Of those that fsspec.asyn.sync_wrapper has made:
        if call is not None and inspect.iscoroutinefunction(getattr(call, "__wrapped__", None)):
            setattr(instance, name, functools.partial(call, timeout=_CALL_SECONDS))


def _with_defaults(implementation: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with defaults of ours: sshfs would wait for a lost host for ever.

    botocore does not retry: it would draw waiting times from the program's generator, which is part of its checkpoints.
    s3fs itself retries what is slow or cut.
    """
    package = implementation.__module__.partition(".")[0]
    if package == "sshfs":
        return {"keepalive_interval": 15, "connect_timeout": 20, **options}
    if package == "s3fs":
        config = {"retries": {"max_attempts": 0}, **options.get("config_kwargs", {})}
        return {**options, "config_kwargs": config}
    return dict(options)


def _overrides(implementation: Any, method: str) -> bool:
    own = getattr(implementation, method, None) is not getattr(fsspec.AbstractFileSystem, method)
    return own or hasattr(implementation, f"_{method}")


def _takes(implementation: Any, method: str, argument: str) -> bool:
    return argument in inspect.signature(getattr(implementation, method)).parameters
