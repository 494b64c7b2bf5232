"""Parts of the loader: batches that carry their number of samples, checksums of samples, measured shares."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from paceline.data.batch_sample_count import with_samples
from paceline.data.measured_shares import (
    MAX_MULTIPLE,
    MIN_MULTIPLE,
    SMOOTHING,
    MeasuredShares,
    blend_speeds,
    largest_share_change,
    shares_from_speeds,
)
from paceline.data.sampling.rank_shares import MAX_PARTS, RankShares
from paceline.errors import UsageError

Pair = namedtuple("Pair", ["x", "y"])
Counted = namedtuple("Counted", ["x", "samples"])


class Plain:
    """Takes attributes, as the batches of many libraries do."""

    def __init__(self, x):
        self.x = x


@dataclass(frozen=True)
class Frozen:
    """Takes no attributes."""

    x: int


class Mapped(dict):
    """A user-defined mapping."""


# ------------------------------------------------------------------ batches keep type and contents


@pytest.mark.parametrize(
    "batch",
    [
        (1, 2),
        [1, 2],
        {"x": 1, "y": 2},
        Pair(1, 2),
        OrderedDict(x=1),
        Mapped(x=1),
        pack_sequence([torch.ones(2)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_keeps_its_type_and_contents(batch):
    carried = with_samples(batch, 7)
    assert carried.samples == 7
    assert isinstance(carried, type(batch))
    assert carried == batch
    assert list(carried) == list(batch)
    assert len(carried) == len(batch)
    assert type(carried).__name__ == type(batch).__name__


def test_tuples_unpack_and_dicts_are_read_as_before():
    x, y = with_samples((1, 2), 3)
    assert (x, y) == (1, 2)
    assert with_samples([1, 2], 3) + [3] == [1, 2, 3]
    named = with_samples({"x": 1}, 3)
    assert named["x"] == 1
    assert {**named} == {"x": 1}
    pair = with_samples(Pair(1, 2), 3)
    assert (pair.x, pair.y, pair._asdict()) == (1, 2, {"x": 1, "y": 2})
    assert pair._replace(x=5) == Pair(5, 2)


def test_a_packed_sequence_still_packs():
    packed = with_samples(pack_sequence([torch.ones(3), torch.ones(2)]), 2)
    assert isinstance(packed, PackedSequence)
    assert packed.to(torch.float64).data.dtype == torch.float64
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(packed)
    assert (padded.shape, lengths.tolist()) == ((3, 2), [3, 2])


def test_tensors_and_objects_take_the_attribute_themselves():
    tensor, thing = torch.arange(3), Plain(1)
    assert with_samples(tensor, 3) is tensor
    assert with_samples(thing, 3) is thing
    assert (tensor.samples, thing.samples) == (3, 3)


@pytest.mark.parametrize(
    "batch", [(1, 2), [1, 2], {"x": 1}, Pair(1, 2), Plain(1), torch.ones(2)], ids=lambda b: type(b).__name__
)
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_copies_and_pickles_keep_the_attribute(batch, way):
    carried = with_samples(batch, 5, ends_step=False)
    again = way(carried)
    assert (again.samples, again.ends_step) == (5, False)
    assert type(again).__name__ == type(batch).__name__
    if not isinstance(batch, Plain):
        assert (
            all(map(torch.equal, [again], [carried])) if isinstance(batch, torch.Tensor) else again == carried
        )


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2), [torch.ones(3)]),
        [torch.ones(2), 3],
        {"x": torch.ones(2), "y": torch.ones(3)},
        Pair(torch.ones(2), torch.ones(3)),
        pack_sequence([torch.ones(3), torch.ones(2)]),
        torch.ones(2),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_pytrees_keep_the_attribute(batch):
    carried = with_samples(batch, 5)
    assert len(pytree.tree_leaves(carried)) == len(pytree.tree_leaves(batch))
    moved = pytree.tree_map(lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) else leaf, carried)
    assert type(moved).__name__ == type(batch).__name__
    leaves = [leaf for leaf in pytree.tree_leaves(moved) if isinstance(leaf, torch.Tensor)]
    assert leaves
    assert all(leaf.dtype == torch.float64 for leaf in leaves)
    if type(batch) in (tuple, list, dict):
        assert (moved.samples, moved.ends_step) == (5, True)


@pytest.mark.parametrize("batch", [np.ones(3), 3, "text", Frozen(1), torch.ones(2, 2).max(0), None, b"bytes"])
def test_a_batch_without_attributes_is_refused_by_type(batch):
    with pytest.raises(UsageError, match=rf"type {type(batch).__qualname__} can't carry .samples"):
        with_samples(batch, 3)


# ------------------------------------------------------------------ batches with a number of their own


def test_a_batchs_own_number_is_kept_except_in_placeholders():
    tokens = Plain(1)
    tokens.samples = 1024
    assert with_samples(tokens, 8).samples == 1024
    placeholder = with_samples(tokens, 0)
    assert (placeholder.samples, placeholder.x) == (0, 1)
    assert tokens.samples == 1024, "the placeholder is another object: this one may be served again"
    counted = Counted(1, 1024)
    assert with_samples(counted, 8).samples == 1024
    assert with_samples(counted, 0) == Counted(1, 0)


@pytest.mark.parametrize("number", [3, 2.5, np.int64(3), np.float32(3), torch.tensor(3), True])
def test_a_batchs_own_number_may_have_any_numeric_type(number):
    assert with_samples(Counted(1, number), 8).samples is number


@pytest.mark.parametrize("data", [torch.ones(3), [1, 2], "three", None])
def test_an_attribute_samples_that_is_no_number_is_refused(data):
    for samples in (8, 0):
        with pytest.raises(
            UsageError, match=rf"type Counted has its own .samples, .* not a number but {type(data).__name__}"
        ):
            with_samples(Counted(1, data), samples)


@pytest.mark.parametrize("batch", [torch.ones(2), Plain(1)], ids=lambda batch: type(batch).__name__)
def test_a_batch_that_is_served_again_is_counted_again(batch):
    """A collate function may return what the dataset keeps: ``lambda samples: samples[0]``."""
    first = with_samples(batch, 4)
    placeholder = with_samples(batch, 0)
    assert (first.samples, placeholder.samples) == (4, 0)
    assert with_samples(batch, 3).samples == 3
    assert type(placeholder) is type(batch)


@pytest.mark.parametrize(
    "batch",
    [(1, 2), [1, 2], {"x": 1}, Pair(1, 2), Counted(1, 9), Plain(1), torch.ones(2)],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_ends_a_step_unless_it_is_said_otherwise(batch):
    assert with_samples(batch, 5).ends_step is True
    for ends in (False, True):
        for samples in (5, 0):
            assert with_samples(batch, samples, ends).ends_step is ends
    assert with_samples(batch, 5).ends_step is True, "also after it was served with virtual ranks"


def test_a_placeholder_shares_the_tensors_memory():
    tensor = torch.arange(4.0)
    placeholder = with_samples(tensor, 0)
    assert torch.equal(placeholder, tensor)
    assert placeholder.data_ptr() == tensor.data_ptr()


# ------------------------------------------------------------------ the first sample of a stream

CHECKSUMS = """
import torch
from paceline.data.iterable_sharding import sample_checksum
text = torch.arange(6.0), {"x": torch.ones(2, 3, dtype=torch.bfloat16), "name": "a"}
print([sample_checksum(each) for each in (torch.arange(6.0), text, "text", [1, 2], lambda: 0)])
"""


@pytest.mark.thorough
def test_checksums_differ_between_samples_and_not_between_processes():
    command = [sys.executable, "-c", CHECKSUMS]
    results = [eval(subprocess.check_output(command, text=True, timeout=120)) for _ in range(2)]
    assert results[0] == results[1]
    assert len(set(results[0])) == 5
    assert results[0][-1] == 0, "a function has no checksum"


# ------------------------------------------------------------------ speeds

speeds_of_ranks = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9)


def test_a_rate_is_the_median_over_steps():
    measured = MeasuredShares()
    for samples, seconds in ((10, 1.0), (10, 1.25), (10, 50.0), (0, 1.0), (5, 0.0), (5, -1.0)):
        measured.record(samples, seconds)
    assert measured.take_rate() == 8.0
    assert measured.take_rate() == 0.0, "steps count once"


@given(speeds_of_ranks, st.floats(1e-3, 1e6))
def test_new_speeds_are_smoothed(before, new):
    after = blend_speeds(before, [new] * len(before))
    assert after == pytest.approx([old + SMOOTHING * (new - old) for old in before])
    assert blend_speeds(None, before) == before
    assert blend_speeds(before, [0.0] * len(before)) == before
    assert blend_speeds([0.0] * len(before), before) == before


@given(speeds_of_ranks)
def test_measured_shares_are_within_bounds_and_follow_speeds(speeds):
    ranks, off = len(speeds), 1 / MAX_PARTS
    shares = list(shares_from_speeds(speeds))
    assert sum(shares) == pytest.approx(1)
    assert all(MIN_MULTIPLE / ranks - off <= share <= MAX_MULTIPLE / ranks + off for share in shares)
    pairs = list(zip(shares, speeds, strict=True))
    for (share, speed), (other_share, other_speed) in itertools.permutations(pairs, 2):
        if speed <= other_speed:
            assert share <= other_share + off
        if all(
            MIN_MULTIPLE / ranks + off < each < MAX_MULTIPLE / ranks - off for each in (share, other_share)
        ):
            assert abs(share * other_speed - other_share * speed) <= off * (speed + other_speed)


@given(st.lists(st.floats(100, 180), min_size=1, max_size=9))
def test_shares_are_proportional_to_similar_speeds(speeds):
    for share, speed in zip(shares_from_speeds(speeds), speeds, strict=True):
        assert share == pytest.approx(speed / sum(speeds), abs=1 / MAX_PARTS)


def test_measured_shares_of_known_cases():
    assert list(shares_from_speeds([30.0, 10.0])) == [0.75, 0.25]
    assert list(shares_from_speeds([1e6, 1.0])) == pytest.approx([1 - 1 / 16, 1 / 16], abs=1e-4)
    assert list(shares_from_speeds([1e6, 1.0, 1.0, 1.0])) == pytest.approx(
        [0.5, 1 / 6, 1 / 6, 1 / 6], abs=1e-4
    )
    assert shares_from_speeds([3.0, 0.0]) == RankShares.equal(2), "while one is not known, all are equal"
    assert list(shares_from_speeds([5.0])) == [1.0]


parts = st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any)


@given(parts, st.data())
def test_the_largest_change_is_relative_to_the_previous_share(before, data):
    after = data.draw(st.lists(st.integers(0, 50), min_size=len(before), max_size=len(before)).filter(any))
    left, right = RankShares(tuple(before)), RankShares(tuple(after))
    change = largest_share_change(left, right)
    assert largest_share_change(left, left) == 0
    assert (change == 0) == (list(left) == pytest.approx(list(right)))
    for old, new in zip(left, right, strict=True):
        assert abs(new - old) <= change * old + 1e-12 or (old == 0 and change >= 1)


def test_the_largest_change_of_known_cases():
    halves, uneven = RankShares.of([0.5, 0.5], 2), RankShares.of([0.25, 0.75], 2)
    assert largest_share_change(halves, uneven) == 0.5
    assert largest_share_change(uneven, halves) == 1.0
    assert largest_share_change(RankShares((1, 0)), halves) == 1.0
