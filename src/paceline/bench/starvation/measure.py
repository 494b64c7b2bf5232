"""Has the scenes played, and returns the result for JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.facts import machine_record
from paceline.bench.starvation.scenes import Scene
from paceline.bench.starvation.setup import Setup
from paceline.bench.step import StartRanks

__all__ = ["measure", "result"]


def measure(setup: Setup, scenes: Sequence[Scene], start: StartRanks) -> list[dict[str, Any]]:
    """Have scenes played, one after the other, and return what became of each; see `SceneOutcome.to_json`.

    Args:
        setup: what they have in common.
        scenes: which.
        start: starts one process, such as `paceline.launch.local.run_ranks`; that one forks the ranks.

    Raises:
        RankFailed: the process that plays the scenes ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-starvation-") as folder:
        job, out = Path(folder, "job.json"), Path(folder, "found.jsonl")
        names = [scene.name for scene in scenes]
        description = {"setup": setup.to_json(), "scenes": names, "out": str(out)}
        job.write_text(json.dumps(description), encoding="utf-8")
        start(
            ["-m", "paceline.bench.starvation.stage", str(job)],
            1,
            env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": folder},
        )
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def result(setup: Setup, scenes: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """Return a measurement for JSON: the command that made it, this machine, the settings and the scenes."""
    return {
        "kind": "starvation",
        "schema": 1,
        "command": command,
        "machine": machine_record(),
        "settings": setup.told(),
        "scenes": list(scenes),
    }
