"""Token windows: batches are functions of the step, equal for any number of ranks; each held-out window counts once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, window_starts

TOKENS = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_global_batch_does_not_depend_on_the_number_of_ranks(ranks, step):
    whole = TrainingWindows(TOKENS, batch=12, context=8, seed=5).at(step)
    dealt = [
        TrainingWindows(TOKENS, batch=12 // ranks, context=8, rank=rank, size=ranks, seed=5).at(step)
        for rank in range(ranks)
    ]
    assert torch.equal(whole.inputs, torch.cat([batch.inputs for batch in dealt]))
    assert torch.equal(whole.targets, torch.cat([batch.targets for batch in dealt]))
    assert [batch.samples for batch in dealt] == [12 // ranks] * ranks


def test_accumulated_micro_batches_are_the_large_batch():
    large = TrainingWindows(TOKENS, batch=12, context=8).at(7)
    batches = TrainingWindows(TOKENS, batch=4, context=8, windows=12)
    small = [batches.at(7, micro) for micro in range(batches.rounds)]
    assert torch.equal(large.inputs, torch.cat([batch.inputs for batch in small]))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_every_window_of_the_global_batch_is_on_one_rank(windows, batch, ranks, step):
    whole = TrainingWindows(TOKENS, batch=windows, context=8).at(step).inputs
    dealt = [
        TrainingWindows(TOKENS, batch, 8, rank=rank, size=ranks, windows=windows) for rank in range(ranks)
    ]
    found = [each.at(step, micro) for micro in range(dealt[0].rounds) for each in dealt]
    assert torch.equal(whole, torch.cat([each.inputs[: each.samples] for each in found]))
    assert all(len(each.inputs) >= 1 for each in found)


def test_targets_follow_inputs_in_the_text():
    batch = TrainingWindows(TOKENS, batch=50, context=8).at(3)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    text = TOKENS.tobytes()
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        assert bytes([*inputs.tolist(), int(targets[-1])]) in text


def test_steps_and_seeds_differ():
    rows = [
        TrainingWindows(TOKENS, batch=8, context=8, seed=seed).at(step).inputs
        for seed in (0, 1)
        for step in (0, 1)
    ]
    assert len({row.numpy().tobytes() for row in rows}) == 4


def test_windows_reach_both_ends_and_are_spread_evenly():
    starts = window_starts(np.arange(100_000, dtype=np.uint64), seed=3, places=100)
    counts = np.bincount(starts, minlength=100)
    assert counts.size == 100
    assert 850 < counts.min() <= counts.max() < 1150  # 1000 each, standard deviation 31


def test_window_of_all_tokens():
    batch = TrainingWindows(TOKENS[:9], batch=2, context=8).at(0)
    assert batch.inputs.tolist() == [TOKENS[:8].tolist()] * 2
    assert batch.targets.tolist() == [TOKENS[1:9].tolist()] * 2


def test_token_numbers_above_int16():
    batch = TrainingWindows(np.full(20, 65535, np.uint16), batch=1, context=8).at(0)
    assert batch.inputs.unique().tolist() == [65535]


@pytest.mark.parametrize("kind", [TrainingWindows, HeldOutWindows])
def test_too_few_tokens_are_refused(kind):
    with pytest.raises(UsageError, match="8 tokens are too few"):
        kind(TOKENS[:8], batch=1, context=8)


@given(
    length=st.integers(9, 400),
    batch=st.integers(1, 7),
    size=st.integers(1, 5),
    limit=st.integers(0, 30),
)
@settings(deadline=None)
def test_each_held_out_window_counts_on_exactly_one_rank(length, batch, size, limit):
    tokens = np.arange(length).astype(np.uint16)
    windows = (length - 1) // 8
    seen, rounds = [], set()
    for rank in range(size):
        batches = list(HeldOutWindows(tokens, batch, context=8, rank=rank, size=size, limit=limit).rounds())
        rounds.add(len(batches))
        for inputs, targets, samples in batches:
            assert 0 <= samples <= batch
            assert len(inputs) == max(1, samples)
            assert torch.equal(inputs + 1, targets)
            seen += inputs[:samples, 0].tolist()
    assert len(rounds) == 1
    assert len(seen) == len(set(seen)) == min(windows, limit or windows)
    assert all(start % 8 == 0 for start in seen)


def test_held_out_windows_are_the_same_for_any_number_of_ranks():
    starts = {tuple(HeldOutWindows(TOKENS, 4, 8, rank=0, size=size, limit=50).starts()) for size in (1, 2, 3)}
    assert len(starts) == 1
