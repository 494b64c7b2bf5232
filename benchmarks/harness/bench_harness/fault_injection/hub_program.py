"""The program of a hub or worker under fault injection; both corrupt a share of what they send.

A worker trains with `paceline.AsyncDataParallel` and logs every round that was acknowledged. The hub logs its memory.
A worker of several ranks is this program under ``paceline run``.

python -m bench_harness.fault_injection.hub_program JOB.json HOST      (host 0: the hub)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from torch import Tensor, nn

import paceline
from paceline._core.files import write_text
from paceline.async_dp.api import AsyncDataParallel
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.errors import ReplicasDiverged
from paceline.transport.zmq import HubExchange
from paceline.transport.zmq.zmq_endpoint import ZmqEndpoint
from paceline.world.control_collectives import rank_and_size, sum_over_ranks

__all__ = ["corrupt_sends", "run_hub", "run_worker"]

_EVERY, _DELAY = 10, 3
_STEP_SECONDS = 0.03  # that a worker sleeps in each step
_NUMEL = 2000
_LOST_SECONDS = 5.0  # of the watchdog of several ranks
_MEMORY_SECONDS = 2.0


def run_hub(job: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    exchange = HubExchange("tcp://*:7077", "", insecure=True)
    corrupt_sends(exchange, job["corrupted"], seed=time.time_ns())
    process, logged_at = psutil.Process(), 0.0
    with (
        HubJournal.open(Path(job["folder"], "hub"), resume=True) as journal,
        Path(job["folder"], "memory.jsonl").open("a", encoding="utf-8", buffering=1) as memory,
    ):
        hub = Hub("faults", HubRules(silent_after=5.0, snapshot_every=200), journal, time.time)

        def log_memory() -> None:
            nonlocal logged_at
            if time.monotonic() - logged_at > _MEMORY_SECONDS:
                logged_at = time.monotonic()
                rss = process.memory_info().rss
                row = {"t": time.time(), "pid": process.pid, "rss": rss, "updates": hub.updates}
                memory.write(json.dumps({**row, "refused": {**hub.refused, **exchange.refused}}) + "\n")

        HubServer(hub, exchange).run(lambda: bool(signals), log_memory)
    exchange.close()


def run_worker(job: dict[str, Any], number: int) -> None:
    """Train until the end of the run, then leave in order; with several ranks as one of them."""
    folder, ranks = Path(job["folder"]), job["ranks"]
    torch.set_num_threads(1)
    world = paceline.init(timeout=60.0)
    write_text(folder / f"pid-{number}-{world.rank}", str(os.getpid()))
    task = _SpiralTask(number, ranks)
    watched = paceline.Watchdog(lost=_LOST_SECONDS) if ranks > 1 else contextlib.nullcontext()
    training = AsyncDataParallel(
        task.model, task.optimizer, job["hub"], _EVERY, _DELAY, insecure=True, score=task.loss,
        folder=folder / f"outbox-{number}", name=f"worker{number}",
    )  # fmt: skip
    try:
        with watched, training:
            if world.rank == 0:
                _corrupt_and_log(training, job, folder / f"acknowledged-{number}.txt")
            while not sum_over_ranks(torch.tensor([float(time.time() >= job["until"])])).item():
                task.step()
                time.sleep(_STEP_SECONDS)
            finished = training.finish(120.0)
    except ReplicasDiverged as error:
        (folder / f"diverged-{number}").write_text(str(error), encoding="utf-8")
        raise
    if world.rank == 0:
        write_text(folder / f"ended-{number}.json", json.dumps({"global_params": finished}))
    paceline.shutdown()


def _corrupt_and_log(training: AsyncDataParallel, job: dict[str, Any], path: Path) -> None:
    """Corrupt what a worker sends, and log the rounds that are acknowledged."""
    assert training._client is not None
    acknowledged = path.open("a", encoding="utf-8", buffering=1)
    for thread in training._client.comm_threads:
        _log_acknowledged(thread.session._outbox, acknowledged)
        corrupt_sends(thread.exchange, job["corrupted"], seed=time.time_ns())


def _log_acknowledged(outbox: Outbox, log: TextIO) -> None:
    """Log acknowledged rounds before the outbox removes them."""
    acknowledge = outbox.acknowledge

    def logged(round: int, fragment: int) -> bool:
        log.write(f"{round} {fragment}\n")
        return acknowledge(round, fragment)

    outbox.acknowledge = logged


class _SpiralTask:
    """A small network that separates two spirals; all workers start with equal parameters, and share held-out data.

    Several ranks compare their parameters at every 10th step.
    """

    def __init__(self, number: int, ranks: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)
        )
        self.model = paceline.DataParallel(self.net) if ranks > 1 else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        if isinstance(self.model, paceline.DataParallel):
            paceline.ReplicaCheck(self.model, self.optimizer, every=10)
        self.inputs, self.targets = _spiral_points(_NUMEL, seed=number + 1)
        self.held_out = _spiral_points(500, seed=0)
        rank = rank_and_size()[0]
        self._generator = torch.Generator().manual_seed(number + 1000 * rank)

    def step(self) -> None:
        rows = torch.randint(0, _NUMEL, (32,), generator=self._generator)
        nn.functional.cross_entropy(self.model(self.inputs[rows]), self.targets[rows]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> float:
        inputs, targets = self.held_out
        return nn.functional.cross_entropy(self.net(inputs), targets).item()


def _spiral_points(numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points on two spirals, and the spiral of each."""
    generator = torch.Generator().manual_seed(seed)
    along = torch.rand(numel, generator=generator)
    spiral = torch.randint(2, (numel,), generator=generator)
    angle = 3.5 * along + math.pi * spiral
    inputs = torch.stack([along * angle.cos(), along * angle.sin()], 1)
    return inputs + 0.01 * torch.randn(numel, 2, generator=generator), spiral


def corrupt_sends(exchange: ZmqEndpoint, share: float, seed: int) -> None:
    """Corrupt a share of what an exchange sends from now on: flip a bit, cut, repeat, lose or delay an envelope.

    Args:
        exchange: whose messages end with header, payload and trailer.
        share: of all envelopes.
        seed: of the random choices.
    """
    generator, delayed = random.Random(seed), list[list[Any]]()
    wire = exchange._socket
    send = wire.send

    def corrupted(parts: Sequence[Any]) -> None:
        if delayed and generator.random() < 0.5:
            send(delayed.pop())  # out of order
        if generator.random() >= share:
            send(parts)
            return
        kind = generator.choice(("flip", "cut", "repeat", "lose", "delay"))
        changed = [bytes(part) for part in parts]
        if kind == "flip":
            index = len(changed) - 1 - generator.randrange(3)
            changed[index] = _flip_bit(changed[index], generator)
        elif kind == "cut":
            changed[-2] = changed[-2][: len(changed[-2]) // 2]
        elif kind == "delay" and len(delayed) < 4:
            delayed.append(changed)
            return
        if kind != "lose":
            send(changed)
        if kind == "repeat":
            send(changed)

    wire.send = corrupted


def _flip_bit(data: bytes, generator: random.Random) -> bytes:
    if not data:
        return b"\x01"
    changed = bytearray(data)
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


if __name__ == "__main__":
    _job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if sys.argv[2] == "0":
        run_hub(_job)
    else:
        run_worker(_job, int(sys.argv[2]))
