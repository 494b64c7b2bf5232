"""Checkpoints beside those of torch.distributed.checkpoint (DCP): the stall of a save, loading, and memory.

    python benchmarks/checkpoint/beside_dcp.py run     (as root: drops the disk's cache before cold loads)
    python benchmarks/checkpoint/beside_dcp.py table

Ranks on one thread each train two copies of a GPT with AdamW, one with Paceline and one with torch, see `contestants`.
A save begins before a training step, as in a training loop, and is complete before the next turn. In every round each
contestant takes a turn, in the same processes; the slowest rank counts. The first save of each, which takes its memory,
is kept apart. Loads take turns in the same way, with the files in the page cache and without.

Memory is measured in new processes: the highest resident memory during the first save and the training step after it,
less that during a step without a save.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from contestants import STAGING, DcpRun, OurRun, digest
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.ranks import gather
from bench_harness.turns import ratio_of, take_turns
from paceline._core.format import format_bytes, format_seconds
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import gpt_size

CASES = [("bucketed", 2), ("sharded", 2), ("full-shard", 2), ("full-shard", 4)]
WINDOWS, CONTEXT = 2, 64
OURS, OUR_NO_SAVE, NO_SAVE = "Paceline", "Paceline, no save", "torch, no save"
LOADS = {
    "DCP": (1, False),
    "DCP, no coordinator": (1, True),
    "DCP, 2 files per rank": (2, False),
    "DCP, 2 files per rank, no coordinator": (2, True),
}
"""Loads of torch's: files that each rank has written, and whether each rank loads by itself."""

bench = Benchmark(__file__, docs=["checkpoint-costs.md"])

logging.disable(logging.WARNING)  # here, since torch logs each save in a process that imports this file


@bench.run
def run(
    size: Annotated[str, Option(help="Size of the GPT.")] = "44m",
    rounds: Annotated[int, Option(min=1, help="Turns of each contestant.")] = 11,
    folder: Annotated[
        Path | None, Option(help="On the disk to measure; default: of temporary files.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure saving, loading and memory."""
    path = bench.output(json_file, "beside-dcp")
    cases, memory = [], []
    with tempfile.TemporaryDirectory(prefix="paceline-beside-dcp-", dir=folder) as place:
        for sync, ranks in CASES:
            case = {"sync": sync, "ranks": ranks}
            job = {"do": "times", "size": size, "rounds": rounds, "place": f"{place}/{sync}-{ranks}"}
            found = bench.start_ranks(job | case, ranks, turns=3 * rounds, title=title(case))
            cases.append(case | found)
        for optimizer in (False, True):
            for way in ("asynchronous", "waits"):
                for who in (OURS, "DCP"):
                    case = {"who": who, "way": way, "optimizer": optimizer}
                    job = {"do": "memory", "size": size, "place": f"{place}/{who}-{way}-{optimizer}"}
                    memory.append(case | bench.start_ranks(job | case, 4))
    settings = {"size": size, "rounds": rounds, "windows": WINDOWS, "context": CONTEXT}
    result = bench.write(path, "checkpoint-beside-dcp", settings, cases=cases, memory=memory)
    for text in (ratios(result), saves(result), loads(result), memory_table(result)):
        print(f"{text}\n")


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure times, or memory."""
    warnings.simplefilter("ignore")  # of torch.distributed.checkpoint, on every save
    world = paceline.init("gloo")
    place = Path(job["place"])
    if world.rank == 0:
        place.mkdir(parents=True)
    dist.barrier()
    found = (measure_times if job["do"] == "times" else measure_memory)(job, place)
    paceline.shutdown()
    return found if world.rank == 0 else None


# ------------------------------------------------------------------ times


def measure_times(job: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return the times of saves and loads, of the slowest rank."""
    size = gpt_size(job["size"])
    batch = random_batch(size, WINDOWS, CONTEXT, dist.get_rank(), "cpu")
    ours = OurRun(job["sync"], size, batch, place / "ours")
    theirs = DcpRun(job["sync"], size, batch, place / "dcp")
    for run in (ours, theirs):
        for _ in range(3):
            run.step()
    saves = {
        NO_SAVE: partial(slowest, theirs.time_step),
        OUR_NO_SAVE: partial(slowest, ours.time_step),
        OURS: partial(slowest, ours.save, ours.tidy),
    }
    saves |= {name: partial(slowest, partial(theirs.save, name), theirs.tidy) for name in STAGING}
    first = {name: turn() for name, turn in saves.items()}
    found = {"first saves": first, "saves": take_turns(saves, job["rounds"], bench.tick)}

    ours.checkpoint.step += 1
    ours.checkpoint.save(wait=True)
    files = {threads: theirs.save_for_loads(threads) for threads, _ in LOADS.values()}
    loads = {OURS: ours.load}
    loads |= {
        name: partial(theirs.load, files[threads], alone=alone) for name, (threads, alone) in LOADS.items()
    }
    for run, names in ((ours, [OURS]), (theirs, list(LOADS))):
        for name in names:
            check_load(run, loads[name])
    for cache in ("warm", "cold"):
        turns = {name: partial(load_turn, load, cold=cache == "cold") for name, load in loads.items()}
        found[f"{cache} loads"] = take_turns(turns, job["rounds"], bench.tick)
    ours.checkpoint.close()
    return found


def slowest(
    measure: Callable[[], dict[str, float]], tidy: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return what a turn measures, of the slowest rank; nothing of it is left to write or to remove."""
    of_ranks = gather(measure())
    tidy()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    return {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}


def load_turn(load: Callable[[], float], *, cold: bool) -> float:
    """Return the seconds of a load on the slowest rank."""
    if cold and dist.get_rank() == 0:
        os.sync()
        with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    return max(gather(load()))


@torch.no_grad()
def check_load(run: OurRun | DcpRun, load: Callable[[], float]) -> None:
    """Raise unless a load restores every bit."""
    saved = digest(run.tensors())
    for tensor in run.tensors():
        tensor.add_(1)
    if digest(run.tensors()) == saved:
        raise AssertionError("the state did not change")
    load()
    if digest(run.tensors()) != saved:
        raise AssertionError("a load restored another state")


# ------------------------------------------------------------------ memory


def measure_memory(job: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return the memory that the first save adds, of the rank with the most, and the bytes of a rank's part."""
    size = gpt_size(job["size"])
    batch = random_batch(size, WINDOWS, CONTEXT, dist.get_rank(), "cpu")
    run_of = OurRun if job["who"] == OURS else DcpRun
    run = run_of("full-shard", size, batch, place / "run")
    for _ in range(3):
        run.step()
    begin = run.first_save(optimizer=job["optimizer"], asynchronous=job["way"] == "asynchronous")
    part = sum(tensor.nbytes for tensor in run.tensors(optimizer=job["optimizer"]))

    def save_and_step() -> None:
        wait = begin()
        run.step()
        wait()

    without = max(peak_nbytes(run.step) for _ in range(3))
    found = gather((peak_nbytes(save_and_step) - without, part))
    return {"extra": max(extra for extra, _ in found), "part": max(part for _, part in found)}


def peak_nbytes(measured: Callable[[], object]) -> int:
    """Return the highest resident memory of this process during a call."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    measured()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


# ------------------------------------------------------------------ tables


def stall(turn: dict[str, float]) -> float:
    """Return how long training waited for a save."""
    return turn["call"] + turn["wait"]


def best(names: list[str], of: dict[str, list[float]]) -> str:
    """Return the contestant with the lowest median."""
    return min(names, key=lambda name: median(of[name]))


def title(case: dict[str, Any]) -> str:
    """Return the name of a case."""
    return f"{case['sync']}, {case['ranks']} ranks"


def saves(result: dict[str, Any]) -> str:
    """Return the table of all ways to save."""
    rows = []
    for case in result["cases"]:
        turns = case["saves"]
        for name in (OURS, *STAGING):
            plain = OUR_NO_SAVE if name == OURS else NO_SAVE
            added = [a["step"] - b["step"] for a, b in zip(turns[name], turns[plain], strict=True)]
            cells = [median(map(stall, turns[name])), stall(case["first saves"][name])]
            cells += [median(each["total"] for each in turns[name])]
            times = [format_seconds(each) for each in cells]
            rows.append([title(case), name, *times, f"{1e3 * median(added):.0f} ms"])
    titles = ["", "save", "training waits", "first save", "until complete", "step longer by"]
    return table(titles, rows, words=2)


def ratios(result: dict[str, Any]) -> str:
    """Return the table of ratios to torch's best."""
    rows = []
    for case in result["cases"]:
        turns = {name: [stall(each) for each in case["saves"][name]] for name in (OURS, *STAGING)}
        peer = best([name for name, each in STAGING.items() if not each.background], turns)
        times = [format_seconds(median(turns[name])) for name in (OURS, peer)]
        row = [title(case), *times, str(ratio_of(turns[OURS], turns[peer]))]
        for cache in ("warm", "cold"):
            seconds = case[f"{cache} loads"]
            row.append(str(ratio_of(seconds[OURS], seconds[best(list(LOADS), seconds)])))
        rows.append(row)
    titles = ["", "training waits", "DCP", "ratio", "load, cached: ratio", "load, from disk: ratio"]
    settings, machine = result["settings"], result["machine"]
    parameters = gpt_size(settings["size"]).parameters()
    return (
        f"{table(titles, rows)}\n\n"
        f"{parameters / 1e6:.0f} M parameters with AdamW, ranks on one thread each, one machine with "
        f"{machine['usable_cores']:g} cores; medians of {settings['rounds']} rounds, ratios with their 95 % interval."
    )


def loads(result: dict[str, Any]) -> str:
    """Return the table of all ways to load."""
    rows = [
        [
            title(case),
            name,
            *(format_seconds(median(case[f"{cache} loads"][name])) for cache in ("warm", "cold")),
        ]
        for case in result["cases"]
        for name in (OURS, *LOADS)
    ]
    return table(["", "load", "cached", "from disk"], rows, words=2)


def memory_table(result: dict[str, Any]) -> str:
    """Return the table of memory."""
    rows = []
    for optimizer in (False, True):
        for way in ("asynchronous", "waits"):
            found = {
                each["who"]: each
                for each in result["memory"]
                if (each["way"], each["optimizer"]) == (way, optimizer)
            }
            part = found[OURS]["part"]
            what = "weights and AdamW" if optimizer else "weights"
            rows.append(
                [what, way, format_bytes(part), *(format_bytes(found[who]["extra"]) for who in (OURS, "DCP"))]
            )
    return table(["", "save", "a rank's part", "Paceline", "DCP"], rows, words=2)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md and docs/checkpoint-costs.md."""
    result = bench.read("beside-dcp")
    return {
        "beside-dcp": ratios(result),
        "beside-dcp-saves": saves(result),
        "beside-dcp-loads": loads(result),
        "beside-dcp-memory": memory_table(result),
    }


if __name__ == "__main__":
    bench.main()
