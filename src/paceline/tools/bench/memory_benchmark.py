"""Memory of a training step: a prediction checked against a measurement with real ranks of the same steps.

Both run the loop of `paceline.tools.plan.memory.traced_training` from one description. The prediction runs it on
tensors without storage among ranks that do not exist, the measurement in real ranks, where torch's allocator is
observed. Their program is ``python -m paceline.tools.bench.memory_benchmark job.json``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from paceline._core.format import format_bytes
from paceline._core.json_codec import decode, encode
from paceline.errors import UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.peak_memory import CpuAllocations
from paceline.tools.bench.rank_jobs import StartRanks, read_job, run_rank_job, write_job_result
from paceline.tools.plan.memory.caching_allocator import replay_allocations
from paceline.tools.plan.memory.memory_prediction import predict_memory
from paceline.tools.plan.memory.traced_training import STEPS, SilentObserver, train_subject
from paceline.tools.plan.memory.training_subject import (
    ALONE,
    TrainingSetting,
    TrainingSubject,
    resolve_subject,
)
from paceline.world import init, shutdown
from paceline.world.value_collectives import gather_values

__all__ = ["MeasuredMemory", "MemoryCheck", "check_prediction", "measure_memory"]


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory that a training took.

    Attributes:
        peak_nbytes: of each rank.
        peak_operators: operators in which rank 0 reached its peak, outermost first.
        unreported_nbytes: of each rank, blocks whose free was not recorded; see
            [Note: reported allocations] in `paceline.tools.bench.peak_memory`.
    """

    peak_nbytes: tuple[int, ...]
    peak_operators: tuple[str, ...]
    unreported_nbytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The largest rank's peak."""
        return max(self.peak_nbytes)


def measure_memory(
    subject: str,
    setting: TrainingSetting,
    start: StartRanks,
    *,
    inputs: Sequence[str] = (),
    steps: int = STEPS,
    threads: int = 1,
) -> MeasuredMemory:
    """Run the steps that a prediction is about and return the memory they took.

    Args:
        subject: as for `resolve_subject`.
        setting: of the training; `ranks` processes are started on this machine.
        start: starts ranks, such as `paceline.launch.process.local_ranks.run_ranks`.
        inputs: as for `resolve_subject`.
        steps: optimizer steps.
        threads: of each rank.

    Raises:
        UsageError: the devices are missing.
        RankFailed: a rank ended with an error.
    """
    gpus = torch.cuda.device_count() if setting.device == "cuda" else setting.ranks
    if setting.ranks > gpus or (setting.device == "cpu" and setting.backend == "nccl"):
        raise UsageError(
            f"{setting.ranks} ranks on {setting.device} with {setting.backend} can't run here",
            remedy="give --device cpu to verify on this machine's processors",
        )
    assert setting.ranks == 1 or setting.strategy != ALONE, "the setting has checked that"
    job = {
        "subject": subject,
        "inputs": list(inputs),
        "setting": encode(setting),
        "steps": steps,
        "threads": threads,
    }
    env = {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": "99"}
    every = run_rank_job(start, "paceline.tools.bench.memory_benchmark", job, setting.ranks, env=env)
    return MeasuredMemory(
        tuple(one["peak_nbytes"] for one in every),
        tuple(every[0]["peak_operators"]),
        tuple(one["unreported_nbytes"] for one in every),
    )


@dataclass(frozen=True)
class MemoryCheck:
    """A prediction with the measurement of the same steps; `seconds` is the time the prediction took."""

    subject: str
    setting: TrainingSetting
    predicted_nbytes: int
    measured: MeasuredMemory
    seconds: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; negative if it is too low."""
        return self.predicted_nbytes / self.measured.nbytes - 1

    def facts(self) -> dict[str, Any]:
        """Return the check for JSON."""
        return {
            "model": self.subject,
            "setting": encode(self.setting),
            "predicted_nbytes": self.predicted_nbytes,
            "measured_nbytes": self.measured.nbytes,
            "error": self.error,
            "prediction_seconds": round(self.seconds, 2),
            "measured": encode(self.measured),
        }


def check_prediction(
    subject: TrainingSubject, setting: TrainingSetting, start: StartRanks, *, inputs: Sequence[str] = ()
) -> MemoryCheck:
    """Predict, then measure.

    Args:
        subject: as for `predict_memory`.
        setting: as for `predict_memory`.
        start: as for `measure_memory`.
        inputs: as for `measure_memory`.

    Raises:
        UsageError: this machine has less memory than predicted.
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
    measured = measure_memory(subject.name, setting, start, inputs=inputs)
    return MemoryCheck(subject.name, setting, predicted, measured, prediction.seconds)


def _run_as_rank(path: str) -> None:
    """Run the job in the file `path` as one of its ranks."""
    job = read_job(path)
    setting = decode(job["setting"], TrainingSetting, "setting")
    torch.manual_seed(0)
    torch.set_num_threads(job["threads"])
    world = init(setting.backend) if setting.ranks > 1 else None
    if setting.device == "cuda":
        torch.set_default_device("cuda" if world is None else world.device)
    subject = resolve_subject(job["subject"], job["inputs"])
    found = _measure(subject, setting, job["steps"])
    every = gather_values(found)
    if world is None or world.rank == 0:
        write_job_result(job, every)
    if world is not None:
        shutdown()


def _measure(subject: TrainingSubject, setting: TrainingSetting, steps: int) -> dict[str, Any]:
    """Return the peak of this rank and, on the CPU, the operators that reached it."""
    with torch.autograd.profiler.profile(profile_memory=True):  # load what the first use of torch loads
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    gc.collect()
    gc.disable()  # cycles would be collected at other times than in a prediction
    if setting.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train_subject(subject, setting, Comm(), SilentObserver(), steps)
        peak = torch.cuda.max_memory_allocated() - before
        return {"peak_nbytes": peak, "peak_operators": [], "unreported_nbytes": 0}
    with CpuAllocations() as allocated:
        train_subject(subject, setting, Comm(), SilentObserver(), steps)
    at_peak = allocated.at_peak()
    return {
        "peak_nbytes": allocated.nbytes,
        "peak_operators": list(at_peak.operators) if at_peak else [],
        "unreported_nbytes": allocated.unreported_nbytes,
    }


if __name__ == "__main__":
    _run_as_rank(sys.argv[1])
