"""Memory bandwidth and matrix rate: real measurements of small things."""

from __future__ import annotations

import time

import pytest
import torch

from paceline._core.units import MIB
from paceline.cost_model.profile_entries import Source
from paceline.errors import UsageError
from paceline.tools.bench import machine_rates
from paceline.tools.bench.machine_rates import (
    MachineSettings,
    RateJob,
    measure_machine_rate,
    rate_jobs,
    repeat,
)

SMALL = MachineSettings("cpu", MIB, (8, 32), repetitions=3, seconds=0.2)
SOURCE = Source("test", "2026-01-01T00:00:00+00:00")


def test_every_rate_is_measured_and_the_threads_are_restored():
    before = torch.get_num_threads()
    rates = [measure_machine_rate(job, SMALL, SOURCE) for job in rate_jobs(SMALL)]
    assert torch.get_num_threads() == before
    assert len({rate.key for rate in rates}) == len(rates)
    assert {rate.kind for rate in rates} == {"copy", "add", "matmul"}
    assert {rate.dtype for rate in rates if rate.kind == "matmul"} == {"float32", "bfloat16"}
    assert 1 in {rate.threads for rate in rates}
    for rate in rates:
        assert 0 < rate.low <= rate.value <= rate.high
        assert rate.shape in ("1 MiB", "8", "32")
        assert rate.source is SOURCE


def test_threads_are_set_during_a_measurement_and_restored_after_an_error(monkeypatch):
    seen = []

    def fail(*_, **__):
        seen.append(torch.get_num_threads())
        raise RuntimeError("no")

    monkeypatch.setattr(machine_rates, "repeat", fail)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no"):
        measure_machine_rate(RateJob("copy", "cpu", "float32", 1), SMALL, SOURCE)
    assert seen == [1]
    assert torch.get_num_threads() == before


def test_bytes_and_operations_are_counted_as_documented(monkeypatch):
    timing = machine_rates.RepeatedTiming(median=2.0, fastest=1.0, slowest=4.0)
    monkeypatch.setattr(machine_rates, "repeat", lambda *_, **__: timing)
    found = {
        kind: measure_machine_rate(RateJob(kind, "cpu", "float32", 1), SMALL, SOURCE)
        for kind in ("copy", "add", "matmul")
    }
    assert (found["copy"].low, found["copy"].value, found["copy"].high) == (2 * MIB / 4, MIB, 2 * MIB)
    assert found["add"].value == 3 * MIB / 2
    assert found["matmul"].value == 2 * 8**3 / 2  # slow: larger ones were not tried
    assert found["matmul"].shape == "8"


def test_short_work_runs_several_times_per_repetition():
    ran = []
    timing = repeat(lambda: ran.append(1), repetitions=4)
    assert timing.fastest <= timing.median <= timing.slowest < 0.001
    assert len(ran) > 100


def test_long_work_is_repeated_at_least_three_times_and_as_time_allows():
    ran = []

    def work():
        ran.append(1)
        time.sleep(0.01)

    assert repeat(work, repetitions=1000, seconds=1e-6).fastest >= 0.01
    assert len(ran) == 2 + 3
    ran.clear()
    repeat(work, repetitions=2, seconds=60)
    assert len(ran) == 2 + 2


def test_the_device_is_waited_for():
    order = []

    def work():
        order.append("work")
        time.sleep(0.01)

    repeat(work, repetitions=1, wait=lambda: order.append("wait"))
    assert order == ["work", "wait", "work", "wait", "wait", "work", "wait"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"dtypes": ("float31",)}, "did you mean 'float32'"),
        ({"dtypes": ()}, "a repetition, a size and a type"),
        ({"sizes": ()}, "a repetition, a size and a type"),
        ({"sizes": (0,)}, "a repetition, a size and a type"),
        ({"repetitions": 0}, "a repetition, a size and a type"),
        ({"nbytes": 10}, "1 MiB or more"),
        ({"seconds": 0.0}, "some time"),
    ],
)
def test_invalid_settings_are_refused(changed, message):
    with pytest.raises(UsageError, match=message):
        MachineSettings(**changed)


def test_a_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        MachineSettings("cuda")
    assert {job.device for job in rate_jobs(MachineSettings())} == {"cpu"}


def test_tensors_that_do_not_fit_into_memory_are_refused_with_those_that_do():
    with pytest.raises(UsageError, match=r"are free on the cpu\n.*give at most --bytes \d+MiB"):
        rate_jobs(MachineSettings("cpu", 2**50))
