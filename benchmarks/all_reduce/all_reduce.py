"""All-reduce between processes of one machine: paceline beside gloo, MPICH and a plain copy.

    python benchmarks/all_reduce/all_reduce.py run --ranks 2      (needs the extra ``mpi``)
    python benchmarks/all_reduce/all_reduce.py chart
    python benchmarks/all_reduce/all_reduce.py table

All variants run in the same processes, which are ranks of MPI and of torch at once, and take turns ([Note: turns] in
`paceline.tools.bench.turn_statistics`). gloo at its best is, at each size, the faster of one call and of two
concurrent halves: a gloo group has two worker threads, and one call keeps one of them busy. So chance favours gloo.

MPICH's tuning guide (doc/mpich/tuning_parameters.md in its repository, sections 2.3 and 2.6) names what can be set: the
algorithm within a host and its buffers; another variable is how often a waiting rank yields its core. A setting holds
for a whole process, so settings can't take turns with the other variants: each is tried three times beforehand, in
fresh processes, and the best one runs in the comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
from mpi_times import SIZES as SIZES_OF_SETTINGS
from mpi_times import time_mpi
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import InterleavedTimes, ratio_of, take_turns
from paceline._core.cpu_cores import usable_cores
from paceline._core.format import format_bytes, format_size
from paceline._core.units import parse_bytes, parse_list
from paceline.errors import UsageError
from paceline.launch.targets.mpiexec_command import mpich_settings, run_mpi
from paceline.tools.bench.collectives import exact_buffers
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.training_charts import Chart, ChartLine, time_and_ratio_chart

GLOO, HALVES, BEST = "gloo", "gloo, two halves", "gloo at its best"
ORDINARY, ARENA, MPICH = "paceline", "paceline, arena", "MPICH"
COPY, COPY_ALONE, PASS = "copy_, every rank", "copy_, one rank alone", "mul_, every rank"
TITLES = {  # in the tables of times, and in ratios
    BEST: ("gloo", "gloo"),
    MPICH: ("MPICH", "MPICH"),
    ORDINARY: ("paceline, ordinary", "ordinary"),
    ARENA: ("paceline, arena", "arena"),
    COPY: ("copy_, all ranks", "copy_"),
    COPY_ALONE: ("copy_, one rank", "copy_, one rank alone"),
    PASS: ("mul_, all ranks", "mul_"),
}
SIZES = "4kB,16kB,64kB,256kB,1MB,4MB,16MB,100MB,1GB"
LARGE_NBYTES = 100_000_000
HALVES_FROM_NBYTES = 1_000_000  # below, a second call costs more than it gains
BUFFERS = 4  # two of the benchmark's, and what gloo and MPICH work in

RELEASE_GATHER = {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"}
SCATTER_GATHER = {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "reduce_scatter_allgather"}
YIELD_OFTEN = mpich_settings(crowded=True)
HEAVY_YIELD = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
SETTINGS: dict[bool, dict[str, dict[str, str]]] = {  # whether ranks share cores: variables of each setting
    False: {
        "defaults": {},
        "release-gather": RELEASE_GATHER,
        "release-gather, 1 MiB buffers": mpich_settings(crowded=False),
        "reduce-scatter, all-gather": SCATTER_GATHER,
        "without CMA": {"MPIR_CVAR_CH4_CMA_ENABLE": "0"},
    },
    True: {
        "defaults": {},
        "yield often": YIELD_OFTEN,
        "yield often; reduce-scatter, all-gather": YIELD_OFTEN | SCATTER_GATHER,
        "heavy yield": HEAVY_YIELD,
        "heavy yield; release-gather": HEAVY_YIELD | RELEASE_GATHER,
    },
}
SETTING_NBYTES, SETTING_PASSES = SIZES_OF_SETTINGS, 3

OPEN_MPI = Path.home() / ".cache" / "paceline-peers" / "openmpi" / "bin"
OPEN_MPI_TURNS = 7
OPEN_MPI_SETTINGS = {  # whether ranks share cores: arguments of mpiexec
    False: ["--bind-to", "none"],
    True: ["--bind-to", "none", "--oversubscribe"],  # which makes waiting ranks yield their cores
}

bench = Benchmark(__file__)


@bench.run
def run(
    ranks: Annotated[int, Option(min=2, help="Processes on this machine.")] = 2,
    sizes: Annotated[
        str | None,
        Option(help="Buffer sizes, by commas; default: 4 kB to 1 GB, or to 100 MB if ranks share cores."),
    ] = None,
    rounds: Annotated[
        int | None, Option(min=1, help="Turns of each variant; default: 6 to 20 by size.")
    ] = None,
    settings: Annotated[
        bool, Option(help="Try MPICH's settings first and use the best; else its defaults.")
    ] = True,
    json_file: JsonOption = None,
) -> None:
    """Time an all-reduce of float32 at each size, by paceline, gloo and MPICH, and a copy of as many bytes."""
    crowded = ranks > usable_cores()
    chosen = [
        nbytes // 4 * 4 for nbytes in parse_list("--sizes", sizes or SIZES, parse_bytes, example="4kB,1MB")
    ]
    if sizes is None and crowded:  # larger ones would take minutes
        chosen = [nbytes for nbytes in chosen if nbytes <= LARGE_NBYTES]
    check_sizes(ranks, chosen)
    path = bench.output(json_file, f"{ranks}-ranks")
    plan = [(nbytes, *rounds_and_calls(nbytes, rounds, crowded)) for nbytes in chosen]
    threads = max(1, int(usable_cores() / ranks))
    # below "multiple" MPICH has no lock, and it yields a core only in its lock
    env = {"OMP_NUM_THREADS": str(threads), "MPI4PY_RC_THREAD_LEVEL": "multiple" if crowded else "funneled"}
    env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    tried = try_settings(ranks, crowded, env) if settings else []
    variables = tried[0]["variables"] if tried else {}
    rows = start_ranks({"plan": plan, "threads": threads}, ranks, {**env, **variables})
    described = {
        "ranks": ranks,
        "dtype": "float32",
        "threads": threads,
        "barrier": "the variant's own",
        "gloo_interface": env["GLOO_SOCKET_IFNAME"],
        "mpi_threads": env["MPI4PY_RC_THREAD_LEVEL"],
        "mpich": variables,
        "plan": [dict(zip(("nbytes", "rounds", "calls"), each, strict=True)) for each in plan],
    }
    packages = ["paceline", "torch", "mpi4py", "mpich", "numpy"]
    parts = {
        "mpich_settings_tried": tried,
        "rows": rows,
        "open_mpi": compare_open_mpi(ranks, crowded, env, variables),
    }
    print(times(bench.write(path, "all-reduce", described, packages=packages, **parts)))


def check_sizes(ranks: int, sizes: Sequence[int]) -> None:
    """Refuse sizes that can't be measured, before anything is started."""
    if min(sizes) < 4:
        raise UsageError(f"--sizes: {min(sizes)} bytes hold no float32", remedy="give 4 bytes or more")
    needed, available = BUFFERS * ranks * max(sizes), psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"{ranks} ranks with buffers of {format_bytes(max(sizes))} need about {format_bytes(needed)}; "
            f"{format_bytes(available)} are available",
            remedy="give smaller --sizes",
        )


def rounds_and_calls(nbytes: int, rounds: int | None, crowded: bool) -> tuple[int, int]:
    """Return the number of rounds at a size, and of calls in a turn."""
    if nbytes > LARGE_NBYTES:
        return rounds or 6, 2
    return rounds or (16 if crowded else 20), min(20, max(3, LARGE_NBYTES // nbytes))


def try_settings(ranks: int, crowded: bool, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return MPICH's settings with their median seconds by size, the best first.

    The best has the least geometric mean over sizes of its time ÷ the least time of any setting.
    """
    tried = SETTINGS[crowded]
    passes: dict[str, list[list[float]]] = {name: [] for name in tried}
    with ProgressBar(f"MPICH's settings, {ranks} ranks", SETTING_PASSES * len(tried)) as tick:
        for number in range(SETTING_PASSES):
            for name in list(tried)[:: -1 if number % 2 else 1]:
                passes[name].append(start_ranks({}, ranks, {**env, **tried[name]}))
                tick()
    seconds = {name: [median(each) for each in zip(*found, strict=True)] for name, found in passes.items()}
    least = [min(each) for each in zip(*seconds.values(), strict=True)]
    found = [
        {
            "name": name,
            "variables": tried[name],
            "seconds": dict(zip(map(str, SETTING_NBYTES), seconds[name], strict=True)),
            "score": geometric_mean(own / low for own, low in zip(seconds[name], least, strict=True)),
        }
        for name in tried
    ]
    return sorted(found, key=lambda setting: setting["score"])


def compare_open_mpi(
    ranks: int, crowded: bool, env: Mapping[str, str], variables: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the seconds of MPICH and Open MPI by size, one per turn, each turn in fresh processes; [] without it.

    A process has one MPI, so they can't take turns in the same ones.
    """
    if not (OPEN_MPI / "mpiexec").exists():
        print("Open MPI is not compared: run benchmarks/peers/set_up.py --only openmpi")
        return []
    program = [str(OPEN_MPI / "python"), str(Path(__file__).with_name("mpi_times.py"))]
    command = [
        str(OPEN_MPI / "mpiexec"),
        "--allow-run-as-root",
        *OPEN_MPI_SETTINGS[crowded],
        "-n",
        str(ranks),
    ]
    own = {**os.environ, **env, "PATH": f"{OPEN_MPI}:{os.environ['PATH']}"}
    found: dict[str, list[list[float]]] = {MPICH: [], "Open MPI": []}
    with ProgressBar(f"Open MPI, {ranks} ranks", 2 * OPEN_MPI_TURNS) as tick:
        for number in range(OPEN_MPI_TURNS):
            for name in list(found)[:: -1 if number % 2 else 1]:
                if name == MPICH:
                    found[name].append(start_ranks({}, ranks, {**env, **variables}))
                else:
                    ended = subprocess.run(
                        [*command, *program], env=own, capture_output=True, text=True, check=True
                    )
                    found[name].append(json.loads(ended.stdout.splitlines()[-1]))
                tick()
    return [
        {"nbytes": nbytes, **{name: [turn[at] for turn in turns] for name, turns in found.items()}}
        for at, nbytes in enumerate(SETTING_NBYTES)
    ]


def start_ranks(job: Mapping[str, Any], ranks: int, env: Mapping[str, str]) -> Any:
    """Start this program's ranks under mpiexec and return what rank 0 returned; if one raises, all end."""
    with bench.job(job) as (program, result):
        status = run_mpi(["-m", "mpi4py", *program], ranks, env=env)
        if status != 0:
            raise UsageError(f"mpiexec ended with {status}", remedy="see what it wrote above")
        return result()


# ---------------------------------------------------------------------- a rank


@bench.rank
def rank(job: dict[str, Any]) -> list[Any] | None:
    """Measure all sizes; without a plan, time MPICH with the settings of this process."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if "plan" not in job:
        found: list[Any] = time_mpi()
    else:
        torch.set_num_threads(job["threads"])
        rendezvous = f"file://{Path(sys.argv[-1]).with_name('rendezvous')}"  # beside the job's file
        dist.init_process_group("paceline", init_method=rendezvous, rank=world.rank, world_size=world.size)
        gloo = dist.new_group(backend="gloo")
        turns = sum(1 + rounds for _, rounds, _ in job["plan"])
        with ProgressBar(f"all-reduce, {world.size} ranks", turns, shown=world.rank == 0) as tick:
            found = [measure(gloo, tick, *size) for size in job["plan"]]
        dist.barrier(group=gloo)
        dist.destroy_process_group()
    return found if world.rank == 0 else None


@dataclass(frozen=True)
class Variant:
    """An operation that is timed.

    Attributes:
        run: does it once, in `buffer`.
        barrier: at which an iteration starts.
        buffer: what it reduces, or copies to.
        source: what it copies from; None: an all-reduce, or what turns ones into what an all-reduce makes of them.
        alone: rank 0 does it while the others sleep.
        exchanges: False: no rank needs another rank's numbers.
    """

    run: Callable[[], object]
    barrier: Callable[[], object]
    buffer: torch.Tensor
    source: torch.Tensor | None = None
    alone: bool = False
    exchanges: bool = True


def variants(gloo: dist.ProcessGroup, nbytes: int) -> dict[str, Variant]:
    """Return all variants, on two buffers: an ordinary tensor, and one that the backend allocated.

    Each starts at its own library's barrier, after which it is fastest: after another one, gloo's threads sleep deeper
    and MPI's ranks start apart.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ordinary, arena = torch.zeros(nbytes // 4), dist.group.WORLD.allocate_tensor(nbytes // 4)
    memory, halves = ordinary.numpy(), ordinary.chunk(2)

    def gloo_barrier() -> None:
        dist.barrier(group=gloo)

    def reduce_halves() -> None:
        for work in [dist.all_reduce(half, group=gloo, async_op=True) for half in halves]:
            work.wait()

    found = {
        GLOO: Variant(lambda: dist.all_reduce(ordinary, group=gloo), gloo_barrier, ordinary),
        HALVES: Variant(reduce_halves, gloo_barrier, ordinary),
        ORDINARY: Variant(lambda: dist.all_reduce(ordinary), dist.barrier, ordinary),
        ARENA: Variant(lambda: dist.all_reduce(arena), dist.barrier, arena),
        MPICH: Variant(lambda: world.Allreduce(MPI.IN_PLACE, memory), world.Barrier, ordinary),
        COPY: Variant(lambda: arena.copy_(ordinary), dist.barrier, arena, ordinary),
        COPY_ALONE: Variant(lambda: arena.copy_(ordinary), dist.barrier, arena, ordinary, alone=True),
        PASS: Variant(lambda: arena.mul_(world.size), dist.barrier, arena, exchanges=False),
    }
    return {name: each for name, each in found.items() if name != HALVES or nbytes >= HALVES_FROM_NBYTES}


def time_calls(gloo: dist.ProcessGroup, variant: Variant, calls: int) -> list[float]:
    """Return the seconds of each of `calls` iterations on this rank."""
    asleep = variant.alone and dist.get_rank() > 0
    seconds = []
    for _ in range(calls):
        variant.barrier()
        started = time.perf_counter()
        if not asleep:
            variant.run()
        seconds.append(time.perf_counter() - started)
        if variant.alone:
            dist.barrier(group=gloo)  # in which ranks sleep
    return seconds


def check(gloo: dist.ProcessGroup, name: str, variant: Variant) -> None:
    """Run it once on numbers that differ between places and ranks, and check every place of the result."""
    rank, buffer = dist.get_rank(), variant.buffer
    exact_buffers.write_pattern(buffer if variant.source is None else variant.source, rank)
    time_calls(gloo, variant, 1)
    if variant.source is None:
        right = exact_buffers.holds_sum(buffer, dist.get_world_size())
    else:
        right = (variant.alone and rank > 0) or exact_buffers.holds_pattern(buffer, rank)
    if not right:
        raise RuntimeError(f"{name} is wrong at {buffer.nbytes} bytes")


def turn(gloo: dist.ProcessGroup, name: str, variant: Variant, calls: int) -> list[float]:
    """Return the seconds of each of `calls` iterations on this rank, after checking the result from ones."""
    variant.buffer.fill_(1.0)
    if variant.source is not None:
        variant.source.fill_(2.0)
    seconds = time_calls(gloo, variant, calls)
    expected = 2.0 if variant.source is not None else float(dist.get_world_size()) ** calls
    if not (variant.alone and dist.get_rank()) and not exact_buffers.all_equal(variant.buffer, expected):
        raise RuntimeError(f"{name} is wrong at {variant.buffer.nbytes} bytes after {calls} calls")
    return seconds


def measure(
    gloo: dist.ProcessGroup, tick: Callable[[], None], nbytes: int, rounds: int, calls: int
) -> dict[str, Any]:
    """Return the times of all variants at one size; the check warms up."""
    found = variants(gloo, nbytes)
    for name, variant in found.items():
        if variant.exchanges:
            check(gloo, name, variant)
    tick()
    turn_of = {name: lambda name=name: turn(gloo, name, found[name], calls) for name in found}
    seconds = torch.tensor(list(take_turns(turn_of, rounds, tick, warm_up=0).values()), dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=gloo)
    slowest = InterleavedTimes.of(nbytes, dict(zip(found, seconds.tolist(), strict=True)))
    return slowest.with_best(BEST, [GLOO, HALVES]).to_json()


# ---------------------------------------------------------------------- results

MB = 1_000_000
WANTED = [  # ranks, bytes, own, other, bound
    (2, 100 * MB, BEST, ARENA, "≥ 4"),
    (2, 100 * MB, BEST, ORDINARY, "≥ 1.8"),
    (2, 100 * MB, MPICH, ARENA, "≥ 2.5"),
    (2, 100 * MB, ARENA, COPY, "≤ 1.1"),
    (2, 100 * MB, ARENA, COPY_ALONE, "≤ 1.1"),
    (2, 100 * MB, ARENA, PASS, ""),
    (2, 100 * MB, MPICH, PASS, ""),
    (2, 4_000, BEST, ORDINARY, "≥ 4"),
    (2, 64_000, MPICH, ORDINARY, "≥ 1"),
    (2, MB, MPICH, ORDINARY, ""),
    (4, 100 * MB, BEST, ARENA, "≥ 2.5"),
    (4, 100 * MB, BEST, ORDINARY, ""),
    (4, 100 * MB, MPICH, ARENA, ""),
    (4, 64_000, MPICH, ORDINARY, "≥ 1"),
    (4, MB, MPICH, ORDINARY, "≥ 1"),
    (4, MB, MPICH, ARENA, "≥ 1"),
]


def times_of(result: dict[str, Any]) -> dict[int, InterleavedTimes]:
    """Return the times of a result by size."""
    return {row["nbytes"]: InterleavedTimes(**row) for row in result["rows"]}


def ratio_title(own: str, other: str) -> str:
    """Return ``"gloo ÷ arena"``."""
    return f"{TITLES[own][1]} ÷ {TITLES[other][1]}"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with about three digits."""
    value = 1e3 * seconds
    return f"{value:.4f}" if value < 0.1 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def times(result: dict[str, Any]) -> str:
    """Return the table of times at all sizes, and of ratios."""
    pairs = [(BEST, ORDINARY), (BEST, ARENA), (MPICH, ARENA), (ARENA, COPY)]
    rows = [
        [
            format_size(nbytes),
            *(milliseconds(row.seconds[name]) for name in TITLES),
            *(f"{row.ratio(*pair).median:.2f}" for pair in pairs),
        ]
        for nbytes, row in times_of(result).items()
    ]
    columns = [column for column, _ in TITLES.values()]
    return table(["bytes", *columns, *(ratio_title(*pair) for pair in pairs)], rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the ratios, the times by number of ranks, and MPICH's settings."""
    results = {ranks: bench.read(f"{ranks}-ranks") for ranks in (2, 4)}
    ratios = []
    for ranks, nbytes, own, other, bound in WANTED:
        ratio = times_of(results[ranks])[nbytes].ratio(own, other)
        ratios.append([str(ranks), format_size(nbytes), ratio_title(own, other), str(ratio), bound])
    tried = [
        [str(ranks), each["name"], *map(milliseconds, each["seconds"].values()), f"{each['score']:.2f}"]
        for ranks, result in results.items()
        for each in result["mpich_settings_tried"]
    ]
    open_mpi = [
        [
            str(ranks),
            format_size(row["nbytes"]),
            *(milliseconds(median(row[name])) for name in (MPICH, "Open MPI")),
            str(ratio_of(row["Open MPI"], row[MPICH])),
        ]
        for ranks, result in results.items()
        for row in result["open_mpi"]
    ]
    setting_columns = ["ranks", "setting", *map(format_size, SETTING_NBYTES), "× the best"]
    return {
        "figures": table(["ranks", "bytes", "", "median (95 % interval)", "wanted"], ratios, words=3),
        **{f"{ranks} ranks": times(result) for ranks, result in results.items()},
        "settings": table(setting_columns, tried, words=2),
        "open mpi": table(["ranks", "bytes", "MPICH", "Open MPI", "Open MPI ÷ MPICH"], open_mpi),
    }


@bench.charts
def charts() -> dict[str, Chart]:
    """Return a chart per result: time against size, and how many times faster than gloo."""
    drawn = {}
    for name, result in bench.find("*-ranks").items():
        lines, ratios = [], []
        for key in (ARENA, BEST, ORDINARY, MPICH, COPY):
            label = TITLES[key][key == COPY]
            rows = times_of(result).items()
            lines.append(ChartLine(label, [(nbytes, row.seconds[key]) for nbytes, row in rows], key == COPY))
            if key not in (BEST, COPY):
                ratios.append(
                    ChartLine(label, [(nbytes, row.ratio(BEST, key).median) for nbytes, row in rows])
                )
        title = f"All-reduce of float32 between {result['settings']['ranks']} processes of one machine"
        drawn[f"{name}.png"] = time_and_ratio_chart(
            lines, ratios, title=title, ratio="times faster than gloo"
        )
    return drawn


if __name__ == "__main__":
    bench.main()
