"""Has real ranks train a subject and say what torch's allocator gave out: what a prediction is held against."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.bench.footprint.setting import ALONE, Setting
from paceline.bench.footprint.training import STEPS
from paceline.bench.step import StartRanks
from paceline.errors import UsageError

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """What a training took.

    Attributes:
        peak_nbytes: of each rank.
        peak_operators: in which rank 0 reached it, outermost first.
        unreported_nbytes: of each rank, blocks whose end nobody reported; see `allocated`.
    """

    peak_nbytes: tuple[int, ...]
    peak_operators: tuple[str, ...]
    unreported_nbytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The largest rank's peak."""
        return max(self.peak_nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {key: list(value) for key, value in asdict(self).items()}


def measure(
    subject: str,
    setting: Setting,
    start: StartRanks,
    *,
    inputs: Sequence[str] = (),
    steps: int = STEPS,
    threads: int = 1,
) -> Measured:
    """Run the steps that a prediction is about and return what they took.

    Args:
        subject: as `subject_of` takes it.
        setting: how it is trained; `ranks` processes are started here.
        start: starts ranks, such as `paceline.launch.local.run_ranks`.
        inputs: as `subject_of` takes them.
        steps: optimizer steps.
        threads: of each rank.

    Raises:
        UsageError: the devices are not there.
        RankFailed: a rank ended with an error.
    """
    gpus = torch.cuda.device_count() if setting.device == "cuda" else setting.ranks
    if setting.ranks > gpus or (setting.device == "cpu" and setting.backend == "nccl"):
        raise UsageError(
            f"{setting.ranks} ranks on {setting.device} with {setting.backend} can't run here",
            remedy="give --device cpu to verify on this machine's processors",
        )
    assert setting.ranks == 1 or setting.strategy != ALONE, "the setting has checked that"
    with tempfile.TemporaryDirectory(prefix="paceline-footprint-") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "found.json"
        told = {
            "subject": subject,
            "inputs": list(inputs),
            "setting": setting.to_json(),
            "steps": steps,
            "threads": threads,
            "out": str(out),
        }
        job.write_text(json.dumps(told), encoding="utf-8")
        env = {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": "99"}
        start(["-m", "paceline.bench.footprint.worker", str(job)], setting.ranks, env=env)
        every = json.loads(out.read_text(encoding="utf-8"))
    return Measured(
        tuple(one["peak_nbytes"] for one in every),
        tuple(every[0]["peak_operators"]),
        tuple(one["unreported_nbytes"] for one in every),
    )
