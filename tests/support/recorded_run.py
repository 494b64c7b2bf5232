"""A made-up run folder in the form that `paceline train` writes, for tests of its readers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path


def write_run(
    folder: Path, *, ranks: int = 2, steps: int = 200, slow_rank: int | None = None, wait: float = 0.012
) -> Path:
    """Write a run; `slow_rank` computes half as much longer, and the others wait for it beyond `wait` s."""
    chance = random.Random(0)
    (folder / "trace").mkdir(parents=True)
    facts = {
        "command": f"paceline train --nproc-per-node {ranks} --steps {steps}",
        "settings": {
            "size": "mini",
            "sync": "sharded",
            "batch_size": 16,
            "context": 128,
            "lr": 1e-3,
            "seed": 0,
        },
        "world": {"size": ranks, "nodes": 1, "backend": "gloo", "device": "cpu"},
        "versions": {"paceline": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "machine": {"cpu": "AMD EPYC 7763", "cores": 2, "memory_gib": 23.5, "system": "Linux 6.1"},
        "parameters": 3_281_000,
        "started": "2026-08-01T10:11:12+00:00",
    }
    (folder / "run.json").write_text(json.dumps(facts))
    clock, lines = 1_785_000_000.0, []
    traces: list[list[str]] = [[] for _ in range(ranks)]
    for step in range(steps):
        seconds = 0.0
        for rank, trace in enumerate(traces):
            pace = (1.5 if rank == slow_rank else 1.0) * chance.uniform(0.97, 1.05)
            idle = wait if slow_rank in (None, rank) else wait + 0.06
            seconds = max(seconds, _write_step(trace, rank, step, clock, pace, idle))
        loss = 1.45 + 4.1 * math.exp(-step / 60) + chance.gauss(0, 0.05)
        line = {
            "step": step + 1,
            "loss": loss,
            "tokens_per_second": ranks * 16 * 128 / seconds,
            "step_seconds": seconds,
            "exposed_share": wait / seconds,
            "samples": 16 * ranks,
            "lr": 1e-3,
        }
        if step % 50 == 0 or step == steps - 1:
            line["val_loss"] = 1.55 + 4.0 * math.exp(-step / 60)
        lines.append(json.dumps(line))
        clock += seconds
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    for rank, trace in enumerate(traces):
        (folder / "trace" / f"rank{rank}.jsonl").write_text("\n".join(trace) + "\n")
    (folder / "sample.txt").write_text("def parse(self, line):\n    if not line:\n        return None\n")
    return folder


def _write_step(trace: list[str], rank: int, step: int, clock: float, pace: float, idle: float) -> float:
    computing = {"data": 0.001, "forward": 0.042 * pace, "backward": 0.081 * pace}
    if step == 0:
        computing["forward"] += 1.0  # what happens once
    phases, at = [], 0.0
    for name, seconds in (
        *computing.items(),
        ("exchange", idle),
        ("optimizer", 0.011 * pace),
        ("outside", 5e-4),
    ):
        phases.append([name, round(1e6 * at)])
        at += seconds
    arrived = round(1e6 * sum(computing.values()))
    through = arrived + round(1e6 * idle)
    nbytes = 26_248_000 // 7
    calls = [
        ["reduce", each, nbytes, nbytes, arrived, arrived, arrived, through, through] for each in range(7)
    ]
    if step == 0:
        trace.append(json.dumps({"name": "session", "start": clock, "seconds": 0.0, "rank": rank, "step": 0}))
        buckets = [
            {"call": "all-reduce", "nbytes": nbytes, "parameters": 3, "first": f"layer{each}"}
            for each in range(7)
        ]
        plan = {"name": "plan", "start": clock, "seconds": 0.0, "rank": rank, "step": 0, "buckets": buckets}
        trace.append(json.dumps(plan))
    line = {"name": "step", "start": clock, "seconds": at, "rank": rank, "step": step, "phases": phases}
    traced = {"waits": [[6, arrived, through]], "tasks": [], "calls": calls}
    counts = {"samples": 16.0, "cpu": 0.13 * pace, "preempted": 2, "quiet": False}
    trace.append(json.dumps(line | traced | counts))
    return at
