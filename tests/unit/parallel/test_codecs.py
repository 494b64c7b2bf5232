"""Codecs: decoded values, errors, packet sizes, and non-finite values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.parallel.compression.blockwise import BlockwiseCodec
from paceline.parallel.compression.codecs import Codec, HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.stochastic_rounding import RoundingBits

NEAREST = {
    "fp32": RawCodec(),
    "bf16": HalfCodec("bf16"),
    "fp16": HalfCodec("fp16"),
    "int8": IntCodec(8),
    "int4": IntCodec(4),
    "int8 in blocks of 6": IntCodec(8, block=6),
    "int4 in blocks of 2": IntCodec(4, block=2),
}
ROUNDED_AT_RANDOM = {
    "bf16": lambda seed, rank: HalfCodec("bf16", "stochastic", seed, rank),
    "int8": lambda seed, rank: IntCodec(8, rounding="stochastic", seed=seed, rank=rank),
    "int4": lambda seed, rank: IntCodec(4, rounding="stochastic", seed=seed, rank=rank),
}
LARGEST = torch.finfo(torch.float32).max
BAD = [math.nan, math.inf, -math.inf]
EVERY = [*NEAREST.values(), *(make(0, 0) for make in ROUNDED_AT_RANDOM.values())]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def words(codec: Codec) -> str:
    layout = f"-{codec.layout.block}" if isinstance(codec, BlockwiseCodec) else ""
    return f"{codec.name}{layout}{'-dithered' if getattr(codec, 'rounding_bits', None) else ''}"


def packed(codec: Codec, values: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    """Return a packet, made where other bytes were before, 16 bytes into its memory."""
    memory = torch.full((codec.nbytes(len(values)) + 16,), 0xA5, dtype=torch.uint8, device=values.device)
    codec.compress(values, memory[16:], error)
    return memory[16:]


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    into = torch.full_like(values, 7.0)
    codec.decompress(packed(codec, values), into)
    return into


def bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return the largest error that each number may have, by the codec's format."""
    size = values.abs().double()
    if isinstance(codec, RawCodec):
        return torch.zeros_like(size)
    if codec.name == "bf16":
        return size * 2.0**-8 + 2.0**-134
    block = codec.layout.block
    rows = torch.nn.functional.pad(size, (0, -len(size) % block)).view(-1, block)
    largest = rows.amax(1, keepdim=True).expand_as(rows).reshape(-1)[: len(size)]
    if codec.name == "fp16":
        return torch.maximum(size * 2.0**-11, largest * 2.0**-39) + 2.0**-149
    level = largest / (127 if codec.bits == 8 else 7)
    return level * (0.5 + 1e-5) + 2.0**-121


NUMBERS = st.one_of(
    st.just(0.0),
    st.floats(-1.0, 1.0, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-(2.0**-123), 2.0**-123, width=32),
    st.sampled_from([LARGEST / 2, -LARGEST / 2, 1.4e-45, -1.2e-38, 1.2e-38]),
)


@pytest.mark.sweep
@pytest.mark.parametrize("codec", NEAREST.values(), ids=NEAREST)
@settings(max_examples=150, deadline=None)
@given(values=st.lists(NUMBERS, max_size=40), times=st.integers(1, 60))
def test_decoded_values_are_within_the_error_bound_of_the_format(codec, values, times):
    given_ = torch.tensor(values * times, dtype=torch.float32)
    off = (there_and_back(codec, given_).double() - given_.double()).abs()
    assert (off <= bound(codec, given_)).all()


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", EVERY, ids=words)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 255, 256, 257, 1024, 65_535, 65_537, 600_001])
def test_decoded_values_plus_the_error_equal_the_input(codec, numel, device):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    kept, error = values.clone(), torch.full_like(values, 7.0)
    packet = packed(codec, values, error)
    into, onto = torch.full_like(values, 7.0), torch.ones_like(values)
    codec.decompress(packet, into)
    codec.add(packet, onto, weight=0.5)
    assert torch.equal(values, kept)
    assert torch.equal(error, values - into)
    assert torch.allclose(onto, 1 + 0.5 * into, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("codec", NEAREST.values(), ids=NEAREST)
@pytest.mark.parametrize("numel", [1, 257, 70_001])
def test_the_error_may_go_where_the_values_are(codec, numel):
    values, beside = torch.randn(numel), torch.empty(numel)
    packet = packed(codec, values, beside)
    assert torch.equal(packed(codec, values, values), packet)
    assert torch.equal(values, beside)


@pytest.mark.parametrize("codec", NEAREST.values(), ids=NEAREST)
def test_equal_numbers_make_equal_bytes_in_a_used_buffer(codec):
    values = torch.randn(777)
    packet = torch.zeros(codec.nbytes(777), dtype=torch.uint8)
    codec.compress(values, packet)
    assert torch.equal(packed(codec, values), packet)


def test_float64_stays_float64():
    codec, values = RawCodec(torch.float64), torch.randn(9, dtype=torch.float64)
    assert (codec.name, codec.nbytes(9)) == ("fp64", 80)
    assert torch.equal(there_and_back(codec, values), values)


def test_bf16_rounds_as_torch_does():
    values = torch.randn(10_000)
    assert torch.equal(there_and_back(HalfCodec("bf16"), values), values.bfloat16().float())


def test_fp16_loses_nothing_to_the_size_of_a_block():
    """Where plain float16 overflows, or keeps no bits."""
    values = torch.randn(1024).half().float()
    for size in (2.0**100, 2.0**-100):
        assert torch.equal(there_and_back(HalfCodec("fp16"), values * size), values * size)


def test_numbers_on_levels_decode_exactly_up_to_rounding():
    for codec, most in ((IntCodec(8), 127), (IntCodec(4), 7)):
        values = torch.arange(-most, most + 1).float().repeat(3) * 0.125
        assert torch.allclose(there_and_back(codec, values), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", [IntCodec(8), IntCodec(4), HalfCodec("fp16")], ids=lambda codec: codec.name)
def test_the_largest_numbers_do_not_overflow(codec):
    values = torch.full((300,), LARGEST)
    values[:20] *= -1
    if codec.name == "fp16":
        values *= 1 - 2.0**-11
    assert there_and_back(codec, values).isfinite().all()


@pytest.mark.parametrize("codec", EVERY, ids=words)
def test_zeros_decode_as_zeros(codec):
    assert torch.equal(there_and_back(codec, torch.zeros(1000)), torch.zeros(1000))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("codec", EVERY[1:], ids=words)
def test_a_block_with_non_finite_values_decodes_as_such_and_leaves_no_error(codec, bad, device):
    values = torch.randn(3001, device=device)
    block = codec.layout.block
    for at in (0, 1500, 3000):
        given_ = values.clone()
        given_[at] = bad
        error = torch.empty_like(given_)
        into = torch.empty_like(given_)
        packet = packed(codec, given_, error)
        codec.decompress(packet, into)
        concerned = torch.zeros_like(given_, dtype=torch.bool)
        concerned[at // block * block : (at // block + 1) * block] = True
        assert torch.equal(~into.isfinite(), concerned)
        assert (error[concerned] == 0).all()
        assert torch.equal(error[~concerned], (given_ - into)[~concerned])
        onto = torch.zeros_like(given_)
        codec.add(packet, onto)
        assert torch.equal(~onto.isfinite(), concerned)


@pytest.mark.parametrize("pattern", [-1, 0x7FFF_FFFF, 0x7F80_0001, -0x7F_FFFF])
def test_any_nan_stays_one_in_dithered_bf16(pattern):
    values = torch.randn(100)
    values.view(torch.int32)[50] = pattern
    assert values.isnan().sum() == 1
    for seed in range(20):
        into = there_and_back(HalfCodec("bf16", "stochastic", seed), values)
        assert (~into.isfinite()).nonzero().flatten().tolist() == [50]


@pytest.mark.thorough
@pytest.mark.parametrize("make", ROUNDED_AT_RANDOM.values(), ids=ROUNDED_AT_RANDOM)
def test_dithered_numbers_are_right_on_average(make):
    codec, rounds = make(3, 1), 4000
    values = torch.randn(256, generator=torch.Generator().manual_seed(5))
    total = torch.zeros(256, dtype=torch.float64)
    squares = torch.zeros(256, dtype=torch.float64)
    for _ in range(rounds):
        into = there_and_back(codec, values).double()
        total += into
        squares += (into - values.double()).square()
    off = total / rounds - values.double()
    spread = (squares / rounds).sqrt()  # 0 where a number is a level
    assert (off.abs() <= 5 * spread / math.sqrt(rounds) + 3e-5 * values.abs().max()).all()
    nearest = there_and_back(NEAREST[codec.name], values)
    assert off.norm() < 0.1 * (nearest - values).norm()


@pytest.mark.parametrize("make", ROUNDED_AT_RANDOM.values(), ids=ROUNDED_AT_RANDOM)
def test_random_bits_depend_on_seed_and_rank_and_continue_from_a_state(make):
    values = torch.randn(3000)
    codec = make(1, 2)
    first = packed(codec, values)
    state = codec.state_dict()
    second = packed(codec, values)
    assert torch.equal(packed(make(1, 2), values), first)
    assert not torch.equal(second, first)
    assert not torch.equal(packed(make(1, 3), values), first)
    assert not torch.equal(packed(make(2, 2), values), first)
    other = make(7, 7)
    other.load_state_dict(state)
    assert torch.equal(packed(other, values), second)


def test_a_state_before_the_first_bits_is_the_start_of_a_seed():
    cpu, fresh, used = torch.device("cpu"), RoundingBits(4, 1), RoundingBits(9, 9)
    used.bits(10, cpu)
    used.load_state_dict(fresh.state_dict())
    assert torch.equal(used.bits(50, cpu), fresh.bits(50, cpu))


def test_a_state_that_was_loaded_and_not_used_is_kept():
    cpu, first, second, third = torch.device("cpu"), RoundingBits(4, 1), RoundingBits(), RoundingBits()
    first.bits(10, cpu)
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    assert torch.equal(third.bits(50, cpu), first.bits(50, cpu))


def test_random_bits_are_even():
    bits = RoundingBits(0, 0).bits(400_000, torch.device("cpu"))
    for bit in range(16):
        assert abs(((bits >> bit) & 1).double().mean() - 0.5) < 0.005
    assert bits.view(-1, 4).double().mean(0).abs().max() < 250


@pytest.mark.parametrize(
    ("codec", "least"),
    [
        (RawCodec(), 1.0),
        (HalfCodec("bf16"), 2.0),
        (HalfCodec("fp16"), 1.99),
        (IntCodec(8), 3.93),
        (IntCodec(4), 7.75),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_packets_have_the_declared_size(codec, least):
    assert least <= (4 << 20) / codec.nbytes(1 << 20) <= least * 1.01
    for numel in (0, 1, 100, 1000, 65_537):
        assert codec.nbytes(numel) % 16 == 0
        assert len(packed(codec, torch.randn(numel))) == codec.nbytes(numel)


def test_codecs_with_the_same_name_are_compatible():
    assert [codec.name for codec in (IntCodec(8), IntCodec(4, rounding="stochastic"))] == ["int8", "int4"]
    assert IntCodec(8, block=64).name == "int8 in blocks of 64"


@pytest.mark.parametrize(
    "make",
    [
        lambda: RawCodec(torch.float16),
        lambda: HalfCodec("fp8"),
        lambda: HalfCodec("fp16", "stochastic"),
        lambda: IntCodec(2),
        lambda: IntCodec(8, block=0),
        lambda: IntCodec(4, block=5),
        lambda: IntCodec(8, rounding="up"),
    ],
)
def test_an_invalid_codec_is_refused(make):
    with pytest.raises(UsageError):
        make()
