"""Groups are understood by the devices that they serve, however they were made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.parallel.buckets.bucket_builder import build_buckets
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.tools.plan.memory.fake_world import fake_process_group
from paceline.world import group_devices
from paceline.world.control_collectives import gather_rows
from paceline.world.group_devices import backend_name, group_device, queues_on_streams, served_backends

CPU = torch.device("cpu")


class Group:
    """Stands in for a process group."""

    def __init__(self, bound: str | None = None) -> None:
        self.bound_device_id = None if bound is None else torch.device(bound)


@pytest.fixture
def describe(monkeypatch):
    """Return a function that sets how torch describes every group: its backend, and its backends by device."""

    def describe(backend: str, config: str) -> None:
        monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)

    return describe


@pytest.fixture
def cards(monkeypatch):
    """Return a function that sets the number of GPUs, the current one, and this process's local rank."""

    def cards(count: int, current: int = 0, local_rank: int | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(variable, raising=False)
        if local_rank is not None:
            monkeypatch.setenv("RANK", str(local_rank))
            monkeypatch.setenv("WORLD_SIZE", "8")
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return cards


@pytest.mark.parametrize(
    ("backend", "config", "name", "on_streams"),
    [
        ("undefined", "cuda:nccl", "nccl", True),  # init_process_group() without a name, on GPUs
        ("undefined", "cpu:gloo", "gloo", False),  # … and on a CPU
        ("undefined", "xpu:xccl", "xccl", True),
        ("undefined", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", True),
        ("nccl", "cuda:nccl", "nccl", True),
        ("xccl", "xpu:xccl", "xccl", True),
        ("cuda:nccl", "cuda:nccl", "nccl", True),
        ("cpu:gloo", "cpu:gloo", "gloo", False),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", True),
        ("cpu:gloo,xpu:xccl", "cpu:gloo,xpu:xccl", "cpu:gloo,xpu:xccl", True),
        ("gloo", "cpu:gloo,cuda:gloo", "gloo", False),
        ("paceline", "cpu:paceline,cuda:paceline", "paceline", False),
        ("mpi4py", "cpu:mpi4py,cuda:mpi4py", "mpi4py", False),
    ],
)
def test_what_the_engine_decides_by_the_backend(describe, backend, config, name, on_streams):
    describe(backend, config)
    assert backend_name() == name
    assert queues_on_streams(name) is on_streams
    with fake_process_group(2):
        comm = Comm()
        assert comm.backend == name
        assert comm.stream_ordered is on_streams
        assert comm.divides_before_sum(torch.empty(1, device="meta")) is on_streams
        assert not comm.divides_before_sum(torch.empty(1))
        assert comm.scatters_in_place(name) is (on_streams or name == "paceline")


def test_the_backends_by_device(describe):
    describe("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")
    assert served_backends(Group()) == {"cpu": "gloo", "cuda": "nccl"}


def test_a_backend_of_one_accelerator_that_a_package_registered(monkeypatch):
    monkeypatch.setitem(dist.Backend.backend_capability, "npuccl", ["npu"])
    assert queues_on_streams("npuccl")
    assert queues_on_streams("cpu:gloo,npu:npuccl")
    assert not queues_on_streams("none")


@pytest.mark.parametrize(
    ("config", "data", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:3", "cuda:3"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cuda:1"),
        ("cpu:paceline,cuda:paceline", "cpu", "cpu"),
        ("cpu:gloo", "xpu:1", "cpu"),  # over the CPU, where the group does not serve the device
        ("cuda:nccl", "cuda:2", "cuda:2"),
        ("cuda:nccl", "cpu", "cuda:5"),
        ("xpu:xccl", "cpu", "xpu:5"),
    ],
)
def test_where_a_control_message_is(describe, config, data, expected):
    describe("undefined", config)
    group = Group(f"{expected.partition(':')[0]}:5" if data == "cpu" != expected else None)
    assert group_device(group, torch.device(data)) == torch.device(expected)


def test_without_a_bound_card_the_one_that_the_group_has_used(describe, cards):
    describe("undefined", "cuda:nccl")
    cards(8, current=0)
    group = Group()
    assert group_device(group) == torch.device("cuda:0")
    assert group_device(group, torch.device("cuda:6")) == torch.device("cuda:6")
    assert group_device(group) == torch.device("cuda:6")
    assert group_device(Group()) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "expected"),
    [
        (8, 0, 3, 3),  # without set_device, every rank of the host would take card 0
        (8, 5, 3, 5),
        (1, 0, 3, 0),  # each rank sees one card
        (8, 0, None, 0),
    ],
)
def test_without_any_card_known_that_of_the_local_rank(describe, cards, count, current, local_rank, expected):
    describe("undefined", "cuda:nccl")
    cards(count, current, local_rank)
    assert group_device(Group()) == torch.device("cuda", expected)


def test_a_subgroup_takes_the_card_bound_to_the_default_group(describe, cards, monkeypatch):
    describe("nccl", "cuda:nccl")
    cards(8, current=0)
    monkeypatch.setattr(group_devices, "default_group", lambda: Group("cuda:4"))
    assert group_device(Group()) == torch.device("cuda:4")


def test_the_round_status_of_no_slots_is_where_the_group_takes_it(describe):
    # as when FSDP2 has every parameter; "meta" stands in for an accelerator
    with fake_process_group(2):
        describe("undefined", "meta:nccl")
        dist.group.WORLD.bound_device_id = torch.device("meta:0")
        comm = Comm()
        (bucket,) = build_buckets([], [], Sync(), comm, status_length=3, sharded=False, reduce_dtype=None)
        assert bucket.flat.device.type == "meta"
        describe("gloo", "cpu:gloo,cuda:gloo")
        (bucket,) = build_buckets([], [], Sync(), comm, status_length=3, sharded=False, reduce_dtype=None)
        assert bucket.flat.device == CPU


def test_a_world_of_one_keeps_the_device():
    assert group_device(None, torch.device("cuda:1")) == torch.device("cuda:1")
    assert group_device(None) == CPU


def test_a_group_of_paceline_says_by_which_backend_it_serves_an_accelerator(describe):
    class Python(Group, dist.ProcessGroup):
        def __init__(self, kinds: list[str]) -> None:
            dist.ProcessGroup.__init__(self, 0, 1)
            self.kinds = kinds

        @property
        def _device_types(self):
            return [torch.device(kind) for kind in self.kinds]

        def _get_backend(self, device):
            return type("Backend", (), {"name": lambda self: "nccl"})()

    describe("paceline", "cpu:paceline,cuda:paceline")
    assert served_backends(Python(["cpu", "cuda"])) == {"cpu": "paceline", "cuda": "nccl"}
    assert served_backends(Python(["cpu"])) == {"cpu": "paceline"}
    describe("undefined", "xpu:xccl")  # a backend of an accelerator that is written in Python
    assert served_backends(Python(["xpu"])) == {"xpu": "xccl"}


def test_a_group_without_a_name_on_this_machine():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "undefined"
        if not torch.accelerator.is_available():
            assert backend_name() == Comm().backend == "gloo"
            assert group_device(None) == CPU
        assert [row.tolist() for row in gather_rows(torch.tensor([3]))] == [[3]]
    finally:
        dist.destroy_process_group()
