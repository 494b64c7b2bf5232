"""What Paceline does with the machine's accelerator follows torch's device modules, not CUDA's names."""

from __future__ import annotations

import datetime
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint import state_copies
from paceline.checkpoint.checkpoint_contents import _random_state, _set_random_state
from paceline.checkpoint.parts.state_parts import TensorPart
from paceline.health.abort_collectives import _abort_on_streams
from paceline.profiling import rank_timeline
from paceline.profiling.profiler import machine_facts
from paceline.tools.diagnostics.machine_findings import diagnose_machine
from paceline.world import accelerator, device_selection
from paceline.world.group_devices import group_device, served_backends
from paceline.world.machine_facts import GpuFacts, read_machine_facts, torch_facts

GIB = 2**30


@pytest.fixture
def xpu(monkeypatch):
    """A machine with two XPUs and no CUDA; the calls of torch.xpu are noted."""
    calls = []
    gpu = SimpleNamespace(name="Max 1550", total_memory=64 * GIB)
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 2,
        "get_device_properties": gpu,
        "get_rng_state": torch.tensor([7], dtype=torch.uint8),
        "set_rng_state": None,
        "max_memory_allocated": 123,
        "synchronize": None,
        "set_device": None,
    }.items():

        def called(*arguments, name=name, value=value):
            calls.append((name, *arguments))
            return value

        monkeypatch.setattr(torch.xpu, name, called)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    return calls


def test_cuda_is_the_first_choice(monkeypatch, xpu):
    assert accelerator.find_accelerator() == accelerator.used_accelerator() == "xpu"
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: False)
    assert accelerator.used_accelerator() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator.find_accelerator() == "cuda"


def test_device_calls_name_the_device(xpu):
    for device in ("cpu", "xpu:1"):
        accelerator.synchronize(torch.device(device))
        accelerator.set_current_device(torch.device(device))
    assert xpu == [("synchronize", torch.device("xpu:1")), ("set_device", torch.device("xpu:1"))]


def test_a_checkpoint_keeps_the_generator_of_any_accelerator(xpu):
    state = _random_state()
    assert state["xpu"].tolist() == [7]
    assert "cuda" not in state
    xpu.clear()
    _set_random_state(state)
    assert [(name, *map(torch.Tensor.tolist, states)) for name, *states in xpu if states] == [
        ("set_rng_state", [7])
    ]


@pytest.mark.parametrize("available", [False, True])
def test_a_generator_of_cuda_from_an_older_checkpoint(monkeypatch, available):
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = _random_state() | {"cuda": torch.tensor([5], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: loaded.extend(state.tolist()))
    _set_random_state(state)
    assert loaded == ([5] if available else [])


def test_copies_for_a_checkpoint_are_waited_for_on_every_device(monkeypatch):
    waited = []
    monkeypatch.setattr(state_copies, "synchronize", waited.append)

    class Elsewhere(torch.Tensor):
        """A tensor of the CPU that says it is on another device."""

        where = torch.device("xpu:1")

        @property
        def device(self):
            return self.where

    elsewhere = torch.ones(3).as_subclass(Elsewhere)
    parts = {"here": TensorPart.whole("here", torch.ones(2)), "there": TensorPart.whole("there", elsewhere)}
    copies = state_copies.HostBuffers().copy({"file": parts}).files
    assert copies["file"]["there"].data.tolist() == [1, 1, 1]
    assert set(waited) == {torch.device("cpu"), torch.device("xpu:1")}


def test_facts_name_any_accelerator(xpu):
    facts = torch_facts()
    assert facts is not None
    assert (facts.gpu_type, facts.gpus) == ("xpu", 2 * (GpuFacts("Max 1550", 64 * GIB, ""),))
    assert machine_facts()["GPUs"] == 2
    found = {
        each.subject: each for each in diagnose_machine(replace(read_machine_facts(), torch=facts), None)
    }
    assert "XCCL" in found["backends"].remedy
    assert "Max 1550 (64 GiB)" in found["GPUs"].value


def test_a_timeline_has_the_memory_peak_of_any_accelerator(monkeypatch, xpu):
    marks = []
    monkeypatch.setattr(rank_timeline.trace_file, "mark", lambda kind, **values: marks.append(values))
    rank_timeline._write_memory()
    assert [mark["allocated"] for mark in marks] == [123]


def test_communicators_of_accelerators_are_aborted_and_no_others():
    aborted = []

    class Backend:
        def __init__(self, name):
            self.name = lambda: name
            self.abort = lambda: aborted.append(name)

    class Group:
        def __init__(self, **backends):
            self._device_types = list(map(torch.device, backends))
            self._get_backend = lambda device: Backend(backends[device.type])

    for group in (Group(cpu="gloo", cuda="nccl"), Group(xpu="xccl"), Group(cpu="gloo", cuda="gloo")):
        _abort_on_streams(group)
    assert aborted == ["nccl", "xccl"]


def test_a_group_of_paceline_serves_an_accelerator_by_its_own_backend(monkeypatch, xpu):
    made = []

    def create(options, _):
        made.append((options.group_rank, options.group_size, options.timeout))
        return dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )

    timeout = datetime.timedelta(seconds=11)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "xpu", "otherccl")
    monkeypatch.setitem(dist.Backend.backend_capability, "otherccl", ["xpu"])
    monkeypatch.setitem(dist.Backend.backend_type_map, "otherccl", dist.ProcessGroup.BackendType.CUSTOM)
    monkeypatch.setitem(dist.Backend._plugins, "OTHERCCL", dist.Backend._BackendPlugin(create, True))
    dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        assert made == [(0, 1, timeout)]
        assert served_backends() == {"cpu": "paceline", "xpu": "gloo"}
        assert group_device(None, torch.device("xpu:1")) == torch.device("xpu:1")
        assert group_device(None) == torch.device("cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "backend"), [("cpu", ""), ("cuda", "nccl"), ("xpu", "xccl"), ("mps", ""), ("vulkan", "")]
)
def test_the_backend_of_an_accelerator(kind, backend):
    assert device_selection.accelerator_backend(kind) == backend
