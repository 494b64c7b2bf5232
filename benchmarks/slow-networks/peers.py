"""What agreeing every so many steps costs on a slow network, by library: torchft, hivemind, and Paceline.

    python benchmarks/peers/set_up.py
    python benchmarks/slow-networks/peers.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux), one rank on each, and writes
``peers-4x200Mbit.json`` beside this file. Libraries can't share a process, so each turn starts its own,
under the Python that the library was installed into; the turns alternate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from figures import (
    BY_HAND,
    HIVEMIND,
    HIVEMIND_FP16,
    HIVEMIND_FP32,
    OURS,
    OURS_STREAMING,
    TORCHFT,
    TORCHFT_STREAMING,
    PeerResult,
)
from rich.table import Table
from workload import BATCH, EVERY, SIZE

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.errors import HostFailed, UsageError, unknown
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.turn_statistics import turn_order
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
HOMES = Path.home() / ".cache" / "paceline-peers"
TRIES, TURN_SECONDS = 3, 400.0
_VERSIONS = (
    "import json; from paceline.tools.result_files import versions; print(json.dumps(versions({packages!r})))"
)


@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    Attributes:
        script: what each rank runs, beside this file; it calls :func:`peer_turn.play`.
        settings: what the script is told.
        home: name of the virtual environment that it runs under; empty: that of this program.
    """

    script: str
    settings: dict[str, Any] = field(default_factory=dict)
    home: str = ""

    def python(self, homes: Path) -> Path:
        """Return the interpreter that runs the script."""
        return homes / self.home / "bin" / "python" if self.home else Path(sys.executable)


CONTESTANTS = {
    BY_HAND: Contestant("peer_plain.py"),
    TORCHFT: Contestant("peer_torchft.py", {"fragments": 1, "delay": 0}, "torchft"),
    TORCHFT_STREAMING: Contestant("peer_torchft.py", {"fragments": 2, "delay": 5}, "torchft"),
    HIVEMIND: Contestant("peer_hivemind.py", {"compression": "Uniform8BitQuantization"}, "hivemind"),
    OURS: Contestant("peer_paceline.py", {"fragments": 1, "delay": 0, "compression": "int4"}),
    OURS_STREAMING: Contestant("peer_paceline.py", {"fragments": 2, "delay": 5, "compression": "int4"}),
}

ON_REQUEST = {
    HIVEMIND_FP16: Contestant("peer_hivemind.py", {"compression": "Float16Compression"}, "hivemind"),
    HIVEMIND_FP32: Contestant("peer_hivemind.py", {"compression": "NoCompression"}, "hivemind"),
}
"""Who takes part only when named."""


def main(
    hosts: Annotated[int, typer.Option(help="Hosts around the switch, a rank on each.")] = 4,
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s",
    turns: Annotated[int, typer.Option(help="Turns of each contestant.")] = 3,
    syncs: Annotated[int, typer.Option(help="Synchronisations alone in a turn.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of real inner steps in a turn.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This contestant, and others so named; else all.")
    ] = None,
    peers: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where set_up.py made the environments.")
    ] = HOMES,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write there; else peers-<hosts>x<rate>.json."),
    ] = None,
) -> None:
    """Time outer steps by library, the synchronisation alone and whole rounds, and count the bytes."""
    chosen = choose(only or [], peers)
    if hosts < 2 or min(turns, syncs, rounds) < 1:
        raise UsageError(
            f"--hosts {hosts} --turns {turns} --syncs {syncs} --rounds {rounds}: nothing to measure",
            remedy="give 2 hosts or more, and 1 or more of the others",
        )
    path = json_file or HERE / f"peers-{hosts}x{rate.removesuffix('/s')}.json"
    check_writable(path, make_folder=True)
    asked = {"hosts": hosts, "rate": rate, "turns": turns, "syncs": syncs, "rounds": rounds, "threads": 1}
    result = result_head("outer-steps-by-library")
    result["versions"] = {"": result["versions"]} | versions_of_homes(chosen, peers)
    result |= {
        "settings": asked
        | {"batch": BATCH, "model": vars(SIZE), "parameters": SIZE.parameters(), "every": EVERY},
        "rows": run(chosen, peers, asked),
    }
    write_json(path, result)
    show(PeerResult.load(path))
    print(path)


def choose(names: list[str], peers: Path) -> dict[str, Contestant]:
    """Return those that are named, or all that take part unasked.

    Raises:
        UsageError: nobody has such a name, or what it needs isn't installed.
    """
    every = CONTESTANTS | ON_REQUEST
    for name in names:
        if name not in every:
            raise unknown("contestant", name, every)
    chosen = {name: one for name, one in every.items() if name in (names or CONTESTANTS)}
    for name, one in chosen.items():
        if not one.python(peers).exists():
            raise UsageError(f"{name}: no environment in {peers}", remedy="run benchmarks/peers/set_up.py")
    return chosen


def versions_of_homes(chosen: dict[str, Contestant], peers: Path) -> dict[str, dict[str, str]]:
    """Return what is installed in the environments that take part."""
    found = {}
    for one in chosen.values():
        if one.home and one.home not in found:
            program = _VERSIONS.format(packages=[one.home, "torch", "numpy"])
            said = subprocess.run([one.python(peers), "-c", program], capture_output=True, check=True)
            found[one.home] = json.loads(said.stdout)
    return found


def run(chosen: dict[str, Contestant], peers: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Make the hosts, let the contestants take turns, and return what each wrote."""
    rows: dict[str, Any] = {
        name: {"settings": one.settings, "turns": [], "failures": []} for name, one in chosen.items()
    }
    names, hosts, rate = list(chosen), asked["hosts"], asked["rate"]
    port = 20_000  # below those that the kernel gives away by itself
    with (
        Lab(hosts, rate) as lab,
        ProgressBar(f"outer steps, {hosts} hosts, {rate}", asked["turns"] * len(names)) as tick,
    ):
        for number in range(asked["turns"]):
            for index in turn_order(len(names), number):
                name = names[index]
                for attempt in range(TRIES):
                    port += 100
                    try:
                        rows[name]["turns"].append(take_turn(lab, chosen[name], peers, asked, port))
                        break
                    except HostFailed as error:
                        rows[name]["failures"].append(str(error).partition("\n")[0])
                        if attempt == TRIES - 1:
                            raise
                tick()
    return rows


def take_turn(lab: Lab, one: Contestant, peers: Path, asked: dict[str, Any], port: int) -> dict[str, Any]:
    """Run one contestant's ranks on all hosts, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        out, job = Path(folder, "found.json"), Path(folder, "job.json")
        told = {"ranks": lab.hosts, "port": port, "folder": folder, "settings": one.settings, "out": str(out)}
        told |= {"syncs": asked["syncs"], "rounds": asked["rounds"]}
        job.write_text(json.dumps(told), encoding="utf-8")
        command = [str(one.python(peers)), str(HERE / one.script), str(job)]
        lab.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=TURN_SECONDS)
        return json.loads(out.read_text(encoding="utf-8"))


def show(result: PeerResult) -> None:
    """Print seconds and bytes of an outer step."""
    table = Table(title="an outer step", title_justify="left", box=None, pad_edge=False)
    table.add_column("contestant", no_wrap=True)
    for title in ("alone, s", "torchft ÷", "per inner step, s", "MB sent", "÷ expected", "apart"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.rows:
        sync = "" if row.sync is None else f"{row.sync:.3f}"
        sent = [f"{row.sent / 1e6:.3f}", f"{row.sent_ratio:.3f}"]
        table.add_row(
            row.name, sync, str(result.speedup(row) or ""), f"{row.inner:.3f}", *sent, f"{row.apart:.0e}"
        )
    print_wide(table)


if __name__ == "__main__":
    run_program(main)
