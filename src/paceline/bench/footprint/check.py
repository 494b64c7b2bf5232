"""A prediction beside a measurement of the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from paceline.bench.footprint.measure import Measured, measure
from paceline.bench.footprint.predict import predict
from paceline.bench.footprint.setting import Setting
from paceline.bench.footprint.subject import Subject
from paceline.bench.step import StartRanks
from paceline.errors import UsageError
from paceline.plan.memory.allocator import replay
from paceline.units import format_bytes

__all__ = ["Check", "check"]


@dataclass(frozen=True)
class Check:
    """What was predicted and what was measured."""

    subject: str
    setting: Setting
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


def check(subject: Subject, setting: Setting, start: StartRanks, *, inputs: Sequence[str] = ()) -> Check:
    """Predict, then measure.

    Args:
        subject, setting, inputs: as for `predict` and `measure`.
        start: starts ranks.

    Raises:
        UsageError: this machine has not the memory that was predicted.
        RankFailed: a rank ended with an error.
    """
    prediction = predict(subject, setting)
    predicted = prediction.timeline.peak().nbytes
    if setting.device == "cuda":
        predicted = replay(prediction.timeline.changes()).allocated_nbytes
    available = psutil.virtual_memory().available
    if setting.device == "cpu" and predicted * setting.ranks > available:
        raise UsageError(
            f"{setting.name} needs {format_bytes(predicted * setting.ranks)} here; "
            f"{format_bytes(available)} are available",
            remedy="verify a smaller model, batch or number of devices",
        )
    measured = measure(subject.name, setting, start, inputs=inputs)
    return Check(subject.name, setting, predicted, measured, prediction.seconds)
