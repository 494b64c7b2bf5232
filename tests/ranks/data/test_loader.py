"""The loader on several ranks: every sample once, exact gradients, positions resumed by other numbers of ranks."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import model_zoo
import paceline
from paceline.data.map_loader_state import LoaderPosition
from paceline.data.sampling.uneven_policies import EXACT
from paceline.errors import UsageError
from paceline.world.control_collectives import gather_rows

POLICIES = ["join", "rebalance", "error", "truncate", "drop", "pad"]
QUARTERS = [0.25, 0.25, 0.10, 0.40]


def drawn_shares(rng, size):
    """Draw shares of `size` ranks, some of them 0; None: equal ones."""
    if rng.random() < 0.3:
        return None
    parts = [rng.choice([0, 1, 1, 2, 5, 13]) for _ in range(size)]
    return [part / sum(parts) for part in parts] if any(parts) else None


def drawn(rng, size):
    """Draw arguments of a loader, and a number of samples."""
    samples = rng.choice([rng.randint(1, 12), rng.randint(1, 150)])
    return {
        "samples": samples,
        "batch_size": rng.choice([1, 2, 3, 8, 64]),
        "block": rng.randint(1, min(samples, 9)),
        "dispatch": rng.choice(["round_robin", "random", "random"]),
        "shares": drawn_shares(rng, size),
        "uneven": rng.choice(["join", "join", "rebalance", "rebalance", "error", "truncate", "drop", "pad"]),
        "shuffle": rng.choice([True, False, "blocks"]),
        "seed": rng.randint(-3, 3),
    }


def serve(rank, size, cases):
    """Return, per case, the batches of two epochs with the position before each, or the error."""
    return [list(served(**case)) for case in cases]


def served(samples, **options):
    try:
        loader = paceline.Loader(list(range(samples)), **options)
        for epoch in range(2):
            loader.set_epoch(epoch)
            yield loader.state_dict(), [(batch.tolist(), batch.samples) for batch in loader]
    except UsageError as error:
        yield type(error).__name__


def check(case, results):
    """Assert that ranks serve batches by the policy: every sample once, or as `RankPortions` predicts."""
    done = 0
    for epoch in zip(*results, strict=True):
        if isinstance(epoch[0], str):
            assert len(set(epoch)) == 1, "all ranks say the same"
            assert case["uneven"] not in ("join", "rebalance"), case
            break
        places, batches_of_rank = zip(*epoch, strict=True)
        assert all(place == places[0] for place in places)
        check_epoch(case, batches_of_rank)
        check_sizes(LoaderPosition.of(places[0]).epoch.portions, batches_of_rank)
        done = 1
    return done


def check_epoch(case, batches_of_rank):
    assert len({len(batches) for batches in batches_of_rank}) == 1, case
    used = Counter(real for batches in batches_of_rank for batch, count in batches if count for real in batch)
    assert set(used) <= set(range(case["samples"]))
    for batches in batches_of_rank:
        assert all(len(batch) == count or (count == 0 and 0 < len(batch) <= 2) for batch, count in batches)
    if case["uneven"] in EXACT:
        assert used == Counter(range(case["samples"])), case


def check_sizes(portions, batches_of_rank):
    for rank, batches in enumerate(batches_of_rank):
        assert [count for _, count in batches] == [
            portions.size(rank, step) for step in range(portions.steps)
        ]
        own = [real for batch, count in batches if count for real in batch]
        assert len(set(own)) == portions.taken(rank, portions.steps)
        first = own[: portions.counts[rank]]
        assert own == (first * (len(own) // max(1, len(first)) + 1))[: len(own)], (
            "padding begins with the first"
        )
    used = {real for batches in batches_of_rank for batch, count in batches if count for real in batch}
    assert len(used) == portions.used
    assert sum(portions.counts) - len(used) == portions.dropped
    served = sum(count for batches in batches_of_rank for _, count in batches)
    assert served - len(used) == portions.repeated


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_serve_batches_by_the_policy(pool, size):
    rng = random.Random(size)
    cases = [drawn(rng, size) for _ in range(50)]
    results = pool(size, "paceline" if size % 2 else "gloo").run(serve, cases)
    done = [check(case, each) for case, each in zip(cases, zip(*results, strict=True), strict=True)]
    assert sum(done) > 20, "many cases are served"


def test_ranks_with_workers_serve_batches_by_the_policy(pool):
    rng = random.Random(7)
    cases = [{**drawn(rng, 2), "uneven": policy, "num_workers": 2} for policy in POLICIES]
    cases += [{**case, "uneven": "join", "persistent_workers": True} for case in cases[:2]]
    results = pool(2).run(serve, cases)
    assert sum(check(case, each) for case, each in zip(cases, zip(*results, strict=True), strict=True)) >= 6


def test_shares_are_kept(pool):
    case = {"samples": 1000, "batch_size": 10, "shares": QUARTERS}
    counts = [sum(count for _, count in result[0][0][1]) for result in pool(4).run(serve, [case])]
    assert counts == [250, 250, 100, 400]


def test_the_order_does_not_depend_on_the_number_of_ranks(pool):
    """The order of an epoch does not depend on the number of ranks: only the part of each rank."""
    case = {"samples": 40, "batch_size": 5}
    alone = [batch for batch, _ in pool(1).run(serve, [case])[0][0][0][1]]
    order = [sample for batch in alone for sample in batch]
    for rank, result in enumerate(pool(2).run(serve, [case])):
        assert [sample for batch, _ in result[0][0][1] for sample in batch] == order[rank::2]


def in_groups(rank, size):
    """Serve two separate groups of ranks, one of them as the axis of a mesh."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    with pytest.raises(UsageError, match="this process is not in the group"):
        paceline.Loader([1, 2], group=groups[1 - rank // 2])
    found = []
    for group in (groups[rank // 2], mesh["data"]):
        loader = paceline.Loader(list(range(25)), 4, group=group, shares=[0.2, 0.8], seed=rank // 2)
        found.append([sample for batch in loader if batch.samples for sample in batch.tolist()])
    return found


def test_a_group_of_ranks_divides_the_data(pool):
    results = pool(4).run(in_groups)
    for way in range(2):
        for pair in (results[:2], results[2:]):
            assert [len(each[way]) for each in pair] == [5, 20]
            assert sorted(pair[0][way] + pair[1][way]) == list(range(25))


# ------------------------------------------------------------------ gradients


def data(samples):
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(samples, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(
        x, torch.randn(samples, 1, generator=generator, dtype=torch.float64), torch.arange(samples)
    )


def gathered(numbers):
    """Return the samples of all ranks, each of which has a few."""
    row = torch.full((64,), -1)
    row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return [number for each in gather_rows(row) for number in each.tolist() if number >= 0]


def one_process(parameters, dataset, numbers):
    """Return the gradient of the mean loss over the samples `numbers` where the model has these parameters."""
    model = model_zoo.build("Plain")
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), parameters, strict=True):
            mine.copy_(theirs)
    x, y, _ = dataset[numbers]
    model_zoo.loss_of(model, "Plain", x, y).backward()
    return [param.grad for param in model.parameters()]


def gradient_errors(rank, size, cases):
    """Return, per case, the largest relative error of any step's gradient, and the outcomes of the steps."""
    return [gradient_error(size, **case) for case in cases]


def gradient_error(size, sync, uneven, samples=83, accumulate=1, **options):
    """Train an epoch with steps of length 1, so that differences are those of the gradient."""
    dataset = data(samples)
    loader = paceline.Loader(
        dataset, 8, uneven=uneven, **{"shares": QUARTERS if size == 4 else None, **options}
    )
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    worst, numbers, seen, counts = 0.0, [], [], []
    for step, batch in enumerate(loader, 1):
        x, y, which = batch
        numbers += which.tolist() if batch.samples else []
        counts.append(batch.samples)
        loss = model_zoo.loss_of(model, "Plain", x, y)
        if step % accumulate and step < len(loader):
            with model.accumulate():
                model.backward(loss, samples=batch.samples)
            continue
        model.backward(loss, samples=batch.samples)
        before = [param.clone() for param in model.whole_parameters()]
        optim.step()
        optim.zero_grad()
        seen += (union := gathered(numbers))
        expected, numbers = one_process(before, dataset, union), []
        for old, new, exact in zip(before, model.whole_parameters(), expected, strict=True):
            worst = max(worst, ((old - new - exact).abs().max() / exact.abs().max()).item())
    return worst, sorted(seen) == list(range(samples)), counts


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_gradients_are_those_of_one_process(pool, backend, sync):
    cases = [
        {"sync": sync, "uneven": uneven, "accumulate": accumulate, **options}
        for uneven in ("join", "rebalance")
        for accumulate in (1, 2)
        for options in (
            {},
            {"dispatch": "random", "block": 3},
            {"shares": [0.5, 0.0, 0.3, 0.2], "samples": 101},
        )
        if backend == "paceline" or not options
    ]
    results = pool(4, backend).run(gradient_errors, cases, timeout=120)
    for case, ranks in zip(cases, zip(*results, strict=True), strict=True):
        assert all(worst <= 1e-12 for worst, _, _ in ranks), case
        assert all(exactly_once for _, exactly_once, _ in ranks), case
        if case["uneven"] == "join":
            ended = [counts.index(0) if 0 in counts else len(counts) for _, _, counts in ranks]
            assert len(set(ended)) >= 3, "ranks run out at different steps"
    assert any(len(ranks[0][2]) % 2 for ranks in zip(*results, strict=True)), "some last micro-batch is odd"


class Through(torch.nn.Module):
    """Writes its result into the batch that it is given, as some libraries' models do."""

    def __init__(self):
        super().__init__()
        self.net = model_zoo.build("Plain")

    def forward(self, batch):
        batch["out"] = self.net(batch["x"])
        return batch


def batches_through(rank, size, sync):
    """Return how much parameters differ after training on served batches and on plain dicts."""
    rows = [{"x": x, "y": y} for x, y, _ in data(40)]
    trained = []
    for kind in (lambda batch: batch, dict):
        model = paceline.DataParallel(Through(), sync=sync)
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for batch in paceline.Loader(rows, 8, shares=[0.3, 0.7]):
            out = model(kind(batch))
            model.backward((out["out"] - out["y"]).square().mean(), samples=batch.samples)
            optim.step()
            optim.zero_grad()
        trained.append([param.clone() for param in model.whole_parameters()])
    return model_zoo.max_difference(*trained)


@pytest.mark.parametrize("sync", ["bucketed", "full-shard"])
def test_a_model_may_return_its_input_batch(pool, sync):
    assert pool(2).run(batches_through, sync) == [0.0, 0.0]


# ------------------------------------------------------------------ places


def continue_from(rank, size, cases):
    """Serve some batches from each position on, and return them with the position after them."""
    return [resumed(rank, size, **case) for case in cases]


def resumed(rank, size, samples, place, steps, options, shares):
    loader = paceline.Loader(list(range(samples)), shares=shares, **options)
    if place is not None:
        loader.load_state_dict(json.loads(place))
    found = [sample for batch in islice(loader, steps) if batch.samples for sample in batch.tolist()]
    return found, json.dumps(loader.state_dict()), loader.epoch


def relay(pool, rng, cases, sizes):
    """Let each case be served by one number of ranks after the other; return the batches of the first epoch."""
    served, over = [Counter() for _ in cases], [False] * len(cases)
    for stage, size in enumerate(sizes):
        last = stage == len(sizes) - 1
        for case in cases:
            case |= {"shares": drawn_shares(rng, size), "steps": None if last else rng.randint(1, 4)}
        results = zip(*pool(size).run(continue_from, cases), strict=True)
        for number, (case, ranks) in enumerate(zip(cases, results, strict=True)):
            assert len({place for _, place, _ in ranks}) == 1, "all ranks are at the same place"
            case["place"], epoch = ranks[0][1:]
            over[number] |= epoch > 0
            if not over[number]:
                served[number].update(sample for found, _, _ in ranks for sample in found)
    return served


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 4, 1, 3), (4, 3, 2, 1, 2, 4)])
def test_a_position_is_resumed_by_any_number_of_ranks(pool, sizes):
    rng = random.Random(len(sizes))
    cases = []
    for _ in range(12):
        case = {**drawn(rng, 1), "uneven": rng.choice(["join", "rebalance"])}
        samples = case.pop("samples")
        cases.append({"samples": samples, "place": None, "options": {**case, "shares": None}})
        cases[-1]["options"].pop("shares")
    for case, found in zip(cases, relay(pool, rng, cases, sizes), strict=True):
        assert found == Counter(range(case["samples"])), case


@pytest.mark.thorough
@pytest.mark.parametrize("uneven", ["truncate", "drop", "pad"])
def test_policies_that_lose_samples_are_resumed_too(pool, uneven):
    """If the rest is too small for another step, the epoch is over."""
    rng = random.Random(3)
    cases = [
        {"samples": 60, "place": None, "options": {"batch_size": rng.randint(2, 9), "uneven": uneven}}
        for _ in range(20)
    ]
    for stage, size in enumerate((2, 4, 1, 3)):
        for case in cases:
            case |= {"shares": None, "steps": rng.randint(1, 3)}
        for case, ranks in zip(cases, zip(*pool(size).run(continue_from, cases), strict=True), strict=True):
            assert len({place for _, place, _ in ranks}) == 1
            case["place"] = ranks[0][1]
            used = [sample for found, _, _ in ranks for sample in found]
            assert used, "every iteration serves something, of this epoch or of the next"
            assert uneven == "pad" or len(set(used)) == len(used), (stage, case)
