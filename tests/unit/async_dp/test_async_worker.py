"""A worker sends at every k-th step, and more often during warm-up (in virtual time)."""

import pytest
import torch

from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.async_worker import AsyncWorker
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import AsyncResult, simulate_async
from paceline.tools.simulate.learning_tasks import LinearTask
from paceline.tools.simulate.simulated_machines import SimulatedMachine


def test_each_hub_receives_its_own_fragments_on_request() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    layout = ParameterLayout.of(net, 4)
    replicas = [
        FragmentReplica(each, dict(net.named_parameters()), UpdateCodec(each, "fp32"))
        for each in layout.fragments
    ]
    sessions = [
        HubSession(
            1, "w", layout, {index: replicas[index], index + 2: replicas[index + 2]}, Outbox(None, 1),
            hello_meta={}, new_session_id=lambda: 1,
        )
        for index in range(2)
    ]  # fmt: skip
    worker = AsyncWorker(replicas, sessions, SyncSchedule(8, 4, 1), SelectionPolicy())
    for session, fragments in ((sessions[1], [1, 3]), (sessions[0], [0, 2])):
        session.hub_status.wants_params = True
        worker.step(1.0, 0.1, 0.0, 1.0)
        assert [(order.kind, order.fragment) for order in session.requests] == [
            ("parameters", fragment) for fragment in fragments
        ]
    assert len(sessions[1].requests) == 2, "one request for all fragments"


def run(
    steps: int, warmup: int, cadence: SyncSchedule, workers: int = 1, latency: float = 1e-4
) -> AsyncResult:
    return simulate_async(
        AsyncPlan(
            machines=[SimulatedMachine(step_seconds=1.0)] * workers,
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
    "cadence", [SyncSchedule(10, 1, 5), SyncSchedule(10, 1, 0), SyncSchedule(2, 1, 1), SyncSchedule(1, 1, 0)]
)
def test_during_warm_up_every_other_step_sends(warmup: int, cadence: SyncSchedule) -> None:
    sent = run(60, warmup, cadence).counts[0]["sent"]
    often = warmup / min(2, cadence.every)
    assert sent == pytest.approx(often + (60 - warmup) / cadence.every, abs=1.0)


def test_updates_that_the_network_can_not_carry_are_skipped() -> None:
    often, slow = (run(60, 40, SyncSchedule(10, 1, 5), latency=latency).counts[0] for latency in (1e-4, 1.5))
    assert slow["skipped"] > 0
    assert often["skipped"] == 0
    assert 2 < slow["sent"] < often["sent"]
    assert slow["steps"] == often["steps"] == 60


def test_a_warm_up_reduces_the_loss_sooner() -> None:
    with_it, without = (run(40, warmup, SyncSchedule(20, 1, 5), workers=4).loss for warmup in (40, 0))
    assert with_it < without
