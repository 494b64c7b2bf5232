"""Plays a storm on the hosts of a lab, and holds what the workers were told against what the hub wrote down."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench_harness.storm.plan import Mishap
from paceline.async_dp.wal.decision_ledger import read_ledger

__all__ = ["Found", "Storm", "count"]

_LOOK_SECONDS = 0.1
_END_SECONDS = 180.0


class Program(Protocol):
    """What was started on a host."""

    def wait(self, timeout: float | None = None, *, check: bool = True) -> object:
        """Wait until it has ended."""
        ...

    def end(self) -> None:
        """End it."""
        ...


class Hosts(Protocol):
    """What a storm needs of `paceline.testing.netlab.Lab`."""

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
class Found:
    """What came out of a storm.

    Attributes:
        updates: taken in, as the ledger has them. acknowledged: rounds that workers were told are taken in or refused.
        lost: of those, how many the ledger has not. twice: rounds that were taken in more than once.
        gaps: revisions that don't follow one another. refused: by the first words of the reason.
        ended: workers that left in order. ended_with_centre: those of them that left with the centre.
        first_score, last_score: of the centre, as workers measured it.
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
    """Workers on hosts 1 to n, the hub on host 0.

    Args:
        lab: with one more host than workers. folder: for what all write.
        seconds: of the storm. spoil: share of envelopes that are spoilt, both ways.
        every, delay: k and d. step_seconds: that a worker sleeps in a step.
    """

    def __init__(
        self,
        lab: Hosts,
        folder: Path,
        seconds: float,
        *,
        spoil: float = 0.02,
        every: int = 10,
        delay: int = 3,
        step_seconds: float = 0.03,
    ) -> None:
        self._lab, self._folder, self._seconds = lab, folder, seconds
        self.workers = lab.hosts - 1
        self._job = {
            "hub": f"tcp://{lab.addresses[0]}:7077",
            "bind": "tcp://*:7077",
            "folder": str(folder),
            "spoil": spoil,
            "every": every,
            "delay": delay,
            "step_seconds": step_seconds,
        }
        self._jobs: dict[int, Program] = {}
        self._due: list[tuple[float, Callable[[], object]]] = []

    def play(self, mishaps: Sequence[Mishap], tick: Callable[[float], object] = lambda _: None) -> None:
        """Have everything happen, and wait until all workers have left and the hub has ended.

        Args:
            mishaps: what goes wrong. tick: called with the seconds that have passed, several times a second.

        Raises:
            HostFailed: a worker or the hub ended by itself before its time, or did not end.
        """
        began = time.time()
        job_file = self._folder / "job.json"
        job_file.write_text(json.dumps(self._job | {"until": began + self._seconds}), encoding="utf-8")
        self._start(0)
        for host in range(1, self.workers + 1):
            self._start(host)
        self._due = [(each.at, lambda each=each: self._befall(each)) for each in mishaps]
        while (past := time.time() - began) < self._seconds:
            for due in [each for each in self._due if each[0] <= past]:
                self._due.remove(due)
                due[1]()
            tick(past)
            time.sleep(_LOOK_SECONDS)
        for _, undo in sorted(self._due, key=lambda each: each[0]):
            undo()
        for host in range(1, self.workers + 1):
            self._jobs[host].wait(_END_SECONDS)
        self._jobs[0].end()

    def _start(self, host: int) -> None:
        module = "bench_harness.storm.hub" if host == 0 else "bench_harness.storm.worker"
        program = [sys.executable, "-m", module, str(self._folder / "job.json")]
        self._jobs[host] = self._lab.start(program + ([] if host == 0 else [str(host)]), on=host)

    def _befall(self, mishap: Mishap) -> None:
        """Have it happen, and plan its end."""
        host, lab = mishap.host, self._lab
        undo: Callable[[], object]
        if mishap.what in ("kill", "hub"):
            lab.kill(host)
            self._jobs[host].wait(10.0, check=False)
            undo = lambda: self._start(host)  # noqa: E731
        elif mishap.what == "stop":
            lab.stop(host)
            undo = lambda: lab.resume(host)  # noqa: E731
        else:
            lab.cut(host)
            undo = lambda: lab.mend(host)  # noqa: E731
        self._due.append((mishap.at + mishap.seconds, undo))


def count(folder: Path, workers: int) -> Found:
    """Hold the workers' notes against the hub's ledger.

    Args:
        folder: that the storm was played in. workers: how many there were.
    """
    rows = list(read_ledger(folder / "hub"))
    numbers = {each["name"]: each["worker"] for each in rows if each["kind"] == "join"}
    taken = [(each["worker"], each["fragment"], each["round"]) for each in rows if each["kind"] == "update"]
    judged = set(taken) | {
        (each["worker"], each["fragment"], each["round"]) for each in rows if each["kind"] == "refuse"
    }
    noted: set[tuple[int, int, int]] = set()
    for worker in range(1, workers + 1):
        path = folder / f"acknowledged-{worker}.txt"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            round, fragment = map(int, line.split())
            noted.add((numbers[f"worker{worker}"], fragment, round))
    revisions = [each["revision"] for each in rows if each["kind"] == "update"]
    refused: dict[str, int] = {}
    for each in rows:
        if each["kind"] == "refuse":
            why = each["why"].partition(":")[0]
            refused[why] = refused.get(why, 0) + 1
    scores = [each["score"] for each in rows if each["kind"] == "centre" and each["score"] is not None]
    ended: list[dict[str, Any]] = [
        json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("ended-*.json")
    ]
    return Found(
        len(taken),
        len(noted),
        len(noted - judged),
        len(taken) - len(set(taken)),
        sum(after != before + 1 for before, after in zip([0, *revisions], revisions, strict=False)),
        refused,
        len(ended),
        sum(each["centre"] for each in ended),
        scores[0] if scores else None,
        scores[-1] if scores else None,
    )
