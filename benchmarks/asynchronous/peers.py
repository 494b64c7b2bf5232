"""What other libraries' nearest modes learn in the same time, on the same machines and links.

    python benchmarks/asynchronous/peers.py run      (as root, on Linux, after `benchmarks/peers/set_up.py`)
    python benchmarks/asynchronous/peers.py chart
    python benchmarks/asynchronous/peers.py table

Trains on the machines and links of `loss.py`, for as long as the asynchronous schedule lasts: by hivemind's optimizer
with local updates, by torchft's streaming DiLoCo, by `paceline.AsyncDataParallel`. The loss is that of the mean of the
four machines' parameters; of Paceline, that of the hub's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from hub_training import LEAD_SECONDS, SETTINGS, finish_chart, lr_share, reached, train
from safetensors.torch import load_file, save_file
from training import BATCH, SIZE, SPEEDS, Training, wait_until
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import host_number, open_lab, read_json
from bench_harness.markdown import table
from bench_harness.ranks import interface_bytes
from paceline.errors import UsageError, unknown
from paceline.testing.netlab import Lab
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.chart_style import COLOURS, Chart, in_paceline_style, stacked_panels

HOMES = Path.home() / ".cache" / "paceline-peers"
COPIES = 10
GRACE_SECONDS = (
    5.0  # for the last copies; then all are ended, as those in lock-step would wait for one another
)
TORCHFT = {"every": 8, "fragments": 2, "delay": 2, "outer": (1.0, 0.0)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "asynchronous": ("", SETTINGS),
    "hivemind, local updates": ("hivemind", {"lr": 2e-3, "samples": 64}),
    "hivemind, local updates, lr 1e-3": ("hivemind", {"lr": 1e-3, "samples": 64}),
    "hivemind, local updates, lr 5e-4": ("hivemind", {"lr": 5e-4, "samples": 64}),
    "torchft DiLoCo, 2 fragments": ("torchft", {"lr": 2e-3, **TORCHFT}),
    "torchft DiLoCo, 2 fragments, lr 1e-3": ("torchft", {"lr": 1e-3, **TORCHFT}),
    "torchft DiLoCo, 2 fragments, lr 4e-3": ("torchft", {"lr": 4e-3, **TORCHFT}),
}
"""Name of the library's environment (empty: this one), and settings of the training."""

bench = Benchmark(__file__)


@bench.run
def run(
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "200Mbit/s",
    fastest: Annotated[float, Option(help="Seconds of a step of the fastest machine.")] = 0.15,
    seconds: Annotated[float, Option(help="Length of schedule and training.")] = 300.0,
    seed: Annotated[int, Option(help="Seed of parameters and data.")] = 0,
    only: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="This variant; can be repeated. Results of others are kept."),
    ] = None,
    peers: Annotated[Path, Option(metavar="FOLDER", help="Where set_up.py made the environments.")] = HOMES,
    json_file: JsonOption = None,
) -> None:
    """Train by other libraries and asynchronously for the same time, and compare what was learnt."""
    path = bench.output(json_file, "peers")
    for name in only or ():
        if name not in VARIANTS:
            raise unknown("variant", name, VARIANTS)
    chosen = {name: VARIANTS[name] for name in VARIANTS if name in (only or VARIANTS)}
    for name, (library, _) in chosen.items():
        if library and not (peers / library).exists():
            raise UsageError(f"{name}: no environment in {peers}", remedy="run benchmarks/peers/set_up.py")
    job = {"rate": rate, "fastest_step": fastest, "seconds": seconds, "seed": seed}
    settings = job | {"speeds": list(SPEEDS), "size": SIZE, "batch": BATCH}
    before: dict[str, Any] = read_json(path) if only and path.exists() else {"settings": None}
    rows = {row["name"]: row for row in before["rows"]} if before["settings"] == settings else {}
    with open_lab(len(SPEEDS), rate, title="by library", turns=len(chosen)) as (lab, folder, tick):
        for number, (name, (library, own)) in enumerate(chosen.items()):
            place = folder / str(number)
            place.mkdir()
            if library:
                port = {"port": 20_000 + 100 * number}
                found = train_by_library(lab, peers / library, place, job | port | {"settings": own})
            else:
                found = train(lab, place, fastest, SETTINGS | {"seconds": seconds}, seed)
            rows[name] = {"name": name, "settings": own} | found
            tick()
    bench.write(
        path, "asynchronous-by-library", settings, rows=[rows[name] for name in VARIANTS if name in rows]
    )


def train_by_library(lab: Lab, home: Path, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return the loss curve of the mean of all machines' parameters, and what each machine did."""
    job |= {"library": home.name, "folder": str(folder), "at": time.time() + 2 * LEAD_SECONDS}
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(bench.folder.parent / "slow-networks")}
    started = lab.start([str(home / "bin" / "python"), *bench.command(worker, job)], env=env)
    while time.time() < job["at"] + job["seconds"] + GRACE_SECONDS:
        if len(started.running()) < len(SPEEDS):
            started.wait()  # raises, with its last output
        time.sleep(0.1)
    started.end()
    evaluated, curve = Training(0, job["seed"], 1e-3, 0.0), []
    for copy in range(1, COPIES + 1):
        copies = [load_file(folder / f"copy-{rank}-{copy}.safetensors") for rank in range(len(SPEEDS))]
        mean = {name: torch.stack([each[name] for each in copies]).mean(0) for name in copies[0]}
        curve.append({"seconds": copy * job["seconds"] / COPIES, "loss": evaluated.loss(mean)})
    return {
        "curve": curve,
        "workers": [read_json(folder / f"worker-{rank}.json") for rank in range(len(SPEEDS))],
    }


# ---------------------------------------------------------------------- a machine, in the library's environment


@bench.process
def worker(job: dict[str, Any]) -> None:
    """Train until this process is ended; write copies of the parameters, and with each what was done so far."""
    rank, folder = host_number(), Path(job["folder"])
    place = SimpleNamespace(
        rank=rank, ranks=len(SPEEDS), port=job["port"], folder=folder, settings=job["settings"]
    )
    training = Training(rank, job["seed"], place.settings["lr"], job["fastest_step"])
    {"hivemind": attach_hivemind, "torchft": attach_torchft}[job["library"]](place, training)
    wait_until(job["at"])
    began, before, copies = time.monotonic(), interface_bytes(), 0
    while True:
        elapsed = time.monotonic() - began
        if copies < COPIES and elapsed >= (copies + 1) * job["seconds"] / COPIES:
            copies += 1
            passed = interface_bytes() - before
            tensors = {name: each.detach().clone() for name, each in training.net.named_parameters()}
            save_file(tensors, folder / f"copy-{rank}-{copies}.safetensors")
            done = {"steps": training.steps, "seconds": elapsed}
            done |= {"sent": passed.sent, "received": passed.received}
            (folder / f"worker-{rank}.json").write_text(json.dumps(done), encoding="utf-8")
        training.step(lr_share(elapsed / job["seconds"]))


def attach_hivemind(place: Any, training: Training) -> None:
    """Wrap AdamW in hivemind's optimizer, in the mode that is nearest to a hub: local updates.

    Every machine updates its own parameters at its own pace; when all together have learnt from ``samples``, parameters
    are averaged in the background and come in by the delta rule.
    """
    import hivemind  # pyright: ignore[reportMissingImports]
    from peer_hivemind import join  # pyright: ignore[reportMissingImports]

    adamw: Any = training.optimizer
    training.optimizer = hivemind.Optimizer(
        dht=join(place),
        run_id="paceline",
        target_batch_size=place.settings["samples"],
        batch_size_per_step=BATCH,
        optimizer=adamw,
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=1.0,
        averaging_timeout=30.0,
        state_averaging_compression=hivemind.compression.Uniform8BitQuantization(),
        averager_opts={"request_timeout": 0.5, "min_group_size": 2, "target_group_size": place.ranks},
        tracker_opts={
            "min_refresh_period": 0.1,
            "default_refresh_period": 0.5,
            "max_refresh_period": 1.0,
        },
    )


def attach_torchft(place: Any, training: Training) -> None:
    """Hook torchft's streaming DiLoCo into AdamW, set up as in `benchmarks/slow-networks`.

    Ranks make the same number of steps, so all go at the pace of the slowest.
    """
    from peer_torchft import fragments_of, manager_of  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    settings = place.settings
    fragments, (lr, momentum) = fragments_of(training.net, settings["fragments"]), settings["outer"]
    outer = [
        torch.optim.SGD(each.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        for each in fragments
    ]
    diloco = DiLoCo(
        manager_of(place), fragments, training.optimizer, outer,
        sync_every=settings["every"], fragment_sync_delay=settings["delay"],
    )  # fmt: skip
    settings["diloco"] = diloco.__enter__()  # kept alive there


# ---------------------------------------------------------------------- results


def loss_at(row: dict[str, Any], seconds: float) -> float:
    """Return the loss of the point that is nearest to a time."""
    return min(row["curve"], key=lambda point: abs(point["seconds"] - seconds))["loss"]


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: what each library learns in the same time."""
    result = bench.read("peers")
    seconds, seed = (result["settings"][name] for name in ("seconds", "seed"))
    target = bench.read("../slow-networks/loss-4x100Mbit")["ddp"]["curves"][seed][-1]["loss"]
    rows = []
    for row in result["rows"]:
        steps, sent = (sum(worker[name] for worker in row["workers"]) for name in ("steps", "sent"))
        at = reached(row["curve"], target, "seconds")
        name, lr, loss = row["name"].partition(", lr")[0], row["settings"]["lr"], loss_at(row, seconds)
        times = [f"{loss:.4f}", "not" if at is None else f"{at:.0f}"]
        rows.append([name, f"{lr:g}", str(steps), f"{sent / 1e6:.0f}", *times])
    titles = ["", "learning rate", "local steps of all", "MB sent by all"]
    titles += [f"held-out loss after {seconds:.0f} s", f"at DDP's {target:.4f} after, s"]
    return {"peers": table(titles, rows)}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of held-out loss over time."""
    return {"peers.png": draw(bench.read("peers"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return held-out loss over time, by library: thick at the best of its learning rates."""
    figure, (axes,) = stacked_panels(width=10, height=5.2)
    of_library: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        of_library.setdefault(row["name"].partition(", lr")[0], []).append(row)
    for (name, rows), colour in zip(of_library.items(), COLOURS, strict=False):
        ordered = sorted(rows, key=lambda row: loss_at(row, result["settings"]["seconds"]))
        for row in ordered:
            points = [(each["seconds"], each["loss"]) for each in row["curve"]]
            style: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5}
            if row is ordered[0]:
                style = {"linewidth": 2.0, "label": f"{name}, lr {row['settings']['lr']:g}"}
            axes.plot(*zip(*points, strict=True), color=colour, **style)
    axes.set_xlabel("seconds")
    finish_chart(axes, result["settings"])
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
