"""Whether a training ends with the same weights, to the bit, on any number of ranks.

    python benchmarks/virtual-ranks/same_bits.py run      (as root, on Linux: plays hosts with a network lab)
    python benchmarks/virtual-ranks/same_bits.py table

Every case is the training of `paceline train --virtual-ranks 8 --dropout 0.1 --steps 160`, on one thread per rank. Its
result is the SHA-256 of the exported weights.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import Annotated, Any

from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.start_training import start_training
from paceline.tools.train.train_settings import TrainSettings

RANKS = (1, 2, 3, 4, 5, 8)
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded", "sharded-gradients")
ON_GLOO = ("naive", "bucketed", "sharded")
HOSTS, RATE = 2, "1Gbit/s"

bench = Benchmark(__file__)


def cases() -> list[dict[str, Any]]:
    """Return the cases: on one host every number of ranks, on two hosts one and two ranks each."""
    alone = {"backend": "paceline", "strategy": "bucketed", "ranks": 1, "hosts": 1}
    pairs = [("paceline", strategy) for strategy in STRATEGIES] + [("gloo", strategy) for strategy in ON_GLOO]
    found = [alone]
    for backend, strategy in pairs:
        case = {"backend": backend, "strategy": strategy}
        found += [case | {"ranks": ranks, "hosts": 1} for ranks in RANKS if ranks > 1]
        if strategy in ON_GLOO:
            found += [case | {"ranks": ranks, "hosts": HOSTS} for ranks in (2, 4)]
    return found


@bench.run
def run(
    steps: Annotated[int, Option(min=1, help="Steps of each training.")] = 160, json_file: JsonOption = None
) -> None:
    """Train each case, and compare the weights."""
    path = bench.output(json_file, "same-bits")
    found, settings = [], settings_of(steps, "naive")
    with ProgressBar("same bits", len(cases())) as tick:
        for case in cases():
            one_host = case["hosts"] == 1
            with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
                result = bench.start_ranks(
                    case | {"steps": steps, "out": f"{folder}/run"},
                    case["ranks"] if one_host else HOSTS,
                    rate=None if one_host else RATE,
                    per_host=case["ranks"] // case["hosts"],
                )
            found.append(case | result)
            tick()
    names = ("model", "virtual_ranks", "dropout", "micro_batch_size", "context", "threads", "clip", "seed")
    facts = {name: value for name, value in asdict(settings).items() if name in names}
    bench.write(path, "same-bits", {"steps": steps, "rate": RATE} | facts, cases=found)


def settings_of(steps: int, strategy: str, out: str = "run") -> TrainSettings:
    """Return the settings of a training."""
    return TrainSettings(
        model="tiny",
        micro_batch_size=2,
        context=64,
        virtual_ranks=8,
        dropout=0.1,
        steps=steps,
        strategy=strategy,
        threads=1,
        eval_every=0,
        eval_windows=16,
        checkpoint_every=0,
        sample_tokens=0,
        out=out,
    )


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Train, and return the digest of the weights."""
    first = paceline.init(job["backend"]).rank == 0
    with redirect_stdout(StringIO()):  # the progress bar of all trainings is shown
        start_training(settings_of(job["steps"], job["strategy"], job["out"]))
    if not first:
        return None
    [weights] = RunFolder(job["out"]).checkpoint.glob("step-*/model.safetensors")
    return {"sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}


def row(backend: str, strategy: str) -> list[str]:
    """Return the cells of a strategy on a backend."""
    of_ways = {
        (each["hosts"], each["ranks"]): each["sha256"][:8]
        for each in bench.read("same-bits")["cases"]
        if (each["backend"], each["strategy"]) == (backend, strategy)
    }
    ways = [(1, ranks) for ranks in RANKS] + [(HOSTS, 2), (HOSTS, 4)]
    return [backend, strategy, *(of_ways.get(way, "") for way in ways)]


@bench.tables
def tables() -> dict[str, str]:
    """Return the digests, by strategy and ranks."""
    found = bench.read("same-bits")["cases"]
    pairs = list(dict.fromkeys((each["backend"], each["strategy"]) for each in found))
    titles = ["backend", "strategy", *map(str, RANKS), "2 hosts, 2", "2 hosts, 4"]
    digest, number = Counter(each["sha256"] for each in found).most_common(1)[0]
    lines = table(titles, [row(*pair) for pair in pairs], words=2)
    return {"bits": f"{lines}\n\n{number} of {len(found)} trainings ended with the weights {digest[:16]}…"}


if __name__ == "__main__":
    bench.main()
