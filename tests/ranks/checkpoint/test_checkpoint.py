"""`Checkpoint` on real ranks: resumed runs equal uninterrupted ones, on any number of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.errors import CheckpointError, UsageError
from paceline.testing import fault_injection
from rank_pool import RankError

SAMPLES, WIDTH = 61, 6


def data():
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Net(nn.Module):
    """Dropout draws random numbers, BatchNorm has buffers, two names have one weight, one weight is never used."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, width), nn.BatchNorm1d(width)
        self.last, self.never = nn.Linear(width, 1), nn.Linear(3, 3)
        self.again = self.last

    def forward(self, x):
        return self.last(nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.25))


class Set:
    """All objects of a program that trains `Net`."""

    def __init__(self, folder, sync="sharded", *, net=Net, batch=4, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = paceline.DataParallel(net().double(), sync=sync)
        self.optim = paceline.ShardedOptimizer(self.model, optimizer, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optim, [4, 9], gamma=0.5)
        self.loader = paceline.Loader(data(), batch)
        objects = self.model, self.optim, self.schedule, self.loader
        self.checkpoint = paceline.Checkpoint(folder, *objects, **options)
        self.losses: list[float] = []

    def run(self, *, epochs=2, stop=None, before=None):
        """Train; return the losses of the steps taken (summed over ranks), stop after step `stop`."""
        for batch in self.checkpoint.resume(self.loader, epochs=epochs):
            if before is not None:
                before(self.checkpoint.step)
            error = self.model(batch).square().mean()
            self.model.backward(error, samples=batch.samples)
            self.optim.step()
            self.optim.zero_grad()
            self.schedule.step()
            self.losses.append(error.item() * batch.samples)
            if self.checkpoint.step == stop:
                break
        self.checkpoint.wait()
        return self

    def results(self):
        """Close, and return (losses, weights, random number, learning rate, epochs, step)."""
        self.checkpoint.close()
        weights = [param.clone() for param in self.model.whole_parameters()]
        if self.checkpoint._writer.rank == 0:
            weights += [buffer.clone() for buffer in self.model.buffers()]
        lr = self.optim.param_groups[0]["lr"]
        return self.losses, weights, torch.rand(1).item(), lr, self.checkpoint.epoch, self.checkpoint.step


def train(rank, size, folder, sync, stop=None, every=5, batch=4):
    paceline.init()
    return Set(folder, sync, every=every, batch=batch).run(stop=stop).results()


def equal(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# ------------------------------------------------------------------ resumed exactly


@pytest.mark.thorough
@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded", "full-shard"])
def test_a_resumed_run_is_bitwise_equal(pool, tmp_path, sync):
    """Weights, optimizer, schedule, loader, dropout after a stop in the middle of an epoch; buffers are rank 0's.

    14 samples a step: what the first step after a resume is weighted by shows in the last bits.
    """
    whole = pool(2, "paceline").run(train, tmp_path / "a", sync, None, 3, 7)
    first = pool(2, "paceline").run(train, tmp_path / "b", sync, 8, 3, 7)
    rest = pool(2, "paceline").run(train, tmp_path / "b", sync, None, 3, 7)
    for rank in range(2):
        losses, weights, *others = whole[rank]
        assert first[rank][0][:6] + rest[rank][0] == losses
        assert equal(rest[rank][1], weights)
        assert list(rest[rank][2:]) == others
        assert others[-2:] == [2, 10]


def steps_of(rank, size, folder, sync, batch, stop):
    paceline.init()
    each = Set(folder, sync, every=3, batch=batch, net=Steady).run(stop=stop)
    return each.losses, each.results()[1]


class Steady(nn.Module):
    """A model without layers that depend on the number of ranks (dropout, BatchNorm)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("syncs", [["sharded"] * 4, ["sharded", "full-shard", "bucketed", "sharded"]])
def test_2_then_4_then_1_then_3_ranks_equal_one(pool, tmp_path, syncs):
    """A global batch of 12, on changing numbers of ranks: the same losses, every sample once."""
    expected, weights = pool(1).run(steps_of, tmp_path / "whole", "bucketed", 12, None)[0]
    assert len(expected) == 2 * -(-SAMPLES // 12)
    losses: list[float] = []
    for ranks, stop, sync in zip((2, 4, 1, 3), (4, 7, 10, None), syncs, strict=True):
        found = pool(ranks).run(steps_of, tmp_path / "many", sync, 12 // ranks, stop)
        losses = losses[: len(losses) - bool(losses)]  # the step after the checkpoint is taken again
        losses += [sum(each) for each in zip(*(results[0] for results in found), strict=True)]
    assert losses == pytest.approx(expected, rel=1e-9)
    for ours, theirs in zip(found[0][1], weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def by_hand(rank, size, folder):
    """Epochs in the program's own loop, a plain torch optimizer, two models, explicit saves."""
    paceline.init()
    torch.manual_seed(0)
    one, two = (paceline.DataParallel(Steady().double()) for _ in range(2))
    optim = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2)
    loader = paceline.Loader(data()[:60], 10, uneven="drop")
    checkpoint = paceline.Checkpoint(folder, optim, loader, one=one, two=two, facts={"note": "α"}, keep=1)
    found = checkpoint.load()
    served = []
    for _ in range(checkpoint.epoch, 3):
        for batch in checkpoint.resume(loader):
            loss = (one(batch) + two(batch)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            served.append(batch.samples)
        checkpoint.save(wait=True)
        if checkpoint.epoch == 2 and found is None:
            break
    checkpoint.close()
    return len(served), checkpoint.step, checkpoint.epoch, found and (found.step, found.ranks, found.facts)


def test_a_program_with_its_own_loop_over_epochs(pool, tmp_path):
    first = pool(2).run(by_hand, tmp_path)[0]
    assert first[1:] == (6, 2, None)
    names = {path.name for path in tmp_path.glob("step-*/*")}
    assert names >= {"one.safetensors", "two.safetensors"}
    assert len(list(tmp_path.glob("step-*"))) == 1
    second = pool(3).run(by_hand, tmp_path)[0]
    assert second == (2, 8, 3, (6, 2, {"note": "α"}))


def everything_alone(rank, size, folder):
    """A world of one with a bare module; its weights load with torch and safetensors alone."""
    torch.manual_seed(0)
    net = Net()
    optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    checkpoint = paceline.Checkpoint(folder, net, optim, scaler, every="10min")
    net(torch.randn(8, WIDTH)).sum().backward()
    optim.step()
    checkpoint.save(wait=True)
    checkpoint.close()
    return net.state_dict(), checkpoint.step


def test_a_bare_module_and_its_safetensors_file(pool, tmp_path):
    state, step = pool(1).run(everything_alone, tmp_path)[0]
    assert step == 1
    stored = load_file(tmp_path / "step-00000001" / "model.safetensors")
    again = Net()
    left = again.load_state_dict(stored, strict=False)
    assert left.missing_keys == ["again.weight", "again.bias"]  # further names of what is there
    assert equal([again.state_dict()[name] for name in state], state.values())


# ------------------------------------------------------------------ refused input


class Wider(Net):
    def __init__(self):
        super().__init__(width=20)


def refused(rank, size, folder, other):
    paceline.init()
    made = Set(folder, every=5, **other)
    before = [param.clone() for param in made.model.parameters()]
    try:
        made.run()
    except UsageError as error:
        assert equal(made.model.parameters(), before)
        return str(error)
    finally:
        made.checkpoint.close()
    return "resumed"


def test_a_checkpoint_of_other_objects_is_refused_by_name(pool, tmp_path):
    pool(2).run(train, tmp_path, "sharded", 6)
    messages = pool(2).run(refused, tmp_path, {"net": Wider})
    assert all(
        "is of another model: 'first.weight' is float64 [16, 6], here float64 [20, 6]" in text
        for text in messages
    )
    text = pool(2).run(refused, tmp_path, {"more": nn.Linear(1, 1)})[0]
    assert "model 'more' is not in the checkpoint" in text
    assert pool(2).run(train, tmp_path, "sharded")[0][-1] == 16


def bad_arguments(rank, size, folder):
    net = Net()
    results = []
    for arguments, options in (
        ((net,), {"every": 0}),
        ((net,), {"keep": 0}),
        ((net, Net()), {}),
        ((net, 3), {}),
        ((net, torch.optim.SGD(Net().parameters())), {}),
    ):
        try:
            checkpoint = paceline.Checkpoint(folder, *arguments, **options)
            checkpoint.save()
        except UsageError as error:
            results.append(str(error))
    return results


def test_bad_arguments(pool, tmp_path):
    results = pool(1).run(bad_arguments, tmp_path)[0]
    words = [
        "every=0",
        "keep=0",
        "two objects of the checkpoint are called 'model'",
        "has no state_dict",
        "none of the models",
    ]
    assert len(results) == len(words)
    for word, text in zip(words, results, strict=True):
        assert word in text


def elsewhere(rank, size, folder):
    """Rank 1 sees another disk."""
    paceline.init()
    os.chdir(folder / str(rank))
    try:
        paceline.Checkpoint("run", Net())
    except UsageError as error:
        return str(error)
    finally:
        os.chdir("/")
    return "made"


def test_a_folder_that_is_not_shared_is_refused(pool, tmp_path):
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    for results in pool(3).run(elsewhere, tmp_path):
        assert "not there on rank 1, 2" in results
        assert "share" in results
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RankError) as caught:
        pool(2).run(train, file / "run", "sharded")
    assert "can't write checkpoints" in str(caught.value)


# ------------------------------------------------------------------ disks


def full_disk(rank, size, folder):
    """The disk of rank 1 is full at step 4 and 8, and has room again before step 12."""
    import logging

    paceline.init()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline.checkpoint").addHandler(handler)
    try:
        made = Set(folder, every=4)

        def fill(step):
            fault_injection.disarm()
            if 3 <= step < 9:
                fault_injection.disk_full(after_nbytes=50, rank=1)

        made.run(before=fill)
        results = made.results()
    finally:
        logging.getLogger("paceline.checkpoint").removeHandler(handler)
        fault_injection.disarm()
    return results, lines, sorted(path.name for path in Path(folder).iterdir())


def test_a_full_disk_is_logged_and_training_continues(pool, tmp_path):
    expected = pool(2, "paceline").run(train, tmp_path / "a", "sharded", None, 4)
    found = pool(2, "paceline").run(full_disk, tmp_path / "b")
    results, lines, names = found[0]
    assert results[0] == expected[0][0]
    assert equal(results[1], expected[0][1])
    assert [line.split(" can't")[0] for line in lines if "can't" in line] == [
        "the checkpoint of step 4", "the checkpoint of step 8",
    ]  # fmt: skip
    assert all(
        "rank 1: No space left on device; training continues" in line for line in lines if "can't" in line
    )
    assert not any("can't" in line for line in found[1][1])
    assert names == ["lock", "step-00000012", "step-00000016"]


def save_and_wait(rank, size, folder):
    paceline.init()
    made = Set(folder)
    made.checkpoint.save(wait=True)
    made.checkpoint.step = 7
    fault_injection.disk_full(after_nbytes=0, rank=size - 1)
    try:
        made.checkpoint.save(wait=True)
    except CheckpointError as error:
        return str(error)
    finally:
        fault_injection.disarm()
        made.checkpoint.close()
    return "saved"


def test_save_with_wait_raises_on_all_ranks(pool, tmp_path):
    for results in pool(2).run(save_and_wait, tmp_path):
        assert "the checkpoint of step 7 can't be written" in results
        assert "rank 1: No space left" in results
    assert [path.name for path in sorted(tmp_path.glob("step*"))] == ["step-00000000"]


# ------------------------------------------------------------------ killed at any moment


def killed(fork, folder, where, moments):
    """Kill ranks at these seconds after the first checkpoint of each life, restart; return the last results."""
    torch.set_num_threads(1)
    for number, (victims, seconds) in enumerate(moments):
        before = newest(where)
        ranks = [fork(life, rank, where, f"{folder}/world-{number}") for rank in range(2)]
        ranks[0].receive()
        deadline = time.monotonic() + 30
        while newest(where) == before < 16:
            assert time.monotonic() < deadline, f"life {number} saved no checkpoint"
            time.sleep(0.002)
        time.sleep(seconds)
        for victim in victims:
            ranks[victim].kill(signal.SIGKILL)
        for rank, child in enumerate(ranks):
            if rank not in victims:
                child.kill(signal.SIGKILL)
    ranks = [fork(life, rank, where, f"{folder}/world-last") for rank in range(2)]
    ranks[0].receive()
    ranks[1].receive()
    results = [child.receive() for child in ranks]
    assert [child.wait() for child in ranks] == [0, 0]
    return results


def newest(where):
    """Return the step of the newest complete checkpoint, 0 without one."""
    return max((int(path.name[5:]) for path in Path(where).glob("step-" + "[0-9]" * 8)), default=0)


def life(send, rank, where, store):
    """One life of a run that saves at every step."""
    paceline.init("paceline", init_method=f"file://{store}", rank=rank, size=2, timeout=30)
    made = Set(where, every=1)
    send("going")
    made.run(before=lambda _: time.sleep(0.01))
    send((made.checkpoint.resumed and made.checkpoint.resumed.step, *made.results()))
    paceline.shutdown()


@pytest.mark.thorough
def test_a_run_that_is_killed_repeatedly_ends_the_same(killable, pool, tmp_path):
    """benchmarks/kills is the whole experiment, with more kills at other times."""
    expected = pool(2, "paceline").run(train, tmp_path / "whole", "sharded", None, 1)
    moments = [((0,), 0.03), ((1,), 0.05), ((0, 1), 0.0), ((0,), 0.04)]
    found = killable.run_ranks(killed, str(tmp_path / "killed"), moments, timeout=120)
    assert max(results[0] or 0 for results in found) > 0
    for results, whole in zip(found, expected, strict=True):
        assert equal(results[2], whole[1])
        assert list(results[3:]) == list(whole[2:])
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left == ["lock", "step-00000015", "step-00000016"]
