"""The simulated accelerator's process group has NCCL's manners."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankError
from simulated_accelerator import DeviceError, simulated_world

SIM, BOTH = "sim:simccl", "cpu:gloo,sim:simccl"


def device():
    return torch.get_device_module("sim")


def sim(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).to("sim")


def collectives(rank, size, path, backend):
    """Return the results of all collectives."""
    with simulated_world(rank, size, path, backend):
        found = {}
        for name, op in (
            ("sum", dist.ReduceOp.SUM),
            ("max", dist.ReduceOp.MAX),
            ("average", dist.ReduceOp.AVG),
        ):
            x = sim(rank + 1.0, 4.0)
            dist.all_reduce(x, op=op)
            found[name] = x.tolist()
        x = sim(10.0 * rank)
        dist.broadcast(x, 1)
        found["broadcast"] = x.tolist()
        x = sim(rank + 1.0)
        dist.reduce(x, 0)
        found["reduce"] = x.tolist() if rank == 0 else None
        parts = [torch.empty(1, device="sim") for _ in range(size)]
        dist.all_gather(parts, sim(rank + 5.0))
        found["all_gather"] = torch.cat(parts).tolist()
        whole = torch.empty(size, device="sim")
        dist.all_gather_single(whole, sim(rank + 5.0))
        found["all_gather_single"] = whole.tolist()
        mine = torch.empty(1, device="sim")
        dist.reduce_scatter_single(mine, sim(*[float(part) for part in range(size)]))
        found["reduce_scatter_single"] = mine.tolist()
        dist.reduce_scatter(mine, [sim(float(part)) for part in range(size)])
        found["reduce_scatter"] = mine.tolist()
        rows = torch.empty(size, 2, device="sim")
        dist.all_to_all_single(rows, torch.full((size, 2), float(rank), device="sim"))
        found["all_to_all"] = rows[:, 0].tolist()
        split = torch.empty(size * (rank + 1), device="sim")  # rank r receives r + 1 elements of each
        given = torch.arange(size * (size + 1) / 2).to("sim") + 100 * rank
        dist.all_to_all_single(split, given, [rank + 1] * size, [other + 1 for other in range(size)])
        found["all_to_all of unequal parts"] = split.tolist()
        if rank == 0:
            dist.send(sim(7.0, 8.0), 1)
        if rank == 1:
            x = torch.empty(2, device="sim")
            dist.recv(x, 0)
            found["recv"] = x.tolist()
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        found["objects"] = objects
        with dist._coalescing_manager():
            x, y = sim(1.0), sim(2.0, 3.0)
            dist.all_reduce(x)
            dist.all_reduce(y)
        found["coalesced"] = [*x.tolist(), *y.tolist()]
        pair = dist.new_group([0, 1])
        x = sim(1.0)
        if rank < 2:
            dist.all_reduce(x, group=pair)
        found["pair"] = x.tolist()
        found["names"] = (dist.get_backend(), dist.get_backend_config())
        return found


@pytest.mark.parametrize("backend", [SIM, BOTH])
def test_collectives(simulated_pool, tmp_path, backend):
    for rank, found in enumerate(
        simulated_pool(3).run(collectives, str(tmp_path / "store"), backend, world=False)
    ):
        assert found == {
            "sum": [6.0, 12.0],
            "max": [3.0, 4.0],
            "average": [2.0, 4.0],
            "broadcast": [10.0],
            "reduce": [6.0] if rank == 0 else None,
            "all_gather": [5.0, 6.0, 7.0],
            "all_gather_single": [5.0, 6.0, 7.0],
            "reduce_scatter_single": [3.0 * rank],
            "reduce_scatter": [3.0 * rank],
            "all_to_all": [0.0, 1.0, 2.0],
            "all_to_all of unequal parts": [
                100.0 * source + rank * (rank + 1) / 2 + place
                for source in range(3)
                for place in range(rank + 1)
            ],
            "objects": [{"rank": other} for other in range(3)],
            "coalesced": [3.0, 6.0, 9.0],
            "pair": [2.0] if rank < 2 else [1.0],
            "names": (backend, backend),
        } | ({"recv": [7.0, 8.0]} if rank == 1 else {})


def sums_of_16_bits(rank, size, path):
    """Return an average and a sum, in bfloat16."""
    with simulated_world(rank, size, path):
        average = sim(*[3.0 + rank / 64, 1e-40 * 3], dtype=torch.bfloat16)
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        total = sim(256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        dist.all_reduce(total)
        return average.cpu(), total.cpu()


def test_averages_scale_first_and_sums_round_after_each_rank(simulated_pool, tmp_path):
    third = torch.tensor(1 / 3, dtype=torch.bfloat16)
    expected = torch.zeros(2, dtype=torch.bfloat16)
    for rank in range(3):
        expected += torch.tensor([3.0 + rank / 64, 1e-40 * 3], dtype=torch.bfloat16) * third
    for average, total in simulated_pool(3).run(sums_of_16_bits, str(tmp_path / "store"), world=False):
        assert torch.equal(average, expected)
        assert total.item() == 256.0, "256 + 1 rounds to 256, twice; in float32 the sum is 258"


def refused(rank, size, path):
    """Return the error of a collective on the host's memory."""
    with simulated_world(rank, size, path), pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(2))
    return str(error.value)


def test_tensors_of_the_host_are_refused_without_gloo(simulated_pool, tmp_path):
    found = simulated_pool(2).run(refused, str(tmp_path / "store"), world=False)
    assert found == ["No backend type associated with device type cpu"] * 2


def accepted(rank, size, path):
    """Return a sum over the host's memory."""
    with simulated_world(rank, size, path, BOTH):
        x = torch.ones(2)
        dist.all_reduce(x)
        return x.tolist()


def test_tensors_of_the_host_go_to_gloo(simulated_pool, tmp_path):
    assert simulated_pool(2).run(accepted, str(tmp_path / "store"), world=False) == [[2.0, 2.0]] * 2


def mismatch(rank, size, path, kind):
    """Return the errors at the host's wait and at the next call, of ranks that do not call the same."""
    with contextlib.suppress(DeviceError), simulated_world(rank, size, path, timeout=1.0) as simulator:
        x = sim(1.0, 2.0)
        simulator.run_all()
        if kind == "order":
            dist.all_reduce(x) if rank else dist.broadcast(x, 0)
        elif kind == "size":
            dist.all_reduce(x if rank else x[:1])
        elif rank == 0:
            dist.all_reduce(x)
        else:
            return "", ""
        with pytest.raises(DeviceError) as first:
            device().synchronize()
        with pytest.raises(RuntimeError) as second:
            dist.all_reduce(x)
        return str(first.value), str(second.value)
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("order", ["broadcast (number 1", "rank 1 all_reduce (number 1", "test_simulated_process_group.py"]),
        ("size", ["rank 0 all_reduce (number 1 of the group, 1 elements of torch.float32", "rank 1 all_reduce (nu"]),
        ("missing", ["timed out after 1 s: ranks 1 have not called it"]),
    ],
)  # fmt: skip
def test_ranks_that_call_something_else_are_found(simulated_pool, tmp_path, kind, words):
    found = simulated_pool(2).run(mismatch, str(tmp_path / "store"), kind, world=False)
    for first, second in found[: 1 if kind == "missing" else 2]:
        assert all(word in first for word in words), first
        assert "the process group failed before" in second


def unwaited(rank, size, path, waits):
    """Return, by seed, whether the result of an all-reduce was right; without its wait if `waits` is False."""
    right = []
    for seed in range(20):
        with simulated_world(rank, size, f"{path}-{seed}", seed=seed) as simulator:
            x = sim(*[1.0] * 64)
            simulator.run_all()
            simulator.synchronisations.clear()
            work = dist.all_reduce(x, async_op=True)
            if waits:
                work.wait()
            y = x * 2
            assert simulator.synchronisations == [], "the host never waits"
            right.append(y.tolist() == [2.0 * size] * 64)
    return right


def test_a_missing_wait_for_a_collective_shows(simulated_pool, tmp_path):
    for right in simulated_pool(2).run(unwaited, str(tmp_path / "with"), True, world=False):
        assert all(right)
    for right in simulated_pool(2).run(unwaited, str(tmp_path / "without"), False, world=False):
        assert not all(right)


def written(rank, size, path):
    """Return whether writing to memory in flight was found, by seed."""
    found = []
    for seed in range(10):
        try:
            with simulated_world(rank, size, f"{path}-{seed}", seed=seed):
                x = sim(*[1.0] * 64)
                dist.all_reduce(x, async_op=True)
                x.add_(1)
                device().synchronize()
            found.append("")
        except DeviceError as error:
            found.append(str(error))
    return found


def test_writing_to_memory_under_way_is_found(simulated_pool, tmp_path):
    for found in simulated_pool(2).run(written, str(tmp_path / "store"), world=False):
        assert any("writes to memory of all_reduce" in text for text in found)


def futures_and_barriers(rank, size, path):
    """Return what a future's callback computed, and where the host waited."""
    with simulated_world(rank, size, path) as simulator:
        x = sim(1.0, 3.0)
        simulator.run_all()
        simulator.synchronisations.clear()
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] / size)
        y = future.wait() + 1
        assert simulator.synchronisations == []
        dist.barrier()
        kinds = [wait.kind for wait in simulator.synchronisations]
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        assert [wait.kind for wait in simulator.synchronisations] == kinds
        return y.tolist(), kinds


def test_futures_order_streams_and_barriers_wait(simulated_pool, tmp_path):
    found = simulated_pool(2).run(futures_and_barriers, str(tmp_path / "store"), world=False)
    assert found == [([2.0, 4.0], ["barrier"])] * 2


def crosswise(rank, size, path):
    """Let rank 0 wait for its device, and rank 1 for rank 0's host."""
    with simulated_world(rank, size, path, BOTH, seed=3):
        x, host = sim(1.0), torch.ones(1)
        dist.all_reduce(x)
        if rank == 0:
            device().synchronize()
        dist.all_reduce(host)
        return x.item() + host.item()


def test_a_device_gets_on_while_its_host_stands_still(simulated_pool, tmp_path):
    assert simulated_pool(2).run(crosswise, str(tmp_path / "store"), world=False) == [4.0, 4.0]


def broken(rank, size, path):
    """Fail."""
    with simulated_world(rank, size, path):
        assert rank == 2, "a test that fails"


def test_a_failed_test_is_seen(simulated_pool, tmp_path):
    with pytest.raises(RankError, match="a test that fails"):
        simulated_pool(2).run(broken, str(tmp_path / "store"), world=False)
