"""paceline.AsyncDataParallel over a real network: workers in threads or processes of one machine, and a hub."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from hub_process import HubProcess, HubThread, hub_thread, wait_until
from paceline.async_dp.hub.hub_settings import (
    HubRules,
    HubShard,
    MergeRules,
    PopulationRules,
    ScreeningRules,
)
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.worker import hub_access
from paceline.errors import UsageError
from paceline.transport.zmq.curve_keys import make_keys

pytestmark = pytest.mark.timeout(180)

INPUTS = torch.randn(256, 12, generator=torch.Generator().manual_seed(0))


def targets(outputs: int) -> torch.Tensor:
    return INPUTS @ torch.randn(12, outputs, generator=torch.Generator().manual_seed(1))


TARGETS = targets(3)


class Task:
    """A least squares problem, and a worker that trains on it."""

    def __init__(self, seed: int = 0, lr: float = 0.02, outputs: int = 3) -> None:
        torch.manual_seed(seed)
        self.net = nn.Linear(12, outputs)
        self._targets = targets(outputs)
        self.optim = torch.optim.SGD(self.net.parameters(), lr)
        self._drawn = torch.Generator().manual_seed(seed)

    def loss(self) -> float:
        with torch.no_grad():
            return float(((self.net(INPUTS) - self._targets) ** 2).mean())

    def train_until(self, true: Callable[[], bool]) -> None:
        """Train until a condition holds: on a busy machine, updates take many steps."""
        wait_until(lambda: true() or self.steps(1))

    def steps(self, count: int, seconds: float = 0.001) -> None:
        for _ in range(count):
            rows = torch.randint(0, 256, (16,), generator=self._drawn)
            ((self.net(INPUTS[rows]) - self._targets[rows]) ** 2).mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            time.sleep(seconds)


def together(*work: Callable[[], object]) -> None:
    """Run all functions at the same time, each in a thread."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


def test_workers_of_different_speeds_train_together() -> None:
    with hub_thread() as hub:
        tasks = [Task(seed) for seed in range(3)]

        def train(index: int) -> None:
            with paceline.AsyncDataParallel(
                tasks[index].net, tasks[index].optim, hub.address, 5, 2, name=f"w{index}"
            ) as training:
                tasks[index].steps(150 * (index + 1), 0.002 / (index + 1))
                tasks[index].train_until(lambda: training.counts.sent > 15 and tasks[index].loss() < 0.04)
                counts[index] = training.counts

        counts = {}
        together(*(lambda index=index: train(index) for index in range(3)))
        assert all(each.sent > 15 for each in counts.values())
        assert hub.hub.updates == sum(each.updates for each in hub.hub.members)
        assert tasks[2].loss() < 0.05
        assert hub.hub.refused == {}


def test_a_single_worker_trains_as_without_a_hub() -> None:
    """Delta rule and averaging with one worker: nothing is lost, and nothing counts twice."""
    alone, task = Task(), Task()
    with hub_thread(HubRules(down="fp32")) as hub:
        with paceline.AsyncDataParallel(
            task.net, task.optim, hub.address, 3, 2, compression=None
        ) as training:
            task.train_until(lambda: training.counts.taken > 5)
        alone.steps(training.counts.steps, 0.0)
        torch.testing.assert_close(task.net.weight, alone.net.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compression", ["int2", "topk-int2"])
def test_updates_of_two_bits_per_number_are_merged_by_a_hub(compression: str) -> None:
    with hub_thread() as hub:
        tasks = [Task(seed, lr=1.0, outputs=128) for seed in range(2)]
        before = tasks[0].loss()

        def train(index: int) -> None:
            with paceline.AsyncDataParallel(
                tasks[index].net, tasks[index].optim, hub.address, 4, 1, compression=compression
            ):
                tasks[index].train_until(lambda: hub.hub.updates > 60 and tasks[index].loss() < 0.1 * before)

        together(*(lambda index=index: train(index) for index in range(2)))
        assert tasks[0].loss() < 0.2 * before
        assert hub.hub.updates > 50
        assert hub.hub.refused == {}
        sizes = {len(payload) for values, payload in hub.journal.recovered().records if "dtype" in values}
        assert max(sizes) < 4 * 128 + 12 * 128 / 4 + 64, "biases, and at most two bits per weight"


def test_a_hub_merges_the_updates_of_a_round_by_quorum() -> None:
    with hub_thread(HubRules(merge=MergeRules("quorum", 0.5))) as hub:
        tasks = [Task(seed) for seed in range(3)]

        def train(index: int) -> None:
            with paceline.AsyncDataParallel(
                tasks[index].net, tasks[index].optim, hub.address, 5, 2
            ) as training:
                tasks[index].train_until(lambda: training.counts.taken > 30 and tasks[index].loss() < 0.04)

        together(*(lambda index=index: train(index) for index in range(3)))
        assert all(task.loss() < 0.05 for task in tasks)
        records = list(hub.journal.ledger())
        merges = [each for each in records if each["kind"] == "merge"]
        arrived = [each["worker"] for each in records if each["kind"] == "update"]
        assert [worker for each in merges for worker in each["of"]] == arrived, (
            "each once, in order; none waits"
        )
        assert max(each["updates"] for each in merges) > 1
        assert hub.hub.updates == len(arrived) > 30
        assert hub.hub.refused == {}


def _step(task: Task) -> bool:
    task.steps(1)
    return False


def test_without_a_hub_training_continues_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    alone, task = Task(), Task()
    alone.steps(40, 0.0)
    with (
        caplog.at_level(logging.WARNING),
        paceline.AsyncDataParallel(task.net, task.optim, "tcp://127.0.0.1:9", 5, 2) as training,
    ):
        task.steps(40, 0.01)
        assert not training.finish(0.2)
    assert torch.equal(task.net.weight, alone.net.weight)
    assert "no hub answers at tcp://127.0.0.1:9" in caplog.text
    assert "training goes on alone" in caplog.text
    assert "keeps its own parameters" in caplog.text


def test_a_hub_that_starts_late_is_found() -> None:
    first = HubThread()
    address = first.address
    first.stop()
    task = Task()
    with ExitStack() as late, paceline.AsyncDataParallel(task.net, task.optim, address, 5, 2) as training:
        task.steps(20, 0.005)
        assert training.counts.taken == 0
        hub = late.enter_context(hub_thread(address=address))  # stays until training has ended
        task.train_until(lambda: training.counts.taken > 3)
        assert hub.hub.updates > 0


def test_a_worker_that_ends_before_the_hub_starts_waits_for_it() -> None:
    first = HubThread()
    address = first.address
    first.stop()
    task, hubs = Task(), list[HubThread]()
    starting = threading.Timer(1.0, lambda: hubs.append(HubThread(address=address)))
    with paceline.AsyncDataParallel(task.net, task.optim, address, 5, 2) as training:
        task.steps(20, 0.0)
        starting.start()
        finished = training.finish(30.0)
        starting.join()
    hubs[0].stop()
    assert finished
    assert training.counts.taken > 0
    held = torch.cat([task.net.weight.detach().flatten(), task.net.bias.detach()])
    assert torch.equal(hubs[0].hub.params.fragments[0].theta, held)


def test_a_worker_that_has_finished_does_not_finish_again() -> None:
    with hub_thread() as hub:
        task = Task()
        with paceline.AsyncDataParallel(task.net, task.optim, hub.address, 5, 2) as training:
            task.train_until(lambda: training.counts.taken > 0)
            assert training.finish()
            sent = training.counts.sent
        assert training.counts.sent == sent == hub.hub.updates


@pytest.mark.thorough
def test_a_killed_and_restarted_hub_loses_no_acknowledged_update(
    tmp_path: Path,
) -> None:
    hub = HubProcess(tmp_path / "hub", "--snapshot-every", "20")
    task, acknowledged = Task(), set[int]()
    try:
        with paceline.AsyncDataParallel(
            task.net, task.optim, hub.address, 4, 2, folder=tmp_path / "outbox"
        ) as training:
            session = training._client.comm_threads[0].session
            take = session._outbox.acknowledge

            def note(round: int, fragment: int) -> bool:
                acknowledged.add(round)
                return take(round, fragment)

            session._outbox.acknowledge = note
            for _ in range(3):
                goal = session.acknowledged + 15
                task.train_until(lambda goal=goal: session.acknowledged >= goal)
                hub.kill()
                task.steps(30)
                hub.start()
            goal = session.acknowledged + 5
            task.train_until(lambda: session.acknowledged >= goal)
        hub.end()
        updates = [each for each in read_ledger(tmp_path / "hub") if each["kind"] == "update"]
        rounds = [each["round"] for each in updates]
        assert len(rounds) == len(set(rounds)), "none was merged twice"
        assert acknowledged <= set(rounds), "none is missing"
        assert [each["revision"] for each in updates] == list(range(1, len(updates) + 1))
    finally:
        hub.end()


def test_another_model_is_refused_with_the_first_tensor_that_differs() -> None:
    with hub_thread() as hub:
        first, other = Task(), Task()
        other.net = nn.Linear(12, 4)
        other.optim = torch.optim.SGD(other.net.parameters(), 0.01)
        with paceline.AsyncDataParallel(first.net, first.optim, hub.address, 5, 2):
            first.train_until(lambda: hub.hub.phase == "together")

            def train() -> None:
                with paceline.AsyncDataParallel(other.net, other.optim, hub.address, 5, 2):
                    for _ in range(2000):
                        other.net(INPUTS[:4]).sum().backward()
                        other.optim.step()
                        time.sleep(0.005)

            with pytest.raises(UsageError, match=r"'weight' has shape \[4, 12\], expected \[3, 12\]"):
                train()


def test_another_run_is_refused() -> None:
    with hub_thread(run="first") as hub:
        task = Task()
        with (
            pytest.raises(UsageError, match="this hub serves run 'first', the worker requests run 'second'"),
            paceline.AsyncDataParallel(task.net, task.optim, hub.address, 5, 2, run="second"),
        ):
            task.steps(2000, 0.005)


def test_a_hub_without_options_makes_keys_that_its_user_s_workers_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_JOB_KEY")
    hub = HubProcess(tmp_path / "hub")
    try:
        keys = tmp_path / "hub" / "keys"
        assert [path.stat().st_mode & 0o777 for path in (keys, keys / "worker.key")] == [0o700, 0o600]
        task = Task()
        with paceline.AsyncDataParallel(task.net, task.optim, tmp_path / "hub", 5, 2) as training:
            task.train_until(lambda: training.counts.taken > 1)
    finally:
        hub.end()
    assert not (tmp_path / "hub" / "address.json").exists()


@pytest.mark.thorough
def test_a_worker_without_the_right_key_is_not_admitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.transport.zmq.curve_keys import HubKeys

    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    with hub_thread(keys=HubKeys.read(tmp_path / "keys")) as hub:
        right, wrong, none = Task(), Task(), Task()
        with caplog.at_level(logging.WARNING):
            with paceline.AsyncDataParallel(
                right.net, right.optim, hub.address, 5, 2, key=tmp_path / "keys" / "worker.key"
            ) as training:
                right.train_until(lambda: training.counts.taken > 1)
            for task, key in ((wrong, tmp_path / "others" / "worker.key"), (none, None)):
                with paceline.AsyncDataParallel(task.net, task.optim, hub.address, 5, 2, key=key) as training:
                    task.steps(150, 0.01)
                    assert training.counts.taken == 0
                    assert not training.finish(0.2)
        assert len(list(hub.hub.members)) == 1
        assert "training goes on alone" in caplog.text


def test_a_worker_with_nan_parameters_takes_the_global_ones_and_continues() -> None:
    with hub_thread(HubRules(screen=ScreeningRules(strikes=10))) as hub:
        good, bad = Task(), Task(1)
        with (
            paceline.AsyncDataParallel(good.net, good.optim, hub.address, 5, 2),
            paceline.AsyncDataParallel(bad.net, bad.optim, hub.address, 5, 2, name="bad") as training,
        ):
            bad.train_until(lambda: training.counts.taken > 1 or _step(good))
            with torch.no_grad():
                bad.net.weight[0, 0] = torch.nan
            bad.train_until(lambda: bool(torch.isfinite(bad.net.weight).all()) or _step(good))
        assert hub.hub.refused["not finite"] >= 1
        assert torch.isfinite(hub.hub.params.fragments[0].theta).all()


@pytest.mark.thorough
def test_a_population_replaces_a_bad_worker_and_joins_the_best() -> None:
    rules = HubRules(population=PopulationRules(steps=300, margin=0.2))
    with hub_thread(rules) as hub:
        tasks = [Task(0), Task(1), Task(2, lr=20.0)]  # the last one diverges

        def train(index: int) -> None:
            task = tasks[index]
            with paceline.AsyncDataParallel(
                task.net, task.optim, hub.address, 10, 3, score=task.loss, name=f"w{index}"
            ) as training:
                task.train_until(
                    lambda: training.counts.steps > 400 and training.counts.taken > 3 and task.loss() < 0.05
                )
                counts[index], scales[index] = training.counts, training.lr_scale

        counts, scales = {}, {}
        together(*(lambda index=index: train(index) for index in range(3)))
        assert counts[2].replaced >= 1
        assert scales[2] == pytest.approx(0.02 / 20.0)
        assert hub.hub.phase == "together"
        assert all(task.loss() < 0.1 for task in tasks)
        kinds = [each["kind"] for each in hub.journal.ledger()]
        assert kinds.index("replace") < kinds.index("together") < kinds.index("begin")


def test_several_hubs_share_the_fragments() -> None:
    with hub_thread(HubRules(shard=HubShard(0, 2))) as one, hub_thread(HubRules(shard=HubShard(1, 2))) as two:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        optim = torch.optim.SGD(net.parameters(), 0.05)
        with paceline.AsyncDataParallel(
            net, optim, [one.address, two.address], 6, 2, fragments=2
        ) as training:

            def step() -> None:
                ((net(INPUTS) - TARGETS) ** 2).mean().backward()
                optim.step()
                optim.zero_grad()

            hubs = (one.hub, two.hub)
            wait_until(
                lambda: (all(each.updates > 5 for each in hubs) and training.counts.taken > 10) or step()
            )
        assert sorted(one.hub.params.fragments) == [0]
        assert sorted(two.hub.params.fragments) == [1]


def test_settings_are_chosen_from_measured_times() -> None:
    with hub_thread() as hub:
        task = Task()
        with paceline.AsyncDataParallel(
            task.net, task.optim, hub.address, "auto", "auto", compression="auto"
        ) as training:
            assert (training.cadence.every, training.cadence.delay) == (20, 5)
            task.train_until(lambda: training.cadence.every != 20)
            assert training.cadence.delay < training.cadence.every <= 500


def test_selection_policies_apply_better_parameters_only() -> None:
    with hub_thread() as hub:
        good, poor = Task(0), Task(1, lr=1e-3)
        with paceline.AsyncDataParallel(
            good.net, good.optim, hub.address, 5, 2, receive="better", score=good.loss
        ) as training:
            good.train_until(lambda: hub.hub.phase == "together")

            def drag() -> None:
                with paceline.AsyncDataParallel(
                    poor.net, poor.optim, hub.address, 5, 2, send="better", score=poor.loss
                ) as other:
                    poor.train_until(lambda: other.counts.taken > 0)

            def lead() -> None:
                good.train_until(
                    lambda: training.counts.taken + training.counts.declined > 5 and good.loss() < 0.4
                )

            together(drag, lead)
        assert good.loss() < 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"delay": -1}, "delay=-1"),
        ({"every": 5, "delay": 5}, "delay=5 with every=5"),
        ({"fragments": 9}, "fragments=9"),
        ({"hub": "127.0.0.1"}, "tcp://"),
        ({"hub": "192.168.77.5:7077"}, "is not a hub address"),
        ({"hub": []}, "0 hubs"),
        ({"bandwidth": "130%"}, "130%"),
        ({"bandwidth": "130% of 1Gbit/s"}, "130%"),
        ({"bandwidth": "0MB/s"}, "0MB/s"),
        ({"send": "some"}, "unknown policy"),
        ({"receive": "better"}, "without a score"),
        ({"compression": "int5"}, "unknown compression"),
        ({"compression": "powersgd"}, "powersgd"),
        ({"key": "/nowhere/worker.key"}, "worker.key"),
        ({"cores": 1000}, "cores=1000"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict, message: str
) -> None:
    monkeypatch.setattr(hub_access, "_START_SECONDS", 0.0)
    task = Task()
    before = threading.active_count()
    with pytest.raises(UsageError, match=message):
        paceline.AsyncDataParallel(task.net, task.optim, **{"hub": "tcp://127.0.0.1:7077", **given})
    assert threading.active_count() == before


def test_the_optimizer_must_belong_to_the_model() -> None:
    task, other = Task(), Task()
    with pytest.raises(UsageError, match="holds no parameter of this model"):
        paceline.AsyncDataParallel(task.net, other.optim, "tcp://127.0.0.1:7077")


def test_an_exception_in_the_block_leaves_no_thread() -> None:
    with hub_thread() as hub:
        task, before = Task(), threading.active_count()

        def train() -> None:
            with paceline.AsyncDataParallel(task.net, task.optim, hub.address, 5, 2):
                task.steps(5)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        assert threading.active_count() == before
        task.steps(3)
