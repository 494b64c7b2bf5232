"""Forecast of a training's memory: prediction, allocator replay, ledger, verdict, alternatives, largest micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.tools.plan.memory.caching_allocator import AllocatorReplay, replay_allocations
from paceline.tools.plan.memory.memory_fit import SAFE_SHARE, MemoryAlternative, MemoryVerdict, judge_fit
from paceline.tools.plan.memory.memory_ledger import MemoryLedger, make_ledger
from paceline.tools.plan.memory.memory_prediction import MemoryPrediction, predict_memory
from paceline.tools.plan.memory.memory_timeline import MemoryTimeline
from paceline.tools.plan.memory.non_tensor_memory import NonTensorMemory
from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject

__all__ = [
    "DeviceMemory",
    "MemoryForecast",
    "MicroBatchFit",
    "forecast_memory",
    "largest_micro_batch",
    "predict_alternatives",
]

_MOST_DEVICES = 1024
_HARDLY = 0.98  # of the memory on half the devices: more devices no longer help
_NOTHING = NonTensorMemory()


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device.

    Attributes:
        capacity_nbytes: total; None: unknown, so there are no verdicts.
        outside: memory that the tensors of a step don't account for.
    """

    capacity_nbytes: int | None = None
    outside: NonTensorMemory = _NOTHING


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of a training, and whether it fits.

    Attributes:
        prediction: every block.
        steps: the blocks that live during the steps, which the verdict is about.
        replay: of these by the CUDA allocator; None on the CPU, whose allocator reserves exactly what is requested.
        ledger: of the peak.
        verdict: None if the capacity is unknown.
    """

    prediction: MemoryPrediction
    steps: MemoryTimeline
    replay: AllocatorReplay | None
    ledger: MemoryLedger
    verdict: MemoryVerdict | None

    @property
    def setting(self) -> TrainingSetting:
        """Setting of the training."""
        return self.prediction.setting

    @property
    def building_nbytes(self) -> int:
        """Peak of the whole program, building and wrapping the model included."""
        return self.prediction.timeline.peak().nbytes

    def facts(self) -> dict[str, Any]:
        """Return the forecast for JSON."""
        peak = self.steps.peak()
        return {
            "setting": self.setting.to_json(),
            "peak_nbytes": peak.nbytes,
            "building_nbytes": self.building_nbytes,
            "allocated_nbytes": self.replay.allocated_nbytes if self.replay else peak.nbytes,
            "reserved_nbytes": self.replay.reserved_nbytes if self.replay else peak.nbytes,
            "device_nbytes": self.ledger.nbytes,
            "where": self.ledger.where,
            "answer": self.verdict.answer.value if self.verdict else None,
            "ledger": [asdict(line) for line in self.ledger.lines],
            "largest": [list(each) for each in self.ledger.largest],
            "questions": self.prediction.value_reads,
            "seconds": round(self.prediction.seconds, 2),
        }


def forecast_memory(
    subject: TrainingSubject, setting: TrainingSetting, available: DeviceMemory
) -> MemoryForecast:
    """Predict the memory of a training, and compare it with `available`; raises as `predict_memory`."""
    prediction = predict_memory(subject, setting)
    steps = prediction.timeline.steps()
    replayed = replay_allocations(steps.changes()) if setting.device == "cuda" else None
    outside = (
        available.outside
        if setting.device == "cuda"
        else NonTensorMemory(data_nbytes=available.outside.data_nbytes)
    )
    ledger = make_ledger(steps, replayed, outside)
    verdict = (
        judge_fit(ledger.nbytes, available.capacity_nbytes) if available.capacity_nbytes is not None else None
    )
    return MemoryForecast(prediction, steps, replayed, ledger, verdict)


def predict_alternatives(
    subject: TrainingSubject, setting: TrainingSetting, available: DeviceMemory
) -> list[MemoryAlternative]:
    """Return the predicted memory of each change of `setting` that would lower it."""
    if available.capacity_nbytes is None:
        return []
    found = [
        MemoryAlternative(
            change,
            judge_fit(forecast_memory(subject, other, available).ledger.nbytes, available.capacity_nbytes),
        )
        for change, other in _changes(setting)
    ]
    devices = _fewest_devices(subject, setting, available)
    return [*found, devices] if devices is not None else found


def _changes(setting: TrainingSetting) -> Iterator[tuple[str, TrainingSetting]]:
    """Yield single changes that lower memory, each with its description."""
    if setting.autocast == setting.gather == "off" and setting.dtype == "fp32":
        yield "bf16 autocast", replace(setting, autocast="bf16")
    if not setting.checkpointing:
        yield "checkpointing", replace(setting, checkpointing=True)
    if setting.batch > 1:
        half = setting.batch // 2
        yield (
            f"a micro-batch of {half}, accumulated twice",
            replace(setting, batch=half, accumulate=2 * setting.accumulate),
        )
        yield "a micro-batch of 1", replace(setting, batch=1, accumulate=setting.batch * setting.accumulate)
    if setting.strategy not in ("sharded", "full-shard") and setting.ranks > 1:
        yield "sharded", replace(setting, strategy="sharded")


def _fewest_devices(
    subject: TrainingSubject, setting: TrainingSetting, available: DeviceMemory
) -> MemoryAlternative | None:
    """Return full-shard on the fewest devices that it fits on, or beyond which more hardly help; powers of two."""
    assert available.capacity_nbytes is not None, "the caller has checked that"
    ranks = max(2, setting.ranks * (2 if setting.strategy == "full-shard" else 1))
    found: MemoryAlternative | None = None
    while ranks <= _MOST_DEVICES:
        other = replace(setting, strategy="full-shard", ranks=ranks)
        verdict = judge_fit(
            forecast_memory(subject, other, available).ledger.nbytes, available.capacity_nbytes
        )
        hardly = found is not None and verdict.nbytes > _HARDLY * found.verdict.nbytes
        if hardly and verdict.poor:
            break
        found = MemoryAlternative(f"full-shard on {ranks} devices", verdict)
        if not verdict.poor:
            break
        ranks *= 2
    return found


@dataclass(frozen=True)
class MicroBatchFit:
    """Largest micro-batch that fits; 0 samples if not even one fits, with the forecast of one sample."""

    samples: int
    forecast: MemoryForecast


def largest_micro_batch(
    subject: TrainingSubject, setting: TrainingSetting, available: DeviceMemory, most: int
) -> MicroBatchFit:
    """Search the largest micro-batch that fits into `available`; raises as `forecast_memory`.

    Memory grows about linearly with the micro-batch, once forward and backward need more than the optimizer's step. So
    the search interpolates between a batch that fits and one that doesn't, until it is known to 1/32.

    Args:
        subject: to train.
        setting: of the training; its `batch` is replaced.
        available: with a known capacity.
        most: upper bound of the samples, 1 or more.
    """
    assert available.capacity_nbytes is not None, "the capacity is known"
    allowed = SAFE_SHARE * available.capacity_nbytes

    def forecast(samples: int) -> MemoryForecast:
        return forecast_memory(subject, replace(setting, batch=samples), available)

    fits, found = 1, forecast(1)
    if found.ledger.nbytes > allowed:
        return MicroBatchFit(0, found)
    if most == 1:
        return MicroBatchFit(1, found)
    over, largest = most, forecast(most)
    if largest.ledger.nbytes <= allowed:
        return MicroBatchFit(most, largest)
    while over - fits > max(1, fits // 32):
        share = (allowed - found.ledger.nbytes) / (largest.ledger.nbytes - found.ledger.nbytes)
        samples = min(max(fits + 1, fits + int(share * (over - fits))), over - 1)
        tried = forecast(samples)
        if tried.ledger.nbytes <= allowed:
            fits, found = samples, tried
        else:
            over, largest = samples, tried
    return MicroBatchFit(fits, found)
