"""Write what was found into the tables of README.md, here and in benchmarks/peers.

    python benchmarks/slow-networks/table.py

Reads the JSON files beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from figures import NO_SYNC, PeerResult, StepResult
from loss_figures import Curve, LossResult

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent
STEP_TITLES = ["", "s per step", "DDP's best ÷", "MB sent per step", "expected", "÷ expected"]

PEER_TITLES = [
    "",
    "s alone",
    "torchft ÷",
    "s per inner step",
    "a step alone",
    "MB sent",
    "÷ expected",
    "apart",
]


def step_figures(result: StepResult) -> str:
    """Return the table of steps: a row per contestant, torch DDP with its fastest bucket in bold."""
    best, rows = result.best_ddp(), []
    for row in result.rows:
        name = f"**{row.name}**" if best is not None and row.name == best.name else row.name
        sent = [f"{row.sent / 1e6:.4g}", f"{row.expected_sent / 1e6:.4g}"]
        ratio = "" if row.name == NO_SYNC else f"{row.sent_ratio:.3f}"
        rows.append([name, f"{row.median:.3g}", str(result.speedup(row) or ""), *sent, ratio])
    return table(STEP_TITLES, rows)


def peer_figures(result: PeerResult) -> str:
    """Return the table of outer steps: a row per library."""
    rows = []
    for row in result.rows:
        sync = "hidden" if row.sync is None else f"{row.sync:.3g}"
        times = [sync, str(result.speedup(row) or ""), f"{row.inner:.3g}", f"{row.alone:.3g}"]
        sent = [f"{row.sent / 1e6:.4g}", f"{row.sent_ratio:.3f}"]
        rows.append([row.name, *times, *sent, f"{row.apart:.1g}"])
    return table(PEER_TITLES, rows)


def compression_figures(result: PeerResult) -> str:
    """Return the table of one library's ways to compress."""
    rows = [
        [row.name, f"{row.sync or 0.0:.3g}", f"{row.sent / 1e6:.4g}", f"{row.apart:.1g}"]
        for row in result.rows
    ]
    return table(["", "s alone", "MB sent", "apart"], rows)


def loss_figures(told: dict[str, Any]) -> str:
    """Return the table of times to the same loss: a row per seed."""
    result = LossResult.from_json(told)
    rows = [
        [
            str(pair.seed),
            f"{pair.target:.4f}",
            f"{pair.ddp_seconds:.0f}",
            "never" if pair.seconds is None else f"{pair.seconds:.0f}",
            "" if pair.step is None else str(pair.step),
            "" if pair.ratio is None else f"{pair.ratio:.2f}",
            f"{pair.last:.4f}",
        ]
        for pair in result.rows()
    ]
    return table(
        ["seed", "DDP's last loss", "by DDP, s", "by ours, s", "at step", "÷", "last loss ÷ DDP's"], rows
    )


def tradeoff_figures(told: dict[str, Any]) -> str:
    """Return the table of ways to synchronise: a row per way, the one that sends most first."""
    rows = []
    first = Curve.from_json(told["rows"][0]["curve"]).loss[-1]
    for row in told["rows"]:
        curve, way = Curve.from_json(row["curve"]), row["way"]
        nbytes = curve.sent[-1] / curve.steps[-1] / told["settings"]["parameters"]
        loss = curve.loss[-1]
        rows.append(
            [
                way["name"],
                f"{way['lr']:g}",
                f"{nbytes:.3g}",
                f"{loss:.3f}",
                f"{100 * (loss / first - 1):+.1f} %",
            ]
        )
    return table(["", "learning rate", "bytes a parameter and step", "held-out loss", "beside DDP"], rows)


def many_figures(told: dict[str, Any]) -> str:
    """Return the table of the run on many hosts: what happened, and when it went on."""
    seconds, curve = told["seconds"], told["curve"]
    rows = [
        ["all hosts train", f"{seconds['until all train']:.0f} s after the start"],
        ["one is killed, the others go on", f"after {seconds['until it goes on without']:.1f} s"],
        ["it comes back, all go on", f"after {seconds['until it goes on with']:.1f} s"],
        ["the run ends", f"after {seconds['in all']:.0f} s, exit codes {sorted(set(told['exit codes']))}"],
        ["parameters of all hosts", "the same" if told["same parameters"] else "differ"],
        ["loss of host 0", f"{curve[0][2]:.2f} → {curve[-1][2]:.2f}"],
    ]
    return table(["", ""], rows, words=2)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results and README.md lie.")] = HERE,
    peers: Annotated[Path, typer.Argument(help="Where the README.md of the libraries lies.")] = HERE.parent
    / "peers",
) -> None:
    """Fill the tables of both README.md."""
    blocks = {
        "steps": step_figures(StepResult.load(folder / "step-4x200Mbit.json")),
        "peers": peer_figures(PeerResult.load(folder / "peers-4x200Mbit.json")),
        "loss": loss_figures(_read(folder / "loss-4x100Mbit.json")),
        "trade-off": tradeoff_figures(_read(folder / "tradeoff.json")),
        "many": many_figures(_read(folder / "many.json")),
    }
    fill_all(folder / "README.md", blocks)
    compression = compression_figures(PeerResult.load(folder / "hivemind-compression.json"))
    fill_all(peers / "README.md", {"compression": compression})


def fill_all(readme: Path, blocks: dict[str, str]) -> None:
    """Put each block into its place."""
    text = readme.read_text(encoding="utf-8")
    for name, block in blocks.items():
        text = fill(text, name, block)
    readme.write_text(text, encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    typer.run(main)
