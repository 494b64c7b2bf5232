"""A made-up run folder of a training that saves and is restarted, with round times, for tests of its readers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, Manifest, RankPiece
from paceline.checkpoint.format.manifest_index import make_manifest
from paceline.checkpoint.storage.local_folder import checkpoint_name

BEGIN = 1_785_000_000.0
"""Unix seconds at which the run began."""

STEP, STALL, FIRST_STALL, COMPLETE, EVERY = 1.0, 0.25, 2.0, 3.0, 10
"""Seconds of a step, of the wait for a save, for the first save of a start, until a save is complete; steps between."""


class SavedRun:
    """Writes a run of two ranks.

    Args:
        folder: to write to.
        nodes: number of hosts in ``run.json``.
        scale: factor on all seconds.
    """

    def __init__(self, folder: Path, nodes: int = 1, scale: float = 1.0) -> None:
        (folder / "trace").mkdir(parents=True)
        (folder / "logs").mkdir()
        facts = {"command": "paceline train", "world": {"size": 2, "nodes": nodes}, "settings": {}}
        (folder / "run.json").write_text(json.dumps(facts))
        self.folder, self.now, self.scale = folder, BEGIN, scale
        self.saves: list[tuple[int, float]] = []  # step, begin

    def start(self, first: int, last: int, *, slow_first: float = 0.0) -> None:
        """Train from step number `first` to `last`; the last one is cut off, as by a kill, and takes half of its time.

        Args:
            first: counted from 0.
            last: not included.
            slow_first: seconds that the first step takes longer.
        """
        self._trace({"name": "session", "start": self.now, "seconds": 0.0, "step": first})
        has_saved = False
        for step in range(first, last):
            seconds = self.scale * STEP + (slow_first if step == first else 0.0)
            tasks = [("clock", 0.9 * seconds, 0.91 * seconds)]
            if (step + 1) % EVERY == 0:
                stall = self.scale * (STALL if has_saved else FIRST_STALL)
                tasks.append(("checkpoint", seconds, seconds + stall))
                self.saves.append((step + 1, self.now + seconds))
                seconds, has_saved = seconds + stall, True
            self._step(step, seconds, tasks)
            self.now += seconds
        self.now += self.scale * STEP / 2

    def restart(self, *, noticed: float, seconds: float, number: int = 1) -> None:
        """Record a failure that happened now, was noticed and logged later, and the time until the ranks run again."""
        record = {"event": "restart", "restart": number, "time": _iso(self.now + noticed, "milliseconds")}
        record |= {"ranks_before": 2, "ranks_after": 2, "written_by": "pc1", "first": None, "why": "killed"}
        self.log(record)
        self.now += seconds

    def log(self, record: dict[str, object]) -> None:
        """Append a record to the log of restarts."""
        with (self.folder / "logs" / "restarts.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def keep(self, newest: int = 2) -> None:
        """Write the newest checkpoints, with manifests that say how long they took."""
        for step, begin in self.saves[-newest:]:
            folder = self.folder / "checkpoint" / checkpoint_name(step)
            folder.mkdir(parents=True)
            written = {"at": _iso(begin + self.scale * STALL, "seconds"), "seconds": self.scale * COMPLETE}
            piece = RankPiece({}, {}, {})
            head = {"step": step, "facts": {}, "container": "safetensors", "aliases": {}, "optimizers": {}}
            manifest = make_manifest([piece], [piece.to_json()], {**head, "written": written})
            text = manifest.to_json()
            (folder / CHECKSUM).write_bytes(Manifest.checksum_line(text))
            (folder / MANIFEST).write_bytes(text)

    def _step(self, step: int, seconds: float, tasks: list[tuple[str, float, float]]) -> None:
        phases = [["forward", 0], ["backward", 300_000], ["optimizer", 900_000]]
        for rank in range(2):  # rank 1 waits less for saves
            shares = [(name, begin, begin + (1 - 0.4 * rank) * (end - begin)) for name, begin, end in tasks]
            line = {"name": "step", "start": self.now, "seconds": seconds, "step": step, "phases": phases}
            line |= {"tasks": [[name, round(1e6 * begin), round(1e6 * end)] for name, begin, end in shares]}
            self._trace(line | {"waits": [], "calls": [], "samples": 4.0}, rank)

    def _trace(self, line: dict[str, object], *ranks: int) -> None:
        for rank in ranks or range(2):
            with (self.folder / "trace" / f"rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line | {"rank": rank}) + "\n")


def _iso(seconds: float, precision: str) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=precision)
