"""Ranks that train until a fault comes true, and write down when they named whom: ``python -m
bench_harness.fire_drill``.

    python -m bench_harness.fire_drill FOLDER HOST HOSTS RANKS

runs RANKS ranks of host number HOST (of HOSTS) through the drills that ``FOLDER/drills.json`` lists, one after
another; the same command runs on every host, and all see the folder. They fork from one process that has imported
torch. Whoever gives the command makes ``FOLDER/over-<n>`` once drill n is over: what is left of its ranks is killed.

    FOLDER/drills.json         [{"backend": "gloo", "faults": "fail_at(rank=1, step=20)", "stall": 4, "lost": 3}, …]
    FOLDER/training-<n>-<r>    rank r has made some steps
    FOLDER/fault-<n>-<r>       the second at which the fault came true
    FOLDER/told-<n>-<r>        what rank r raised, and when

Seconds are those of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

import paceline
from paceline.health import abort_collectives
from paceline.testing import fault_effects, fault_injection

__all__ = ["main"]

WIDTH, BATCH = 128, 8
_TRAINING = 5
"""Steps after which a rank says that it is training."""

_TOLD = ("rank", "host", "step", "pid", "phase", "exit_code", "kind", "stack")


def main(folder: Path, host: int, hosts: int, ranks: int) -> None:
    """Run the ranks of one host through all drills."""
    importlib.import_module("torch._dynamo")  # once, rather than in every rank
    importlib.import_module("paceline.health.watchdog")
    torch.set_num_threads(1)
    for number, drill in enumerate(json.loads((folder / "drills.json").read_text())):
        mine = range(host * ranks, (host + 1) * ranks)
        pids = []
        for rank in mine:
            pids.append(os.fork())
            if pids[-1] == 0:
                _be_rank(folder, number, drill, rank, hosts * ranks)
        _wait(pids, folder / f"over-{number}")


def _wait(pids: list[int], over: Path) -> None:
    """Return when the drill is over and no rank of it is left."""
    while not over.exists():
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_rank(folder: Path, number: int, drill: dict[str, Any], rank: int, size: int) -> NoReturn:
    """Train until something is raised, and write down what."""
    told = folder / f"told-{number}-{rank}"
    abort_collectives.end_process = lambda reason: _tell(told, reason, freed=False)
    try:
        _note_faults(folder / f"fault-{number}-{rank}")
        place: dict[str, Any] = {"rank": rank, "size": size, "device": "cpu", "timeout": 120.0}
        paceline.init(drill["backend"], init_method=f"file://{folder}/world-{number}", **place)
        _train(drill, folder / f"training-{number}-{rank}")
    except BaseException as error:  # noqa: BLE001 — whatever it is, it is what is told
        _tell(told, error, freed=True)
    os._exit(0)


def _tell(path: Path, error: BaseException, *, freed: bool) -> None:
    """Write down what was raised, or could not be raised because its thread was not to be freed."""
    told: dict[str, Any] = {name: getattr(error, name, None) for name in _TOLD}
    told |= {"at": time.monotonic(), "error": type(error).__name__, "text": str(error), "freed": freed}
    _write(path, told)
    if not freed:
        os._exit(abort_collectives.EXIT_CODE)


def _train(drill: dict[str, Any], training: Path) -> NoReturn:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    model = paceline.DataParallel(net, sync="bucketed")
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, step = torch.ones(BATCH, WIDTH), 0
    fault_injection.arm(drill["faults"])
    with paceline.Watchdog(stall=drill["stall"], lost=drill["lost"]):
        while True:
            model.backward(model(batch).mean(), samples=BATCH)
            optim.step()
            optim.zero_grad()
            step += 1
            if step == _TRAINING:
                _write(training, step)


def _note_faults(path: Path) -> None:
    """Have the moment written down at which a fault comes true."""

    def noted(happen: Any) -> Any:
        def first_note(*arguments: Any) -> None:
            _write(path, time.monotonic())
            happen(*arguments)

        return first_note

    for ways in (fault_effects.FAILURES, fault_effects.STALLS):
        for name, happen in list(ways.items()):
            ways[name] = noted(happen)


def _write(path: Path, what: Any) -> None:
    """Write JSON that is there whole or not at all."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(what))
    beside.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
