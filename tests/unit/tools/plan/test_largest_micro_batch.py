"""The largest micro-batch that fits, on a made-up memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.plan.memory import memory_forecast
from paceline.tools.plan.memory.memory_forecast import DeviceMemory
from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject


@pytest.fixture
def memory(monkeypatch):
    """`memory(nbytes_of)` makes every forecast return a function of the micro-batch; returns the tried ones."""

    def use(nbytes_of):
        tried = []

        def forecast(_subject, setting, _room):
            tried.append(setting.batch)
            return SimpleNamespace(ledger=SimpleNamespace(nbytes=nbytes_of(setting.batch)))

        monkeypatch.setattr(memory_forecast, "forecast_memory", forecast)
        return tried

    return use


def sought(capacity, most):
    return memory_forecast.largest_micro_batch(
        TrainingSubject("made up", lambda setting: None), TrainingSetting(), DeviceMemory(capacity), most
    ).samples


def test_a_given_batch_that_fits_is_used(memory):
    tried = memory(lambda samples: samples)
    assert sought(1000, 100) == 100
    assert tried == [1, 100]


def test_a_single_sample_that_does_not_fit_gives_0(memory):
    memory(lambda samples: 801)
    assert sought(1000, 100) == 0


def test_one_sample_is_the_upper_bound(memory):
    memory(lambda samples: 10)
    assert sought(1000, 1) == 1


def test_a_straight_line_needs_few_tries(memory):
    tried = memory(lambda samples: 100 + 10 * samples)
    assert sought(1000, 4096) == 70
    assert len(tried) <= 6


def test_a_constant_floor_does_not_mislead_the_search(memory):
    memory(lambda samples: max(500, 10 * samples))
    assert 78 <= sought(1000, 4096) <= 80


@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 3000))
def test_the_largest_batch_found_is_near_the_limit(floor, slope, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            memory_forecast,
            "forecast_memory",
            lambda _s, setting, _r: SimpleNamespace(
                ledger=SimpleNamespace(nbytes=max(floor, slope * setting.batch + setting.batch**2 // 50))
            ),
        )
        found = sought(1000, most)
    assert 1 <= found <= most

    def nbytes(samples):
        return max(floor, slope * samples + samples**2 // 50)

    assert nbytes(found) <= 800
    assert found == most or nbytes(found + max(1, found // 32)) > 800
