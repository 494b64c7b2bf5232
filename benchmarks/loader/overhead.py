"""Cost of the loader, compared with torch's DataLoader with a DistributedSampler; and the start of a huge epoch.

    python benchmarks/loader/overhead.py run
    python benchmarks/loader/overhead.py table

Both loaders live in one process, fetch the same small items in batches of the same size, and take turns, an epoch a
turn, in several processes one after another; with workers, the workers of both stay.
"""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Annotated, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import ratio_of, take_turns
from paceline._core.format import format_seconds
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

WIDTH, BATCH, HUGE = 32, 64, 10**9
PLANS = {0: (16_384, 8, 40), 2: (65_536, 4, 10)}
"""Workers: (samples of an epoch, processes, turns of each loader in each). Turns are short, because disturbances last
longer than one. Several processes, because one by itself can favour one loader or the other by some percent.
"""

bench = Benchmark(__file__)


class Huge:
    """A dataset of many samples that takes no memory."""

    def __len__(self) -> int:
        return HUGE

    def __getitem__(self, number: int) -> int:
        return number


@bench.run
def run(
    rounds: Annotated[
        int | None, Option(min=1, help="Turns of each loader in a process; default: 40 and 10.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time epochs of both loaders, with 0 and 2 workers, and the start of an epoch over 10^9 samples."""
    path = bench.output(json_file, "overhead")
    settings = {"item": f"{WIDTH} float32 and a label", "batch_size": BATCH}
    rows = [compare(workers, rounds) for workers in PLANS]
    packages = ["paceline", "torch", "numpy"]
    start = start_of_a_huge_epoch()
    bench.write(path, "loader-overhead", settings, packages=packages, schema=2, rows=rows, start=start)


def compare(workers: int, rounds: int | None) -> dict[str, Any]:
    """Return the seconds of every epoch of both loaders, by process, and their ratio over all of them."""
    samples, processes, turns = PLANS[workers]
    seconds = []
    with ProgressBar(f"{workers} workers", processes) as tick:
        for _ in range(processes):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                seconds.append(pool.submit(time_epochs, samples, workers, rounds or turns).result())
            tick()
    all_of = {name: [each for process in seconds for each in process[name]] for name in seconds[0]}
    return {
        "workers": workers,
        "samples": samples,
        "microseconds_a_batch": {name: median(each) / samples * BATCH * 1e6 for name, each in all_of.items()},
        "ratio": vars(ratio_of(all_of["paceline"], all_of["torch"])),
        "seconds": seconds,
    }


def time_epochs(samples: int, workers: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every epoch of both loaders; the first of each does not count."""
    torch.set_num_threads(1)
    dataset = TensorDataset(torch.randn(samples, WIDTH), torch.randint(10, (samples,)))
    options = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    loader = paceline.Loader(dataset, **options)

    def epochs(batches: Iterable[object], set_epoch: Callable[[int], None]) -> Callable[[], float]:
        numbers = itertools.count()

        def epoch() -> float:
            started = time.perf_counter()
            set_epoch(next(numbers))
            for _ in batches:
                pass
            return time.perf_counter() - started

        return epoch

    torchs = DataLoader(dataset, sampler=sampler, **options)
    return take_turns(
        {"torch": epochs(torchs, sampler.set_epoch), "paceline": epochs(loader, loader.set_epoch)}, rounds
    )


def start_of_a_huge_epoch() -> dict[str, float]:
    """Return seconds and bytes until the first batch of an epoch over 10^9 samples: median, most."""
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


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of both loaders' times, and a sentence about the start of a huge epoch."""
    result = bench.read("overhead")
    rows, start = [], result["start"]
    for row in result["rows"]:
        times = [f"{row['microseconds_a_batch'][name]:.0f} µs" for name in ("torch", "paceline")]
        interval = "{median:.3f} ({low:.3f} to {high:.3f})".format(**row["ratio"])
        single = [ratio_of(each["paceline"], each["torch"]).median for each in row["seconds"]]
        rows.append([str(row["workers"]), *times, interval, f"{min(single):.3f} to {max(single):.3f}"])
    columns = ["workers", "torch, a batch", "Paceline", "ratio (95 % interval)", "in single processes"]
    sentence = (
        f"The first batch of an epoch over 10⁹ samples is there after {format_seconds(start['seconds_median'])} "
        f"(median of 21; at most {format_seconds(start['seconds_most'])}), with {start['nbytes_most'] / 1e6:.1f} MB "
        "at most for loader, epoch and batch."
    )
    return {"overhead": table(columns, rows), "start": sentence}


if __name__ == "__main__":
    bench.main()
