"""Which checkpoint is there, and does it fit what is asked for? Read without torch.

    checkpoint/step-00000200/
        checkpoint.json                step, model, data, who wrote it
        model.safetensors              every parameter, whole
        optimizer-rank<k>.safetensors  the pieces of the optimizer's state that rank k answers for

A folder without ``.tmp`` is complete (see state.py), and the one of the highest step is the latest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.lm.corpus import Corpus
from paceline.lm.sizes import Size
from paceline.train.folder import RunFolder
from paceline.train.settings import Settings

__all__ = ["FORMAT", "Snapshot", "optimizer_file", "to_resume"]

FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        facts: what ``checkpoint.json`` says.
    """

    path: Path
    facts: Mapping[str, Any]

    @classmethod
    def latest(cls, folder: RunFolder) -> Snapshot:
        """Return the latest complete checkpoint of the run in `folder`.

        Raises:
            UsageError: there is none, or it can't be read.
        """
        complete = folder.complete_checkpoints()
        if not complete:
            raise UsageError(
                f"no complete checkpoint in {str(folder.checkpoint)!r}",
                remedy="leave --resume out to start anew",
            )
        path = complete[-1]
        try:
            facts = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"checkpoint {str(path)!r} can't be read: {error}") from error
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise UsageError(f"checkpoint {str(path)!r} is not of format {FORMAT}, which this version reads")
        return cls(path, facts)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.facts["step"]

    @property
    def weights(self) -> Path:
        """The file of the parameters."""
        return self.path / "model.safetensors"

    @property
    def optimizer_of_rank(self) -> list[Path]:
        """The files of the optimizer's state, by the rank that wrote them."""
        return [optimizer_file(self.path, rank) for rank in range(self.facts["ranks"])]

    def check(self, size: Size, fingerprint: int) -> None:
        """Raise unless this checkpoint is of a model of `size`, trained on data with this `fingerprint`.

        Raises:
            UsageError: naming what differs.
        """
        asked, saved = asdict(size), self.facts["model"]
        for name, value in asked.items():
            if saved.get(name) != value:
                raise UsageError(
                    f"the checkpoint is of a model with {name}={saved.get(name)!r}, asked for is {value!r}",
                    remedy="resume with the options that the run began with, or start anew with --overwrite",
                )
        if self.facts["data"] != fingerprint:
            raise UsageError(
                "the checkpoint was trained on other data",
                remedy="resume with the --data that the run began with, or start anew with --overwrite",
            )


def optimizer_file(folder: Path, rank: int) -> Path:
    """Return where `rank` writes its part of the optimizer's state."""
    return folder / f"optimizer-rank{rank}.safetensors"


def to_resume(settings: Settings, size: Size, corpus: Corpus) -> Snapshot | None:
    """Return the checkpoint that a training goes on from, None if it starts anew.

    Args:
        settings: what is asked for.
        size: shapes of its model.
        corpus: its data.

    Raises:
        UsageError: there is no checkpoint, it does not fit, or it has nothing left to do.
    """
    if settings.existing != "resume":
        return None
    found = Snapshot.latest(RunFolder(settings.out))
    found.check(size, corpus.fingerprint)
    if found.step >= settings.steps:
        raise UsageError(
            f"nothing left to do: the checkpoint is at step {found.step} of {settings.steps}",
            remedy="ask for more --steps, or start anew with --overwrite",
        )
    return found
