"""The advice for a slow network: its formulas, and that a slower one never gets a milder remedy."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.plan.compression_or_local_sgd import LOSS_EFFECTS, advise_network, exchange_nbytes

MEGABIT = 1e6 / 8


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_bytes_are_those_of_the_packets(name, ranks):
    numel = 256 * ranks * 10
    codec = Compression("bf16").codec(rank=0) if name == "none" else Compression(name).codec(rank=0)
    packet = 4 * numel // ranks if name == "none" else codec.nbytes(numel // ranks)
    assert exchange_nbytes(numel, ranks, name) == pytest.approx(2 * (ranks - 1) * packet, rel=0.01)


def option_of(advice, compression, every_step=True):
    return next(
        each for each in advice.options if each.compression == compression and (each.every == 1) == every_step
    )


def test_times_of_the_options():
    """20 M parameters on 4 hosts with 200 Mbit/s: 120 MB a step take 4.8 s, of which half a step is hidden."""
    advice = advise_network(20_000_000, 4, 200 * MEGABIT, 1.0)
    plain = option_of(advice, "none")
    assert plain.nbytes == 120e6
    assert plain.comm_seconds == pytest.approx(4.8)
    assert plain.exposed_seconds == pytest.approx(4.3)
    assert plain.step_seconds == pytest.approx(5.3)
    assert option_of(advice, "bf16").comm_seconds == pytest.approx(2.4)
    assert option_of(advice, "int8").speedup == pytest.approx(5.3 / (0.5 + 4.8 * 65 / 256), rel=1e-3)


@given(
    parameters=st.integers(1, 10**10),
    ranks=st.integers(2, 500),
    step=st.floats(1e-3, 100),
    rate=st.floats(1e3, 1e11),
    share=st.floats(0.01, 1.0),
    layers=st.none() | st.integers(1, 40),
)
def test_every_option_can_be_selected_and_keeps_the_rule(parameters, ranks, step, rate, share, layers):
    advice = advise_network(parameters, ranks, rate, step, share, layers)
    severities = [option.severity for option in advice.options]
    assert severities == sorted(severities)
    for option in advice.options:
        _ = SyncSchedule(option.every, option.fragments, option.delay)
        assert option.fragments <= (layers or math.inf)
        assert option.step_seconds >= max(step, option.comm_seconds) * (1 - 1e-9)
        assert option.step_seconds == pytest.approx(step + option.exposed_seconds)
        if option.every > 1 and not option.delay and option.every < 500:
            assert option.comm_seconds <= share * step * (1 + 1e-9)  # T_comm ≤ share × H × T_step
    milder = advice.options[: advice.options.index(advice.chosen)]
    if advice.enough:
        assert advice.chosen.waiting_share <= share
        assert all(option.waiting_share > share for option in milder)
    else:
        assert advice.chosen.step_seconds == min(option.step_seconds for option in advice.options)
    assert all(sentence.endswith(".") for sentence in advice.sentences)
    assert json.loads(json.dumps(advice.facts()))["enough"] == advice.enough


@given(
    parameters=st.integers(1000, 10**9),
    ranks=st.integers(2, 64),
    step=st.floats(1e-2, 10),
    rate=st.floats(1e4, 1e10),
    slower=st.floats(1.0, 1000.0),
    layers=st.none() | st.integers(1, 12),
)
def test_a_slower_network_never_gets_a_milder_remedy(parameters, ranks, step, rate, slower, layers):
    fast = advise_network(parameters, ranks, rate, step, layers=layers)
    slow = advise_network(parameters, ranks, rate / slower, step, layers=layers)
    assert slow.chosen.severity >= fast.chosen.severity
    assert slow.enough <= fast.enough


@pytest.mark.parametrize(
    ("rate", "flags"),
    [
        (10_000, ""),
        (1000, "--compression bf16"),
        (600, "--compression int8"),
        (300, "--compression int4"),
        (100, "--every 2 --outer average --compression int4 --fragments 2 --delay 1"),
        (10, "--every 15 --outer diloco --compression int4 --fragments 4 --delay 4"),
    ],
)
def test_the_mildest_sufficient_remedy(rate, flags):
    advice = advise_network(20_000_000, 4, rate * MEGABIT, 0.97)
    assert advice.chosen.flags == flags
    assert advice.enough


def test_too_slow_a_network_is_called_so():
    advice = advise_network(20_000_000, 4, 1000, 0.97)
    assert not advice.enough
    assert "the network is too slow" in advice.sentences[1]
    assert advice.further is None


def test_the_next_faster_one_is_named():
    advice = advise_network(20_000_000, 4, 300 * MEGABIT, 0.97, share=0.5)
    assert advice.chosen.compression == "int8"
    assert advice.further is not None
    assert advice.further.speedup > advice.chosen.speedup
    assert advice.sentences[2].startswith(f"Faster still: {advice.further.name}")


def test_one_rank_sends_nothing():
    advice = advise_network(1000, 1, 1.0, 1.0)
    assert advice.chosen.nbytes == 0
    assert advice.chosen.flags == ""


def test_every_compression_has_a_loss_effect_from_every_step_on():
    assert {kind for kind, _ in LOSS_EFFECTS} == {"none", "bf16", "int8", "int4"}
    assert all((kind, 1) in LOSS_EFFECTS for kind, _ in LOSS_EFFECTS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 2, 1.0, 1.0), "parameters=0"),
        ((1, 0, 1.0, 1.0), "ranks=0"),
        ((1, 2, 0.0, 1.0), "bytes_per_second=0.0"),
        ((1, 2, math.inf, 1.0), "bytes_per_second=inf"),
        ((1, 2, 1.0, -1.0), "step_seconds=-1.0"),
        ((1, 2, 1.0, math.nan), "step_seconds=nan"),
        ((1, 2, 1.0, 1.0, 0.0), "share=0.0"),
        ((1, 2, 1.0, 1.0, 1.1), "share=1.1"),
        ((1, 2, 1.0, 1.0, 0.1, -1), "layers=-1"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        advise_network(*values)
