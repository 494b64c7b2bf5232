"""Asynchronous training on a lab: a worker on each of four hosts, and the hub on the first, beside its worker."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from training import SPEEDS, Training, wait_until

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import host_number, results
from bench_harness.ranks import interface_bytes
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.testing.netlab import Lab
from paceline.tools.report.charts.chart_style import set_title
from paceline.tools.train.lr_schedule import cosine_lr
from paceline.transport.zmq import HubExchange

__all__ = ["LEAD_SECONDS", "SETTINGS", "finish_chart", "lr_share", "reached", "train"]

SETTINGS = {
    "seconds": 300.0,
    "every": 4,
    "delay": 3,
    "lr": 2e-3,
    "compression": "int4",
    "bandwidth": None,
}
"""Length of the learning-rate schedule; k and d; largest learning rate; compression of updates; of each worker."""

LEAD_SECONDS = 20.0  # for processes to start in
_COPY_SECONDS = 10.0

bench = Benchmark(__file__)


def train(
    lab: Lab, folder: Path, fastest: float, settings: Mapping[str, Any], seed: int, *, alone: bool = False
) -> dict[str, Any]:
    """Train once; return what each worker did, and the loss curve of the hub's parameters.

    Args:
        folder: for what the hub writes. fastest: seconds of a step of the fastest machine.
        alone: workers without a hub, so without a curve.
    """
    shutil.rmtree(folder / "hub", ignore_errors=True)
    job = dict(settings) | {
        "hub": None if alone else f"tcp://{lab.addresses[0]}:7077",
        "folder": str(folder),
        "seed": seed,
        "fastest": fastest,
        "at": time.time() + LEAD_SECONDS,
    }
    serving = None if alone else lab.start(bench.command(hub, job), on=0)
    workers = results(lab.start(bench.command(worker, job), on=range(len(SPEEDS))))
    if serving is None:
        return {"workers": workers}
    (copies,), evaluated = results(serving), Training(0, seed, 1e-3, 0.0)
    curve = [{"seconds": seconds, "loss": evaluated.loss(load_file(path))} for seconds, path in copies]
    return {"curve": curve, "workers": workers}


@bench.process
def hub(job: dict[str, Any]) -> list[tuple[float, str]]:
    """Serve; return seconds and file of copies of the parameters, written at the end so that it takes no time."""
    folder, copies = Path(job["folder"]), list[tuple[float, dict[str, Tensor]]]()
    exchange = HubExchange("tcp://*:7077", "", insecure=True)
    with HubJournal.open(folder / "hub", resume=False) as journal:
        hub = Hub("benchmark", HubRules(outer=HubOptimizer("averaging", lr=1.0)), journal, time.time)

        def copy_when_due() -> None:
            now = time.time()
            due = job["at"] + (len(copies) + 1) * _COPY_SECONDS
            if hub.params is not None and hub.phase == "together" and now >= due:
                places = hub.params.layout.fragments[0].tensors
                theta = hub.params.fragments[0].theta.clone()
                copies.append((now - job["at"], {place.name: place.view_in(theta) for place in places}))

        HubServer(hub, exchange).run(lambda: time.time() > job["at"] + job["seconds"] + 15, copy_when_due)
    exchange.close()
    paths = [str(folder / f"copy-{number:04d}.safetensors") for number in range(len(copies))]
    for path, (_, tensors) in zip(paths, copies, strict=True):
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    return [(seconds, path) for (seconds, _), path in zip(copies, paths, strict=True)]


@bench.process
def worker(job: dict[str, Any]) -> dict[str, Any]:
    """Train until the time is over, and return what this worker did."""
    rank = host_number()
    training = Training(rank, job["seed"], job["lr"], job["fastest"])
    loop = nullcontext()
    if job["hub"]:
        loop = paceline.AsyncDataParallel(
            training.net, training.optimizer, job["hub"], job["every"], job["delay"], insecure=True,
            compression=job["compression"], bandwidth=job["bandwidth"], name=f"worker{rank}",
        )  # fmt: skip
    wait_until(job["at"])
    began, before, last = time.monotonic(), interface_bytes(), 0.0
    with loop as running:
        while (elapsed := time.monotonic() - began) < job["seconds"]:
            training.step(lr_share(elapsed / job["seconds"]))
            last = time.monotonic() - began
        counts = vars(running.counts) if running is not None else {}
    passed = interface_bytes() - before
    return {
        "rank": rank,
        "steps": training.steps,
        "seconds": last,
        "sent": passed.sent,
        "received": passed.received,
        "counts": counts,
    }


def lr_share(progress: float) -> float:
    """Return the share of the largest learning rate: a cosine over the time of training, after a warm-up of 5 %."""
    return cosine_lr(min(999, int(progress * 1000)), steps=1000, warmup=50, peak=1.0)


# ---------------------------------------------------------------------- results


def reached(curve: Sequence[Mapping[str, float]], target: float, column: str) -> float | None:
    """Return `column` of the first point whose loss is at most `target`."""
    return next((point[column] for point in curve if point["loss"] <= target), None)


def finish_chart(axes: Any, settings: Mapping[str, Any]) -> None:
    """Add title, limits and legend to a chart of held-out losses over time."""
    speeds = " : ".join(map(str, settings["speeds"]))
    set_title(axes, f"Held-out loss of {settings['size']}, machines of speeds {speeds}, {settings['rate']}")
    axes.set_ylabel("nats per token")
    axes.set_xlim(0, None)
    axes.set_ylim(None, 3.0)  # above that all variants fall alike
    axes.legend(frameon=False, fontsize=10)


if __name__ == "__main__":
    bench.main()
