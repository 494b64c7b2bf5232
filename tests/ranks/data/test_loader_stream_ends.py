"""Ends of streams: ranks without a sample, warnings, streams that raise, positions that are resumed."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import Counter, namedtuple
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import paceline
from numbered_streams import Stream, drawn_shares, own, shown, used
from paceline.errors import DataError, MismatchError, UnevenData, UsageError

# ------------------------------------------------------------------ ranks without any sample


def serve_placeholders(rank, size, kind):
    """Return type and contents of the batch of a rank without a sample."""
    collate = {"tensor": None, "pair": make_pair, "dict": make_dict, "record": Record}[kind]
    found = list(paceline.Loader(Stream(1000 * rank, 0 if rank == 1 else 6), 4, collate_fn=collate))
    return [(type(batch).__name__, batch.samples, str(batch)) for batch in found]


Pair = namedtuple("Pair", ["x", "y"])


def make_pair(samples):
    return Pair(torch.tensor(samples), len(samples))


def make_dict(samples):
    return {"x": torch.tensor(samples)}


@dataclass
class Record:
    x: list

    def __post_init__(self):
        self.also = {"sum": torch.tensor(self.x).sum(), "name": ("a", None)}


class Own:
    def __init__(self, samples):
        self.x = samples

    def __str__(self):
        return f"own {self.x}"


@pytest.mark.parametrize("kind", ["tensor", "pair", "dict", "record"])
def test_a_rank_without_samples_gets_a_batch_of_another_rank(pool, kind):
    first, empty, third = pool(3).run(serve_placeholders, kind)
    assert [count for _, count, _ in first] == [4, 2]
    assert [count for _, count, _ in empty] == [0, 0]
    assert [count for _, count, _ in third] == [4, 2]
    assert [name for name, _, _ in empty] == [name for name, _, _ in first]
    assert empty[0][2] == empty[1][2] == first[0][2], "the first batch of rank 0"


def placeholders_in_groups(rank, size):
    """Two groups of ranks, in each of which the second one has no sample."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loader = paceline.Loader(own(rank, [6, 0, 4, 0]), 4, group=groups[rank // 2])
    mean = paceline.evaluate(torch.nn.Identity(), loader, lambda _, batch: batch.double().mean())
    return shown(loader), mean


def test_placeholders_stay_within_a_group(pool):
    (first, mean), (filled, _), (third, other), (also, _) = pool(4).run(placeholders_in_groups)
    assert first == [([0, 1, 2, 3], 4), ([4, 5], 2)]
    assert filled == [([0, 1, 2, 3], 0)] * 2
    assert third == [([2000, 2001, 2002, 2003], 4)]
    assert also == [([2000, 2001, 2002, 2003], 0)]
    assert (mean, other) == (2.5, 2001.5)


class Secret(Own):
    """Would need a pickle."""

    def __init__(self, samples):
        super().__init__(samples)
        self.lock = threading.Lock()


def secret_placeholder(rank, size):
    try:
        return shown(paceline.Loader(Stream(0, 0 if rank == 0 else 6), 4, collate_fn=Secret))
    except DataError as error:
        return error.rank, str(error)


def test_a_placeholder_that_cannot_be_sent_is_an_error_on_all_ranks(pool):
    for source, results in pool(3).run(secret_placeholder):
        assert source == 1
        assert "rank 0 has no sample, and a placeholder batch can't be sent to it" in results
        assert "is not a plain value" in results


def kept_in_a_list(rank, size):
    """A served batch does not change when it is used as a placeholder later."""
    loaders = [paceline.Loader(own(rank, [3, 20]), 4, collate_fn=collate) for collate in (None, Own)]
    return [[batch.samples for batch in list(loader)] for loader in loaders]


def test_served_batches_keep_their_number(pool):
    short, long = pool(2).run(kept_in_a_list)
    assert short == [[3, 0, 0, 0, 0]] * 2
    assert long == [[4, 4, 4, 4, 4]] * 2


def all_empty(rank, size):
    return [shown(paceline.Loader(Stream(0, 0), 4, stream=stream)) for stream in ("own", "whole")]


@pytest.mark.parametrize("size", [1, 3])
def test_empty_streams_are_epochs_without_a_step(pool, size):
    assert pool(size).run(all_empty) == [[[], []]] * size


# ------------------------------------------------------------------ warnings


def warnings_of(rank, size, firsts, stream, kind, samples=9):
    """Serve an epoch, and return the log."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
    log = logging.getLogger("paceline.data")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        dataset = Stream(firsts[rank], samples)
        list(paceline.Loader(Shown(dataset, kind), 4, stream=stream, collate_fn=len_of))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return messages


class Shown(IterableDataset):
    """The numbers of another stream, as another kind of sample."""

    def __init__(self, dataset, kind):
        self.dataset, self.kind = dataset, kind

    def __iter__(self):
        for number in self.dataset:
            yield {
                "number": number,
                "tensor": torch.tensor(float(number)),
                "text": {"text": f"line {number}", "tokens": torch.full((5,), number, dtype=torch.bfloat16)},
            }[self.kind]


def len_of(samples):
    return torch.tensor(len(samples))


@pytest.mark.parametrize("kind", ["number", "tensor", "text"])
def test_streams_that_contradict_the_option_are_warned_of(pool, kind):
    alike = (
        "all ranks' streams begin with the same sample: if they are the same, every sample is used 2 times"
    )
    separate_streams = "ranks read different streams, of which each keeps its part only"
    for firsts, stream, expected in (
        ([0, 0], "own", alike),
        ([0, 100], "own", None),
        ([0, 0], "whole", None),
        ([0, 100], "whole", separate_streams),
    ):
        first, second = pool(2).run(warnings_of, firsts, stream, kind)
        assert not second, "rank 0 speaks for all"
        assert first[0][0] == "INFO"
        assert [level for level, _ in first[1:]] == (["WARNING"] if expected else [])
        assert not expected or first[1][1].startswith(expected)


def test_a_stream_describes_the_use_of_its_data(pool):
    results = pool(2).run(warnings_of, [0, 100], None, "number")[0]
    assert results == [
        (
            "INFO",
            "every rank reads its own stream (2 ranks): every sample is used once; a rank that runs out takes "
            "part without data until all have",
        )
    ]


# ------------------------------------------------------------------ failures


def failing(rank, size, bad, workers, uneven, times):
    """Return the batches until the error, and the error."""
    sizes = [20, 20, 4]
    dataset = Stream(1000 * rank, sizes[rank], 1000 * rank + bad if rank == 2 else None, times)
    found, loader = [], paceline.Loader(dataset, 3, num_workers=workers, uneven=uneven)
    try:
        found.extend(batch.samples for batch in loader)
    except DataError as error:
        return found, error.rank, str(error)
    return found, None, ""


@pytest.mark.parametrize(
    ("bad", "workers", "uneven", "times", "steps"),
    [
        (0, 0, "join", 0, 0),
        (3, 0, "join", 0, 1),
        (0, 2, "join", 0, 0),
        (2, 0, "pad", 1, 2),
    ],
)
def test_a_stream_that_raises_on_one_rank_is_an_error_on_all(pool, bad, workers, uneven, times, steps):
    """The last case raises when the stream is read again, to pad."""
    results = pool(3).run(failing, bad, workers, uneven, times)
    assert {len(found) for found, _, _ in results} == {steps + (uneven == "pad")}
    assert [rank for _, rank, _ in results] == [2, 2, 2]
    assert "ValueError: no such file: cat.png" in results[2][2]
    for _, _, error in results[:2]:
        assert f"rank 2 could not load its batch {steps + (uneven == 'pad')} of epoch 0" in error


def twice(rank, size):
    """After an error on all ranks, all can continue with the next epoch."""
    dataset = Stream(1000 * rank, 8, 1004 if rank == 1 else None)
    loader = paceline.Loader(dataset, 3)
    with pytest.raises(DataError):
        list(loader)
    dataset.bad = None
    return shown(loader), loader.epoch


def test_the_epoch_after_an_error_is_served(pool):
    results = pool(2).run(twice)
    assert used([batches for batches, _ in results]) == Counter([*range(8), *range(1000, 1008)])
    assert [epoch for _, epoch in results] == [1, 1]


# ------------------------------------------------------------------ places


def continue_from(rank, size, cases):
    return [resumed(rank, **case) for case in cases]


def resumed(rank, samples, place, steps, options, shares=None):
    dataset = own(rank, samples) if isinstance(samples, list) else Stream(0, samples)
    loader = paceline.Loader(dataset, shares=shares, **options)
    if place is not None:
        loader.load_state_dict(json.loads(place))
    found = [real for batch in islice(loader, steps) if batch.samples for real in batch.tolist()]
    return found if loader.epoch == 0 else [], json.dumps(loader.state_dict())


def relay(pool, rng, cases, sizes):
    """Let each case be served by one number of ranks after the other; return the batches of the first epoch."""
    served = [Counter() for _ in cases]
    for stage, size in enumerate(sizes):
        for case in cases:
            case["steps"] = None if stage == len(sizes) - 1 else rng.randint(1, 3)
            if not isinstance(case["samples"], list):
                case["shares"] = drawn_shares(rng, size)
        results = zip(*pool(size).run(continue_from, cases), strict=True)
        for number, (case, ranks) in enumerate(zip(cases, results, strict=True)):
            assert len({place for _, place in ranks}) == 1, "all ranks are at the same place"
            case["place"] = ranks[0][1]
            for found, _ in ranks:
                served[number].update(found)
    return served


@pytest.mark.thorough
def test_one_stream_is_resumed_by_any_number_of_ranks(pool):
    rng, cases = random.Random(5), []
    for _ in range(10):
        options = {"stream": "whole", "batch_size": rng.choice([1, 3, 8]), "block": rng.choice([1, 4])}
        options |= {"dispatch": rng.choice(["round_robin", "random"]), "seed": rng.randint(0, 2)}
        cases.append({"samples": rng.randint(100, 200), "place": None, "options": options})
    cases[0]["options"]["num_workers"] = 2
    for case, found in zip(cases, relay(pool, rng, cases, (2, 4, 1, 3)), strict=True):
        assert found == Counter(range(case["samples"])), case


@pytest.mark.thorough
def test_a_stream_per_rank_is_resumed_by_the_same_number_of_ranks(pool):
    rng, cases = random.Random(6), []
    for _ in range(8):
        sizes = [rng.choice([0, 1, 40, 60]), rng.randint(50, 70), 60]
        cases.append({"samples": sizes, "place": None, "options": {"batch_size": rng.choice([2, 5])}})
    cases[0]["options"]["num_workers"] = 2
    for case, found in zip(cases, relay(pool, rng, cases, (3, 3, 3)), strict=True):
        expected = [1000 * rank + each for rank, size in enumerate(case["samples"]) for each in range(size)]
        assert found == Counter(expected), case


def more_ranks(rank, size, place):
    with pytest.raises(UsageError, match="the state is of 2 ranks with a stream each; now there are 3"):
        paceline.Loader(Stream(0, 9), 4).load_state_dict(json.loads(place))


def test_a_stream_per_rank_is_not_resumed_by_more_ranks(pool):
    case = {"samples": [9, 9], "place": None, "options": {"batch_size": 4}, "steps": 1}
    place = pool(2).run(continue_from, [case])[0][0][1]
    pool(3).run(more_ranks, place)


def differ(rank, size):
    """Ranks have different positions, or batch their streams differently."""
    place = paceline.Loader(own(rank, [9, 9]), 2).state_dict()
    later = {**place, "step": 3, "layers": [{**place["layers"][0], "taken": [[[0, 6]], [[0, 6]]]}]}
    loader = paceline.Loader(own(rank, [9, 9]), 2)
    loader.load_state_dict(later if rank == 1 else place)
    with pytest.raises(MismatchError, match="rank 0 has epoch 0, step 0; rank 1 has epoch 0, step 3"):
        iter(loader)
    loader = paceline.Loader(own(rank, [9, 9]), 2 + rank)
    with pytest.raises(MismatchError, match=r"batch_size=2.*rank 1 has .*batch_size=3"):
        iter(loader)


def test_differences_between_ranks_are_named(pool):
    pool(2).run(differ)


def uneven_is_refused(rank, size):
    loader = paceline.Loader(own(rank, [9, 5]), 2, uneven="error")
    with pytest.raises(UnevenData, match="after 3 steps of epoch 0 rank 1 has no batch, and others have"):
        list(loader)


def test_the_rank_that_ran_out_is_named(pool):
    pool(2, "paceline").run(uneven_is_refused)
