"""Compressed reductions on an accelerator: the CPU's results to the bit in any order of execution; no host waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from paceline import Compression
from paceline.parallel.compression import codecs
from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.compression.stochastic_rounding import RoundingBits
from paceline.parallel.gradient_collectives import Comm
from simulated_worlds import same_bits, world_beside_cpus

COMPRESSIONS = {
    "bf16": Compression("bf16"),
    "fp16": Compression("fp16"),
    "int8": Compression("int8"),
    "int8 without feedback": Compression("int8", feedback=False),
    "int4": Compression("int4"),
    "int2": Compression("int2"),
    "topk": Compression("topk", keep=0.02, warmup=2),
    "topk with momentum": Compression("topk", keep=0.02, momentum=0.9),
    "topk-int2": Compression("topk-int2"),
    "powersgd": Compression("powersgd", rank=2, warmup=1),
}
CASES = [(name, sharded) for name in COMPRESSIONS for sharded in (False, True)]
SHAPES = [(48, 60), (33, 64)]
STEPS = 4


@dataclass
class Slot:
    name: str
    start: int
    param: torch.Tensor

    @property
    def numel(self):
        return self.param.numel()


@dataclass
class Bucket:
    """A bucket of two matrices, padded like the engine's."""

    device: str
    ranks: int
    dtype: torch.dtype = torch.float32
    index: int = 0
    compressed: CompressedBucket | None = None
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self):
        end = 0
        for number, shape in enumerate(SHAPES):
            self.slots.append(Slot(f"layer.{number}", end, torch.zeros(shape, device=self.device)))
            end += self.slots[-1].numel
        unit = 16 * self.ranks
        self.flat = torch.zeros(-(-end // unit) * unit, dtype=self.dtype, device=self.device)
        self.grads = self.flat[:end]


class OnStream(Comm):
    """Ranks whose calls are ordered on a stream."""

    stream_ordered = True


class OnHost(Comm):
    """Ranks whose calls the host runs, as gloo's."""

    stream_ordered = False


def made(device, comm, compression, sharded, dtype=torch.float32):
    bucket = Bucket(device, comm.size, dtype)
    thread = ExchangeThread(bucket.flat.device, on_stream=comm.stream_ordered)
    bucket.compressed = CompressedBucket(bucket, compression, comm, thread, sharded=sharded)
    return bucket


def gradients(rank, bucket, bad):
    generator = torch.Generator().manual_seed(1000 * rank)
    given = [torch.randn(bucket.grads.numel(), generator=generator) for _ in range(STEPS)]
    if bad and rank == 1:
        given[1][::500] = torch.nan
    return given


def owned(bucket, comm, sharded):
    """Return a copy of this rank's part of the result."""
    part = bucket.flat.view(comm.size, -1)[comm.rank] if sharded else bucket.flat
    return part.clone()


def reduce_on_both(simulator, compression, sharded, bad=False, dtype=torch.float32, ranks=OnStream):
    """Reduce on the CPU and on the device; return where the host waited, and what differs."""
    device, comm = torch.get_device_module("sim"), OnHost()
    host = made("cpu", comm, compression, sharded, dtype)
    ours = made("sim", ranks(), compression, sharded, dtype)
    given = gradients(comm.rank, host, bad)
    staged = [each.to("sim") for each in given]
    simulator.run_all()
    simulator.synchronisations.clear()
    side, results = device.Stream(), []
    for step in range(STEPS):
        simulator.next_step()
        host.grads.copy_(given[step])
        host.compressed.launch(step, mean=True)
        host.compressed.wait()
        side.wait_stream(device.current_stream())
        with device.stream(side):  # as in a hook of backward
            ours.grads.copy_(staged[step])
            ours.compressed.launch(step, mean=True)
        ours.compressed.wait()
        if step == 2:
            host.compressed.rescale(0.5)
            ours.compressed.rescale(torch.full((), 0.5, device="sim"))
        results.append((owned(host, comm, sharded), owned(ours, comm, sharded)))
    waits = list(simulator.synchronisations)
    simulator.run_all()
    wrong = [f"result {step}" for step, pair in enumerate(results) if not same_bits(*cpu(pair))]
    kept = [each.compressed.feedback for each in (host, ours)]
    if kept[0] is not None:
        for name in ("residual", "velocity"):
            pair = [getattr(each, name) for each in kept]
            wrong += [name] if pair[0] is not None and not same_bits(*cpu(pair)) else []
    stats = [each.compressed.stats() for each in (host, ours)]
    if not same_loss(*stats):
        wrong.append(f"errors {[each.error for each in stats]}")
    return waits, wrong


def same_loss(host, ours):
    return ours.step == host.step and ours.error == pytest.approx(host.error, rel=1e-6, nan_ok=True)


def cpu(tensors):
    return [each.cpu() for each in tensors]


def all_cases(rank, size, path, seed):
    """Return per case what `reduce_on_both` returns."""
    with world_beside_cpus(rank, size, path, seed) as simulator:
        found = {case: reduce_on_both(simulator, COMPRESSIONS[case[0]], case[1], bad=True) for case in CASES}
        found["bf16 gradients"] = reduce_on_both(
            simulator, COMPRESSIONS["int8"], sharded=False, dtype=torch.bfloat16
        )
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.thorough) for s in range(1, 6))])
def test_results_are_the_cpu_s_and_the_host_never_waits(simulated_pool, tmp_path, seed):
    expected = dict.fromkeys([*CASES, "bf16 gradients"], ([], []))
    ranks = 2 if seed < 4 else 3
    for found in simulated_pool(ranks).run(all_cases, str(tmp_path / "store"), seed, world=False):
        assert found == expected


def over_gloo(rank, size, path, seed):
    """Return per case what differs where a group of the host moves the device's data."""
    with world_beside_cpus(rank, size, path, seed) as simulator:
        return [
            reduce_on_both(simulator, COMPRESSIONS[name], sharded, ranks=OnHost)[1]
            for name, sharded in [("int8", False), ("int4", True), ("topk", False), ("powersgd", False)]
        ]


def test_results_over_a_group_of_the_host_are_the_cpu_s(simulated_pool, tmp_path):
    """The host waits there, in a thread that uses the stream of the call."""
    for found in simulated_pool(2).run(over_gloo, str(tmp_path / "store"), 0, world=False):
        assert found == [[]] * 4


class OneGenerator(RoundingBits):
    """Draws from a generator of the host, as the simulated device has none; in the order of execution."""

    def _on(self, device):
        return super()._on(torch.device("cpu"))


def rounded_at_random(rank, size, path, seed):
    """Return where the host waited, and the result and the relative error of two roundings."""
    with world_beside_cpus(rank, size, path, seed) as simulator:
        found = []
        for name in ("bf16", "int8"):
            with mock.patch.object(codecs, "make_rounding_bits", lambda *kind: OneGenerator(*kind[1:])):
                ours = made("sim", OnStream(), Compression(name, rounding="stochastic"), sharded=False)
                given = gradients(rank, ours, bad=False)[0].to("sim")
                simulator.run_all()
                simulator.synchronisations.clear()
                ours.grads.copy_(given)
                ours.compressed.launch(0, mean=True)
                ours.compressed.wait()
            waits = list(simulator.synchronisations)
            found.append((waits, ours.flat.cpu().tolist(), ours.compressed.stats().error))
    return found


def test_stochastic_rounding_does_not_wait_either(simulated_pool, tmp_path):
    results = simulated_pool(2).run(rounded_at_random, str(tmp_path / "store"), 0, world=False)
    for (waits, result, error), (_, other, _) in zip(*results, strict=True):
        assert waits == []
        assert result == other
        assert 0 < error < 0.02
