"""Synchronising every 20 steps on a slow network, by library: torchft, hivemind, and Paceline.

    python benchmarks/peers/set_up.py
    python benchmarks/slow-networks/peers.py run     (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/slow-networks/peers.py table

One rank per host. Libraries can't share a process, so each turn starts its own, under the Python that the library was
installed into; the turns alternate.
"""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from typer import Option
from workload import (
    EVERY,
    FACTS,
    OUTER_LR,
    OUTER_MOMENTUM,
    SIZE,
    Peer,
    Place,
    batch_of,
    digest_of,
    model_and_optimizer,
    stepper,
    train_step,
)

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import fill, table
from bench_harness.ranks import gather, interface_bytes
from bench_harness.turns import Ratio, ratio_of
from paceline._core.files import write_text
from paceline.errors import HostFailed, UsageError, unknown
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.turn_statistics import turn_order
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT
from paceline.tools.result_files import versions
from paceline.tools.train.traffic_counter import float32_gradient_nbytes

HOMES = Path.home() / ".cache" / "paceline-peers"
TRIES, TURN_SECONDS = 3, 400.0
ALONE_STEPS, FARTHEST = 3, 1e-2
TORCHFT = "torchft DiLoCo"
STREAMING = {"fragments": 2, "delay": 5}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch's all-reduce, by hand": ("by_hand", {}),
    TORCHFT: ("torchft", {"fragments": 1, "delay": 0}),
    "torchft DiLoCo, 2 fragments, delay 5": ("torchft", STREAMING),
    "hivemind averager, 8 bits": ("hivemind", {"compression": "Uniform8BitQuantization"}),
    "Paceline DiLoCo, int4": ("paceline", {"fragments": 1, "delay": 0, "compression": "int4"}),
    "Paceline DiLoCo, int4, 2 fragments, delay 5": ("paceline", STREAMING | {"compression": "int4"}),
}
"""Library and settings, by name."""

ON_REQUEST: dict[str, tuple[str, dict[str, Any]]] = {
    "hivemind averager, fp16": ("hivemind", {"compression": "Float16Compression"}),
    "hivemind averager, float32": ("hivemind", {"compression": "NoCompression"}),
}
"""Measured only when named."""

bench = Benchmark(__file__)


# ---------------------------------------------------------------------- libraries


Build = Callable[[Place, GPT, torch.optim.Optimizer], Peer]


def by_hand(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return DiLoCo by hand: the inner optimizer, and every so many steps a Nesterov step with the mean movement.

    It shows what a single all-reduce of torch costs, without any library.
    """
    base = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
    outer = torch.optim.SGD([base], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    inner_step, steps = stepper(optimizer), 0

    @torch.no_grad()
    def go_back() -> None:
        vector_to_parameters(base.detach().clone(), model.parameters())

    @torch.no_grad()
    def finish() -> None:
        nonlocal steps
        inner_step()
        steps += 1
        if steps % EVERY == 0:
            moved = base - parameters_to_vector(model.parameters())
            dist.all_reduce(moved)
            base.grad = moved.div_(place.ranks)
            outer.step()
            go_back()

    sent = float32_gradient_nbytes(SIZE.parameters(), place.ranks)
    return Peer(finish, nullcontext(), sent, begin=go_back)


def diloco(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return Paceline's DiLoCo, which counts the steps of the inner optimizer."""
    loop = paceline.DiLoCo(
        model, optimizer, EVERY, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM, **place.settings
    )
    overlaps = place.settings["delay"] > 0
    return Peer(
        stepper(optimizer),
        loop,
        loop.round_nbytes,
        overlaps=overlaps,
        agreed=(lambda: loop.shared().values()) if overlaps else None,
    )


OWN: dict[str, Build] = {"by_hand": by_hand, "paceline": diloco}
"""Need no installation; the others are built by ``peer_<library>.py``, which runs where the library is installed."""


def python_of(library: str, homes: Path) -> Path:
    """Return the interpreter of a library."""
    return Path(sys.executable) if library in OWN else homes / library / "bin" / "python"


# ---------------------------------------------------------------------- measuring


@bench.run
def run(
    hosts: Annotated[int, Option(min=2, help="Hosts around the switch, a rank on each.")] = 4,
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "200Mbit/s",
    turns: Annotated[int, Option(min=1, help="Turns of each variant.")] = 3,
    syncs: Annotated[int, Option(min=1, help="Synchronisations alone in a turn.")] = 2,
    rounds: Annotated[int, Option(min=1, help="Rounds of real inner steps in a turn.")] = 1,
    only: Annotated[
        list[str] | None, Option(metavar="NAME", help="This variant, and others so named; else all.")
    ] = None,
    peers: Annotated[
        Path, Option(metavar="FOLDER", help="Folder of the environments made by set_up.py.")
    ] = HOMES,
    json_file: JsonOption = None,
) -> None:
    """Time outer steps by library, the synchronisation alone and whole rounds, and count the bytes."""
    known = VARIANTS | ON_REQUEST
    for name in only or []:
        if name not in known:
            raise unknown("variant", name, known)
    chosen = {name: each for name, each in known.items() if name in (only or VARIANTS)}
    for name, (library, _) in chosen.items():
        if not python_of(library, peers).exists():
            raise UsageError(f"{name}: no environment in {peers}", remedy="run benchmarks/peers/set_up.py")
    path = bench.output(json_file, f"peers-{hosts}x{rate.removesuffix('/s')}")
    installed = {"": versions(("paceline", "torch"))}
    installed |= versions_of({library for library, _ in chosen.values()}, peers)
    rows: dict[str, Any] = {
        name: {"settings": settings, "turns": [], "failures": []} for name, (_, settings) in chosen.items()
    }
    names, port = list(chosen), 20_000  # below the ports that the kernel gives away by itself
    title = f"outer steps, {hosts} hosts, {rate}"
    with Lab(hosts, rate) as lab, ProgressBar(title, turns * len(names)) as tick:
        for number in range(turns):
            for index in turn_order(len(names), number):
                name = names[index]
                for attempt in range(TRIES):
                    port += 100
                    job = {"variant": chosen[name], "port": port, "syncs": syncs, "rounds": rounds}
                    try:
                        rows[name]["turns"].append(take_turn(lab, job, peers))
                        break
                    except HostFailed as error:
                        rows[name]["failures"].append(str(error).partition("\n")[0])
                        if attempt == TRIES - 1:
                            raise
                tick()
    settings = {"hosts": hosts, "rate": rate, "turns": turns, "syncs": syncs, "rounds": rounds} | FACTS
    bench.write(path, "outer-steps-by-library", settings, versions=installed, rows=rows)
    print(figures(rows))


def take_turn(lab: Lab, job: dict[str, Any], homes: Path) -> dict[str, Any]:
    """Run one variant's ranks on all hosts, and return what they measured."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        bench.job(job | {"ranks": lab.hosts, "folder": folder}) as (program, result),
    ):
        command = [str(python_of(job["variant"][0], homes)), *program]
        lab.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=TURN_SECONDS)
        return result()


def versions_of(libraries: set[str], homes: Path) -> dict[str, dict[str, str]]:
    """Return what is installed in the environments of libraries."""
    found = {}
    for library in sorted(libraries - set(OWN)):
        program = (
            "import json; from paceline.tools.result_files import versions; "
            f"print(json.dumps(versions({[library, 'torch', 'numpy']!r})))"
        )
        ended = subprocess.run([python_of(library, homes), "-c", program], capture_output=True, check=True)
        found[library] = json.loads(ended.stdout)
    return found


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Take one turn of a variant.

    Phases: set the library up; form a gloo group that is used between measurements only; take some steps without the
    library; a first round, which opens connections; rounds whose inner steps change the parameters but compute nothing,
    which leaves the synchronisation alone; rounds of real inner steps; measure how far apart the ranks are.
    """
    library, settings = job["variant"]
    build: Build = OWN.get(library) or importlib.import_module(f"peer_{library}").build
    host = int(socket.gethostname().removeprefix("host"))
    place = Place(host, job["ranks"], job["port"] + 1, Path(job["folder"]), settings)
    model, optimizer = model_and_optimizer()
    meeting = f"tcp://host0:{job['port']}"
    dist.init_process_group("gloo", init_method=meeting, rank=host, world_size=place.ranks)
    peer = build(place, model, optimizer)
    mine: dict[str, Any] = {"alone": seconds_alone(model, optimizer, place)}
    with peer.running:
        peer.begin()
        take_round(peer, model, place, compute=False)
        for kept in peer.extra.values():
            kept.clear()
        syncs = [
            take_round(peer, model, place, compute=False) for _ in range(0 if peer.overlaps else job["syncs"])
        ]
        rounds = [take_round(peer, model, place, compute=True) for _ in range(job["rounds"])]
        mine["syncs"], mine["rounds"] = ([seconds for seconds, _ in each] for each in (syncs, rounds))
        mine["passed"] = [passed for _, passed in syncs + rounds]
        mine["apart"] = distance(list(model.parameters() if peer.agreed is None else peer.agreed()))
        mine["extra"] = dict(peer.extra)
        every = gather(mine)
    dist.barrier()
    dist.destroy_process_group()
    return slowest(every) | {"expected_sent": peer.sent} if host == 0 else None


def seconds_alone(model: GPT, optimizer: torch.optim.Optimizer, place: Place) -> float:
    """Return the seconds of a step without synchronisation, beside the other ranks' steps."""
    seconds, batch, finish = [], batch_of(place.rank), stepper(optimizer)
    for _ in range(1 + ALONE_STEPS):
        dist.barrier()
        started = time.perf_counter()
        train_step(model, batch, finish)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def take_round(peer: Peer, model: GPT, place: Place, *, compute: bool) -> tuple[float, tuple[int, int]]:
    """Return the seconds of a round on this rank, and the bytes that its host sent and received."""
    batch, before = batch_of(place.rank), interface_bytes()
    if not compute:
        peer.prepare()
        nudge(model, place.rank)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(EVERY):
        if compute:
            train_step(model, batch, peer.finish)
        else:
            peer.finish()
    seconds = time.perf_counter() - started
    dist.barrier()
    passed = interface_bytes() - before
    return seconds, (passed.sent, passed.received)


@torch.no_grad()
def nudge(model: torch.nn.Module, rank: int) -> None:
    """Change the parameters as an inner step might, without computing one."""
    drawn = torch.Generator().manual_seed(rank)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape[-1], generator=drawn), alpha=1e-3)


@torch.no_grad()
def distance(agreed: list[torch.Tensor]) -> float:
    """Return how far this rank is from rank 0: ‖a − b‖ / ‖b‖ over all that should be equal; 0: bit for bit.

    Raises:
        RuntimeError: it is further than rounding on the wire explains.
    """
    if len(set(gather(digest_of(agreed)))) == 1:
        return 0.0
    mine = torch.cat([tensor.detach().reshape(-1) for tensor in agreed])
    first = mine.clone()
    dist.broadcast(first, src=0)
    apart = float((mine - first).norm() / first.norm())
    if not apart < FARTHEST:
        raise RuntimeError(f"after a round this rank's parameters are {apart:.2g} away from rank 0's")
    return apart


def slowest(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest rank's seconds, and the bytes of every round and host."""

    def largest(lists: list[list[float]]) -> list[float]:
        return [max(values) for values in zip(*lists, strict=True)]

    return {
        "alone": max(one["alone"] for one in every),
        "apart": max(one["apart"] for one in every),
        "syncs": largest([one["syncs"] for one in every]),
        "rounds": largest([one["rounds"] for one in every]),
        "passed": [list(hosts) for hosts in zip(*(one["passed"] for one in every), strict=True)],
        "extra": {name: largest([one["extra"][name] for one in every]) for name in every[0]["extra"]},
    }


# ---------------------------------------------------------------------- results


def syncs_of(row: dict[str, Any]) -> list[float]:
    """Return the seconds of a synchronisation alone in each turn; none if it overlaps with inner steps."""
    return [median(turn["syncs"]) for turn in row["turns"] if turn["syncs"]]


def sent_of(row: dict[str, Any], over_hosts: Callable[[list[float]], float]) -> float:
    """Return the bytes sent in a round, reduced over hosts: median over rounds."""
    return median(
        over_hosts([sent for sent, _ in hosts]) for turn in row["turns"] for hosts in turn["passed"]
    )


def apart_of(row: dict[str, Any]) -> float:
    """Return how far ranks are apart after all rounds of a turn."""
    return max(turn["apart"] for turn in row["turns"])


def figures(rows: dict[str, Any]) -> str:
    """Return the table of outer steps: a row per variant."""
    cells = []
    for name, row in rows.items():
        syncs, turns = syncs_of(row), row["turns"]
        ratio: Ratio | str = ratio_of(syncs_of(rows[TORCHFT]), syncs) if syncs and TORCHFT in rows else ""
        cells.append(
            [
                name,
                f"{median(syncs):.3g}" if syncs else "hidden",
                str(ratio),
                f"{median(median(turn['rounds']) for turn in turns) / EVERY:.3g}",
                f"{median(turn['alone'] for turn in turns):.3g}",
                f"{sent_of(row, max) / 1e6:.4g}",
                f"{sent_of(row, fmean) / turns[0]['expected_sent']:.3f}",
                f"{apart_of(row):.1g}",
            ]
        )
    titles = [
        "",
        "s alone",
        "torchft ÷",
        "s per inner step",
        "a step alone",
        "MB sent",
        "÷ expected",
        "apart",
    ]
    return table(titles, cells)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md, and fill the one of hivemind's compressions in benchmarks/peers."""
    rows = [
        [name, f"{median(syncs_of(row)):.3g}", f"{sent_of(row, max) / 1e6:.4g}", f"{apart_of(row):.1g}"]
        for name, row in bench.read("hivemind-compression")["rows"].items()
    ]
    page = bench.folder.parent / "peers" / "README.md"
    block = table(["", "s alone", "MB sent", "apart"], rows)
    write_text(page, fill(page.read_text(encoding="utf-8"), "compression", block))
    print(page)
    return {"peers": figures(bench.read("peers-4x200Mbit")["rows"])}


if __name__ == "__main__":
    bench.main()
