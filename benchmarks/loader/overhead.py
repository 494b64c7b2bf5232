"""What the loader costs: beside torch's DataLoader with a DistributedSampler, and at the start of a huge epoch.

    python benchmarks/loader/overhead.py

Both loaders live in one process, fetch the same small items in batches of the same size, and take turns (A B B A), an
epoch a turn; with workers, the workers of both stay. Writes ``overhead.json`` beside this file.
"""

from __future__ import annotations

import gc
import json
import shlex
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl
from paceline.bench.facts import machine_record, versions
from paceline.bench.paired import ratio_of
from paceline.bench.progress import TurnBar

HERE = Path(__file__).parent
WIDTH, BATCH = 32, 64
PLANS = {0: (16_384, 200), 2: (65_536, 24)}
"""Workers: (samples of an epoch, turns of each loader). Short turns: what disturbs lasts longer than one."""

HUGE = 10**9


class Huge:
    """A dataset of many samples that takes no memory."""

    def __len__(self) -> int:
        return HUGE

    def __getitem__(self, number: int) -> int:
        return number


def main(
    rounds: Annotated[int | None, typer.Option(help="Turns of each loader; else 200 and 24.")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE
    / "overhead.json",
) -> None:
    """Time epochs of both loaders, with 0 and 2 workers, and the start of an epoch over 10^9 samples."""
    torch.set_num_threads(1)
    rows = [beside_torch(samples, workers, rounds or turns) for workers, (samples, turns) in PLANS.items()]
    result = {
        "kind": "loader-overhead",
        "schema": 1,
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine_record(),
        "versions": versions(["paceline", "torch", "numpy"]),
        "settings": {"item": f"{WIDTH} float32 and a label", "batch_size": BATCH},
        "rows": rows,
        "start": start_of_a_huge_epoch(),
    }
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps({**result["start"], "rows": [row["ratio"] for row in rows]}, indent=1))


def beside_torch(samples: int, workers: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of every epoch of both loaders, and their ratio."""
    dataset = TensorDataset(torch.randn(samples, WIDTH), torch.randint(10, (samples,)))
    options = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    theirs, ours = DataLoader(dataset, sampler=sampler, **options), pl.Loader(dataset, **options)

    def torch_epoch(epoch: int) -> None:
        sampler.set_epoch(epoch)
        for _ in theirs:
            pass

    def our_epoch(epoch: int) -> None:
        ours.set_epoch(epoch)
        for _ in ours:
            pass

    contestants: dict[str, Callable[[int], None]] = {"torch": torch_epoch, "paceline": our_epoch}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    with TurnBar(f"{workers} workers", 2 * (rounds + 1)) as tick:
        for number in range(rounds + 1):
            for name in sorted(contestants, reverse=number % 2 == 1):
                started = time.perf_counter()
                contestants[name](number)
                if number:
                    seconds[name].append(time.perf_counter() - started)
                tick()
    gc.enable()
    ratio = ratio_of(seconds["paceline"], seconds["torch"])
    batches = samples // BATCH
    return {
        "workers": workers,
        "samples": samples,
        "microseconds_a_batch": {name: median(each) / batches * 1e6 for name, each in seconds.items()},
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "seconds": seconds,
    }


def start_of_a_huge_epoch() -> dict[str, float]:
    """Return seconds and bytes until the first batch of an epoch over 10^9 samples is there: median, most."""
    loader, seconds, nbytes = pl.Loader(Huge(), batch_size=BATCH), [], []
    for _ in range(21):
        gc.collect()
        started = time.perf_counter()
        next(iter(loader))
        seconds.append(time.perf_counter() - started)
    for _ in range(5):
        gc.collect()
        tracemalloc.start()
        next(iter(pl.Loader(Huge(), batch_size=BATCH)))
        nbytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return {
        "samples": HUGE,
        "seconds_median": median(seconds),
        "seconds_most": max(seconds),
        "nbytes_most": max(nbytes),
    }


if __name__ == "__main__":
    typer.run(main)
