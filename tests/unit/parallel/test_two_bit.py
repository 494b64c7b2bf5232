"""Two bits per number: values, places, sizes, hostile packets, and convergence with error feedback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DamagedEnvelope, UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.two_bit import TwoBitCodec

DENSE, SPARSE = TwoBitCodec(), TwoBitCodec(sparse=True)
BOTH = pytest.mark.parametrize("codec", [DENSE, SPARSE], ids=lambda codec: codec.name)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
SIZES = [0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 4160, 4161, 12_288, 70_001]


def randn(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def packed(codec: TwoBitCodec, values: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    """Return a packet, made where other bytes were before, 16 bytes into its memory."""
    memory = torch.full((codec.nbytes(len(values)) + 16,), 0xA5, dtype=torch.uint8, device=values.device)
    codec.compress(values, memory[16:], error)
    return memory[16:]


def decoded(codec: TwoBitCodec, packet: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    into = torch.full_like(like, 7.0)
    codec.decompress(packet, into)
    return into


@BOTH
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", SIZES)
def test_decoded_values_plus_the_error_equal_the_input(codec, numel, device):
    values = randn(numel, numel).to(device)
    kept, error, onto = values.clone(), torch.full_like(values, 7.0), torch.ones_like(values)
    packet = packed(codec, values, error)
    into = decoded(codec, packet, values)
    codec.add(packet, onto, weight=0.5)
    assert torch.equal(values, kept)
    assert torch.equal(error, values - into)
    assert torch.allclose(onto, 1 + 0.5 * into, rtol=1e-6, atol=1e-6)
    assert codec.nbytes(numel) % 16 == 0
    assert torch.equal(packed(codec, values, values), packet), "the error may go where the values are"
    assert torch.equal(values, error)


def test_a_sign_and_two_magnitudes_are_sent_exactly():
    values = torch.tensor([0.5, -0.5, 2.0, -2.0]).repeat(100)
    assert torch.equal(decoded(DENSE, packed(DENSE, values), values), values)
    for numel in (1, 4096):
        same = torch.full((numel,), -3.0)
        assert torch.equal(decoded(DENSE, packed(DENSE, same), same), same)
    assert torch.equal(decoded(DENSE, packed(DENSE, torch.zeros(300)), torch.zeros(300)), torch.zeros(300))


def test_the_error_on_normal_numbers_is_that_of_the_best_two_bits():
    """0.1175 is that of the best quantiser of four levels (Max, IRE Trans. Inf. Theory 1960, table I)."""
    values = randn(256_000)
    error = torch.empty_like(values)
    packed(DENSE, values, error)
    assert 0.1 < float(error.square().mean()) < 0.1175 * 1.02


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70), st.integers(1, 80))
def test_the_error_is_never_larger_than_the_numbers(values, times):
    """Up to the cut to bfloat16: otherwise error feedback would not converge."""
    given_ = torch.tensor(values * times)
    for codec in (DENSE, SPARSE):
        error = torch.empty_like(given_)
        packed(codec, given_, error)
        assert float(error.double().norm()) <= float(given_.double().norm()) * (1 + 1e-6)


@pytest.mark.parametrize("numel", [4096, 4097, 5000, 8192])
def test_the_largest_of_every_block_are_sent(numel):
    values = randn(numel, 3)
    into = decoded(SPARSE, packed(SPARSE, values), values)
    for begin in range(0, numel, 4096):
        block = values[begin : begin + 4096].abs()
        count = math.ceil(len(block) / 64)
        expected = block.topk(count).indices.sort().values
        assert into[begin : begin + 4096].nonzero().view(-1).tolist() == expected.tolist()
        assert torch.equal(
            into[begin : begin + 4096][expected].sign(), values[begin : begin + 4096][expected].sign()
        )


def test_packets_are_as_small_as_stated():
    assert 4 / (DENSE.nbytes(1 << 24) / (1 << 24)) == pytest.approx(15.06, rel=1e-3)
    assert 4 / (SPARSE.nbytes(1 << 24) / (1 << 24)) == pytest.approx(141.2, rel=1e-3)


@BOTH
def test_the_largest_numbers_do_not_overflow(codec):
    values = torch.full((5000,), torch.finfo(torch.float32).max)
    values[:20] *= -1
    assert decoded(codec, packed(codec, values), values).isfinite().all()
    tiny = torch.full((5000,), 2.0**-140)
    assert (decoded(codec, packed(codec, tiny), tiny).abs() <= 2.0**-139).all()


@BOTH
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4500, 9000])
def test_a_block_with_a_non_finite_number_decodes_as_such_and_leaves_no_error(codec, bad, at, device):
    values = randn(9001).to(device)
    values[at] = bad
    error = torch.empty_like(values)
    into = decoded(codec, packed(codec, values, error), values)
    assert not math.isfinite(into[at])
    assert error.isfinite().all()
    length = 4096 if codec.sparse else 256
    elsewhere = torch.ones(9001, dtype=torch.bool)
    elsewhere[at // length * length : (at // length + 1) * length] = False
    assert into[elsewhere.to(device)].isfinite().all()
    assert torch.equal(error[elsewhere.to(device)], (values - into)[elsewhere.to(device)])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 100, 4097, 4160, 8200]), st.data())
def test_any_bytes_decode_or_are_refused_and_nothing_is_written_outside(numel, data):
    for codec in (DENSE, SPARSE):
        size = codec.nbytes(numel)
        drawn = (
            data.draw(st.binary(min_size=size, max_size=size))
            if size < 400
            else data.draw(st.randoms(use_true_random=False)).randbytes(size)
        )
        memory = torch.full((numel + 8192,), 7.0)
        try:
            codec.decompress(
                torch.frombuffer(bytearray(drawn), dtype=torch.uint8), memory[4096 : 4096 + numel]
            )
        except DamagedEnvelope:
            assert codec.sparse
        assert (memory[:4096] == 7).all()
        assert (memory[4096 + numel :] == 7).all()


@pytest.mark.parametrize("numel", [4096, 4096 + 100])
def test_indices_that_repeat_or_lie_outside_are_refused(numel):
    """The bytes of the last block's indices; of a whole block, none can lie outside."""
    packet = packed(SPARSE, randn(numel))
    broken = packet.clone()
    indices_at = 16 + 16 + (16 if numel > 4096 else 0)
    broken[indices_at : indices_at + 96] = 0
    with pytest.raises(DamagedEnvelope, match="ascending"):
        decoded(SPARSE, broken, torch.empty(numel))
    if numel > 4096:
        broken = packet.clone()
        broken[indices_at + 96 : indices_at + 99] = 0xFF
        with pytest.raises(DamagedEnvelope, match="below 100"):
            decoded(SPARSE, broken, torch.empty(numel))


def test_a_residual_that_decays_keeps_the_part_that_was_not_sent():
    feedback = ErrorFeedback(TwoBitCodec(sparse=True), 8192, decay=0.5)
    packet = torch.empty(feedback.codec.nbytes(8192), dtype=torch.uint8)
    expected = torch.zeros(8192)
    for turn in range(5):
        values = randn(8192, turn)
        expected = 0.5 * expected + values
        feedback.compress(values, packet)
        expected -= decoded(SPARSE, packet, values)
        torch.testing.assert_close(feedback.residual, expected)


@pytest.mark.parametrize("name", ["int2", "topk-int2"])
def test_gradient_descent_with_feedback_reaches_the_minimum(name):
    """Without it, the sparse one moves 1.56 % of the numbers in a step."""
    compression = Compression(name)
    codec = compression.codec(rank=0)
    feedback = ErrorFeedback(codec, 4096, decay=compression.feedback_decay)
    target, x = randn(4096, 1), torch.zeros(4096)
    packet, step = torch.empty(codec.nbytes(4096), dtype=torch.uint8), torch.empty(4096)
    for _ in range(600):
        feedback.compress(0.1 * (x - target), packet)
        codec.decompress(packet, step)
        x -= step
    assert float((x - target).norm() / target.norm()) < 0.1


def test_names_tell_the_block_and_invalid_settings_are_refused():
    assert [codec.name for codec in (DENSE, SPARSE, TwoBitCodec(block=64))] == [
        "int2",
        "topk-int2",
        "int2 in blocks of 64",
    ]
    assert Compression("int2", block=64).codec(rank=0).name == "int2 in blocks of 64"
    with pytest.raises(UsageError, match="stochastic"):
        Compression("int2", rounding="stochastic")
    with pytest.raises(UsageError, match="momentum"):
        Compression("topk-int2", momentum=0.9)
