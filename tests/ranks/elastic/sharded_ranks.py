"""Ranks that train with sharded optimizers or master weights, recover live, and die at given places."""

from __future__ import annotations

import hashlib
import os
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline._core.summation_tree import leaves_of
from paceline.data.leaf_random import seed_leaf
from paceline.elastic.shard_recovery import ShardRecovery
from paceline.errors import CollectiveError
from paceline.parallel.buckets.neighbour_exchange import NeighbourExchange
from paceline.parallel.engine.launch_queue import LaunchQueue
from paceline.parallel.sharding.copying_update import CopyingUpdate
from world_entry import free_port

VIRTUAL_RANKS = 6
SMALL = paceline.Sync(0.02, shard="optimizer")


@dataclass(frozen=True)
class Setup:
    """What a run trains with.

    Attributes:
        kind: "adamw", "muon", "masters" (whole bfloat16 weights, updated in float32) or "plain" (no virtual ranks).
        backend, sync, steps: of the run.
        pause: after each step, in seconds.
        checkpoint: the step after which one is saved; 0: none.
        waits_at: the step before which ranks attempt nothing until the file ``over`` exists; −1: none.
    """

    kind: str = "adamw"
    backend: str = "paceline"
    sync: paceline.Sync = SMALL
    steps: int = 8
    pause: float = 0.0
    checkpoint: int = 0
    waits_at: int = -1


@dataclass(frozen=True)
class Fault:
    """What happens on a rank in a step, when it has reached a place for the `count`-th time."""

    place: str
    step: int = 3
    count: int = 1
    error: bool = False
    wait: float = 0.0


class Scheduler:
    """Changes the learning rate after each step, as what follows a step in an attempt."""

    def __init__(self, optimizers):
        self.optimizers, self.steps = optimizers, 0

    def step(self):
        self.steps += 1
        for each in self.optimizers:
            for group in each.param_groups:
                group["lr"] = 0.01 / (1 + self.steps % 4)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Faults:
    """Brings about the faults of this rank."""

    def __init__(self, faults, step):
        self.faults, self.step, self.reached = faults, step, Counter()

    def reach(self, place):
        self.reached[place, self.step()] += 1
        for fault in self.faults:
            if (fault.place, fault.step, fault.count) == (
                place,
                self.step(),
                self.reached[place, self.step()],
            ):
                time.sleep(fault.wait)
                if fault.error:
                    raise CollectiveError("a rank is gone")
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self, model, optimizers):
        model.module[0].register_forward_pre_hook(lambda *_: self.reach("forward"))
        model.module[3].register_forward_hook(self.watch)
        for each in optimizers[1:]:
            each.register_step_pre_hook(lambda *_: self.reach("between"))
        self.around(LaunchQueue, "_launch", before="launch")
        self.around(paceline.DataParallel, "clip_grad_norm_", after="clip")
        self.around(CopyingUpdate, "_gather_others", before="updated")
        self.around(NeighbourExchange, "all_gather", after="gather")
        self.around(ShardRecovery, "exchange", before="exchange", after="exchanged")
        self.around(ShardRecovery, "rejoin", after="rejoined")
        real = NeighbourExchange.confirm

        def confirm(exchange, step):
            known = exchange.is_decided(step)
            if not known:
                self.reach("confirm")
            found = real(exchange, step)
            if not known:
                try:
                    self.reach("confirmed")
                except CollectiveError as error:
                    exchange._error = found = error
            return found

        NeighbourExchange.confirm = confirm

    def watch(self, module, args, output):
        output.register_hook(lambda _grad: self.reach("backward"))

    def around(self, owner, name, before="", after=""):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if before:
                self.reach(before)
            result = real(*args, **kwargs)
            if after:
                self.reach(after)
            return result

        setattr(owner, name, call)


def build(setup):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 90), nn.BatchNorm1d(90), nn.Dropout(0.2), nn.Linear(90, 60), nn.Tanh(), nn.Linear(60, 3)
    )
    virtual = None if setup.kind == "plain" else VIRTUAL_RANKS
    if setup.kind == "masters":
        model = paceline.DataParallel(
            net.bfloat16(), sync="bucketed", virtual_ranks=virtual, reduce_dtype=torch.float32
        )
        adamw = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, master_dtype=torch.float32)
        return model, [adamw]
    model = paceline.DataParallel(net, sync=setup.sync, virtual_ranks=virtual)
    if setup.kind != "muon":
        return model, [paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)]
    matrices, rest = paceline.matrix_parameters(model)
    return model, [
        paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=1e-2),
        paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, lr=1e-2),
    ]


def run_step(model, optimizers, scheduler, step):
    for leaf in leaves_of(model.comm.rank, model.comm.size, VIRTUAL_RANKS):
        seed_leaf(0, 0, step, leaf)
        samples = (3 * step + leaf) % 4 + 2
        inputs, targets = torch.randn(samples, 12), torch.randn(samples, 3)
        inputs = inputs.to(next(model.module.parameters()).dtype)
        model.backward((model(inputs) - targets).square().mean(), samples=samples)
    model.clip_grad_norm_(0.1)
    for each in optimizers:
        each.step()
    scheduler.step()
    for each in optimizers:
        each.zero_grad()


def digest(model, optimizers, scheduler):
    found = hashlib.sha256(str(scheduler.steps).encode())
    for value in model.module.state_dict().values():
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def start_run(folder):
    """Choose the port of a run in `folder`, before its ranks begin."""
    Path(folder, "port").write_text(str(free_port()))


def train(send, folder, rank, size, setup, faults=(), incarnation=0, joins=False):
    """Train, and send ``("digest", digest, worlds)`` at the end or ``("error", text)``."""
    port = Path(folder, "port").read_text()
    os.environ |= {
        "RANK": str(rank % size),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if size > 1:
        os.environ["PACELINE_STORE"] = f"file://{folder}/store?master=127.0.0.1%3A{port}"
        os.environ["PACELINE_MEMBER"] = f"host/{rank}/{incarnation}"
    if joins:
        os.environ["PACELINE_JOINER"] = "1"
    torch.set_num_threads(1)
    try:
        send(("digest", *_train(send, Path(folder), size, setup, faults)))
    except SystemExit:
        send(("left",))
    except BaseException as error:  # noqa: BLE001 - the test shows it
        send(("error", f"{error}\n{traceback.format_exc()}"))


def _train(send, folder, size, setup, faults):
    paceline.init(setup.backend if size > 1 else None, device="cpu")
    model, optimizers = build(setup)
    scheduler, worlds = Scheduler(optimizers), []
    named = {f"optimizer{number}": each for number, each in enumerate(optimizers)}
    checkpoint = None
    if setup.checkpoint:
        checkpoint = paceline.Checkpoint(
            folder / "checkpoints", model, scheduler, asynchronous=False, **named
        )
    elastic = paceline.Elastic(model, scheduler, lost=4.0, checkpoint=checkpoint, **named)
    Faults(faults, lambda: elastic.step).install(model, optimizers)
    elastic.on_world(lambda world: worlds.append(world.size))
    with elastic:
        while elastic.step < setup.steps:
            with elastic.attempt():
                if elastic.step != setup.waits_at or (folder / "over").exists():
                    run_step(model, optimizers, scheduler, elastic.step)
            if setup.checkpoint and elastic.step == setup.checkpoint and elastic.recoveries == 0:
                checkpoint.save(wait=True)
            send(("step", elastic.step, model.comm.size))
            time.sleep(setup.pause)
    return digest(model, optimizers, scheduler), worlds
