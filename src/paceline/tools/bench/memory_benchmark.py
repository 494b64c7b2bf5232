"""The memory of a training step, predicted without running it and measured by running it, from one description.

setting.py    strategy, ranks, optimizer, precision: plain values
subject.py    what is trained: a reference size, or whatever the user's code builds
training.py   the loop that both ways run
predict.py    runs it on tensors without memory, among ranks that are not there
measure.py    has real ranks run it
worker.py     what each of them runs
allocated.py  what torch's allocator says of a block of code

Has real ranks train a subject and say what torch's allocator gave out: what a prediction is held against.

A prediction beside a measurement of the same steps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline._core.format import format_bytes
from paceline.errors import UsageError
from paceline.tools.bench.step.step_benchmark import StartRanks
from paceline.tools.plan.memory.caching_allocator import replay_allocations
from paceline.tools.plan.memory.memory_prediction import predict_memory
from paceline.tools.plan.memory.traced_training import STEPS
from paceline.tools.plan.memory.training_subject import ALONE, TrainingSetting, TrainingSubject

__all__ = ["Check", "Measured", "check", "measure"]


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
    setting: TrainingSetting,
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
        start: starts ranks, such as `paceline.launch.process.local_ranks.run_ranks`.
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
        start(["-m", "paceline.tools.bench.memory_worker", str(job)], setting.ranks, env=env)
        every = json.loads(out.read_text(encoding="utf-8"))
    return Measured(
        tuple(one["peak_nbytes"] for one in every),
        tuple(every[0]["peak_operators"]),
        tuple(one["unreported_nbytes"] for one in every),
    )


@dataclass(frozen=True)
class Check:
    """What was predicted and what was measured."""

    subject: str
    setting: TrainingSetting
    predicted_nbytes: int
    measured: Measured
    seconds: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured; negative: too low."""
        return self.predicted_nbytes / self.measured.nbytes - 1

    def facts(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "model": self.subject,
            "setting": self.setting.to_json(),
            "predicted_nbytes": self.predicted_nbytes,
            "measured_nbytes": self.measured.nbytes,
            "error": self.error,
            "prediction_seconds": round(self.seconds, 2),
            "measured": self.measured.to_json(),
        }


def check(
    subject: TrainingSubject, setting: TrainingSetting, start: StartRanks, *, inputs: Sequence[str] = ()
) -> Check:
    """Predict, then measure.

    Args:
        subject, setting, inputs: as for `predict_memory` and `measure`.
        start: starts ranks.

    Raises:
        UsageError: this machine has not the memory that was predicted.
        RankFailed: a rank ended with an error.
    """
    prediction = predict_memory(subject, setting)
    predicted = prediction.timeline.peak().nbytes
    if setting.device == "cuda":
        predicted = replay_allocations(prediction.timeline.changes()).allocated_nbytes
    available = psutil.virtual_memory().available
    if setting.device == "cpu" and predicted * setting.ranks > available:
        raise UsageError(
            f"{setting.name} needs {format_bytes(predicted * setting.ranks)} here; "
            f"{format_bytes(available)} are available",
            remedy="verify a smaller model, batch or number of devices",
        )
    measured = measure(subject.name, setting, start, inputs=inputs)
    return Check(subject.name, setting, predicted, measured, prediction.seconds)
