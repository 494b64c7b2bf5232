"""Files in the folder of a hub.

run.json                              facts of the run, written when it starts
hub.lock                              locked while a hub has the folder open
snapshot-000000000200.safetensors     the state at a revision; the last two are kept
journal-000000000200.log              records since that snapshot; kept since the older of the two
ledger.jsonl                          one line per record of the whole run
term.json                             how often a standby took over, and whether one took over from this hub
standby.json                          instead, while the folder is a standby's copy of another hub's
address.json                          where the running hub is reached, for processes of the same user
keys/                                 of hub and workers, if none were given elsewhere
snapshot-….safetensors.damaged        set aside by a recovery, until two newer ones exist
.snapshot-…                           being written, or left by a hub that died
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from paceline.async_dp.wal.durable_files import numbered_files, remove_temporary
from paceline.async_dp.wal.journal_records import JOURNAL_HEADER_NBYTES

__all__ = ["LEDGER", "HubFolder"]

log = logging.getLogger("paceline.async_dp")

LEDGER = "ledger.jsonl"
_JOURNAL = re.compile(r"journal-(\d{12,})\.log")
_SNAPSHOT = re.compile(r"snapshot-(\d{12,})\.safetensors")
_DAMAGED = re.compile(r"snapshot-(\d{12,})\.safetensors\.damaged")
_TEMPORARY = re.compile(r"\.(run\.json|journal-\d+\.log|snapshot-\d+\.safetensors)-.*")
_SNAPSHOTS_KEPT = 2


class HubFolder:
    """Paths in a hub's folder, which exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file, self.ledger = path / "run.json", path / LEDGER

    def journal(self, revision: int) -> Path:
        """Return the journal that follows the snapshot of a revision."""
        return self.path / f"journal-{revision:012d}.log"

    def snapshot(self, revision: int) -> Path:
        """Return the snapshot of a revision."""
        return self.path / f"snapshot-{revision:012d}.safetensors"

    def journals(self) -> dict[int, Path]:
        """Return the existing journals by revision, newest first."""
        return self._newest_first(_JOURNAL)

    def snapshots(self) -> dict[int, Path]:
        """Return the existing snapshots by revision, newest first."""
        return self._newest_first(_SNAPSHOT)

    def _newest_first(self, name: re.Pattern[str]) -> dict[int, Path]:
        return dict(reversed(numbered_files(self.path, name).items()))

    def holds_run(self) -> bool:
        """Return whether a hub has recorded anything here."""
        return (
            self.run_file.exists()
            or bool(self.snapshots())
            or (self.ledger.exists() and self.ledger.stat().st_size > 0)
            or any(path.stat().st_size > JOURNAL_HEADER_NBYTES for path in self.journals().values())
        )

    def nbytes(self) -> int:
        """Return the size of the snapshots and journals."""
        return sum(path.stat().st_size for path in (*self.snapshots().values(), *self.journals().values()))

    def set_aside(self, snapshot: Path) -> None:
        """Rename a damaged snapshot, so that it does not count among those that are kept."""
        snapshot.replace(snapshot.with_name(f"{snapshot.name}.damaged"))

    def remove_temporary(self) -> None:
        """Remove unfinished files of hubs that died; the caller holds the lock."""
        remove_temporary(self.path, _TEMPORARY)

    def remove_old(self) -> None:
        """Remove all snapshots but the last two, and the journals before the older of these."""
        for path in self._old():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s is no longer needed, but can't be removed: %s", path, error)

    def _old(self) -> list[Path]:
        """Return the files that are no longer needed, snapshots first."""
        snapshots, journals = self.snapshots(), self.journals()
        kept = list(snapshots)[:_SNAPSHOTS_KEPT]
        if not kept:
            return []
        first_journal = next((revision for revision in journals if revision <= kept[-1]), 0)
        old = [path for revision, path in snapshots.items() if revision < kept[-1]]
        old += [path for revision, path in self._newest_first(_DAMAGED).items() if revision < kept[-1]]
        return old + [path for revision, path in journals.items() if revision < first_journal]
