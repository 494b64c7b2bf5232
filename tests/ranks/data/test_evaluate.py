"""paceline.evaluate: the exact mean over all samples, on any number of ranks, under every strategy."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import model_zoo
import paceline
from paceline.errors import BackwardFailed, PeerLost, SyncError, UsageError

SAMPLES = 47
SHARES = {1: None, 2: [0.9, 0.1], 3: [0.0, 0.3, 0.7], 4: [0.25, 0.25, 0.10, 0.40]}
ALL = ["naive", "flat", "bucketed", "sharded", "full-shard"]


def data():
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(SAMPLES, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64))


def loss(model, batch):
    x, y = batch
    return model_zoo.loss_of(model, "Plain", x, y)


def one_process():
    with torch.no_grad():
        return loss(model_zoo.build("Plain"), data().tensors).item()


# ------------------------------------------------------------------ the mean


def means(rank, size, sync, uneven):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    loader = paceline.Loader(data(), 8, shuffle=False, uneven=uneven, shares=SHARES[size])
    found = [paceline.evaluate(model, loader, loss) for _ in range(2)]
    assert model.training
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("sync", ALL)
def test_the_mean_is_that_of_one_process(pool, size, sync):
    for uneven in ("join", "rebalance"):
        results = pool(size, "paceline" if size == 4 else "gloo").run(means, sync, uneven)
        assert len({mean for found in results for mean in found}) == 1, "the same on all ranks, and again"
        assert results[0][0] == pytest.approx(one_process(), rel=1e-14)


def training_meanwhile(rank, size, sync):
    """Evaluate a stream in the middle of an epoch of training."""

    class Rows(IterableDataset):
        def __iter__(self):
            return (data()[number] for number in range(rank, SAMPLES, size))

    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
    validation, found = paceline.Loader(data(), 8, shares=SHARES[size]), []
    for batch in paceline.Loader(Rows(), 3):
        found.append(paceline.evaluate(model, validation, loss))
        model.backward(loss(model, batch), samples=batch.samples)
        optim.step()
        optim.zero_grad()
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_evaluation_during_training_changes_nothing(pool, sync):
    for found in pool(3).run(training_meanwhile, sync):
        assert len(found) == 6
        assert found == pytest.approx([one_process()] * 6, rel=1e-13)


def many_means(rank, size, cases):
    """Return the errors of means of random numbers, under random assignments."""
    worst = 0.0
    for seed, options in cases:
        numbers = torch.randn(
            options["samples"], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        weights = torch.arange(1.0, len(numbers) + 1)
        rows = TensorDataset(numbers, weights)
        loader = paceline.Loader(
            rows, **{name: value for name, value in options.items() if name != "samples"}
        )
        found = paceline.evaluate(torch.nn.Identity(), loader, weighted)
        exact = {"plain": numbers.mean(), "weighted": (numbers * weights).sum() / weights.sum()}
        worst = max(worst, *(abs(found[name] - exact[name].item()) for name in exact))
    return worst


def weighted(model, batch):
    """Return nan for a placeholder batch, which must not be counted."""
    if not batch.samples:
        return {"plain": float("nan"), "weighted": (torch.tensor(float("nan")), float("nan"))}
    numbers, weights = batch
    return {
        "plain": numbers.mean(),
        "weighted": ((numbers * weights).sum() / weights.sum(), weights.sum()),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_placeholders_are_ignored_and_weights_counted(pool, size):
    rng, cases = random.Random(size), []
    for seed in range(12):
        options = {"samples": rng.randint(1, 60), "batch_size": rng.choice([1, 4, 16]), "block": 1}
        options |= {
            "dispatch": rng.choice(["round_robin", "random"]),
            "uneven": rng.choice(["join", "rebalance"]),
        }
        options |= {"shuffle": rng.choice([True, False]), "shares": SHARES[size]}
        cases.append((seed, options))
    assert max(pool(size).run(many_means, cases)) < 1e-11


def kinds(rank, size):
    loader = paceline.Loader(torch.arange(10.0), 4, shuffle=False)
    identity = torch.nn.Identity()
    return [
        paceline.evaluate(identity, loader, measure)
        for measure in (
            lambda model, batch: model(batch).mean(),
            lambda model, batch: model(batch).mean().item(),
            lambda model, batch: model(batch).mean().reshape(1, 1),
            lambda model, batch: (model(batch).mean(), len(batch) if batch.samples else 0),
            lambda model, batch: {"mean": model(batch).mean(), "half": batch.mean() / 2},
            lambda model, batch: {"half": batch.mean() / 2, "mean": model(batch).mean()},
            lambda model, batch: {0: batch.mean()},
            lambda model, batch: {},
            lambda model, batch: model(batch).mean().bool(),
        )
    ]


def test_measures_of_all_kinds(pool):
    for found in pool(3).run(kinds):
        assert found[:4] == [4.5] * 4
        assert found[4] == found[5] == {"mean": 4.5, "half": 2.25}
        assert found[6:8] == [{0: 4.5}, {}]
        assert 0.5 < found[8] <= 1


def other_order(rank, size):
    """Ranks name the same in another order."""
    loader = paceline.Loader(torch.arange(10.0), 4)

    def measure(model, batch):
        found = {"a": batch.mean(), "b": -batch.mean()}
        return dict(reversed(found.items())) if rank else found

    return paceline.evaluate(torch.nn.Identity(), loader, measure)


def test_names_may_come_in_any_order(pool):
    assert pool(2).run(other_order) == [{"a": 4.5, "b": -4.5}] * 2


def tokens(rank, size):
    """A batch with its own number is weighted by that."""
    loader = paceline.Loader(torch.arange(10.0), 4, collate_fn=Tokens)
    return paceline.evaluate(torch.nn.Identity(), loader, lambda model, batch: batch.mean)


class Tokens:
    """Numbers that count as often as they are large."""

    def __init__(self, numbers):
        numbers = torch.stack(numbers)
        self.samples = numbers.sum().item()
        self.mean = (numbers * numbers).sum() / self.samples if self.samples else 0.0


def test_a_batchs_own_number_is_the_weight(pool):
    assert pool(3).run(tokens) == pytest.approx([285 / 45] * 3)


def placeholder_in_training(rank, size):
    """Evaluate in every step: a placeholder batch is not counted as a full one afterwards."""
    model = paceline.DataParallel(torch.nn.Linear(1, 1))
    validation, outcomes = paceline.Loader(torch.arange(4.0), 4), []
    for batch in paceline.Loader(torch.arange(20.0), 4, shares=[0.8, 0.2]):
        loss = model(batch[:, None]).mean()
        paceline.evaluate(model, validation, lambda model, batch: model(batch[:, None]).mean())
        try:
            model.backward(loss)
            outcomes.append(None)
        except SyncError as error:
            outcomes.append(type(error))
        model.zero_grad()
    return outcomes


def test_evaluation_does_not_hide_a_placeholder_batch(pool):
    results = pool(2).run(placeholder_in_training)
    assert results == [[None, *[BackwardFailed] * 3], [None, *[SyncError] * 3]]


# ------------------------------------------------------------------ the model


class Modes(torch.nn.Module):
    """Some of it in training mode, and some not."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(1)
        self.frozen.eval()

    def forward(self, x):
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        return self.frozen(self.trained(x[:, None]))


def modes(rank, size, fails):
    model = Modes()

    def measure(model, batch):
        found = model(batch).mean()
        if fails:
            raise KeyError("cat")
        return found

    try:
        paceline.evaluate(model, paceline.Loader(torch.arange(8.0), 4), measure)
    except KeyError:
        assert fails
    assert torch.is_grad_enabled()
    return model.training, model.trained.training, model.frozen.training


@pytest.mark.parametrize("fails", [False, True])
def test_training_modes_are_restored(pool, fails):
    assert pool(2).run(modes, fails) == [(True, True, False)] * 2


# ------------------------------------------------------------------ refusals


def refused(rank, size, measures, uneven="join"):
    """Return the result or error of each measure on this rank."""
    messages = []
    for measure in measures:
        loader = paceline.Loader(torch.arange(20.0), 4, uneven=uneven)
        try:
            messages.append(("ok", paceline.evaluate(torch.nn.Identity(), loader, MEASURES[measure](rank))))
        except UsageError as error:
            messages.append((type(error).__name__, str(error)))
    return messages


def by_batch(first, later):
    """Return a measure that returns something else from the second batch on."""
    seen = []

    def measure(model, batch):
        seen.append(batch)
        return first if len(seen) == 1 else later

    return measure


MEASURES = {
    "list": lambda rank: lambda model, batch: [1.0],
    "none": lambda rank: lambda model, batch: None,
    "vector": lambda rank: lambda model, batch: batch,
    "triple": lambda rank: lambda model, batch: (1.0, 2.0, 3.0),
    "in a dict": lambda rank: lambda model, batch: {"loss": "high"},
    "other names": lambda rank: by_batch({"a": 1.0}, {"b": 1.0}),
    "a name, then none": lambda rank: by_batch({"a": 1.0}, 1.0),
    "no weight": lambda rank: lambda model, batch: (1.0, 0),
    "other names on rank 1": lambda rank: lambda model, batch: {"ab"[rank]: 1.0},
    "a list on rank 1": lambda rank: lambda model, batch: [1.0] if rank else 1.0,
    "other names on rank 1 later": lambda rank: by_batch({"a": 1.0}, {"ab"[rank]: 1.0}),
    "other values": lambda rank: lambda model, batch: [float(rank)],
}


def test_invalid_results_are_refused_on_all_ranks(pool):
    both = list(MEASURES)
    first, second = (dict(zip(both, outcome, strict=True)) for outcome in pool(2).run(refused, both))
    for name, message in (
        ("list", "measure returned list [1.0]"),
        ("none", "measure returned NoneType None"),
        ("vector", "measure returned a tensor of shape [4]"),
        ("triple", "measure returned tuple (1.0, 2.0, 3.0)"),
        ("in a dict", "measure returned str 'high' for 'loss'"),
        ("other names", "measure returned 'b' for batch 1, 'a' before"),
        ("a name, then none", "measure returned no name for batch 1, 'a' before"),
        ("no weight", "nothing was measured: all weights are 0"),
        ("other values", "measure returned list ["),
    ):
        for outcome in (first[name], second[name]):
            assert outcome[0] in ("UsageError", "MismatchError")
            assert message in outcome[1], name
    for outcome in (first, second):
        assert outcome["other names on rank 1"][0] == "MismatchError"
        assert "rank 0 has 'a'; rank 1 has 'b'" in outcome["other names on rank 1"][1]
    assert "rank 1 has measure returned list [1.0]" in first["a list on rank 1"][1]
    assert "measure returned list [1.0]\n" in second["a list on rank 1"][1]
    assert (
        "rank 1 has measure returned 'b' for batch 1, 'a' before" in first["other names on rank 1 later"][1]
    )
    assert first["other names on rank 1 later"][0] == "MismatchError"


@pytest.mark.parametrize("uneven", ["truncate", "drop", "pad"])
def test_policies_that_are_not_exact_are_refused(pool, uneven):
    for outcome in pool(2).run(refused, ["list"], uneven):
        assert f"evaluating with uneven='{uneven}', which does not use every sample once" in outcome[0][1]


def test_other_loaders_are_refused():
    with pytest.raises(UsageError, match=r"evaluate\(model, DataLoader, ...\)"):
        paceline.evaluate(torch.nn.Identity(), DataLoader([1.0]), lambda model, batch: batch.mean())


def empty_stream(rank, size):
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(UsageError, match="nothing was measured: there was no batch"):
        paceline.evaluate(torch.nn.Identity(), paceline.Loader(Nothing()), lambda model, batch: 0.0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_stream_without_a_sample_has_no_mean(pool, size):
    pool(size).run(empty_stream)


def raises_on_one(rank, size, place):
    """A rank that raises in measure leaves; ranks that wait for it raise too."""
    paceline.init("paceline", init_method=f"file://{place}", rank=rank, size=size)

    def measure(model, batch):
        if rank == 1:
            raise FloatingPointError("no such class")
        return batch.mean()

    try:
        paceline.evaluate(torch.nn.Identity(), paceline.Loader(torch.arange(20.0), 4), measure)
    except (FloatingPointError, PeerLost) as error:
        paceline.shutdown()
        return type(error).__name__
    return "ok"


def test_a_measure_that_raises_on_one_rank_ends_all(pool, tmp_path):
    results = pool(2, "paceline").run(raises_on_one, str(tmp_path / "meet"), world=False)
    assert results == ["PeerLost", "FloatingPointError"]
