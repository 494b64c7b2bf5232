"""TopK: selected values, their positions after decoding, and the residual."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.parallel.compression.topk import TopKCodec, largest_indices

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
BAD = [math.nan, math.inf, -math.inf]


def by_sorting(values: torch.Tensor, k: int) -> list[int]:
    """The slow oracle: non-finite values first, then by size, then by index."""
    size = [math.inf if math.isnan(value) else abs(value) for value in values.tolist()]
    return sorted(sorted(range(len(size)), key=lambda at: (-size[at], at))[:k])


def packed(codec: TopKCodec, values: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    memory = torch.full((codec.nbytes(len(values)) + 16,), 0xA5, dtype=torch.uint8, device=values.device)
    codec.compress(values, memory[16:], error)
    return memory[16:]


def decoded(codec: TopKCodec, packet: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    into = torch.full_like(like, 7.0)
    codec.decompress(packet, into)
    return into


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(-3, 3).map(float), st.just(-0.0)),
        min_size=1,
        max_size=80,
    ),
    keep=st.floats(0.001, 1.0),
)
def test_the_largest_are_sent_and_of_equal_ones_the_first(values, keep):
    given_, codec = torch.tensor(values), TopKCodec(keep)
    error = torch.empty_like(given_)
    packet = packed(codec, given_, error)
    expected = by_sorting(given_, codec.count(len(values)))
    assert codec.entries(packet, len(values))[0].tolist() == expected
    into = decoded(codec, packet, given_)
    others = torch.ones(len(values), dtype=torch.bool)
    others[expected] = False
    assert (into[others] == 0).all()
    assert torch.equal(error, given_ - into)
    size = given_.abs().double()
    bound = torch.maximum(size * 2.0**-11, size.max() * 2.0**-39) + 2.0**-149
    assert ((into.double() - given_.double()).abs() <= bound)[expected].all()


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [1e-7, 0.0001, 0.01, 0.3, 1.0])
def test_a_sampled_threshold_finds_the_same_numbers(keep, device):
    """More numbers than a sample has: also where many are equal, and where the sample misleads."""
    numel = 700_000
    plain = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    steps = (plain * 4).round() / 4
    sparse = torch.where(plain > 3, plain, 0.0)
    misleading = plain.clone()
    misleading[:: numel // (1 << 17)] *= 100
    for values in (plain, steps, sparse, misleading, torch.zeros(numel), torch.ones(numel)):
        k = TopKCodec(keep).count(numel)
        order = values.abs().sort(descending=True, stable=True).indices[:k]
        assert torch.equal(largest_indices(values.to(device), k).cpu(), order.sort().values)


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_beyond_16_bits(device):
    """Several times over, right at the border, and at both ends."""
    numel = 65_535 * 6 + 11
    for at in (
        [0],
        [numel - 1],
        [65_534],
        [65_535],
        [65_536],
        [0, 65_535],
        [0, 65_536],
        [0, 131_070],
        [0, 131_071],
        [3, 4, 4 + 65_535 * 2, 5 + 65_535 * 4, numel - 1],
        [numel - 2, numel - 1],
    ):
        values = torch.zeros(numel, device=device)
        values[at] = torch.arange(1.0, len(at) + 1, device=device)
        codec = TopKCodec(len(at) / numel)
        assert codec.count(numel) == len(at)
        packet = packed(codec, values)
        assert codec.entries(packet, numel)[0].tolist() == at
        assert torch.equal(decoded(codec, packet, values), values)


@pytest.mark.parametrize("device", DEVICES)
def test_packets_add_up(device):
    codec, onto = TopKCodec(0.1), torch.ones(5000, device=device)
    values = torch.randn(5000, device=device)
    packet = packed(codec, values)
    codec.add(packet, onto, weight=-0.5)
    assert torch.allclose(onto, 1 - 0.5 * decoded(codec, packet, values))


def test_equal_numbers_make_equal_bytes_and_a_packet_has_the_declared_size():
    for numel in (0, 1, 3, 1000, 600_000):
        values, codec = torch.randn(numel), TopKCodec(0.01)
        packet = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
        codec.compress(values, packet)
        assert torch.equal(packed(codec, values), packet)
        assert codec.nbytes(numel) % 16 == 0
        assert torch.equal(packed(codec, values, values.clone()), packet)
        assert decoded(codec, packet, values).count_nonzero() == codec.count(numel)
    assert TopKCodec(0.01).nbytes(10_000_000) < 10_000_000 * 0.041


def test_the_error_may_go_where_the_values_are():
    values, beside, codec = torch.randn(3000), torch.empty(3000), TopKCodec(0.05)
    packet = packed(codec, values, beside)
    assert torch.equal(packed(codec, values, values), packet)
    assert torch.equal(values, beside)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("numel", [1000, 600_000])
def test_non_finite_values_are_transmitted_and_leave_no_error(bad, numel, device):
    codec, values = TopKCodec(0.01), torch.randn(numel, device=device)
    at = [0, 500, numel - 1]
    values[at] = bad
    error = torch.empty_like(values)
    packet = packed(codec, values, error)
    into = decoded(codec, packet, values)
    assert (~into.isfinite()).nonzero().view(-1).tolist() == at
    assert (error[at] == 0).all()
    rest = values.isfinite()
    assert torch.equal(error[rest], (values - into)[rest])


def test_more_non_finite_values_than_are_sent():
    codec, values = TopKCodec(0.01), torch.randn(1000)
    values[100:200] = math.nan
    error = torch.empty_like(values)
    packet = packed(codec, values, error)
    assert codec.entries(packet, 1000)[0].tolist() == list(range(100, 110))
    assert decoded(codec, packet, values)[100:110].isnan().all()
    assert error.isfinite().all()
    assert torch.equal(error[:100], values[:100])


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, math.nan])
def test_an_invalid_fraction_is_refused(keep):
    with pytest.raises(UsageError, match="keep"):
        TopKCodec(keep)


def test_names_contain_the_kept_share():
    assert [TopKCodec(keep).name for keep in (1, 0.1, 0.01, 0.001)] == [
        "top-100%",
        "top-10%",
        "top-1%",
        "top-0.1%",
    ]
