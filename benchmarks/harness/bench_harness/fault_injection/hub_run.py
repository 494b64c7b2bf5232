"""Applies a fault plan to a hub and its workers on a `Lab`, and compares the workers' logs with the hub's ledger."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench_harness.fault_injection.fault_plan import Fault
from bench_harness.lab_run import read_json
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.testing.netlab import Lab, LabJob

__all__ = ["count_losses", "run_with_faults"]

_POLL_SECONDS = 0.1
_END_SECONDS = 180.0


def run_with_faults(
    lab: Lab,
    folder: Path,
    seconds: float,
    faults: Sequence[Fault],
    on_poll: Callable[[float], object] = lambda _: None,
    *,
    corrupted: float = 0.02,
    ranks: int = 1,
) -> int:
    """Run a hub on host 0 and a worker on each other host with these faults, then terminate the hub.

    Args:
        folder: that all programs write to.
        seconds: after which the workers finish.
        on_poll: called several times per second, with the seconds since the beginning.
        corrupted: share of envelopes that are corrupted, in both directions.
        ranks: of each worker; several are run by ``paceline run``, which restarts them. When that gives up, since the
            same rank failed again and again, it is started again.

    Returns:
        how often ``paceline run`` was started again.

    Raises:
        HostFailed: a worker or the hub ended early, or did not end.
    """
    began = time.time()
    job = {
        "hub": f"tcp://{lab.addresses[0]}:7077",
        "folder": str(folder),
        "corrupted": corrupted,
        "until": began + seconds,
        "ranks": ranks,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    hosts = _FaultyHosts(lab, folder, ranks)
    for host in range(lab.hosts):
        hosts.start(host)
    pending: list[tuple[float, Callable[[], object]]] = []

    def inject(fault: Fault) -> None:
        pending.append((fault.at + fault.seconds, hosts.inject(fault)))

    pending.extend((each.at, partial(inject, each)) for each in faults)
    while (elapsed := time.time() - began) < seconds:
        for action in [each for each in pending if each[0] <= elapsed]:
            pending.remove(action)
            action[1]()
        hosts.revive()
        on_poll(elapsed)
        time.sleep(_POLL_SECONDS)
    for _, undo in sorted(pending, key=lambda each: each[0]):
        undo()
    deadline = time.time() + _END_SECONDS
    while ranks > 1 and hosts.running() and time.time() < deadline:
        hosts.revive()
        time.sleep(_POLL_SECONDS)
    for host in range(1, lab.hosts):
        hosts.jobs[host].wait(max(1.0, deadline - time.time()))
    hosts.jobs[0].end()
    return hosts.revived


class _FaultyHosts:
    """The programs of all hosts, which are killed, stopped, cut off and started again.

    Attributes:
        jobs: by host.
        revived: how often a job that had given up was started again.
    """

    def __init__(self, lab: Lab, folder: Path, ranks: int) -> None:
        self._lab, self._folder, self._ranks = lab, folder, ranks
        self._killed: set[int] = set()
        self.jobs: dict[int, LabJob] = {}
        self.revived = 0

    def start(self, host: int) -> None:
        program = ["-m", "bench_harness.fault_injection.hub_program"]
        if host and self._ranks > 1:
            options = ["--nproc-per-node", str(self._ranks), "--max-restarts", "1000"]
            program = ["-m", "paceline", "run", *options, *program]
        self._killed.discard(host)
        self.jobs[host] = self._lab.start([*program, str(self._folder / "job.json"), str(host)], on=host)

    def inject(self, fault: Fault) -> Callable[[], object]:
        """Cause a fault, and return what undoes it."""
        host, rank, lab = fault.host, fault.rank, self._lab
        if rank is not None:  # after a kill `paceline run` restarts it
            self._signal(host, rank, "KILL" if fault.what == "kill" else "STOP")
            return partial(self._signal, host, rank, "CONT")
        if fault.what in ("stop", "cut"):
            begin, undo = (lab.stop, lab.resume) if fault.what == "stop" else (lab.cut, lab.mend)
            begin(host)
            return partial(undo, host)
        self._killed.add(host)
        lab.kill(host)
        self.jobs[host].wait(10.0, check=False)
        return partial(self.start, host)

    def _signal(self, host: int, rank: int, name: str) -> None:
        """Send a signal to one rank, if it runs; its number is of the host's own namespace."""
        path = self._folder / f"pid-{host}-{rank}"
        if path.exists():
            number = path.read_text(encoding="utf-8")
            devnull = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._lab.popen(host, ["kill", f"-{name}", number], **devnull).wait(10.0)

    def running(self) -> bool:
        """Return whether a worker has not ended well."""
        workers = [job for host, job in self.jobs.items() if host]
        return any(job.running() or job.wait(check=False)[0].code for job in workers)

    def revive(self) -> None:
        """Start the workers of several ranks again whose `paceline run` has given up."""
        for host, job in self.jobs.items():
            if not host or self._ranks == 1 or host in self._killed or job.running():
                continue
            if job.wait(check=False)[0].code:
                self.revived += 1
                self.start(host)


def count_losses(folder: Path, workers: int) -> dict[str, Any]:
    """Compare the workers' logs of acknowledged rounds with the hub's ledger.

    Returns:
        ``updates``: merged, according to the ledger; ``acknowledged``: rounds that workers saw acknowledged, as merged
        or refused; ``lost``: those of them that the ledger lacks; ``twice``: rounds that were merged more than once;
        ``gaps``: revisions that don't follow one another; ``refused``: updates by reason; ``ended``: workers that left
        in order; ``ended_with_global_params``: those of them that left with the global parameters; ``diverged``:
        workers whose ranks found different parameters; ``first_score`` and ``last_score`` of the global parameters
        that workers reported, or None.
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
    scores = [row["score"] for row in rows if row["kind"] == "global_score" and row["score"] is not None]
    ended = [read_json(path) for path in folder.glob("ended-*.json")]
    return {
        "updates": len(merged),
        "acknowledged": len(acknowledged),
        "lost": len(acknowledged - known),
        "twice": len(merged) - len(set(merged)),
        "gaps": sum(after != before + 1 for before, after in zip([0, *revisions], revisions, strict=False)),
        "refused": dict(Counter(row["why"].partition(":")[0] for row in refusals)),
        "ended": len(ended),
        "ended_with_global_params": sum(each["global_params"] for each in ended),
        "diverged": len(list(folder.glob("diverged-*"))),
        "first_score": scores[0] if scores else None,
        "last_score": scores[-1] if scores else None,
    }
