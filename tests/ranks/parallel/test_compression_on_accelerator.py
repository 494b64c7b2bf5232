"""Compressed reductions on an accelerator: the CPU's results to the bit in any order of execution; no host waits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from paceline import Compression
from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.parallel.compression.exchange_thread import ExchangeThread, PendingExchange
from paceline.parallel.gradient_collectives import Comm
from rank_pool import RankError
from simulated_worlds import same_bits, simulated_world

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


def reduce_on_both(simulator, compression, sharded, bad=False, dtype=torch.float32):
    """Reduce on the CPU and on the device; return where the host waited, and what differs."""
    device, comm = torch.get_device_module("sim"), Comm()
    host = made("cpu", comm, compression, sharded, dtype)
    ours = made("sim", OnStream(), compression, sharded, dtype)
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
    # The simulated driver stages the first Q of powersgd: it has no page-locked memory.
    waits = [wait for wait in simulator.synchronisations if wait.kind != "pageable copy"]
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
    with simulated_world(rank, size, path, seed) as simulator:
        found = {case: reduce_on_both(simulator, COMPRESSIONS[case[0]], case[1], seed == 1) for case in CASES}
        found["bf16 gradients"] = reduce_on_both(
            simulator, COMPRESSIONS["int8"], sharded=False, dtype=torch.bfloat16
        )
    return found


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.thorough) for s in range(2, 12))])
def test_results_are_the_cpu_s_and_the_host_never_waits(simulated_pool, tmp_path, seed):
    expected = dict.fromkeys([*CASES, "bf16 gradients"], ([], []))
    ranks = 2 if seed < 2 else 3
    for found in simulated_pool(ranks).run(all_cases, str(tmp_path / "store"), seed, world=False):
        assert found == expected


# ---------------------------------------------------------------------- every wait is needed


def unordered(method):
    """Let nothing be ordered behind the collectives that a method of `Comm` starts on the device."""
    original = getattr(Comm, method)

    def call(comm, *args):
        pending = original(comm, *args)
        if comm.stream_ordered:
            pending.wait = lambda: None
        return pending

    return mock.patch.object(Comm, method, call)


def without_the_end_of_the_second_half():
    original = PendingExchange.wait
    return mock.patch.object(
        PendingExchange, "wait", lambda pending: None if pending.result() is not None else original(pending)
    )


DELETED: dict[str, tuple[Callable[[], AbstractContextManager], str, bool]] = {
    "wait for the packets of peers": (lambda: unordered("all_to_all_rows"), "int8", False),
    "wait for the packets of sums": (lambda: unordered("all_gather_rows"), "int8", False),
    "wait for sparse packets": (lambda: unordered("all_gather_rows"), "topk", False),
    "wait for one P": (lambda: unordered("all_gather_rows"), "powersgd", False),
    "wait for the end of the second half": (without_the_end_of_the_second_half, "int8", True),
}


def without(rank, size, path, seed, what):
    delete, name, sharded = DELETED[what]
    with simulated_world(rank, size, path, seed) as simulator, delete():
        return reduce_on_both(simulator, COMPRESSIONS[name], sharded)[1]


def seen(pool, path, function, *args):
    """Return whether one of some orders of execution shows an error."""
    for seed in range(6):
        try:
            wrong = any(pool(2).run(function, path, seed, *args, world=False))
        except RankError as error:
            if "DeviceError" not in str(error):
                raise
            wrong = True
        if wrong:
            return True
    return False


@pytest.mark.parametrize("what", DELETED)
def test_a_wait_that_is_deleted_shows(simulated_pool, tmp_path, what):
    assert seen(simulated_pool, str(tmp_path / "store"), without, what)


def given_up(rank, size, path, seed, name, kept):
    """Rank 0 gives up its model under way; return what is wrong on the others, which had its packets already."""
    forget = (
        nullcontext() if kept else mock.patch.object(ExchangeThread, "keep")
    )
    with simulated_world(rank, size, path, seed) as simulator, forget:
        host = made("cpu", Comm(), COMPRESSIONS[name], sharded=False)
        ours = made("sim", OnStream(), COMPRESSIONS[name], sharded=False)
        given = gradients(rank, host, bad=False)[0]
        host.grads.copy_(given)
        host.compressed.launch(1, mean=True)
        host.compressed.wait()
        ours.grads.copy_(given.to("sim"))
        simulator.run_all()
        ours.compressed.launch(1, mean=True)
        if rank == 0:
            del ours
            gc.collect()
            torch.ones(8, device="sim")
            simulator.run_all()
            return []
        ours.compressed.wait()
        return [] if same_bits(host.flat, ours.flat.cpu()) else ["sum"]


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_memory_of_a_round_that_was_given_up_is_used_until_its_end(simulated_pool, tmp_path, name):
    assert not seen(simulated_pool, str(tmp_path / "kept"), given_up, name, True)
    assert seen(simulated_pool, str(tmp_path / "forgotten"), given_up, name, False)
