"""The table of devices and links: found by the names that people write, and plausible."""

from __future__ import annotations

import pytest

from paceline.cost_model.hardware_catalog import (
    DEVICES,
    DTYPES,
    INTERCONNECTS,
    find_device,
    find_interconnect,
)
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100-sxm"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("h100 pcie", "h100-pcie"),
        ("Tesla T4", "t4"), ("NVIDIA GeForce GTX 1660 Ti", "gtx-1660-ti"), ("a100", "a100-80gb"),
        ("RTX_3050", "rtx-3050-8gb"), ("NVIDIA B200", "b200"), ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
    ],
)  # fmt: skip
def test_a_device_is_found_by_common_and_driver_names(written, name):
    assert find_device(written).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [("NVLink4", "nvlink4"), ("10GbE", "ethernet-10g"), ("ndr", "infiniband-400g"), ("PCIe4", "pcie4")],
)
def test_a_link_is_found(written, name):
    assert find_interconnect(written).name == name


def test_unknown_names_are_reported_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'h200'"):
        find_device("h201")
    with pytest.raises(UsageError, match="did you mean 'nvlink5'"):
        find_interconnect("nvlink 5x")


@pytest.mark.parametrize("row", DEVICES.values(), ids=str)
def test_rows_of_devices_are_plausible(row):
    assert 6e9 <= row.memory_nbytes <= 300e9
    assert 100e9 < row.memory_nbytes_per_second < 10e12
    rates = [getattr(row, each) for each in DTYPES if getattr(row, each) is not None]
    assert rates
    assert all(1e12 < rate < 5e15 for rate in rates)
    assert rates == sorted(rates, reverse=True), "16 bits are at least as fast as 19, and these as 32"
    assert row.link in INTERCONNECTS
    assert row.source


@pytest.mark.parametrize("row", INTERCONNECTS.values(), ids=str)
def test_rows_of_links_are_plausible(row):
    assert 1e8 < row.nbytes_per_second <= 900e9
    assert 1e-7 < row.latency_seconds < 1e-4
    assert row.source
    assert row.latency_source


def test_one_direction_in_bytes():
    assert find_interconnect("nvlink4").nbytes_per_second == 900e9 / 2
    assert find_interconnect("400GbE").nbytes_per_second == 400e9 / 8
    assert find_interconnect("pcie4").nbytes_per_second == pytest.approx(
        2 * find_interconnect("pcie3").nbytes_per_second
    )
    assert (
        find_interconnect("nvlink3").nbytes_per_second / find_interconnect("nvlink2").nbytes_per_second == 2
    )


def test_a_type_that_a_device_lacks_is_refused_with_those_it_has():
    with pytest.raises(UsageError, match="it has: fp16, fp32"):
        find_device("v100").flops_per_second("bf16")
    with pytest.raises(UsageError, match="number type"):
        find_device("v100").flops_per_second("fp8")
