"""What other libraries' nearest modes learn in the time that the star takes, on the same machines and links.

    python benchmarks/star/peers.py

Trains the reference model `mini` on four hosts that `paceline.testing.netlab` plays (as root, on Linux), whose
speeds are 1 : 1 : 2 : 4, on links of 200 Mbit/s, for as long as the star's schedule lasts: by hivemind's optimizer
with local updates, by torchft's streaming DiLoCo, by the star. The loss is that of the mean of the four machines'
parameters; of the star, the centre's. ``benchmarks/peers/set_up.py`` makes the environments.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from loss import LEAD_SECONDS, Stage, StarSettings
from training import BATCH, SIZE, SPEEDS, Training

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.errors import UsageError, unknown
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
HOMES = Path.home() / ".cache" / "paceline-peers"
COPIES = 10
GRACE_SECONDS = 5.0
"""For the last copies; then all are ended: those who go in lock-step would wait for one another."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    Attributes:
        home: the library, by the name of its environment; ``""``: the star. settings: of its training.
    """

    home: str
    settings: dict[str, Any]


def _torchft(lr: float) -> Contestant:
    return Contestant("torchft", {"lr": lr, "every": 8, "fragments": 2, "delay": 2, "outer": (1.0, 0.0)})


CONTESTANTS = {
    "the star": Contestant("", asdict(StarSettings())),
    "hivemind, local updates": Contestant("hivemind", {"lr": 2e-3, "samples": 64}),
    "hivemind, local updates, lr 1e-3": Contestant("hivemind", {"lr": 1e-3, "samples": 64}),
    "hivemind, local updates, lr 5e-4": Contestant("hivemind", {"lr": 5e-4, "samples": 64}),
    "torchft DiLoCo, 2 fragments": _torchft(2e-3),
    "torchft DiLoCo, 2 fragments, lr 1e-3": _torchft(1e-3),
    "torchft DiLoCo, 2 fragments, lr 4e-3": _torchft(4e-3),
}


def main(
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s",
    fastest: Annotated[float, typer.Option(help="Seconds of a step of the fastest machine.")] = 0.15,
    seconds: Annotated[float, typer.Option(help="Of the learning-rate schedule, and of training.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of parameters and data.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="This contestant, and others so named; what was found of others stays."
        ),
    ] = None,
    peers: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where set_up.py made the environments.")
    ] = HOMES,
    json_file: JsonOption = None,
) -> None:
    """Train by other libraries and by the star for the same time, and compare what was learnt."""
    path = json_file or HERE / "peers.json"
    check_writable(path, make_folder=True)
    chosen = choose(only or [], peers)
    asked = {"rate": rate, "fastest_step": fastest, "seconds": seconds, "seed": seed}
    settings = asked | {"speeds": list(SPEEDS), "size": SIZE, "batch": BATCH}
    rows = {} if not only else found_before(path, settings)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        Lab(len(SPEEDS), rate) as lab,
        ProgressBar("the same time, by library", len(chosen)) as tick,
    ):
        for number, (name, one) in enumerate(chosen.items()):
            place = Path(folder, str(number))
            place.mkdir()
            job = {"seed": seed, "fastest": fastest, "seconds": seconds, "port": 20_000 + 100 * number}
            found = (
                train(lab, one, peers / one.home, place, job)
                if one.home
                else star(Stage(lab, place, fastest), StarSettings(seconds=seconds), seed)
            )
            rows[name] = {"name": name, "settings": one.settings} | found
            print(f"{name}: {found['curve'][-1]['loss']:.4f}", flush=True)
            tick()
    result = result_head("asynchronous-by-library") | {
        "settings": settings,
        "rows": [rows[name] for name in CONTESTANTS if name in rows],
    }
    write_json(path, result)
    print(path)


def found_before(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of an earlier result, by name; none if it was of other settings."""
    if not path.exists():
        return {}
    result = json.loads(path.read_text(encoding="utf-8"))
    return {row["name"]: row for row in result["rows"]} if result["settings"] == settings else {}


def choose(names: list[str], peers: Path) -> dict[str, Contestant]:
    """Return those that are named, or all.

    Raises:
        UsageError: nobody has such a name, or what it needs isn't installed.
    """
    for name in names:
        if name not in CONTESTANTS:
            raise unknown("contestant", name, CONTESTANTS)
    chosen = {name: one for name, one in CONTESTANTS.items() if name in (names or CONTESTANTS)}
    for name, one in chosen.items():
        if one.home and not (peers / one.home).exists():
            raise UsageError(f"{name}: no environment in {peers}", remedy="run benchmarks/peers/set_up.py")
    return chosen


def star(stage: Stage, settings: StarSettings, seed: int) -> dict[str, Any]:
    """Train by the star; return its curve and what the workers did."""
    workers = stage.workers(settings, seed)
    return {"curve": stage.curve(seed), "workers": workers}


def train(lab: Lab, one: Contestant, home: Path, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Train by a library; return the curve of the mean of all parameters, and what the workers did."""
    told = job | {
        "ranks": len(SPEEDS),
        "copies": COPIES,
        "settings": one.settings,
        "folder": str(folder),
        "at": time.time() + 2 * LEAD_SECONDS,
    }
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(told), encoding="utf-8")
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "slow-networks")}
    script = str(HERE / f"beside_{one.home}.py")
    jobs = [
        lab.start([str(home / "bin" / "python"), script, str(job_file), str(rank)], on=rank, env=env)
        for rank in range(len(SPEEDS))
    ]
    while time.time() < told["at"] + job["seconds"] + GRACE_SECONDS:
        for each in jobs:
            if not each.running():
                each.wait()  # raises, with what it wrote last
        time.sleep(0.1)
    for each in jobs:
        each.end()
    workers = [json.loads((folder / f"worker-{rank}.json").read_text()) for rank in range(len(SPEEDS))]
    return {"curve": curve(folder, job["seed"], job["seconds"]), "workers": workers}


def curve(folder: Path, seed: int, seconds: float) -> list[dict[str, float]]:
    """Return the held-out loss of the mean of the machines' parameters, copy by copy."""
    from safetensors.torch import load_file

    judge, points = Training(0, seed, 1e-3, 0.0), []
    for copy in range(1, COPIES + 1):
        copies = [load_file(folder / f"copy-{rank}-{copy}.safetensors") for rank in range(len(SPEEDS))]
        mean = {name: torch.stack([each[name] for each in copies]).mean(0) for name in copies[0]}
        points.append({"seconds": copy * seconds / COPIES, "loss": judge.loss(mean)})
    return points


if __name__ == "__main__":
    run_program(main)
