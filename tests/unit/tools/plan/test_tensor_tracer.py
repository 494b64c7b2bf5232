"""The tracer on small models: against hand-computed sums, real allocations and torch's own tracker."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.errors import UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.peak_memory import CpuAllocations
from paceline.tools.plan.memory.kernel_workspaces import cpu_workspace
from paceline.tools.plan.memory.memory_prediction import Untraceable, predict_memory
from paceline.tools.plan.memory.tensor_tracer import TensorTracer
from paceline.tools.plan.memory.traced_training import SilentObserver, train_subject
from paceline.tools.plan.memory.training_subject import (
    BuiltSubject,
    TrainingSetting,
    TrainingSubject,
    resolve_subject,
)


def of_category(timeline):
    """Return the bytes of every category at the peak."""
    found = {}
    for block in timeline.alive_at(timeline.peak().tick):
        found[block.category] = found.get(block.category, 0) + block.nbytes
    return found


def test_an_mlp_takes_the_memory_computed_by_hand():
    def step():
        tracer.begin(0, "build")
        net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False))
        tracer.claim("parameters", net.parameters())
        tracer.begin(0, "forward")
        with tracer.label_allocations("inputs"):
            x = torch.randn(16, 64)
        loss = net(x).sum()
        tracer.begin(0, "backward")
        loss.backward()
        tracer.claim("gradients", [param.grad for param in net.parameters()])
        tracer.end()

    with FakeTensorMode(), TensorTracer() as tracer:
        step()
    timeline = tracer.timeline()
    weights = 4 * (64 * 128 + 128 * 32)
    # at the end: parameters, gradients, input; ReLU's result is dropped when its backward has run
    lasting = {"parameters": weights, "gradients": weights, "inputs": 4 * 16 * 64}
    end = timeline.alive_at(timeline.ticks - 1)
    measured = {name: sum(block.nbytes for block in end if block.category == name) for name in lasting}
    assert measured == lasting
    # ReLU's backward makes the gradient of its input beside that of its output, and its saved result
    middle = 4 * 16 * 128
    second = 4 * 128 * 32
    assert (
        timeline.peak().nbytes
        == max(
            weights + 4 * 16 * 64 + middle + second + middle + middle,
            weights + 4 * 16 * 64 + weights + middle,
        )
        + 4
        + 4
    )  # the loss and the gradient that backward begins with


def test_module_and_operator_of_a_block_are_known_in_both_directions():
    with FakeTensorMode(), TensorTracer() as tracer:
        net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4)))
        tracer.modules.name(net)
        tracer.begin(0, "forward")
        loss = net(torch.randn(2, 8)).sum()
        tracer.begin(0, "backward")
        loss.backward()
    named = {(block.module, block.operator) for block in tracer.timeline().blocks}
    assert ("1.0", "aten.addmm.default") in named
    assert ("1.0", "aten.mm.default") in named  # in backward
    assert ("0", "aten.mm.default") in named


def test_views_of_earlier_tensors_are_not_counted():
    x = torch.randn(8, 8)
    with TensorTracer() as tracer:
        y = x.t()
        z = y + 1
    del z
    assert tracer.timeline().peak().nbytes == 256


def test_tensors_on_the_meta_device_have_no_memory():
    with FakeTensorMode(), TensorTracer() as tracer:
        kept = torch.zeros(256), torch.zeros(256, device="meta")
    assert tracer.timeline().peak().nbytes == kept[0].nbytes


def test_a_storage_that_is_resized_is_followed():
    with TensorTracer() as tracer:
        x = torch.empty(256)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(512)
    held = tracer.timeline().held().tolist()
    assert held == [1024, 0, 512]


def test_resize_is_torchs_own_again_afterwards():
    before = torch.UntypedStorage.resize_
    with TensorTracer():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_values_are_read_as_one_and_counted():
    with FakeTensorMode(), TensorTracer() as tracer:
        value = torch.randn(3).sum().item()
        count = torch.randint(5, (3,)).max().item()
    assert (value, count, tracer.value_reads) == (1.0, 1, 2)


def test_gradients_are_added_up_in_place_as_autograd_does_with_real_tensors():
    def fan_in(observe):
        x = torch.randn(512, 64, requires_grad=True)
        observe("forward")
        y = x * 2
        loss = sum((y * factor).sum() for factor in range(2, 8))
        observe("backward")
        loss.backward()

    with FakeTensorMode(), TensorTracer() as tracer:
        fan_in(lambda phase: tracer.begin(0, phase))
    fan_in(lambda phase: None)
    with CpuAllocations() as allocated:
        fan_in(lambda phase: None)
    assert tracer.timeline().peak().nbytes == pytest.approx(allocated.nbytes, abs=64)


def convolution(kernel, stride, channels):
    net = nn.Conv2d(channels, 32, kernel, stride, kernel // 2, bias=False)
    return net, torch.randn(8, channels, 32, 32)


@pytest.mark.sweep
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [3, 32])
def test_a_convolutions_workspace_is_that_of_the_cpu_kernel(stride, channels):
    def run():
        net, x = convolution(3, stride, channels)
        net(x).sum().backward()

    with FakeTensorMode(), TensorTracer(cpu_workspace) as tracer:
        run()
    run()
    with CpuAllocations() as allocated:
        run()
    assert tracer.timeline().peak().nbytes == pytest.approx(allocated.nbytes, rel=0.05)


def test_sparse_gradients_are_their_indices_and_values():
    def run():
        embedding = nn.Embedding(1000, 64, sparse=True)
        embedding(torch.arange(16)).sum().backward()
        return embedding

    with FakeTensorMode(), TensorTracer() as tracer:
        run()
    run()
    with CpuAllocations() as allocated:
        run()
    assert tracer.timeline().peak().nbytes == pytest.approx(allocated.nbytes, rel=1e-3)


def test_tensors_without_memory_of_their_own_do_not_disturb_a_measurement():
    unsupported = [torch.eye(3).to_sparse(), torch.zeros(3, 3).to_mkldnn()]
    with CpuAllocations() as allocated:
        kept = torch.zeros(256)
    assert allocated.nbytes == kept.nbytes
    del unsupported


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed", "sharded", "full-shard"])
def test_states_are_those_of_the_strategy_on_64_devices(strategy):
    found = predict_memory(
        resolve_subject("tiny"), TrainingSetting(strategy=strategy, ranks=64, batch=2, context=32)
    )
    end = found.timeline.alive_at(found.timeline.ticks - 1)
    held = {
        name: sum(b.nbytes for b in end if b.category == name) for name in ("parameters", "optimizer state")
    }
    share = 64 if strategy in ("sharded", "full-shard") else 1
    whole = 1 if strategy != "full-shard" else 64
    assert held["parameters"] == pytest.approx(found.parameter_nbytes / whole, rel=0.02)
    assert held["optimizer state"] == pytest.approx(2 * found.parameter_nbytes / share, rel=0.03)


@pytest.mark.thorough
def test_more_devices_take_less_with_shards_and_as_much_without():
    def peak(strategy, ranks):
        return (
            predict_memory(
                resolve_subject("tiny"), TrainingSetting(strategy=strategy, ranks=ranks, batch=1, context=16)
            )
            .timeline.steps()
            .peak()
            .nbytes
        )

    for strategy in ("sharded", "full-shard"):
        peaks = [peak(strategy, ranks) for ranks in (2, 4, 16)]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[0] > peaks[-1]
    assert peak("bucketed", 2) == pytest.approx(peak("bucketed", 16), rel=0.01)


@pytest.mark.thorough
def test_batch_checkpointing_and_precision_matter():
    def peak(**changes):
        return (
            predict_memory(
                resolve_subject("tiny"), TrainingSetting(strategy="alone", ranks=1, **{"batch": 8, **changes})
            )
            .timeline.peak()
            .nbytes
        )

    usual = peak()
    assert peak(batch=16) > usual > peak(batch=4)
    assert peak(checkpointing=True) < usual
    assert peak(autocast="bf16") < usual
    assert peak(optimizer="sgd") < usual


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"dtype": "bf16", "master_weights": "fp32"}])
def test_predicted_memory_equals_that_of_one_process(changes):
    setting = TrainingSetting(strategy="alone", ranks=1, batch=4, context=64, **changes)
    train_subject(resolve_subject("tiny"), setting, Comm(), SilentObserver())
    with CpuAllocations() as allocated:
        train_subject(resolve_subject("tiny"), setting, Comm(), SilentObserver())
    assert predict_memory(resolve_subject("tiny"), setting).timeline.peak().nbytes == pytest.approx(
        allocated.nbytes, rel=0.01
    )


def low_precision(convert):
    """Return a subject of bf16 that is converted, or made so."""

    def build(setting):
        dtype = None if convert else torch.bfloat16
        layers = [nn.Linear(64, 96, dtype=dtype), nn.Tanh(), nn.Linear(96, 8, dtype=dtype)]
        net = nn.Sequential(*layers)
        net = net.bfloat16() if convert else net
        return BuiltSubject(
            net,
            lambda: torch.zeros(setting.batch, 64, dtype=torch.bfloat16),
            lambda model, x: model(x).mean(),
        )

    return TrainingSubject("low", build)


@pytest.mark.parametrize("strategy", ["alone", "sharded"])
def test_a_converted_model_takes_the_memory_of_its_new_dtype(strategy):
    setting = TrainingSetting(strategy=strategy, ranks=1 if strategy == "alone" else 2, batch=32)
    converted, made = (predict_memory(low_precision(way), setting) for way in (True, False))
    assert converted.parameter_nbytes == made.parameter_nbytes == 2 * (64 * 96 + 96 + 96 * 8 + 8)
    assert converted.timeline.peak().nbytes == made.timeline.peak().nbytes


def test_predictions_are_repeatable():
    setting = TrainingSetting(strategy="sharded", ranks=4, batch=2, context=32)
    one, two = (predict_memory(resolve_subject("tiny"), setting).timeline for _ in range(2))
    assert one.blocks == two.blocks


def test_torchs_tracker_finds_the_same_peak():
    tools = pytest.importorskip("torch.distributed._tools.mem_tracker", reason="this torch has no MemTracker")

    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(32, 64)

    with FakeTensorMode():
        net, x = build()
        theirs = tools.MemTracker()
        theirs.track_external(net, x)
        with theirs:
            net(x).sum().backward()
    device = torch.device("cpu")
    peak = theirs.get_tracker_snapshot("peak")[device]["Total"]
    with FakeTensorMode(), TensorTracer() as tracer:
        net, x = build()
        net(x).sum().backward()
    assert tracer.timeline().peak().nbytes == pytest.approx(peak, rel=0.02)  # theirs rounds to 512 bytes


class Choosy(nn.Module):
    """Keeps positive values; their number depends on the data."""

    def forward(self, x):
        return x[x > 0]


def test_shapes_that_depend_on_values_are_refused():
    from paceline.tools.plan.memory.training_subject import BuiltSubject

    def build(setting):
        return BuiltSubject(
            nn.Sequential(nn.Linear(4, 4), Choosy()),
            lambda: torch.randn(2, 4),
            lambda model, x: model(x).sum(),
        )

    with pytest.raises(Untraceable, match="state alone take 320 B"):
        predict_memory(TrainingSubject("choosy", build), TrainingSetting(strategy="alone"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"strategy": "bukketed"},
        {"ranks": 0},
        {"strategy": "alone", "ranks": 2},
        {"autocast": "int8"},
        {"device": "tpu"},
        {"dtype": "fp8"},
        {"master_weights": "bf16"},
        {"bucket_mib": 0},
        {"strategy": "bucketed", "gather": "bf16"},
        {"context": 0},
    ],
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(UsageError):
        TrainingSetting(**wrong)


def test_settings_survive_json():
    setting = TrainingSetting(strategy="sharded", ranks=4, batch=2, autocast="bf16", bucket_mib=5.0)
    assert TrainingSetting.from_json(setting.to_json()) == setting
