"""A hub is killed while workers train; its standby takes over, and no acknowledged update is lost or merged twice."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from hub_process import HubProcess, wait_until
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.transport.zmq import zmq_worker
from paceline.transport.zmq.curve_keys import make_keys

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def key(tmp_path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def hubs(tmp_path, key):
    """Starts hubs with the same keys, and ends those that are left."""
    started: list[HubProcess] = []

    def start(name: str, *options: str) -> HubProcess:
        always = ["--keys", str(key.parent), "--silent-after", "1s", "--snapshot-every", "7"]
        started.append(HubProcess(tmp_path / name, *always, *options))
        return started[-1]

    yield start
    for hub in started:
        hub.process.kill()
        hub.process.communicate()


class Worker(threading.Thread):
    """Trains until it is stopped; counts its acknowledged updates by hub's answer."""

    def __init__(self, hub: str, key: Path, folder: Path, seed: int) -> None:
        super().__init__(daemon=True)
        torch.manual_seed(seed)
        self.net, self.stop, self.acknowledged, self.finished = nn.Linear(12, 3), threading.Event(), 0, False
        self.error: BaseException | None = None
        self._given = hub, key, folder
        self.start()

    def run(self) -> None:
        hub, key, folder = self._given
        optim = torch.optim.SGD(self.net.parameters(), 0.01)
        try:
            with paceline.AsyncDataParallel(
                self.net, optim, hub, every=4, delay=2, key=key, folder=folder, name=folder.name
            ) as training:
                session = training._client.comm_threads[0].session
                while not self.stop.wait(0.002):
                    self.net(torch.randn(8, 12)).square().mean().backward()
                    optim.step()
                    optim.zero_grad()
            self.acknowledged, self.finished = session.acknowledged, not session._outbox.pending()
        except BaseException as error:  # noqa: BLE001 - raised by end()
            self.error = error

    def end(self) -> None:
        self.stop.set()
        self.join(60)
        if self.error is not None:
            raise self.error
        assert self.finished


def failed(workers: list[Worker]) -> bool:
    """Raise the first error of a worker."""
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return False


def updates(folder: Path) -> list[dict]:
    return [each for each in read_ledger(folder) if each["kind"] == "update"]


def states(folder: Path) -> list[str]:
    return [each["state"] for each in read_ledger(folder) if each["kind"] == "standby"]


def theta(folder: Path) -> torch.Tensor:
    with HubJournal.open(folder, resume=True) as journal:
        hub = Hub(str(journal.run_facts["run"]), HubRules(), journal, lambda: 0.0)
        assert hub.params is not None
        return hub.params.fragments[0].theta.clone()


@pytest.mark.parametrize("kind", ["stream", pytest.param("shared", marks=pytest.mark.thorough)])
def test_a_standby_takes_over_from_a_killed_hub(tmp_path, monkeypatch, key, hubs, kind) -> None:
    monkeypatch.setattr(zmq_worker, "_SWITCH_SECONDS", 0.5)
    active = hubs("a")
    taken = tmp_path / ("b" if kind == "stream" else "a")
    if kind == "shared":
        wait_until(lambda: (taken / "run.json").exists())
    standby = hubs(taken.name, "--standby", active.address if kind == "stream" else "shared")
    if kind == "stream":
        wait_until(lambda: states(tmp_path / "a") == ["copying", "in sync"])
    # With the stream, one worker learns the standby's address from the hub.
    both = f"{active.address}|{standby.address}"
    addresses = [both, active.address if kind == "stream" else both]
    workers = [Worker(each, key, tmp_path / f"w{n}", n) for n, each in enumerate(addresses)]
    wait_until(lambda: len(updates(tmp_path / "a")) > 20 or failed(workers))
    active.kill()
    before = len(updates(taken))
    wait_until(lambda: len(updates(taken)) > before + 20 or failed(workers))
    for worker in workers:
        worker.end()
    (term,) = (each for each in read_ledger(taken) if each["kind"] == "term")
    merged = [each for each in updates(tmp_path / "a") if each["n"] < term["n"]]
    assert {each["n"] for each in updates(taken)} > {each["n"] for each in merged}
    merged += [each for each in updates(taken) if each["n"] > term["n"]]
    assert max(Counter((each["worker"], each["fragment"], each["round"]) for each in merged).values()) == 1
    assert len(merged) == sum(worker.acknowledged for worker in workers)
    assert len({each["worker"] for each in merged[-20:]}) == 2
    assert term["term"] == 2
    if kind == "stream":
        active.start()  # it has missed that, and stops as soon as it hears of it
        assert "another hub has taken over run" in active.process.communicate(timeout=30)[0]
        assert active.process.returncode == 2
    standby.end()
    final = theta(taken)
    newest = max(taken.glob("snapshot-*.safetensors"))
    shutil.move(newest, tmp_path / "newest")
    assert torch.equal(theta(taken), final), "its records continue those of the killed hub to the bit"
