"""Predictions of memory against real ranks: building, wrapping and two steps over gloo."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction, measure_memory
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject


def start(argv, ranks, *, env):
    run_ranks(argv, ranks, env=env, timeout=240)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setting",
    [
        TrainingSetting(strategy="bucketed", ranks=2, batch=4, context=64, autocast="bf16"),
        TrainingSetting(strategy="sharded", ranks=2, batch=2, context=64),
        TrainingSetting(strategy="full-shard", ranks=2, batch=2, context=64, checkpointing=True),
        TrainingSetting(
            strategy="full-shard", ranks=2, batch=2, context=64, gather="bf16", optimizer="sgd-momentum"
        ),
        TrainingSetting(strategy="naive", ranks=3, batch=2, context=32, accumulate=2),
        TrainingSetting(strategy="bucketed", ranks=2, batch=2, context=64, optimizer="muon"),
        TrainingSetting(strategy="sharded", ranks=3, batch=1, context=16, optimizer="muon"),
        TrainingSetting(strategy="full-shard", ranks=2, batch=1, context=16, optimizer="muon"),
        TrainingSetting(strategy="sharded", ranks=2, context=16, dtype="bf16", master_weights="fp32"),
        TrainingSetting(
            strategy="full-shard", ranks=2, context=16, dtype="bf16", master_weights="fp32", optimizer="muon"
        ),
    ],
    ids=lambda setting: setting.name,
)
def test_predicted_memory_equals_that_of_ranks(setting):
    found = check_prediction(resolve_subject("tiny"), setting, start)
    # Below 80 % of it, a device on which a training is said to fit would run out.
    assert abs(found.error) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("autocast", ["off", "bf16"])
def test_predicted_memory_equals_that_of_a_gpu(autocast):
    setting = TrainingSetting(
        strategy="alone", ranks=1, batch=8, context=128, autocast=autocast, device="cuda", backend="nccl"
    )
    assert abs(check_prediction(resolve_subject("mini"), setting, start).error) < 0.10


def test_more_than_the_available_gpus_can_not_be_measured():
    setting = TrainingSetting(
        strategy="bucketed",
        ranks=1 + torch.cuda.device_count(),
        batch=1,
        context=32,
        device="cuda",
        backend="nccl",
    )
    with pytest.raises(UsageError, match="can't run here"):
        measure_memory("tiny", setting, start)


@pytest.mark.thorough
def test_a_training_that_exceeds_memory_is_refused_before_it_runs():
    with pytest.raises(UsageError, match="are available"):
        check_prediction(
            resolve_subject("xl"), TrainingSetting(strategy="bucketed", ranks=64, batch=8, context=256), start
        )
