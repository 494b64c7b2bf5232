"""Settings of `loss.py` for Paceline, chosen on a smaller model and another seed than the ones that are compared.

    python benchmarks/slow-networks/loss_settings.py run      (as root, on Linux: plays hosts)
    python benchmarks/slow-networks/loss_settings.py table

Trains `tiny`, with a quarter of the parameters of `mini`, on links of a quarter of the rate. First torch DDP with
several learning rates, in four processes on one host; then Paceline with each candidate, in a lab. The candidate wins
that is the first to have the loss that DDP ends with. `loss.py` takes its schedule, codec, and number of steps, and its
learning rate relative to that of DDP.
"""

from __future__ import annotations

from typing import Any

from loss_curve import EARLY, method, train_as_rank

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.errors import UsageError
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import gpt_size

SIZE, HOSTS, RATE, SEED, EVERY = "tiny", 4, "25Mbit/s", 3, 10
DDP_RATES = (2e-3, 3e-3, 4e-3)


def candidate(every: int, fragments: int, delay: int, steps: int, times_lr: float = 2.0) -> dict[str, Any]:
    """Return settings of `LocalSGD`.

    Args:
        every, fragments, delay: of `LocalSGD`.
        steps: of the schedule.
        times_lr: learning rate, relative to DDP's best.
    """
    options = {"every": every, "fragments": fragments, "delay": delay, "compression": "int4"}
    return {"options": options, "steps": steps, "times_lr": times_lr}


CANDIDATES = (
    candidate(4, 1, 2, 760, 1.5),
    candidate(4, 4, 1, 760),
    candidate(4, 4, 1, 720, 1.5),
    candidate(4, 4, 1, 680, 1.5),
    candidate(3, 3, 1, 680, 1.5),
    candidate(2, 2, 1, 640, 1.5),
)

bench = Benchmark(__file__)
bench.rank(train_as_rank)


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Train by DDP at several learning rates, then by Paceline with each candidate."""
    path = bench.output(json_file, f"loss-settings-{SIZE}")
    ddp = [method("torch DDP", "ddp", lr) for lr in DDP_RATES]
    turns = sum(each["steps"] // EVERY for each in (*ddp, *CANDIDATES))
    with ProgressBar(f"settings, {SIZE}", turns) as tick:

        def train(lab: Lab, training: dict[str, Any]) -> list[dict[str, Any]]:
            job = {"method": training, "seed": SEED, "size": SIZE, "timed": 0, "every": EVERY, "early": EARLY}
            curve: list[dict[str, Any]] = bench.run_in_lab(lab, job, tick, per_host=HOSTS // lab.hosts)
            print(f"{training['lr']:g} {training['options']}: {curve[-1]['loss']:.4f}", flush=True)
            return curve

        with Lab(1) as lab:
            curves = [{"way": each, "loss": train(lab, each)[-1]["loss"]} for each in ddp]
        best = min(curves, key=lambda each: each["loss"])
        settings = {"hosts": HOSTS, "rate": RATE, "size": SIZE, "seed": SEED}
        settings["parameters"] = gpt_size(SIZE).parameters()
        rows: list[dict[str, Any]] = []
        result: dict[str, Any] = {}
        with Lab(HOSTS, RATE) as lab:
            for each in CANDIDATES:
                lr = best["way"]["lr"] * each["times_lr"]
                training = method("LocalSGD", "local", lr, steps=each["steps"], options=each["options"])
                rows.append(each | {"lr": lr, "curve": train(lab, training)})
                # After each, so that a run that is cut off keeps what it has.
                result = bench.write(path, "loss-settings", settings, ddp=curves, rows=rows)
    print(figures(result))


# ---------------------------------------------------------------------- results


def reached(row: dict[str, Any], target: float) -> dict[str, Any] | None:
    """Return the first point of a candidate with the target loss; None: there is none."""
    return next((point for point in row["curve"] if point["loss"] <= target), None)


def chosen() -> dict[str, Any]:
    """Return the candidate that has DDP's last loss first, as `candidate` made it.

    Raises:
        UsageError: none has it.
    """
    result = bench.read(f"loss-settings-{SIZE}")
    target = min(each["loss"] for each in result["ddp"])
    times = [(point["seconds"], row) for row in result["rows"] if (point := reached(row, target))]
    if not times:
        raise UsageError(
            f"no candidate reaches DDP's loss of {target:.4f}", remedy="add others to CANDIDATES"
        )
    row = min(times, key=lambda each: each[0])[1]
    return {name: row[name] for name in ("options", "steps", "times_lr")}


def figures(result: dict[str, Any]) -> str:
    """Return the table of candidates: loss at the end, and the time until DDP's loss."""
    target, rows = min(each["loss"] for each in result["ddp"]), []
    for row in result["rows"]:
        point, options, last = reached(row, target), row["options"], row["curve"][-1]
        cells = [f"{point['seconds']:.1f}", str(point["step"])] if point else ["never", ""]
        names = [str(options[name]) for name in ("every", "fragments", "delay")]
        shown = [f"{row['lr']:g}", f"{last['loss']:.4f}", f"{1e3 * last['seconds'] / last['step']:.1f}"]
        rows.append([*names, str(row["steps"]), *shown, *cells])
    titles = ["H", "fragments", "delay", "steps", "learning rate", "last loss", "ms per step"]
    return table([*titles, "s to DDP's loss", "at step"], rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md."""
    result = bench.read(f"loss-settings-{SIZE}")
    losses = ", ".join(f"{each['loss']:.4f} at {each['way']['lr']:g}" for each in result["ddp"])
    return {"settings": figures(result), "settings-ddp": f"DDP's last loss: {losses}."}


if __name__ == "__main__":
    bench.main()
