"""The training that launchers start (training.py), and the records of its ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["KILL_ONCE", "STEPS", "TRAINING", "WEIRD", "Notes"]

TRAINING = Path(__file__).with_name("training.py")
STEPS = 12
WEIRD = ('a b"=0"', "two\nlines", "$HOME")
KILL_ONCE = "fail_at(rank=1, step=5, how='kill', restart=0)"


class Notes:
    """Records that the ranks of one training wrote into its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def words(self, pause: float = 0.0) -> list[str]:
        """Return the program and its arguments; ranks pause for so many seconds after each step."""
        return [str(TRAINING), str(self.folder), str(STEPS), str(pause), *WEIRD]

    def all(self) -> list[dict[str, Any]]:
        """Return all notes so far, in the order in which they were made."""
        path = self.folder / "notes.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self, rank: int = 0) -> list[list[int]]:
        """Return the steps of a rank, for each of its processes."""
        steps_of_process: dict[int, list[int]] = {}
        for note in self.all():
            if note["rank"] == rank and "step" in note:
                steps_of_process.setdefault(note["pid"], []).append(note["step"])
        return list(steps_of_process.values())

    def digest(self) -> str:
        """Return the digest of the weights at the end, which all ranks have."""
        [digest] = {note["digest"] for note in self.all() if "digest" in note}
        return digest

    def await_step(self, step: int, details: Callable[[], object] = str) -> list[int]:
        """Return the process ids of the latest ranks once they have begun `step`."""
        deadline = time.monotonic() + 120
        while True:
            here = [note for note in self.all() if note.get("step", -1) >= step]
            if len({note["rank"] for note in here}) == 2:
                return [
                    next(one["pid"] for one in reversed(here) if one["rank"] == rank) for rank in range(2)
                ]
            assert time.monotonic() < deadline, (self.all(), details())
            time.sleep(0.05)

    def check_finished(
        self, expected_digest: str, *, nodes: int = 1, backends: Sequence[str] = ("paceline",)
    ) -> None:
        """Assert that one start of two ranks made all steps, with the right arguments and weights."""
        assert self.steps() == [list(range(STEPS))]
        self._check_end(expected_digest, nodes, backends)

    def check_resumed(self, expected_digest: str, *, starts: int = 2, nodes: int = 1) -> None:
        """Assert that the training resumed from a checkpoint, with the weights of an uninterrupted run."""
        made = self.steps()
        assert len(made) == starts, made
        for earlier, later in pairwise(made):
            assert 0 < later[0] <= earlier[-1] + 1, made  # from a checkpoint, and no step was left out
        assert made[-1][-1] == STEPS - 1
        self._check_end(expected_digest, nodes, ("paceline",))

    def _check_end(self, expected_digest: str, nodes: int, backends: Sequence[str]) -> None:
        ends = [note for note in self.all() if "digest" in note]
        assert sorted(note["rank"] for note in ends) == [0, 1]
        for note in ends:
            assert (note["size"], note["nodes"], note["words"]) == (2, nodes, list(WEIRD))
            assert note["backend"] in backends
        assert self.digest() == expected_digest
