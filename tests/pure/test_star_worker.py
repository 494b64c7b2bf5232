"""When a worker sends: at every k-th step, more often in its warm-up; in virtual time, where nothing else matters."""

import pytest

from paceline.simulate.asynchrony import AsyncPlan, AsyncResult, Machine, simulate
from paceline.simulate.tasks import LinearTask
from paceline.sync.staggering import Cadence


def run(steps: int, warmup: int, cadence: Cadence, workers: int = 1, latency: float = 1e-4) -> AsyncResult:
    return simulate(
        AsyncPlan(
            [Machine(step_seconds=1.0)] * workers,
            steps=steps,
            cadence=cadence,
            compression=None,
            warmup=warmup,
            latency=latency,
        ),
        LinearTask(),
    )


@pytest.mark.parametrize("warmup", [0, 10, 20, 40])
@pytest.mark.parametrize(
    "cadence", [Cadence(10, 1, 5), Cadence(10, 1, 0), Cadence(2, 1, 1), Cadence(1, 1, 0)]
)
def test_in_the_warm_up_every_other_step_sends(warmup: int, cadence: Cadence) -> None:
    sent = run(60, warmup, cadence).counts[0]["sent"]
    often = warmup / min(2, cadence.every)
    assert sent == pytest.approx(often + (60 - warmup) / cadence.every, abs=1.0)


def test_what_the_network_does_not_manage_is_skipped() -> None:
    often, slow = (run(60, 40, Cadence(10, 1, 5), latency=latency).counts[0] for latency in (1e-4, 1.5))
    assert slow["skipped"] > 0
    assert often["skipped"] == 0
    assert 2 < slow["sent"] < often["sent"]
    assert slow["steps"] == often["steps"] == 60


def test_a_warm_up_brings_workers_together_sooner() -> None:
    with_it, without = (run(40, warmup, Cadence(20, 1, 5), workers=4).loss for warmup in (40, 0))
    assert with_it < without
