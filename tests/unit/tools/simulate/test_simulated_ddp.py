"""DDP in virtual time: its mean gradient, its time, its bytes."""

import math

import pytest
import torch

from paceline.errors import UsageError
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.simulate.learning_tasks import GPTTask, LinearTask
from paceline.tools.simulate.simulated_ddp import DdpPlan, ring_all_reduce_seconds, simulate_ddp
from paceline.tools.simulate.simulated_machines import SimulatedMachine

MACHINES = [SimulatedMachine(step_seconds=seconds) for seconds in (0.1, 0.1, 0.4)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_worker_is_plain_sgd():
    found = simulate_ddp(DdpPlan(machines=MACHINES[:1], steps=40), LinearTask())
    alone = LinearTask().learner(0, 1)
    alone.steps(0, 40, 1.0)
    assert found.loss == pytest.approx(alone.score(), rel=1e-5)
    assert found.nbytes == found.communication == found.waiting == 0


def test_gradients_are_those_of_all_batches_together():
    size = GptSize("small", 32, 64, 1, 2, vocabulary=256, context=32)
    three = simulate_ddp(DdpPlan(machines=MACHINES, steps=4), GPTTask(size, batch=2, held_out=16))
    one = simulate_ddp(DdpPlan(machines=MACHINES[:1], steps=4), GPTTask(size, batch=6, held_out=16))
    assert three.loss == pytest.approx(one.loss, rel=1e-4)


def test_a_step_waits_for_the_slowest_rank_and_exposed_communication():
    plan = DdpPlan(machines=MACHINES, steps=10, parameters=1_000_000, latency=0.0, overlap=0.0)
    narrow = [SimulatedMachine(step_seconds=each.step_seconds, up=10e6, down=20e6) for each in MACHINES]
    found = simulate_ddp(
        DdpPlan(machines=narrow, seconds=99.0, steps=10, parameters=1_000_000, latency=0.0, overlap=0.0),
        LinearTask(),
    )
    ring = ring_all_reduce_seconds(3, 1.045 * 4e6, 10e6, 0.0)
    assert ring == pytest.approx(2 * 2 / 3 * 1.045 * 4e6 / 10e6)
    assert found.seconds == pytest.approx(10 * (0.4 + ring))
    assert found.communication == pytest.approx(ring / (0.4 + ring))
    assert found.waiting == pytest.approx(0.2 / (0.4 + ring))
    assert found.nbytes == pytest.approx(10 * ring * 10e6)
    hidden = simulate_ddp(
        DdpPlan(machines=narrow, seconds=99.0, steps=10, parameters=1_000_000, latency=0.0, overlap=0.5),
        LinearTask(),
    )
    assert hidden.seconds == pytest.approx(10 * (0.4 + ring - 0.2))
    assert hidden.digest == found.digest == simulate_ddp(plan, LinearTask()).digest


def test_it_ends_by_time_or_steps_with_a_point_at_the_end():
    found = simulate_ddp(DdpPlan(machines=MACHINES, seconds=4.1, score_every=1.0), LinearTask())
    assert [point.seconds for point in found.points] == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.1])
    assert (found.seconds, found.steps) == (4.1, 10)
    assert found.points[-1].loss == found.loss < found.points[0].loss
    assert (
        simulate_ddp(DdpPlan(machines=MACHINES, seconds=100.0, steps=10), LinearTask()).digest == found.digest
    )


def test_steps_that_differ_at_random_make_the_slowest_slower():
    shaky = [SimulatedMachine(step_seconds=1.0, jitter=0.2)] * 8
    found = simulate_ddp(DdpPlan(machines=shaky, steps=30), LinearTask())
    assert found.seconds > 1.15 * 30
    assert found.waiting > 0.1


def test_a_schedule_by_what_is_done():
    still = simulate_ddp(
        DdpPlan(machines=MACHINES, steps=10, schedule=lambda share: float(share < 0.5)), LinearTask()
    )
    assert still.loss == simulate_ddp(DdpPlan(machines=MACHINES, steps=5), LinearTask()).loss


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"machines": []}, "without workers"),
        ({}, "without an end"),
        ({"steps": 1, "overlap": 1.5}, "overlap=1.5"),
    ],
)
def test_invalid_plans_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        DdpPlan(**{"machines": MACHINES, "seconds": math.inf} | values)
