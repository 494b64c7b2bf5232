"""Number of tokens from which computing hides communication, compared with the times themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.closed_form_cost import closed_form
from paceline.errors import UsageError
from paceline.tools.plan.communication_roofline import ddp_tokens, fsdp_tokens, fsdp_tp_tokens, hsdp_tokens

C, W, PARAMETERS = 3e14, 4e10, 1.3e9
RATES = st.floats(1.0, 1e5)
RANKS = st.integers(2, 4096)


@given(ranks=RANKS, gradient=st.sampled_from([1.0, 2.0, 4.0]))
def test_ddp_at_the_threshold_backward_is_as_long_as_the_ring(ranks, gradient):
    tokens = ddp_tokens(C / W, ranks, gradient).tokens
    ring = closed_form("all-reduce", "ring", ranks).seconds(gradient * PARAMETERS, 0.0, 1 / W)
    assert 4 * PARAMETERS * tokens / C == pytest.approx(ring)


@given(ranks=RANKS, weight=st.sampled_from([2.0, 4.0]), gradient=st.sampled_from([2.0, 4.0]))
def test_fsdp_at_the_threshold_the_worse_of_both_passes_is_as_long_as_its_messages(ranks, weight, gradient):
    tokens = fsdp_tokens(C / W, ranks, weight, gradient).tokens
    gather = closed_form("all-gather", "ring", ranks).seconds(weight * PARAMETERS, 0.0, 1 / W)
    scatter = closed_form("reduce-scatter", "ring", ranks).seconds(gradient * PARAMETERS, 0.0, 1 / W)
    forward, backward = 2 * PARAMETERS * tokens / C, 4 * PARAMETERS * tokens / C
    assert max(gather / forward, (gather + scatter) / backward) == pytest.approx(1.0)


@given(alpha=RATES, ranks=RANKS)
def test_with_two_bytes_each_all_agree(alpha, ranks):
    assert ddp_tokens(alpha, ranks).tokens == pytest.approx(fsdp_tokens(alpha, ranks).tokens)
    assert ddp_tokens(alpha, ranks).tokens == pytest.approx(alpha * (ranks - 1) / ranks)


def test_one_rank_sends_nothing():
    assert ddp_tokens(1000.0, 1).tokens == fsdp_tokens(1000.0, 1).tokens == 0.0


@given(d_ff=st.integers(1000, 100_000), tp=st.integers(1, 16), mx=st.integers(1, 3), my=st.integers(1, 3))
def test_fsdp_and_tp_at_the_threshold_a_block_is_as_long_as_both_kinds_of_messages(d_ff, tp, mx, my):
    d_model, alpha = 16384, C / W
    tokens = fsdp_tp_tokens(alpha, d_ff, tp, mx, my).tokens
    if math.isinf(tokens):
        assert tp * alpha >= d_ff * my * (1 - 1e-12)
        return
    compute = 4 * tokens * d_model * d_ff / (tp * C)
    weights = 4 * d_model * d_ff / (tp * W * mx)
    activations = 4 * tokens * d_model / (W * my)
    assert compute == pytest.approx(weights + activations)
    overlapped = fsdp_tp_tokens(alpha, d_ff, tp, mx, my, overlap=True).tokens
    assert overlapped <= tokens
    assert 4 * overlapped * d_model * d_ff / (tp * C) == pytest.approx(weights)


def test_accumulation_counts_for_ddp_and_not_for_fsdp():
    assert ddp_tokens(1000.0, 8).per == "optimizer step"
    assert fsdp_tokens(1000.0, 8).per == "micro-batch"


def test_hybrid_sharding_hides_slow_links_behind_a_shard():
    inside, between = hsdp_tokens(2200.0, 19800.0, shard_ranks=8, replicas=4)
    assert inside == fsdp_tokens(2200.0, 8)
    assert between.tokens == pytest.approx(19800 / 8 * 3 / 4)
    assert between.per == "optimizer step"


@pytest.mark.parametrize("bad", [(0.0, 2), (-1.0, 2), (math.inf, 2), (math.nan, 2), (1.0, 0)])
def test_invalid_rates_and_ranks_are_refused(bad):
    with pytest.raises(UsageError):
        ddp_tokens(*bad)
    with pytest.raises(UsageError):
        fsdp_tokens(*bad)
