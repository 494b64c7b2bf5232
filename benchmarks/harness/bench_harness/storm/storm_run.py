"""Runs a fault plan on the hosts of a `Lab`, and compares the workers' logs with the hub's ledger."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench_harness.storm.fault_plan import Fault
from paceline.async_dp.wal.decision_ledger import read_ledger

__all__ = ["Storm", "StormResult", "count_losses"]

_POLL_SECONDS = 0.1
_END_SECONDS = 180.0


class Program(Protocol):
    """A program on a host."""

    def wait(self, timeout: float | None = None, *, check: bool = True) -> object:
        """Wait until it ends."""
        ...

    def end(self) -> None:
        """Terminate it."""
        ...


class Hosts(Protocol):
    """The part of `paceline.testing.netlab.Lab` that a storm needs."""

    @property
    def hosts(self) -> int: ...
    @property
    def addresses(self) -> Sequence[str]: ...
    def start(self, command: Sequence[str], *, on: int) -> Program: ...
    def kill(self, host: int) -> None: ...
    def stop(self, host: int) -> None: ...
    def resume(self, host: int) -> None: ...
    def cut(self, host: int) -> None: ...
    def mend(self, host: int) -> None: ...


@dataclass(frozen=True)
class StormResult:
    """Counts after a storm.

    Attributes:
        updates: merged, according to the ledger.
        acknowledged: rounds that workers saw acknowledged, as merged or refused.
        lost: acknowledged rounds that the ledger lacks.
        twice: rounds that were merged more than once.
        gaps: revisions that don't follow one another.
        refused: updates by reason.
        ended: workers that left in order.
        ended_with_centre: those of them that left with the global parameters.
        first_score: first score of the global parameters that a worker reported.
        last_score: the last one.
    """

    updates: int
    acknowledged: int
    lost: int
    twice: int
    gaps: int
    refused: dict[str, int]
    ended: int
    ended_with_centre: int
    first_score: float | None
    last_score: float | None


class Storm:
    """A hub on host 0, and workers on the others.

    Args:
        lab: the hosts.
        folder: that all programs write to.
        seconds: of the run.
        corrupted: share of envelopes that are corrupted, in both directions.
        every: k.
        delay: d.
        step_seconds: that a worker sleeps in each step.
    """

    def __init__(
        self,
        lab: Hosts,
        folder: Path,
        seconds: float,
        *,
        corrupted: float = 0.02,
        every: int = 10,
        delay: int = 3,
        step_seconds: float = 0.03,
    ) -> None:
        self._lab, self._job_file, self._seconds = lab, folder / "job.json", seconds
        self._job = {
            "hub": f"tcp://{lab.addresses[0]}:7077",
            "bind": "tcp://*:7077",
            "folder": str(folder),
            "corrupted": corrupted,
            "every": every,
            "delay": delay,
            "step_seconds": step_seconds,
        }
        self._programs: dict[int, Program] = {}
        self._actions: list[tuple[float, Callable[[], object]]] = []

    def play(self, faults: Sequence[Fault], on_poll: Callable[[float], object] = lambda _: None) -> None:
        """Run all programs with these faults, until the workers have left; then terminate the hub.

        Args:
            faults: of hosts.
            on_poll: called several times per second, with the seconds since the beginning.

        Raises:
            HostFailed: a worker or the hub ended early, or did not end.
        """
        began = time.time()
        self._job_file.write_text(json.dumps(self._job | {"until": began + self._seconds}), encoding="utf-8")
        for host in range(self._lab.hosts):
            self._start(host)
        self._actions = [(each.at, lambda each=each: self._inject(each)) for each in faults]
        while (elapsed := time.time() - began) < self._seconds:
            for action in [each for each in self._actions if each[0] <= elapsed]:
                self._actions.remove(action)
                action[1]()
            on_poll(elapsed)
            time.sleep(_POLL_SECONDS)
        for _, undo in sorted(self._actions, key=lambda each: each[0]):
            undo()
        for host in range(1, self._lab.hosts):
            self._programs[host].wait(_END_SECONDS)
        self._programs[0].end()

    def _start(self, host: int) -> None:
        program = [sys.executable, "-m", "bench_harness.storm.storm_program", str(self._job_file), str(host)]
        self._programs[host] = self._lab.start(program, on=host)

    def _inject(self, fault: Fault) -> None:
        """Cause a fault, and schedule the end of it."""
        host, lab = fault.host, self._lab
        if fault.what in ("kill", "hub"):
            lab.kill(host)
            self._programs[host].wait(10.0, check=False)
            undo = self._start
        elif fault.what == "stop":
            lab.stop(host)
            undo = lab.resume
        else:
            lab.cut(host)
            undo = lab.mend
        self._actions.append((fault.at + fault.seconds, lambda: undo(host)))


def count_losses(folder: Path, workers: int) -> StormResult:
    """Compare the workers' logs of acknowledged rounds with the hub's ledger.

    Args:
        folder: of the storm.
        workers: number of workers.
    """
    rows = list(read_ledger(folder / "hub"))
    updates = [row for row in rows if row["kind"] == "update"]
    refusals = [row for row in rows if row["kind"] == "refuse"]
    numbers = {row["name"]: row["worker"] for row in rows if row["kind"] == "join"}
    merged = [(row["worker"], row["fragment"], row["round"]) for row in updates]
    known = set(merged) | {(row["worker"], row["fragment"], row["round"]) for row in refusals}
    acknowledged: set[tuple[int, int, int]] = set()
    for worker in range(1, workers + 1):
        path = folder / f"acknowledged-{worker}.txt"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            round, fragment = map(int, line.split())
            acknowledged.add((numbers[f"worker{worker}"], fragment, round))
    revisions = [row["revision"] for row in updates]
    scores = [row["score"] for row in rows if row["kind"] == "centre" and row["score"] is not None]
    ended = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("ended-*.json")]
    return StormResult(
        updates=len(merged),
        acknowledged=len(acknowledged),
        lost=len(acknowledged - known),
        twice=len(merged) - len(set(merged)),
        gaps=sum(after != before + 1 for before, after in zip([0, *revisions], revisions, strict=False)),
        refused=dict(Counter(row["why"].partition(":")[0] for row in refusals)),
        ended=len(ended),
        ended_with_centre=sum(each["centre"] for each in ended),
        first_score=scores[0] if scores else None,
        last_score=scores[-1] if scores else None,
    )
