"""Codecs on an accelerator: the CPU's packets, sums and residuals to the bit, row by row, and the host never waits."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.parallel.compression.codecs import HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.error_feedback import ErrorFeedback
from paceline.parallel.compression.topk import TopKCodec
from paceline.parallel.compression.two_bit import TwoBitCodec
from simulated_accelerator import simulated_device

CODECS = {
    "fp32": RawCodec,
    "bf16": lambda: HalfCodec("bf16"),
    "fp16": lambda: HalfCodec("fp16"),
    "int8": lambda: IntCodec(8),
    "int4": lambda: IntCodec(4),
    "int2": TwoBitCodec,
    "top-1%": lambda: TopKCodec(0.01),
    "top-all": lambda: TopKCodec(1.0),
    "topk-int2": lambda: TwoBitCodec(sparse=True),
}
NUMELS = [1000, 4096 + 300]
BAD = [math.nan, math.inf, -math.inf]
codecs = pytest.mark.parametrize("name", CODECS)


def some_rows(rows, numel, bad=False):
    """Return numbers with equal magnitudes among them."""
    generator = torch.Generator().manual_seed(rows * 7919 + numel)
    values = torch.randn(rows, numel, generator=generator)
    values[:, ::3] = values[:, ::3].round()
    if bad:
        for row, number in enumerate(BAD[:rows]):
            values[row, row::97] = number
    return values


def one_by_one(codec, values):
    """Return packets, errors and decompressed numbers, by the CPU's path for single packets."""
    packets = torch.full((len(values), codec.nbytes(values.shape[1])), 0xA5, dtype=torch.uint8)
    errors, decoded = torch.empty_like(values), torch.empty_like(values)
    for row, packet, error, into in zip(values, packets, errors, decoded, strict=True):
        codec.compress(row, packet, error)
        codec.decompress(packet, into)
    return packets, errors, decoded


def same_bits(one, other):
    """Return whether tensors are equal to the bit; of a NaN, sign and payload don't matter."""
    if one.is_floating_point():
        one, other = (torch.where(each.isnan(), math.nan, each) for each in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@codecs
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
def test_packets_errors_and_numbers_are_the_cpu_s(name, numel, bad):
    codec, values = CODECS[name](), some_rows(3, numel, bad)
    expected = one_by_one(codec, values)
    wide = torch.full((4, codec.nbytes(numel) + 32), 0xA5, dtype=torch.uint8)
    with simulated_device(seed=numel) as simulator:
        outgoing, given = wide.to("sim"), values.to("sim")
        simulator.synchronisations.clear()
        packets, errors, decoded = (
            outgoing[1:, :-32],
            torch.empty_like(given),
            torch.full_like(given, 7.0),
        )
        codec.compress(given, packets, errors)
        codec.decompress(packets, decoded)
        assert simulator.synchronisations == []
        got = packets.cpu(), errors.cpu(), decoded.cpu()
    for one, other in zip(got, expected, strict=True):
        assert same_bits(one, other)


@codecs
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("weights", [None, [3.0, 0.0, 0.7], [1.0, 1.0, 0.0]])
def test_sums_are_the_cpu_s_and_weight_0_adds_nothing(name, numel, weights):
    codec, values = CODECS[name](), some_rows(3, numel)
    given = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    given[::5] = -0.0
    if weights is not None:
        values[weights.index(0.0), ::2] = math.nan
    packets, _, _ = one_by_one(codec, values)
    expected = given.clone()
    for packet, weight in zip(packets, weights or [1.0] * 3, strict=True):
        if weight != 0.0:
            codec.add(packet, expected, weight)
    with simulated_device(seed=numel) as simulator:
        onto, rows = given.to("sim"), packets.to("sim")
        factors = None if weights is None else torch.tensor(weights, dtype=torch.float64).to("sim")
        simulator.synchronisations.clear()
        codec.add_rows(rows, onto, factors)
        assert simulator.synchronisations == []
        assert same_bits(onto.cpu(), expected)


def feedback_state(feedback):
    kept = [feedback.residual, feedback.velocity]
    return [each.cpu() for each in kept if each is not None]


FEEDBACK = [("int8", 0.0), ("int2", 0.0), ("top-1%", 0.0), ("top-1%", 0.9), ("topk-int2", 0.0)]


@pytest.mark.parametrize("decay", [1.0, 0.95])
@pytest.mark.parametrize(("name", "momentum"), FEEDBACK)
def test_residuals_are_the_cpu_s(name, decay, momentum):
    numel, codec = 1000, CODECS[name]()
    host = ErrorFeedback(codec, 3 * numel, momentum=momentum, decay=decay)
    packets = torch.empty(3, codec.nbytes(numel), dtype=torch.uint8)
    with simulated_device(seed=4) as simulator:
        device = ErrorFeedback(codec, 3 * numel, "sim", momentum=momentum, decay=decay)
        sent = torch.empty_like(packets, device="sim")
        yes, no = (
            torch.ones((), dtype=torch.bool, device="sim"),
            torch.zeros((), dtype=torch.bool, device="sim"),
        )
        simulator.run_all()
        for step in range(4):
            values = some_rows(3, numel, bad=step == 2)
            for part, (row, packet) in enumerate(zip(values, packets, strict=True)):
                host.compress(row, packet, part * numel)
            given = values.to("sim")
            simulator.synchronisations.clear()
            device.compress(given, sent, counts=None if step % 2 else yes)
            assert simulator.synchronisations == []
            assert same_bits(sent.cpu(), packets)
        before = feedback_state(device)
        device.compress(given, sent, counts=no)
        codec.decompress(sent, given)
        assert not given.cpu().any(), "zeros are sent"
        for one, other, kept in zip(feedback_state(device), before, feedback_state(host), strict=True):
            assert same_bits(one, other)
            assert same_bits(one, kept)


@pytest.mark.parametrize("keep", [3e-5, 2e-4])
def test_far_indices_are_read_from_gaps_of_fixed_number(keep):
    numel, codec = 200_000, TopKCodec(keep)
    values = torch.zeros(2, numel)
    values[0, [0, 150_000]] = torch.tensor([1.0, 2.0])
    values[1, [70_000, numel - 1]] = torch.tensor([1.0, 2.0])
    packets, _, decoded = one_by_one(codec, values)
    with simulated_device() as simulator:
        given = values.to("sim")
        sent, into = torch.empty_like(packets, device="sim"), torch.empty_like(given)
        simulator.synchronisations.clear()
        codec.compress(given, sent)
        codec.decompress(sent, into)
        assert simulator.synchronisations == []
        assert same_bits(sent.cpu(), packets)
        assert same_bits(into.cpu(), decoded)
