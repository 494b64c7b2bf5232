"""Parameter layouts, and packing of fragments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS, UpdateCodec
from paceline.errors import DamagedEnvelope, UsageError
from paceline.parallel.compression.compression_config import Compression


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(40, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3, bias=False)


INT4 = Compression.of("int4")


def test_order_is_compressed_matrices_then_exempt_parameters_then_buffers() -> None:
    (fragment,) = ParameterLayout.of(Net(), 1, INT4).fragments
    assert [(place.name, place.kind) for place in fragment.tensors] == [
        ("first.weight", "compressed"),
        ("first.bias", "plain"),
        ("norm.weight", "plain"),
        ("norm.bias", "plain"),
        ("last.weight", "plain"),
        ("norm.running_mean", "averaged"),
        ("norm.running_var", "averaged"),
    ]
    assert (fragment.compressed, fragment.trained) == (40 * 64, 40 * 64 + 3 * 64 + 3 * 64)
    assert fragment.numel == fragment.trained + 2 * 64


def test_each_tensor_is_in_one_fragment_and_buffers_in_the_last() -> None:
    layout = ParameterLayout.of(Net(), 3, INT4)
    names = [place.name for fragment in layout.fragments for place in fragment.tensors]
    assert sorted(names) == sorted(
        ["first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "norm.running_mean"]
        + ["norm.running_var"]
    )
    assert [place.kind for place in layout.fragments[2].tensors].count("averaged") == 2
    with pytest.raises(UsageError, match="the model has 3 layers"):
        ParameterLayout.of(Net(), 4, INT4)


def test_a_layout_survives_being_packed() -> None:
    layout = ParameterLayout.of(Net(), 2, INT4)
    again = ParameterLayout.unpack(layout.pack())
    assert again == layout
    assert again.hash == layout.hash


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ParameterLayout.of(Net(65), 1, INT4),
            r"parameter 'first.weight' has shape \[65, 40\], expected \[64, 40\]",
        ),
        (ParameterLayout.of(Net(), 2, INT4), "it has 2 fragments, expected 1"),
        (ParameterLayout.of(Net(), 1, None), "parameter 'first.bias' is compressed, expected plain"),
        (
            ParameterLayout.of(nn.Sequential(nn.Linear(40, 64)), 1, INT4),
            "parameter 'first.weight' is missing",
        ),
    ],
)
def test_the_first_difference_is_named(other: ParameterLayout, message: str) -> None:
    import re

    assert re.search(message, ParameterLayout.of(Net(), 1, INT4).difference(other))
    assert ParameterLayout.of(Net(), 1, INT4).difference(ParameterLayout.of(Net(), 1, INT4)) == ""


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_layout_are_refused(data: bytes) -> None:
    try:
        ParameterLayout.unpack(data)
    except DamagedEnvelope:
        return
    assert ParameterLayout.unpack(data).pack()


def test_a_layout_of_impossible_sizes_is_refused() -> None:
    import msgpack

    for rows in ([], [[]], [[["a", [-1], 0]]], [[["a", [1 << 50], 0]]], [[["a", [2], 1], ["b", [2], 0]]]):
        with pytest.raises(DamagedEnvelope):
            ParameterLayout.unpack(msgpack.packb(rows))


@pytest.mark.parametrize("codec", UPDATE_CODECS)
def test_a_packet_has_the_expected_size_and_round_trips(codec: str) -> None:
    (fragment,) = ParameterLayout.of(Net(), 1, INT4).fragments
    numbers = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(0))
    packing, back = UpdateCodec(fragment, codec), torch.empty(fragment.numel)
    packet = packing.pack(numbers)
    assert memoryview(packet).nbytes == packing.nbytes
    packing.unpack(packet, back)
    torch.testing.assert_close(back[fragment.compressed :], numbers[fragment.compressed :], rtol=0, atol=0)
    most = {"fp32": 0.0, "bf16": 2e-2, "fp16": 3e-3, "int8": 2e-2, "int4": 0.4, "int2": 3.0}
    assert (back - numbers).abs().max() <= most.get(codec, 4.0)


def test_the_compression_error_is_sent_later_after_a_change_of_codec_too() -> None:
    (fragment,) = ParameterLayout.of(Net(), 1, INT4).fragments
    packing = UpdateCodec(fragment, "int4", feedback=True)
    numbers, back = torch.linspace(-1, 1, fragment.numel), torch.empty(fragment.numel)
    total = torch.zeros(fragment.numel)
    for turn in range(20):
        if turn == 10:
            packing = packing.with_codec(fragment, "int8")
        packing.unpack(packing.pack(numbers), back)
        total += back
    assert packing.feedback is not None
    split = fragment.compressed
    torch.testing.assert_close(
        total[:split] + packing.feedback.residual, 20 * numbers[:split], rtol=1e-4, atol=1e-4
    )


def test_a_compression_that_a_hub_can_not_unpack_is_refused() -> None:
    (fragment,) = ParameterLayout.of(Net(), 1, INT4).fragments
    with pytest.raises(UsageError, match="can't be sent to a hub"):
        UpdateCodec.with_compression(fragment, Compression.of("topk"))
    for name in ("int4", "int2"):
        with pytest.raises(UsageError, match="can't be sent to a hub"):
            UpdateCodec.with_compression(fragment, Compression(name, block=64))
