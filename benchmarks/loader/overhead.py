"""What the loader costs: beside torch's DataLoader with a DistributedSampler, and at the start of a huge epoch.

    python benchmarks/loader/overhead.py

Both loaders live in one process, fetch the same small items in batches of the same size, and take turns (A B B A), an
epoch a turn, in several processes one after another; with workers, the workers of both stay. Writes
``overhead.json`` beside this file.
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from bench_harness.program import run_program
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
WIDTH, BATCH = 32, 64
PLANS = {0: (16_384, 8, 40), 2: (65_536, 4, 10)}
"""Workers: (samples of an epoch, processes, turns of each loader in each). Short turns: what disturbs lasts longer
than one. Several processes: one by itself can favour one loader or the other by some percent.
"""

HUGE = 10**9


class Huge:
    """A dataset of many samples that takes no memory."""

    def __len__(self) -> int:
        return HUGE

    def __getitem__(self, number: int) -> int:
        return number


def main(
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of each loader in a process; else 40 and 10.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE
    / "overhead.json",
) -> None:
    """Time epochs of both loaders, with 0 and 2 workers, and the start of an epoch over 10^9 samples."""
    check_writable(out, make_folder=True)
    result = result_head("loader-overhead", ["paceline", "torch", "numpy"], schema=2) | {
        "settings": {"item": f"{WIDTH} float32 and a label", "batch_size": BATCH},
        "rows": [beside_torch(workers, rounds) for workers in PLANS],
        "start": start_of_a_huge_epoch(),
    }
    write_json(out, result)
    print(json.dumps({**result["start"], "rows": [row["ratio"] for row in result["rows"]]}, indent=1))


def beside_torch(workers: int, rounds: int | None) -> dict[str, Any]:
    """Return the seconds of every epoch of both loaders, by process, and their ratio over all of them."""
    samples, processes, turns = PLANS[workers]
    seconds = []
    with ProgressBar(f"{workers} workers", processes) as tick:
        for _ in range(processes):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                seconds.append(pool.submit(take_turns, samples, workers, rounds or turns).result())
            tick()
    all_of = {name: [each for process in seconds for each in process[name]] for name in seconds[0]}
    ratio = ratio_of(all_of["paceline"], all_of["torch"])
    batches = samples // BATCH
    return {
        "workers": workers,
        "samples": samples,
        "microseconds_a_batch": {name: median(each) / batches * 1e6 for name, each in all_of.items()},
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "seconds": seconds,
    }


def take_turns(samples: int, workers: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every epoch of both loaders; the first of each is not counted."""
    torch.set_num_threads(1)
    dataset = TensorDataset(torch.randn(samples, WIDTH), torch.randint(10, (samples,)))
    options = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    theirs, ours = DataLoader(dataset, sampler=sampler, **options), paceline.Loader(dataset, **options)

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
    for number in range(rounds + 1):
        for name in sorted(contestants, reverse=number % 2 == 1):
            started = time.perf_counter()
            contestants[name](number)
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def start_of_a_huge_epoch() -> dict[str, float]:
    """Return seconds and bytes until the first batch of an epoch over 10^9 samples is there: median, most."""
    loader, seconds, nbytes = paceline.Loader(Huge(), batch_size=BATCH), [], []
    for _ in range(21):
        gc.collect()
        started = time.perf_counter()
        next(iter(loader))
        seconds.append(time.perf_counter() - started)
    for _ in range(5):
        gc.collect()
        tracemalloc.start()
        next(iter(paceline.Loader(Huge(), batch_size=BATCH)))
        nbytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return {
        "samples": HUGE,
        "seconds_median": median(seconds),
        "seconds_most": max(seconds),
        "nbytes_most": max(nbytes),
    }


if __name__ == "__main__":
    run_program(main)
