"""Iterable datasets on several ranks: a stream per rank under each policy, and one stream that is divided among all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import paceline
from numbered_streams import Stream, drawn_shares, one_length, own, shown, used
from paceline.errors import UsageError

POLICIES = ["join", "truncate", "drop", "pad", "error"]


# ------------------------------------------------------------------ a stream for every rank


def serve_own(rank, size, cases):
    """Return, per case, the batches of two epochs, or the error."""
    return [list(served(own(rank, sizes), options)) for sizes, options in cases]


def served(dataset, options):
    try:
        loader = paceline.Loader(dataset, **options)
        for _ in range(2):
            yield shown(loader)
    except UsageError as error:
        yield type(error).__name__


def cut(rank, count, batch_size, drop=False):
    """Return the batches of a rank's own stream."""
    numbers = range(1000 * rank, 1000 * rank + count)
    batches = [list(numbers[first : first + batch_size]) for first in range(0, count, batch_size)]
    return [batch for batch in batches if len(batch) == batch_size or not drop]


def expected_of_own(sizes, batch_size, policy):
    """Return what each rank is served, None for a placeholder batch; or "UnevenData"."""
    batches_of_rank = [cut(rank, count, batch_size, policy == "drop") for rank, count in enumerate(sizes)]
    lengths = [len(batches) for batches in batches_of_rank]
    if policy == "error" and len(set(lengths)) > 1:
        return "UnevenData"
    steps = min(lengths) if policy in ("truncate", "drop") else max(lengths)
    found = []
    for batches in batches_of_rank:
        again = batches if policy == "pad" and batches else [None]
        more = [again[step % len(again)] for step in range(max(0, steps - len(batches)))]
        found.append((batches + more)[:steps])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_stream_per_rank_is_served_by_the_policy(pool, size):
    rng = random.Random(size)
    cases = []
    for policy in POLICIES * 8:
        sizes = [rng.choice([0, 1, 5, 8, rng.randint(0, 30)]) for _ in range(size)]
        sizes = [rng.randint(9, 12)] * size if policy == "error" and rng.random() < 0.7 else sizes
        cases.append((sizes, {"batch_size": rng.choice([1, 3, 4, 50]), "uneven": policy}))
    for case, ranks in zip(cases, zip(*pool(size).run(serve_own, cases), strict=True), strict=True):
        expected = expected_of_own(case[0], case[1]["batch_size"], case[1]["uneven"])
        for epoch in zip(*ranks, strict=True):
            if expected == "UnevenData":
                assert set(epoch) == {"UnevenData"}, case
                continue
            for wanted, batches in zip(expected, epoch, strict=True):
                assert [batch if count else None for batch, count in batches] == wanted, case
                assert all(len(batch) == count for batch, count in batches if count)


@pytest.mark.thorough
def test_streams_with_workers_are_served_by_the_policy(pool):
    cases = [
        (sizes, {"batch_size": 4, "uneven": policy, "num_workers": 2, "persistent_workers": policy == "join"})
        for policy, sizes in (
            ("join", [30, 0, 7]),
            ("truncate", [30, 9, 17]),
            ("pad", [30, 3, 8]),
            ("drop", [30, 25, 20]),
        )
    ]
    whole = {"batch_size": 4, "num_workers": 2, "stream": "whole", "block": 3, "shares": [0.5, 0.1, 0.4]}
    results = pool(3).run(serve_own, cases)
    join, truncate, pad, drop = zip(*results, strict=True)
    for epoch in zip(*join, strict=True):
        assert used(epoch) == Counter([*range(30), *range(2000, 2007)])
        assert one_length(epoch) == 8
    for epoch in zip(*truncate, strict=True):
        assert one_length(epoch) == 3, "of 9 samples one worker has 5, in two batches, and the other one 4"
        assert max(used(epoch).values()) == 1
    for epoch in zip(*pad, strict=True):
        assert set(used(epoch)) == {*range(30), *range(1000, 1003), *range(2000, 2008)}
        assert one_length(epoch) == 8
        assert all(count for batches in epoch for _, count in batches)
    for epoch in zip(*drop, strict=True):
        assert all(count == 4 for batches in epoch for _, count in batches)
        assert one_length(epoch) == 4
    for ranks in zip(*pool(3).run(serve_whole, [(97, whole)]), strict=True):
        for epoch in zip(*ranks, strict=True):
            assert used(epoch) == Counter(range(97))


# ------------------------------------------------------------------ one stream, dealt to all


def serve_whole(rank, size, cases):
    return [list(served(Stream(0, samples), options)) for samples, options in cases]


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_stream_is_divided_exactly(pool, size):
    rng = random.Random(size)
    cases = [
        (
            rng.choice([0, 1, rng.randint(2, 120)]),
            {
                "stream": "whole",
                "batch_size": rng.choice([1, 3, 8]),
                "block": rng.choice([1, 1, 2, 7]),
                "dispatch": rng.choice(["round_robin", "random"]),
                "shares": drawn_shares(rng, size),
                "seed": rng.randint(0, 3),
                "uneven": rng.choice(["join", "join", "error"]),
            },
        )
        for _ in range(40)
    ]
    complete = 0
    for (samples, options), ranks in zip(
        cases, zip(*pool(size).run(serve_whole, cases), strict=True), strict=True
    ):
        for epoch in zip(*ranks, strict=True):
            if options["uneven"] == "error" and "UnevenData" in epoch:
                assert set(epoch) == {"UnevenData"}
                continue
            complete += 1
            one_length(epoch)
            assert used(epoch) == Counter(range(samples)), (samples, options)
            starts = [batch[0] for batches in epoch for batch, count in batches if count]
            assert samples == 0 or 0 in starts
    assert complete >= 40


@pytest.mark.parametrize("uneven", ["truncate", "drop", "pad"])
def test_one_stream_under_policies_that_lose_or_repeat(pool, uneven):
    cases = [
        (samples, {"stream": "whole", "batch_size": 4, "block": 5, "uneven": uneven})
        for samples in (7, 40, 63)
    ]
    for (samples, _), ranks in zip(cases, zip(*pool(3).run(serve_whole, cases), strict=True), strict=True):
        for epoch in zip(*ranks, strict=True):
            counts = [
                sum(min(5, samples - block) for block in range(5 * rank, samples, 15)) for rank in range(3)
            ]
            batches = [count // 4 if uneven == "drop" else -(-count // 4) for count in counts]
            steps = max(batches) if uneven == "pad" else min(batches)
            assert one_length(epoch) == steps
            times = used(epoch)
            if uneven == "pad":
                assert set(times) == set(range(samples))
            else:
                assert set(times.values()) <= {1}
                assert sum(times.values()) == sum(min(count, 4 * steps) for count in counts)


def test_shares_of_one_stream_are_kept_throughout(pool):
    options = {"stream": "whole", "batch_size": 5, "shares": [0.25, 0.25, 0.10, 0.40]}
    results = [result[0][0] for result in pool(4, "paceline").run(serve_whole, [(1000, options)])]
    assert [sum(count for _, count in batches) for batches in results] == [250, 250, 100, 400]
    for rank, share in enumerate(options["shares"]):
        own = sorted(used([results[rank]]))
        for number in (10, 99, 500):
            assert abs(sum(each < number for each in own) - share * number) < 1, (
                "within one of its share, always"
            )


def no_share(rank, size):
    for uneven in ("truncate", "drop", "pad"):
        with pytest.raises(
            UsageError, match=rf"the share of rank 1 is 0, and uneven='{uneven}' requires samples"
        ):
            paceline.Loader(Stream(0, 9), 2, stream="whole", shares=[1.0, 0.0], uneven=uneven)


def test_a_share_of_0_of_a_stream_needs_an_exact_policy(pool):
    pool(2).run(no_share)
