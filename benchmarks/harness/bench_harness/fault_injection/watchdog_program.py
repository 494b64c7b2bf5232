"""Ranks that train until an injected fault, and write down which failure they reported and when.

    python -m bench_harness.fault_injection.watchdog_program FOLDER HOST HOSTS RANKS

runs RANKS ranks of host number HOST (of HOSTS) through the cases that ``FOLDER/cases.json`` lists, one after another;
the same command runs on every host, and all see the folder. Ranks fork from one process that has imported torch. The
program that started them makes ``FOLDER/end-<n>`` when case n is over: its remaining ranks are killed.

    FOLDER/cases.json          [{"backend": "gloo", "faults": "fail_at(rank=1, step=20)", "stall": 4, "lost": 3}, …]
    FOLDER/training-<n>-<r>    rank r has made some steps
    FOLDER/fault-<n>-<r>       the second of the fault
    FOLDER/error-<n>-<r>       what rank r raised, and when

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

_WIDTH, _BATCH = 128, 8
_TRAINING_STEPS = 5  # after which a rank reports that it is training
_FACTS = ("rank", "host", "step", "pid", "phase", "exit_code", "kind", "stack")


def main(folder: Path, host: int, hosts: int, ranks: int) -> None:
    """Run the ranks of one host through all cases."""
    importlib.import_module("torch._dynamo")  # once, rather than in every rank
    importlib.import_module("paceline.health.watchdog")
    torch.set_num_threads(1)
    for number, case in enumerate(json.loads((folder / "cases.json").read_text(encoding="utf-8"))):
        pids = []
        for rank in range(host * ranks, (host + 1) * ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                _run_rank(folder, number, case, rank, hosts * ranks)
        while not (folder / f"end-{number}").exists():
            time.sleep(0.02)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_rank(folder: Path, number: int, case: dict[str, Any], rank: int, size: int) -> NoReturn:
    """Train until something is raised, and write that down."""
    path = folder / f"error-{number}-{rank}"
    abort_collectives.end_process = lambda reason: _write_error(path, reason, freed=False)
    try:
        _log_faults(folder / f"fault-{number}-{rank}")
        place: dict[str, Any] = {"rank": rank, "size": size, "device": "cpu", "timeout": 120.0}
        paceline.init(case["backend"], init_method=f"file://{folder}/world-{number}", **place)
        _train(case, folder / f"training-{number}-{rank}")
    except BaseException as error:  # noqa: BLE001 — whatever it is, it is written down
        _write_error(path, error, freed=True)
    os._exit(0)


def _write_error(path: Path, error: BaseException, *, freed: bool) -> None:
    """Write down what was raised; `freed`: False if it could not be raised in the blocked thread."""
    facts: dict[str, Any] = {name: getattr(error, name, None) for name in _FACTS}
    facts |= {"at": time.monotonic(), "error": type(error).__name__, "text": str(error), "freed": freed}
    _write(path, facts)
    if not freed:
        os._exit(abort_collectives.EXIT_CODE)


def _train(case: dict[str, Any], training: Path) -> NoReturn:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 1))
    model = paceline.DataParallel(net, sync="bucketed")
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, step = torch.ones(_BATCH, _WIDTH), 0
    fault_injection.arm(case["faults"])
    with paceline.Watchdog(stall=case["stall"], lost=case["lost"]):
        while True:
            model.backward(model(batch).mean(), samples=_BATCH)
            optim.step()
            optim.zero_grad()
            step += 1
            if step == _TRAINING_STEPS:
                _write(training, step)


def _log_faults(path: Path) -> None:
    """Have the moment of a fault written down."""

    def logged(happen: Any) -> Any:
        def log_and_happen(*arguments: Any) -> None:
            _write(path, time.monotonic())
            happen(*arguments)

        return log_and_happen

    for effects in (fault_effects.FAILURES, fault_effects.STALLS):
        for name, happen in list(effects.items()):
            effects[name] = logged(happen)


def _write(path: Path, value: Any) -> None:
    """Write JSON that is there complete or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
