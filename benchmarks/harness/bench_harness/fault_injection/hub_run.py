"""Applies a fault plan to a hub and its workers on a `Lab`, and compares the workers' logs with the hub's ledger."""

from __future__ import annotations

import json
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
) -> None:
    """Run a hub on host 0 and a worker on each other host with these faults, then terminate the hub.

    Args:
        folder: that all programs write to.
        seconds: after which the workers finish.
        on_poll: called several times per second, with the seconds since the beginning.
        corrupted: share of envelopes that are corrupted, in both directions.

    Raises:
        HostFailed: a worker or the hub ended early, or did not end.
    """
    began = time.time()
    job = {
        "hub": f"tcp://{lab.addresses[0]}:7077",
        "folder": str(folder),
        "corrupted": corrupted,
        "until": began + seconds,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    running: dict[int, LabJob] = {}
    pending: list[tuple[float, Callable[[], object]]] = []

    def start(host: int) -> None:
        program = ["-m", "bench_harness.fault_injection.hub_program", str(folder / "job.json"), str(host)]
        running[host] = lab.start(program, on=host)

    def inject(fault: Fault) -> None:
        begin, undo = {"stop": (lab.stop, lab.resume), "cut": (lab.cut, lab.mend)}.get(
            fault.what, (lab.kill, start)
        )
        begin(fault.host)
        if undo is start:
            running[fault.host].wait(10.0, check=False)
        pending.append((fault.at + fault.seconds, partial(undo, fault.host)))

    for host in range(lab.hosts):
        start(host)
    pending.extend((each.at, partial(inject, each)) for each in faults)
    while (elapsed := time.time() - began) < seconds:
        for action in [each for each in pending if each[0] <= elapsed]:
            pending.remove(action)
            action[1]()
        on_poll(elapsed)
        time.sleep(_POLL_SECONDS)
    for _, undo in sorted(pending, key=lambda each: each[0]):
        undo()
    for host in range(1, lab.hosts):
        running[host].wait(_END_SECONDS)
    running[0].end()


def count_losses(folder: Path, workers: int) -> dict[str, Any]:
    """Compare the workers' logs of acknowledged rounds with the hub's ledger.

    Returns:
        ``updates``: merged, according to the ledger; ``acknowledged``: rounds that workers saw acknowledged, as merged
        or refused; ``lost``: those of them that the ledger lacks; ``twice``: rounds that were merged more than once;
        ``gaps``: revisions that don't follow one another; ``refused``: updates by reason; ``ended``: workers that left
        in order; ``ended_with_global_params``: those of them that left with the global parameters; ``first_score`` and
        ``last_score`` of the global parameters that workers reported, or None.
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
        "first_score": scores[0] if scores else None,
        "last_score": scores[-1] if scores else None,
    }
