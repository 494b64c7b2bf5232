"""Virtual ranks on real ones: 1, 2 and 3 ranks serve the same leaves and evaluate to the same bits."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

import model_zoo
import paceline
from paceline._core.step_state import wait_counters
from paceline.errors import DataError, MismatchError, UnevenData
from served_leaves import Augmented, collate, drawn, serve


class Stream(IterableDataset):
    """Numbers in a random order, with random numbers; divided among workers."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        numbers = [*range(worker, self.size, workers)]
        random.shuffle(numbers)
        for number in numbers:
            yield number, [drawn() for _ in range(1 + number % 3)][-1]


def make(kind, size, **options):
    if kind == "map":
        return paceline.Loader(Augmented(size), collate_fn=collate, **options)
    return paceline.Loader(Stream(size), collate_fn=collate, stream="whole", **options)


def serve_cases(rank, size, cases):
    """Return, per case, what two epochs serve, the position after a few steps, and the rest from there."""
    found = []
    for kind, options, steps in cases:
        try:
            loader = make(kind, **options)
            epochs = [serve(loader), serve(loader)]
            loader.set_epoch(0)
            serve(loader, steps)
            again = make(kind, **options)
            again.load_state_dict(loader.state_dict())
            found.append((epochs, loader.state_dict(), serve(again), drawn()))
        except UnevenData as error:
            found.append(str(error))
    return found


def drawn_case(rng):
    kind = rng.choice(["map", "map", "stream"])
    options = {
        "size": rng.choice([rng.randint(3, 9), rng.randint(3, 70)]),
        "batch_size": rng.choice([1, 2, 5]),
        "virtual_ranks": rng.choice([3, 4, 5, 7, 8]),
        "dispatch": rng.choice(["round_robin", "random"]),
        "uneven": rng.choice(
            ["join", "join", "error"] + ["rebalance"] * (kind == "map") + ["pad"] * (kind != "map")
        ),
        "seed": rng.randint(-3, 3),
    }
    if kind == "map":
        options["shuffle"] = rng.choice([True, False])
    if rng.random() < 0.12:
        options["num_workers"] = rng.choice([1, 2])
    return kind, options, rng.randint(1, 3)


def merge(parts):
    """Return the leaves that all ranks have served."""
    merged = {}
    for part in parts:
        assert not merged.keys() & part.keys()
        merged |= part
    return merged


def together(results):
    """Return what ranks have found, as one rank would have."""
    if isinstance(results[0], str):
        assert len(set(results)) == 1
        return results[0]
    epochs, states, rests, after = zip(*results, strict=True)
    assert all(state == states[0] for state in states)
    assert len(set(after)) == 1, "after an epoch all ranks draw the same"
    return [merge(each) for each in zip(*epochs, strict=True)], states[0], merge(rests), after[0]


def test_any_number_of_ranks_serves_the_same(pool):
    rng = random.Random(11)
    cases = [drawn_case(rng) for _ in range(30)]
    one = [together(each) for each in zip(*pool(1).run(serve_cases, cases), strict=True)]
    assert sum(not isinstance(each, str) for each in one) > 20, "most cases are served"
    for size in (2, 3):
        found = zip(*pool(size, "paceline" if size == 3 else "gloo").run(serve_cases, cases), strict=True)
        for case, expected, each in zip(cases, one, found, strict=True):
            assert together(each) == expected, case


def resumed(rank, size, kind, state):
    loader = make(kind, 50, batch_size=3, virtual_ranks=5)
    loader.load_state_dict(state)
    return serve(loader, 1), loader.state_dict()


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_epoch_goes_on_with_other_numbers_of_ranks(pool, kind):
    loader = make(kind, 50, batch_size=3, virtual_ranks=5)
    state, whole = loader.state_dict(), serve(loader)
    for step, size in enumerate((2, 1, 3)):
        leaves, states = zip(*pool(size).run(resumed, kind, state), strict=True)
        state = states[0]
        assert all(each == state for each in states)
        found = {leaf: each for (_, _, leaf), each in merge(leaves).items()}
        assert found == {leaf: each for (_, at, leaf), each in whole.items() if at == step}


# ------------------------------------------------------------------ wrong input


def mismatched(rank, size):
    loader = paceline.Loader(list(range(20)), 2, virtual_ranks=3 + rank)
    with pytest.raises(MismatchError, match=r"virtual_ranks"):
        list(loader)


def too_few(rank, size):
    with pytest.raises(paceline.errors.UsageError, match=rf"\[rank {rank}\] virtual_ranks=2 with 3 ranks"):
        paceline.Loader(list(range(20)), 2, virtual_ranks=2)


class BreaksOnOne(Stream):
    """Can't be read to the end by rank 1."""

    def __init__(self, rank):
        super().__init__(40)
        self.rank = rank

    def __iter__(self):
        yield from islice(super().__iter__(), 20)
        if self.rank == 1:
            raise ValueError("no such file")
        yield from islice(super().__iter__(), 20, None)


def broken(rank, size):
    loader = paceline.Loader(BreaksOnOne(rank), 2, collate_fn=collate, virtual_ranks=5, stream="whole")
    with pytest.raises(DataError, match="no such file" if rank == 1 else "rank 1 could not load its batch 2"):
        list(loader)


def uneven(rank, size):
    loader = paceline.Loader(
        Stream(13), 2, collate_fn=collate, virtual_ranks=5, stream="whole", uneven="error"
    )
    with pytest.raises(
        UnevenData, match="with virtual_ranks=5, after 1 steps of epoch 0 rank 3 has no batch"
    ):
        list(loader)


class Unsendable:
    def __init__(self, samples):
        self.count = len(samples)


def unsendable(rank, size):
    loader = paceline.Loader(Stream(2), 2, collate_fn=Unsendable, virtual_ranks=5, stream="whole")
    with pytest.raises(
        DataError, match="virtual rank 2 has no sample, and a placeholder batch can't be sent"
    ):
        list(loader)


@pytest.mark.parametrize("wrong", [mismatched, broken, uneven, unsendable])
def test_what_is_wrong_is_found_on_all_ranks(pool, wrong):
    pool(2).run(wrong)


def test_ranks_without_a_leaf_are_refused(pool):
    pool(3).run(too_few)


# ------------------------------------------------------------------ evaluation


def measures(model, batch):
    x, y = batch
    loss = model_zoo.loss_of(model, "Plain", x, y)
    return {"loss": loss, "weighted": (loss + torch.rand(()), x.square().sum()), "samples": float(len(x))}


def data(samples, dtype=torch.float32):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, model_zoo.WIDTH, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randn(samples, 1, generator=generator, dtype=dtype))


def evaluated(rank, size, cases):
    model, found = model_zoo.build("Plain").float(), []
    for options in cases:
        loader = paceline.Loader(data(options.pop("samples")), **options)
        found.append([paceline.evaluate(model, loader, measures) for _ in range(2)])
    return found


def test_a_mean_is_the_same_to_the_bit_on_any_number_of_ranks(pool):
    rng = random.Random(3)
    cases = [
        {
            "samples": rng.randint(1, 80),
            "batch_size": rng.choice([1, 3, 8]),
            "virtual_ranks": rng.randint(3, 9),
            "uneven": rng.choice(["join", "rebalance"]),
            "shuffle": rng.choice([True, False]),
        }
        for _ in range(12)
    ]
    (one,) = pool(1).run(evaluated, cases)
    for size in (2, 3):
        for found in pool(size).run(evaluated, cases):
            assert found == one
    for case, (first, _) in zip(cases, one, strict=True):
        x, y = data(case["samples"]).tensors
        with torch.no_grad():
            exact = model_zoo.loss_of(model_zoo.build("Plain").float(), "Plain", x, y).item()
        assert first["loss"] == pytest.approx(exact, rel=1e-5)


def sharded(rank, size):
    """Evaluate where ranks have different numbers of leaves, and every forward has collectives."""
    model = paceline.DataParallel(model_zoo.build("Plain"), sync="full-shard")
    loader = paceline.Loader(data(23, torch.float64), 3, virtual_ranks=5, shuffle=False)
    calls = []

    def measure(model, batch):
        calls.append(batch.samples)
        return model_zoo.loss_of(model, "Plain", *batch)

    return paceline.evaluate(model, loader, measure), len(calls)


def test_all_ranks_measure_equally_often(pool):
    results = pool(2).run(sharded)
    assert results[0] == results[1]
    x, y = data(23, torch.float64).tensors
    with torch.no_grad():
        exact = model_zoo.loss_of(model_zoo.build("Plain"), "Plain", x, y).item()
    assert results[0][0] == pytest.approx(exact, rel=1e-13)
    assert results[0][1] == 3 * 2


def meanwhile(rank, size, evaluates):
    """Return the random numbers of a training loop, and whether its leaf stays known."""
    validation, found = paceline.Loader(list(range(20)), 2, virtual_ranks=4), []
    for batch in paceline.Loader(Augmented(24), 3, collate_fn=collate, virtual_ranks=4):
        before = drawn(), wait_counters.leaf, wait_counters.samples
        if evaluates and batch.ends_step:
            paceline.evaluate(torch.nn.Identity(), validation, lambda model, batch: batch.double().mean())
        assert (wait_counters.leaf, wait_counters.samples) == before[1:]
        found.append((*before, drawn()))
    return found


def test_evaluation_does_not_change_the_random_numbers_of_training(pool):
    assert pool(2).run(meanwhile, True) == pool(2).run(meanwhile, False)
