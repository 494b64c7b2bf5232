"""What the rank that runs dry does, and who trains (pure).

Has the scenes played, and returns the result for JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import unknown
from paceline.tools.bench.starvation.scene_setup import Setup
from paceline.tools.bench.step.step_benchmark import StartRanks
from paceline.tools.result_files import machine_record

__all__ = ["SCENES", "Scene", "Then", "measure", "result", "scenes_named"]

Then = Literal[
    "ends",
    "idles",
    "barrier",
    "reduces one",
    "reduces many",
    "next epoch",
    "join",
    "stops early",
    "takes part",
]


@dataclass(frozen=True)
class Scene:
    """One way to meet unequal numbers of batches.

    Attributes:
        name: what it is called.
        trainer: ``"DDP"``, ``"FSDP2"``, or one of Paceline's strategies.
        then: what a rank does that has no batches left, while others have.
        told: the same in words.
        divide_by_initial: of torch's Join: whether gradients are divided by the number of all ranks, or of
            those that still have batches.
    """

    name: str
    trainer: str
    then: Then
    told: str
    divide_by_initial: bool = True

    @property
    def under(self) -> str:
        """Whose training it is, in words."""
        return f"torch {self.trainer}" if self.trainer in ("DDP", "FSDP2") else f"Paceline, {self.trainer}"


_TAKES_PART = "takes part with 0 samples"


SCENES = (
    Scene("exits", "DDP", "ends", "its process ends"),
    Scene("idles", "DDP", "idles", "does something else"),
    Scene("barrier", "DDP", "barrier", "waits in a barrier"),
    Scene("metric", "DDP", "reduces one", "all-reduces its metric, one number"),
    Scene("larger", "DDP", "reduces many", "all-reduces more than the gradient has"),
    Scene("next-epoch", "DDP", "next epoch", "begins its next epoch"),
    Scene("fsdp2", "FSDP2", "idles", "does something else"),
    Scene("join", "DDP", "join", "waits in Join, ÷ all ranks (default)"),
    Scene("join-active", "DDP", "join", "waits in Join, ÷ ranks with data", divide_by_initial=False),
    Scene("truncated", "DDP", "stops early", "all stop after min(batches)"),
    Scene("bucketed", "bucketed", "takes part", _TAKES_PART),
    Scene("sharded", "sharded", "takes part", _TAKES_PART),
    Scene("full-shard", "full-shard", "takes part", _TAKES_PART),
)


def scenes_named(names: Iterable[str]) -> list[Scene]:
    """Return the scenes with these names, in their usual order; all of them for no names.

    Raises:
        UsageError: no scene has that name.
    """
    wanted, valid = list(names), [scene.name for scene in SCENES]
    for name in wanted:
        if name not in valid:
            raise unknown("scene", name, valid)
    return [scene for scene in SCENES if not wanted or scene.name in wanted]


def measure(setup: Setup, scenes: Sequence[Scene], start: StartRanks) -> list[dict[str, Any]]:
    """Have scenes played, one after the other, and return what became of each; see `SceneOutcome.to_json`.

    Args:
        setup: what they have in common.
        scenes: which.
        start: starts one process, such as `paceline.launch.process.local_ranks.run_ranks`; that one forks the ranks.

    Raises:
        RankFailed: the process that plays the scenes ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-starvation-") as folder:
        job, out = Path(folder, "job.json"), Path(folder, "found.jsonl")
        names = [scene.name for scene in scenes]
        description = {"setup": setup.to_json(), "scenes": names, "out": str(out)}
        job.write_text(json.dumps(description), encoding="utf-8")
        start(
            ["-m", "paceline.tools.bench.starvation.scene_program", str(job)],
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
