"""Writes a checkpoint while training continues.

    training thread, all ranks     copy the state (training waits for nothing else) and hand it over
    writing thread, all ranks      copy the rest, see `state_copies`; write, flush and publish the files; report the
                                   rank's piece of the manifest
    writing thread, rank 0         wait for the pieces of all ranks; complete the checkpoint with the manifest; then
                                   remove older checkpoints, which no rank waits for

The writing threads communicate through the place of the checkpoints alone: collectives of the process group belong to
training. A rank that can't write reports that, if it can. Before the next checkpoint the ranks exchange how the last
one went (`Checkpoint.wait`), so that all abandon one that can't be completed, and training continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xxhash import xxh3_128_hexdigest

from paceline.checkpoint.checkpoint_contents import CheckpointContents
from paceline.checkpoint.format.dcp_files import dcp_file, dcp_metadata, write_dcp
from paceline.checkpoint.format.manifest import (
    CHECKSUM,
    MANIFEST,
    METADATA,
    Manifest,
    RankPiece,
    StoredFile,
    piece_name,
)
from paceline.checkpoint.format.manifest_index import make_manifest
from paceline.checkpoint.format.tensor_files import ChecksummedFile, write_parts
from paceline.checkpoint.parts.dcp_names import dcp_aliases
from paceline.checkpoint.parts.rank_digests import warn_of_differences
from paceline.checkpoint.parts.state_parts import TensorPart
from paceline.checkpoint.state_copies import StateCopy
from paceline.checkpoint.storage.checkpoint_store import SaveAttempt, StoreLock
from paceline.checkpoint.storage.remote_attempt import has_program_ended

__all__ = ["BackgroundSave", "on_cpu"]

log = logging.getLogger("paceline.checkpoint")

_POLL_SECONDS = 0.02

_EXIT_SECONDS = 60.0
"""How long rank 0's thread waits for the parts of all other ranks after its main thread has ended; one may be dead."""


class BackgroundSave:
    """A checkpoint that is being written.

    Args:
        begin: makes the attempt, in the writing thread.
        contents: what this rank writes, with copied tensors.
        head: on rank 0, the manifest's entries that do not come from ranks.
        began: when the save began, as `time.perf_counter` counts.
        rank, ranks: this rank, and the number of ranks.
        remove_old: on rank 0, removes older checkpoints once this one is complete.
        unchanged: files that an earlier checkpoint has already; their tensors are not copied.
        earlier: name of that checkpoint.
        copy: of the tensors, which this completes; None: they do not change until they are written.
        lock: of the store, on rank 0; referenced until the end, so that it stays held.
        previous: the save before, whose thread may still remove older checkpoints; joined by this one's.

    Attributes:
        failure: why this rank could not write; empty: it could.
        complete: on rank 0, whether the checkpoint is complete.
        files: what this rank has written.
    """

    def __init__(
        self,
        begin: Callable[[], SaveAttempt],
        contents: CheckpointContents,
        head: Mapping[str, Any],
        *,
        began: float,
        rank: int,
        ranks: int,
        remove_old: Callable[[], None],
        unchanged: Mapping[str, StoredFile],
        earlier: str,
        copy: StateCopy | None = None,
        lock: StoreLock | None = None,
        previous: BackgroundSave | None = None,
    ) -> None:
        self.failure = ""
        self.complete = False
        self._began = began
        self._begin, self._contents, self._copy, self._head = begin, contents, copy, head
        self._rank, self._ranks, self._remove_old, self._lock = rank, ranks, remove_old, lock
        self._unchanged, self._earlier = unchanged, earlier
        self.files: dict[str, StoredFile] = {}
        self._previous = previous
        self._deadline, self._missing = math.inf, ""
        self._written, self._finished, self._abandoned = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
        self._thread.start()

    # ------------------------------------------------------------------ called by the training thread

    @property
    def frozen(self) -> set[str]:
        """Its files of weights that training does not change."""
        return self._contents.parts.frozen

    def before_step(self) -> None:
        """Wait until an optimizer may change the state."""
        if self._copy is not None:
            self._copy.before_step()

    def wait_written(self) -> str:
        """Wait until this rank's files are on the disk; return why they are not, or an empty text."""
        self._written.wait()
        return self.failure

    def finish(self, *, abandon: bool) -> None:
        """Wait until rank 0 has completed the checkpoint, or removed it with `abandon`."""
        if abandon:
            self._abandoned.set()
        self._finished.wait()

    def join(self) -> None:
        """Wait for this thread and those of earlier saves, which may still remove older checkpoints."""
        self._thread.join()

    # ------------------------------------------------------------------ the writing thread

    def _run(self) -> None:
        attempt: SaveAttempt | None = None
        try:
            if self._copy is not None:
                self._copy.finish()
            attempt = self._begin()
            attempt.report(piece_name(self._rank), self._write(attempt))
        except Exception as error:  # noqa: BLE001 — reported to all ranks instead of ending the thread
            self.failure = _reason(error)
            self._report_failure(attempt)
        self._written.set()
        if self._rank == 0 and attempt is not None:
            try:
                self._complete(attempt)
            except Exception as error:  # noqa: BLE001 — the training thread waits for the end of this one
                self.failure = _reason(error)
            if not self.complete:
                attempt.abandon()
        self._finished.set()
        self._warn_at_end()
        if self._previous is not None:
            self._previous.join()
            self._previous = None
        if self.complete:
            try:
                self._remove_old()
            except OSError as error:
                log.warning("older checkpoints stay until the next save: %s", error)

    def _warn_at_end(self) -> None:
        """Log that the checkpoint is lost, if no training thread will."""
        reason = self.failure or self._missing
        if reason and not self.complete and has_program_ended():
            step = self._head.get("step")
            log.warning("the checkpoint of step %s is lost, and earlier ones stay: %s", step, reason)

    def _report_failure(self, attempt: SaveAttempt | None) -> None:
        if attempt is not None:
            with contextlib.suppress(OSError):  # a full disk: the ranks find out before the next checkpoint
                attempt.report(_failed_name(self._rank), self.failure.encode())

    def _write(self, attempt: SaveAttempt) -> bytes:
        """Write and publish this rank's files; return the text of its piece of the manifest."""
        contents, folder = self._contents, attempt.folder
        records: dict[str, tuple[str, int, int]] = {}
        written: list[str] = []
        for name, parts in contents.parts.files.items():
            known = self._unchanged.get(name)
            if known is not None:
                if attempt.link(attempt.prefix + name, self._earlier):
                    self.files[name] = known
                    continue
                parts = on_cpu(parts)
            written.append(name)
            if contents.container == "dcp":
                values = contents.values if name == dcp_file(self._rank) else {}
                self.files[name], found = write_dcp(folder / name, parts, values)
                records |= {label: (name, *where) for label, where in found.items()}
            else:
                self.files[name] = write_parts(folder / name, parts)
            if known is not None and _checksums(self.files[name]) != _checksums(known):
                raise RuntimeError(f"frozen weights in {name} changed while they were written")
        for name, text in contents.parts.texts.items():
            with ChecksummedFile(folder / name) as file:
                file.write(text)
                self.files[name] = file.finish()
            written.append(name)
        if self._copy is not None:
            self._copy.check(self.files)
        attempt.publish(written)
        return RankPiece(self.files, contents.parts.values, contents.state, records).to_json()

    def _complete(self, attempt: SaveAttempt) -> None:
        """Wait for the pieces of all ranks, and make them the newest checkpoint."""
        texts = [self._wait_for_piece(attempt, rank) for rank in range(self._ranks)]
        given = [text for text in texts if text is not None]
        if len(given) < len(texts):
            return
        pieces = [RankPiece.from_json(text, piece_name(rank)) for rank, text in enumerate(given)]
        warn_of_differences(str(attempt.folder.parent), [piece.state for piece in pieces])
        extra: dict[str, bytes] = {}
        if self._contents.container == "dcp":
            names = self._contents.names
            for piece in pieces:
                names.add_values(piece.values)
            aliases = dcp_aliases(self._contents.shared["aliases"]) | names.aliases
            extra[METADATA] = dcp_metadata(pieces, names.path, attempt.prefix, aliases)
        checksums = {name: xxh3_128_hexdigest(content) for name, content in extra.items()}
        written = {**self._head["written"], "seconds": round(time.perf_counter() - self._began, 3)}
        head = {**self._head, "written": written, "prefix": attempt.prefix, "extra_files": checksums}
        manifest: Manifest = make_manifest(pieces, given, head)
        text = manifest.to_json()
        last = [*extra.items(), (MANIFEST, text), (CHECKSUM, manifest.checksum_line(text))]
        sizes = {name: file.nbytes for piece in pieces for name, file in piece.files.items()}
        attempt.complete(last, sizes)
        self.complete = True

    def _wait_for_piece(self, attempt: SaveAttempt, rank: int) -> bytes | None:
        """Return the piece of `rank`, None once it is clear that none will come."""
        while (text := attempt.reported(piece_name(rank))) is None:
            if (failure := attempt.reported(_failed_name(rank))) is not None:
                self._missing = f"rank {rank}: {failure.decode(errors='replace')}"
                return None
            if self._abandoned.wait(_POLL_SECONDS):
                return None
            if not threading.main_thread().is_alive():
                self._deadline = min(self._deadline, time.monotonic() + _EXIT_SECONDS)
            if time.monotonic() > self._deadline:
                waited = f"within {_EXIT_SECONDS:g} s of the end of this program"
                self._missing = f"rank {rank} has not written its part {waited}"
                return None
        return text


def on_cpu(parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
    """Return parts with tensors that are contiguous on the CPU; without a copy where they already are."""
    return {label: replace(part, data=part.data.detach().cpu().contiguous()) for label, part in parts.items()}


def _checksums(file: StoredFile) -> dict[str, str]:
    return {label: chunk.checksums for label, chunk in file.chunks.items()}


def _failed_name(rank: int) -> str:
    return f"rank-{rank:05d}.failed"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
