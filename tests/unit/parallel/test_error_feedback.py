"""Error feedback: no part of the input is lost; momentum as in the paper's algorithm."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import UsageError
from paceline.parallel.compression.codecs import Codec, HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.topk import TopKCodec, density_at
from paceline.parallel.compression.two_bit import TwoBitCodec

CODECS = {
    "bf16": lambda: HalfCodec("bf16"),
    "fp16": lambda: HalfCodec("fp16"),
    "int8": lambda: IntCodec(8),
    "int4": lambda: IntCodec(4),
    "int4 dithered": lambda: IntCodec(4, rounding="stochastic"),
    "int2": TwoBitCodec,
    "top-1%": lambda: TopKCodec(0.01),
    "topk-int2": lambda: TwoBitCodec(sparse=True),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def sent_of(feedback: ErrorFeedback, values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Compress, and return the decoded packet."""
    packet = torch.empty(feedback.codec.nbytes(len(values)), dtype=torch.uint8, device=values.device)
    feedback.compress(values, packet, start)
    into = torch.empty_like(values)
    feedback.codec.decompress(packet, into)
    return into


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
def test_sent_values_plus_the_residual_equal_the_input(make, device):
    """Over many rounds, with parts in any order."""
    numel, parts = 3001, [(2000, 3001), (0, 700), (700, 2000)]
    feedback = ErrorFeedback(make(), numel, device)
    random = torch.Generator().manual_seed(0)
    given = torch.zeros(numel, dtype=torch.float64)
    sent = torch.zeros(numel, dtype=torch.float64)
    for _ in range(60):
        values = torch.randn(numel, generator=random)
        given += values.double()
        for start, stop in parts:
            sent[start:stop] += sent_of(feedback, values[start:stop].to(device), start).cpu().double()
    left = feedback.residual.cpu().double()
    assert ((sent + left - given).norm() / given.norm()).item() < 1e-6
    assert left.norm() > 0


def test_values_below_a_level_are_sent_in_time():
    """Without feedback it never would."""
    values = torch.full((256,), 0.01)
    values[0] = 7.0
    codec, feedback = IntCodec(4), ErrorFeedback(IntCodec(4), 256)
    packet, into = torch.empty(codec.nbytes(256), dtype=torch.uint8), torch.zeros(256)
    total = torch.zeros(256)
    for _ in range(100):
        codec.compress(values, packet)
        codec.add(packet, into)
        total += sent_of(feedback, values)
    assert (into[1:] == 0).all()
    assert torch.allclose(total[1:], torch.ones(255), atol=0.51)


def test_the_values_stay_as_they_are():
    values = torch.randn(100)
    kept, feedback = values.clone(), ErrorFeedback(IntCodec(8), 100)
    sent_of(feedback, values)
    sent_of(feedback, values)
    assert torch.equal(values, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_raw_numbers_pass_through(dtype):
    values, feedback = torch.randn(50, dtype=dtype), ErrorFeedback(RawCodec(dtype), 50)
    assert torch.equal(sent_of(feedback, values), values)
    assert (feedback.residual == 0).all()


def test_scaling_multiplies_the_residual():
    feedback = ErrorFeedback(TopKCodec(0.1), 100, momentum=0.5)
    sent_of(feedback, torch.randn(100))
    residual, velocity = feedback.residual.clone(), feedback.velocity.clone()
    feedback.scale(0.5)
    assert torch.equal(feedback.residual, residual * 0.5)
    assert torch.equal(feedback.velocity, velocity * 0.5)


def dgc_by_the_paper(rounds: list[torch.Tensor], keep: float, momentum: float) -> list[torch.Tensor]:
    """Algorithm 2 of arXiv 1712.01887 for one node, number by number, without clipping; float16 is not in it."""
    numel = len(rounds[0])
    u, v, sent = [0.0] * numel, [0.0] * numel, []
    for values in rounds:
        for i in range(numel):
            u[i] = momentum * u[i] + values[i].item()
            v[i] += u[i]
        threshold = sorted((abs(x) for x in v), reverse=True)[math.ceil(keep * numel) - 1]
        message = [0.0] * numel
        for i in range(numel):
            if abs(v[i]) >= threshold:
                message[i], u[i], v[i] = v[i], 0.0, 0.0
        sent.append(torch.tensor(message))
    return sent


def test_momentum_is_that_of_the_paper():
    """Numbers in steps of 1/8, and momentum 1/2: float16 rounds nothing for a while."""
    random = torch.Generator().manual_seed(2)
    rounds = [torch.randint(-400, 400, (120,), generator=random) / 8 for _ in range(5)]
    feedback = ErrorFeedback(TopKCodec(0.05), 120, momentum=0.5)
    for values, expected in zip(rounds, dgc_by_the_paper(rounds, 0.05, 0.5), strict=True):
        assert torch.allclose(sent_of(feedback, values), expected, rtol=2.0**-10, atol=0)


def test_momentum_keeps_rounding_errors():
    feedback = ErrorFeedback(TopKCodec(0.5), 2, momentum=0.9)
    value = 1 + 2.0**-13
    sent = sent_of(feedback, torch.tensor([value, 0.25]))
    assert sent.tolist() == [1.0, 0.0]
    assert feedback.residual.tolist() == [2.0**-13, 0.25]
    assert feedback.velocity.tolist() == [0.0, 0.25]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("many", [False, True])
def test_non_finite_values_leave_no_residual(momentum, bad, many, device):
    for make in CODECS.values() if momentum == 0 else [lambda: TopKCodec(0.01)]:
        codec: Codec = make()
        feedback = ErrorFeedback(codec, 2000, device, momentum=momentum)
        values = torch.randn(2000, device=device)
        values[300 : 900 if many else 301] = bad
        assert not sent_of(feedback, values).isfinite().all()
        assert sent_of(feedback, torch.randn(2000, device=device)).isfinite().all()
        assert feedback.residual.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ErrorFeedback(TopKCodec(0.1), 10, momentum=1.0),
        lambda: ErrorFeedback(TopKCodec(0.1), 10, momentum=-0.1),
        lambda: ErrorFeedback(IntCodec(8), 10, momentum=0.9),
        lambda: sent_of(ErrorFeedback(IntCodec(8), 10), torch.zeros(11)),
        lambda: sent_of(ErrorFeedback(IntCodec(8), 10), torch.zeros(5), 6),
        lambda: sent_of(ErrorFeedback(IntCodec(8), 10), torch.zeros(5), -1),
    ],
)
def test_invalid_values_are_refused(make):
    with pytest.raises(UsageError):
        make()


def test_densities_fall_exponentially_to_the_kept_share():
    rungs = [density_at(step, 0.001, 40) for step in range(50)]
    assert rungs[:40] == [0.25] * 10 + [0.0625] * 10 + [0.015625] * 10 + [0.00390625] * 10
    assert rungs[40:] == [0.001] * 10
    assert density_at(0, 0.001, 0) == 0.001
    assert density_at(0, 0.5, 100) == density_at(0, 0.25, 100) * 2 == 0.5
    uneven = [density_at(step, 0.01, 7) for step in range(8)]
    assert uneven == sorted(uneven, reverse=True)
    assert set(uneven) == {0.25, 0.0625, 0.015625, 0.01}
