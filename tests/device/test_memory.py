"""The planner's memory compared with CUDA's allocator."""

from __future__ import annotations

import pytest

from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject

BAR = 0.02


@pytest.mark.parametrize("autocast", ["off", "bf16"])
@pytest.mark.parametrize("strategy", ["alone", "bucketed"])
def test_a_predicted_peak_is_the_measured_one(strategy, autocast):
    setting = TrainingSetting(
        strategy=strategy, batch=8, context=128, autocast=autocast, backend="nccl", device="cuda"
    )
    checked = check_prediction(resolve_subject("small"), setting, run_ranks)
    assert abs(checked.error) <= BAR, checked.facts()
