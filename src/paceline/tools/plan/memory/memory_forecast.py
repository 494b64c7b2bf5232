"""A prediction with its answer: the allocator's share, the ledger, whether it fits, what would fit.

The largest micro-batch that fits on a device, for a strategy: predicted, not tried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.tools.plan.memory.caching_allocator import AllocatorReplay, replay_allocations
from paceline.tools.plan.memory.memory_fit import SAFE_SHARE, MemoryAlternative, MemoryVerdict, judge_fit
from paceline.tools.plan.memory.memory_ledger import MemoryLedger, NonTensorMemory, make_ledger
from paceline.tools.plan.memory.memory_prediction import MemoryPrediction, predict_memory
from paceline.tools.plan.memory.memory_timeline import MemoryTimeline
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


_HARDLY = 0.98  # of the memory on half as many devices


_NOTHING = NonTensorMemory()


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device and what is taken of it before a step.

    Attributes:
        capacity_nbytes: of the device; None: it is not asked whether anything fits.
        outside: what no tensor of a step accounts for.
    """

    capacity_nbytes: int | None = None
    outside: NonTensorMemory = _NOTHING


@dataclass(frozen=True)
class MemoryForecast:
    """What a training takes, and whether that fits.

    Attributes:
        prediction: every block.
        steps: its blocks that are there when steps run, or are made in them: what is judged.
        replay: of these by the CUDA allocator; None on the CPU, whose allocator takes what is asked for.
        ledger: of the peak.
        verdict: None where no capacity is known.
    """

    prediction: MemoryPrediction
    steps: MemoryTimeline
    replay: AllocatorReplay | None
    ledger: MemoryLedger
    verdict: MemoryVerdict | None

    @property
    def setting(self) -> TrainingSetting:
        """How the model is trained."""
        return self.prediction.setting

    @property
    def building_nbytes(self) -> int:
        """The most that building and wrapping the model takes, or the steps where they take more."""
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
            "ledger": [
                {"name": line.name, "nbytes": line.nbytes, "rule": line.rule, "source": line.source}
                for line in self.ledger.lines
            ],
            "largest": [list(each) for each in self.ledger.largest],
            "questions": self.prediction.value_reads,
            "seconds": round(self.prediction.seconds, 2),
        }


def forecast_memory(subject: TrainingSubject, setting: TrainingSetting, room: DeviceMemory) -> MemoryForecast:
    """Predict a training and judge it.

    Raises: as `predict_memory`.
    """
    prediction = predict_memory(subject, setting)
    steps = prediction.timeline.steps()
    replayed = replay_allocations(steps.changes()) if setting.device == "cuda" else None
    outside = (
        room.outside if setting.device == "cuda" else NonTensorMemory(data_nbytes=room.outside.data_nbytes)
    )
    ledger = make_ledger(steps, replayed, outside)
    verdict = judge_fit(ledger.nbytes, room.capacity_nbytes) if room.capacity_nbytes is not None else None
    return MemoryForecast(prediction, steps, replayed, ledger, verdict)


def predict_alternatives(
    subject: TrainingSubject, setting: TrainingSetting, room: DeviceMemory
) -> list[MemoryAlternative]:
    """Return what each change of `setting` would take; each has been predicted."""
    if room.capacity_nbytes is None:
        return []
    found = [
        MemoryAlternative(
            change, judge_fit(forecast_memory(subject, other, room).ledger.nbytes, room.capacity_nbytes)
        )
        for change, other in _changes(setting)
    ]
    devices = _fewest_devices(subject, setting, room)
    return [*found, devices] if devices is not None else found


def _changes(setting: TrainingSetting) -> Iterator[tuple[str, TrainingSetting]]:
    """Yield single changes that take less memory, in words."""
    if setting.autocast == setting.gather == "off":
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
    subject: TrainingSubject, setting: TrainingSetting, room: DeviceMemory
) -> MemoryAlternative | None:
    """Return full-shard on the fewest devices (a power of two) that it fits on; or where more hardly help."""
    assert room.capacity_nbytes is not None, "the caller has checked that"
    ranks = max(2, setting.ranks * (2 if setting.strategy == "full-shard" else 1))
    found: MemoryAlternative | None = None
    while ranks <= _MOST_DEVICES:
        other = replace(setting, strategy="full-shard", ranks=ranks)
        verdict = judge_fit(forecast_memory(subject, other, room).ledger.nbytes, room.capacity_nbytes)
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
    """What fits under a strategy.

    Attributes:
        samples: the largest micro-batch that fits; 0: not even one sample does.
        forecast: of a step with it; with one sample where none fits.
    """

    samples: int
    forecast: MemoryForecast


def largest_micro_batch(
    subject: TrainingSubject, setting: TrainingSetting, room: DeviceMemory, most: int
) -> MicroBatchFit:
    """Return the largest micro-batch that fits into `room`, and what a step takes with it.

    Memory grows with the micro-batch, about in line once forward and backward take more than the optimizer's step.
    So the answer is sought between one that fits and one that doesn't, where the line between them meets the margin,
    until it is known to a thirty-second part.

    Args:
        subject: what is trained. setting: how; its `batch` is what is sought. room: with the memory of a device.
        most: samples that are wanted at most, 1 or more.

    Raises: as `forecast_memory`.
    """
    assert room.capacity_nbytes is not None, "there is something to fit into"
    allowed = SAFE_SHARE * room.capacity_nbytes

    def of(samples: int) -> MemoryForecast:
        return forecast_memory(subject, replace(setting, batch=samples), room)

    fits, found = 1, of(1)
    if found.ledger.nbytes > allowed:
        return MicroBatchFit(0, found)
    if most == 1:
        return MicroBatchFit(1, found)
    over, largest = most, of(most)
    if largest.ledger.nbytes <= allowed:
        return MicroBatchFit(most, largest)
    while over - fits > max(1, fits // 32):
        share = (allowed - found.ledger.nbytes) / (largest.ledger.nbytes - found.ledger.nbytes)
        samples = min(max(fits + 1, fits + int(share * (over - fits))), over - 1)
        tried = of(samples)
        if tried.ledger.nbytes <= allowed:
            fits, found = samples, tried
        else:
            over, largest = samples, tried
    return MicroBatchFit(fits, found)
