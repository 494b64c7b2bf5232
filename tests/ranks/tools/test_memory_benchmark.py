"""Predictions of memory against real ranks: building, wrapping and two steps over gloo."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction, measure_memory
from paceline.tools.plan.memory.training_subject import Setting, subject_of


def start(argv, ranks, *, env):
    run_ranks(argv, ranks, env=env, timeout=240)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("bucketed", 2, 4, 64, autocast="bf16"),
        Setting("sharded", 2, 2, 64),
        Setting("full-shard", 2, 2, 64, checkpointing=True),
        Setting("full-shard", 2, 2, 64, gather="bf16", optimizer="sgd-momentum"),
        Setting("naive", 3, 2, 32, accumulate=2),
    ],
    ids=lambda setting: setting.name,
)
def test_a_prediction_equals_the_peak_of_real_ranks(setting):
    found = check_prediction(subject_of("tiny"), setting, start)
    assert abs(found.error) < 0.10
    assert (
        found.measured.nbytes <= found.predicted_nbytes / 0.8
    )  # of a device that it fits, it does not run out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("autocast", ["off", "bf16"])
def test_a_prediction_equals_the_allocation_of_a_gpu(autocast):
    setting = Setting("alone", 1, 8, 128, autocast=autocast, device="cuda", backend="nccl")
    assert abs(check_prediction(subject_of("mini"), setting, start).error) < 0.10


def test_more_gpus_than_available_are_refused():
    setting = Setting("bucketed", 1 + torch.cuda.device_count(), 1, 32, device="cuda", backend="nccl")
    with pytest.raises(UsageError, match="can't run here"):
        measure_memory("tiny", setting, start)


def test_a_training_that_exceeds_memory_is_refused_before_it_runs():
    with pytest.raises(UsageError, match="are available"):
        check_prediction(subject_of("xl"), Setting("bucketed", 64, 8, 256), start)
