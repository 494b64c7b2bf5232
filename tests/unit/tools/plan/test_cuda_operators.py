"""Memory predicted for CUDA: of its operators, and beside what a GPU has measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from paceline.tools.plan.memory.caching_allocator import replay_allocations
from paceline.tools.plan.memory.cuda_operators import cuda_operators
from paceline.tools.plan.memory.memory_prediction import predict_memory
from paceline.tools.plan.memory.tensor_tracer import TensorTracer
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject

MEASURED = Path(__file__).parents[4] / "benchmarks" / "device" / "memory.json"
BAR = 0.02


def measured():
    for row in json.loads(MEASURED.read_text())["rows"]:
        setting = TrainingSetting.from_json(row["setting"])
        quick = row["model"] == "44m" or setting.accumulate > 1
        yield pytest.param(
            row, id=f"{row['model']}, {setting.name}", marks=[] if quick else pytest.mark.thorough
        )


@pytest.mark.parametrize("row", list(measured()))
def test_a_prediction_is_what_a_gpu_measured(row, monkeypatch):
    monkeypatch.syspath_prepend(MEASURED.parent)
    try:
        timeline = predict_memory(
            resolve_subject(row["model"]), TrainingSetting.from_json(row["setting"])
        ).timeline
    finally:
        sys.modules.pop("models", None)
    predicted = replay_allocations(timeline.changes()).allocated_nbytes
    assert predicted == pytest.approx(row["measured_nbytes"], rel=BAR)


def kept(function, *shapes, **options):
    """Return the bytes that a result and its graph hold, beyond the inputs."""
    inputs = [torch.ones(shape, requires_grad=True, **options) for shape in shapes]
    with TensorTracer() as tracer:
        result = function(*inputs)
        timeline = tracer.timeline()
        assert result.requires_grad
        return sum(block.nbytes for block in timeline.alive_at(timeline.ticks))


def test_a_normalisation_keeps_a_number_of_each_row():
    rows = 24
    normalise = lambda x, weight: functional.rms_norm(x, (64,), weight)  # noqa: E731
    result = 4 * rows * 64
    assert kept(normalise, (4, 6, 64), (64,)) == 2 * result + 4 * rows
    with cuda_operators():
        assert kept(normalise, (4, 6, 64), (64,)) == result + 4 * rows
        x = torch.ones(4, 6, 64, requires_grad=True)
        weight = torch.ones(64, requires_grad=True)
        functional.rms_norm(x, [64], weight).sum().backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_weight_of_another_type_has_no_kernel_of_its_own():
    x, weight = torch.ones(4, 64), torch.ones(64, dtype=torch.bfloat16)
    expected = functional.rms_norm(x, (64,), weight)
    with cuda_operators():
        assert torch.equal(functional.rms_norm(x, (64,), weight), expected)


@pytest.mark.parametrize(
    ("heads", "options"),
    [(2, {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}), (1, {"enable_gqa": True})],
    ids=["mask", "grouped heads"],
)
def test_other_attention_is_the_cpu_s(heads, options):
    query, key = torch.randn(1, 2, 8, 16), torch.randn(1, heads, 8, 16)
    expected = functional.scaled_dot_product_attention(query, key, key, **options)
    with cuda_operators():
        assert torch.equal(functional.scaled_dot_product_attention(query, key, key, **options), expected)


def test_the_functions_are_themselves_again():
    before = functional.rms_norm, functional.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), cuda_operators():
        raise ZeroDivisionError
    assert before == (functional.rms_norm, functional.scaled_dot_product_attention)
