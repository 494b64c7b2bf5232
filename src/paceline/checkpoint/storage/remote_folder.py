"""Checkpoints of a run on a remote file system: S3, GCS, Azure, SFTP, or whatever else fsspec has.

    s3://bucket/run/
        owner.json, heartbeat-…         the run that writes here, see `run_ownership`
        step-00000200/                  complete once the file with the manifest's checksum is in it
        step-00000100.damaged/          the manifest of one that was skipped, without which it is not complete

Object stores have neither locks nor renames, so none is needed: a checkpoint is complete with its last small file, and
is no longer with that file's removal. Checkpoints that torch.distributed.checkpoint has written here are listed, too;
they, and files that are not Paceline's, are never removed as incomplete.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline._core.units import parse_rate
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, METADATA
from paceline.checkpoint.storage.file_system import Entry, FileSystem
from paceline.checkpoint.storage.host_cache import HostCache
from paceline.checkpoint.storage.local_folder import checkpoint_name, step_of
from paceline.checkpoint.storage.paced_upload import RateLimit
from paceline.checkpoint.storage.remote_attempt import AttemptPlace, RemoteAttempt
from paceline.checkpoint.storage.remote_files import RemoteFiles
from paceline.checkpoint.storage.run_ownership import HEARTBEAT, RunOwnership
from paceline.errors import UsageError

__all__ = ["RemoteFolder"]

log = logging.getLogger("paceline.checkpoint")

_PREPARE_SECONDS = 20.0
"""How long a place that can't be reached is tried before a run, or before it is read."""

_DAMAGED, _PROBE = ".damaged", "probe-"

_RUN = "[0-9a-f]{12}"
"""Name of the folder of a run in that of a checkpoint."""

_SMALL = (CHECKSUM, MANIFEST, METADATA)
"""Files of a checkpoint outside of the folder of its run, without any of which it is not complete."""


class RemoteFolder:
    """The checkpoints of a run on S3, GCS, Azure, SFTP or another remote file system, to pass to `Checkpoint`.

    Files are written to a disk of the host and uploaded in the background. Calls that fail are repeated until nothing
    has worked for 3 minutes; then that save fails with a warning, and training continues. `Checkpoint` also takes a
    URL alone, which is the same with the defaults of all other arguments.

    Args:
        url: of the folder, such as ``s3://bucket/run``; it need not exist, a bucket must.
        cache: folder on a disk of this host, where files are written before they are uploaded, and the newest
            checkpoint's are kept: room for two checkpoints' files of the host's ranks. None: in ``$TMPDIR`` or
            ``/var/tmp``.
        options: of fsspec's implementation, such as ``{"endpoint_url": …}``; the credentials that it finds itself need
            not be passed.
        bandwidth: rate at which this rank uploads, on average over a few seconds: in bytes per second, or a text such
            as ``"50MB/s"`` or ``"1Gbit/s"``; None: unlimited.
        reads_cache: read what is on this host from there, and keep what is downloaded for its other ranks. False: read
            the remote file system only, as a check of a checkpoint must.

    Raises:
        UsageError: the URL is not valid, a package for it is missing, or `bandwidth` is no positive rate.

    Example:
        >>> place = RemoteFolder("s3://bucket/run-a", cache="/scratch", bandwidth="50MB/s")  # doctest: +SKIP
        >>> checkpoint = Checkpoint(place, model, optim, loader, every="10min")  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        *,
        cache: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        bandwidth: str | float | None = None,
        reads_cache: bool = True,
    ) -> None:
        rate = None if bandwidth is None else parse_rate(bandwidth)
        if rate is not None and not 0 < rate < float("inf"):
            raise UsageError(
                f"bandwidth={bandwidth!r}", remedy="pass a rate such as '50MB/s', or None for no limit"
            )
        self._files = FileSystem(url, options)
        self._cache, self._reads_cache = HostCache(url.rstrip("/"), cache), reads_cache
        self._limit = RateLimit(rate)
        self._ownership: RunOwnership | None = None
        self._attempt: RemoteAttempt | None = None

    @property
    def location(self) -> str:
        """The URL, without a password."""
        return self._files.location

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, newest first.

        Raises:
            OSError: they can't be listed.
        """
        return self._complete()

    def _complete(self, seconds: float | None = None) -> list[str]:
        listing = self._files.list(seconds=seconds)
        folders = [
            name for name, entry in listing.items() if entry.is_folder and re.fullmatch(r"step-\d+", name)
        ]
        return [
            name
            for name in sorted(folders, key=step_of, reverse=True)
            if _is_complete(self._files.list(name, seconds=seconds))
        ]

    def files(self, name: str) -> RemoteFiles:
        """Return the files of a checkpoint."""
        return RemoteFiles(self._files, name, self._cache if self._reads_cache else None)

    # ------------------------------------------------------------------ before a run

    def prepare(self) -> None:
        """Check that the place can hold checkpoints: write, list, read and remove a file.

        Raises:
            UsageError: it can't.
        """
        name, content = f"{_PROBE}{uuid.uuid4().hex[:12]}", uuid.uuid4().bytes
        try:
            self._files.write(name, content, seconds=_PREPARE_SECONDS)
            if name not in self._files.list(seconds=_PREPARE_SECONDS):
                raise OSError(errno.EIO, "a file that was written is not listed")
            if self._files.read(name, seconds=_PREPARE_SECONDS) != content:
                raise OSError(errno.EIO, "a file that was written has another content")
            self._files.remove(name, seconds=_PREPARE_SECONDS)
        except OSError as error:
            raise self._refusal(error) from error

    def check_readable(self) -> None:
        """Check that the place answers; it may hold nothing.

        Raises:
            UsageError: it can't be read.
        """
        try:
            self._files.list(seconds=_PREPARE_SECONDS)
        except OSError as error:
            raise self._refusal(error, "read checkpoints in") from error

    def _refusal(self, error: OSError, action: str = "write checkpoints to") -> UsageError:
        if isinstance(error, PermissionError):
            remedy = "check the credentials that the implementation finds or is passed, and what they permit"
        elif isinstance(error, FileNotFoundError):
            remedy = "make the bucket first, or correct the URL"
        else:
            remedy = "check the URL, and whether this host reaches the place"
        return UsageError(f"can't {action} {self.location!r}: {error.strerror or error}", remedy=remedy)

    def lock(self) -> RunOwnership:
        """Make this run the only one that writes, until the lock is closed or the process ends.

        Raises:
            CheckpointError: another run writes here; names it.
            UsageError: the place can't be written.
        """
        try:
            self._ownership = RunOwnership(self._files)
        except OSError as error:
            raise self._refusal(error) from error
        return self._ownership

    def _verify_owner(self) -> None:
        if self._ownership is None:
            raise OSError(errno.EPERM, f"this run does not own {self.location}")
        self._ownership.verify()

    def remove_incomplete(self) -> None:
        """Remove what runs that died have left; only the holder of the lock may call this."""
        heartbeat = "" if self._ownership is None else self._ownership.heartbeat
        try:
            complete, listing = set(self.names()), self._files.list()
            for name, entry in listing.items():
                is_step = entry.is_folder and re.fullmatch(r"step-\d+", name)
                if is_step and name not in complete and f"{name}{_DAMAGED}" not in listing:
                    if _is_own(self._files.list(name)):
                        self._files.remove_folder(name)
                    else:
                        log.warning("%s/%s is no checkpoint, and stays", self.location, name)
                elif (name.startswith((HEARTBEAT, _PROBE)) or ".part-" in name) and name != heartbeat:
                    self._files.remove(name)
        except OSError as error:
            log.warning("incomplete checkpoints of earlier runs stay in %s: %s", self.location, error)

    def put_probe(self, mark: str) -> None:
        """Leave a mark by which ranks find out whether they see the same place.

        Raises:
            UsageError: it can't be written.
        """
        try:
            self._files.write(f"{_PROBE}{mark}", b"", seconds=_PREPARE_SECONDS)
        except OSError as error:
            raise self._refusal(error) from error

    def sees_probe(self, mark: str) -> bool:
        """Return whether this rank sees the mark; logs why it can't look."""
        try:
            return self._files.exists(f"{_PROBE}{mark}", seconds=_PREPARE_SECONDS)
        except OSError as error:
            log.warning("this rank can't read %s: %s", self.location, error.strerror or error)
            return False

    def remove_probe(self, mark: str) -> None:
        """Remove the mark, as far as possible."""
        with contextlib.suppress(OSError):
            self._files.remove(f"{_PROBE}{mark}", seconds=_PREPARE_SECONDS)

    # ------------------------------------------------------------------ during a run

    def begin(self, step: int, mark: str) -> RemoteAttempt:
        """Begin to write the checkpoint of `step`.

        Raises:
            OSError: its folder on this host can't be made.
        """
        name = checkpoint_name(step)
        if self._attempt is None:
            self._cache.remove_stale()
        else:
            self._attempt.remove_local()
        with contextlib.suppress(OSError):  # down: what is there stays until the next time
            self._cache.keep_only([name, *self._complete(seconds=0)[:1]])
        place = AttemptPlace(self._files, self._cache, self._limit, self._verify_owner, self.set_aside)
        self._attempt = RemoteAttempt(place, name, mark)
        return self._attempt

    def set_aside(self, name: str) -> None:
        """Take a checkpoint out of `names`: move its small files to ``step-….damaged``, the completing one first.

        Raises:
            OSError: it can't be done.
        """
        there = self._files.list(name)
        for file in _SMALL:
            if file not in there:
                continue
            self._files.write(f"{name}{_DAMAGED}/{file}", self._files.read(f"{name}/{file}"))
            self._files.remove(f"{name}/{file}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove complete checkpoints, and damaged ones older than all that are left, as far as possible."""
        doomed = set(names)
        try:
            for name in doomed:
                self._remove(name)
            complete = self.names()
            left = [step_of(name) for name in complete if name not in doomed]
            for folder in self._files.list():
                name = folder.removesuffix(_DAMAGED)
                if folder != name and left and step_of(name) < min(left):
                    self._remove(name)
        except OSError as error:
            log.warning("older checkpoints stay in %s: %s", self.location, error)

    def _remove(self, name: str) -> None:
        self._files.remove(f"{name}/{CHECKSUM}")
        self._files.remove_folder(name)
        self._files.remove_folder(f"{name}{_DAMAGED}")


def _is_complete(entries: Mapping[str, Entry]) -> bool:
    """Return whether a folder is a complete checkpoint: Paceline's, or one that torch has written into it."""
    is_torchs = METADATA in entries and MANIFEST not in entries and not _is_own(entries)
    return CHECKSUM in entries or is_torchs


def _is_own(entries: Mapping[str, Entry]) -> bool:
    """Return whether a folder has files only that Paceline writes there, and folders of runs."""
    return all(
        re.fullmatch(_RUN, name) if entry.is_folder else name.partition(".part-")[0] in _SMALL
        for name, entry in entries.items()
    )
