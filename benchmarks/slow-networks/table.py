"""Write what `step.py` and `peers.py` found into the tables of README.md, here and in benchmarks/peers.

    python benchmarks/slow-networks/table.py

Reads ``step-4x200Mbit.json``, ``peers-4x200Mbit.json`` and ``hivemind-compression.json`` beside this file. No figure
there is typed by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from figures import NO_SYNC, PeerResult, StepResult

from paceline.report.markdown import fill, table

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


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results and README.md lie.")] = HERE,
    peers: Annotated[Path, typer.Argument(help="Where the README.md of the libraries lies.")] = HERE.parent
    / "peers",
) -> None:
    """Fill the tables of both README.md."""
    blocks = {
        "steps": step_figures(StepResult.load(folder / "step-4x200Mbit.json")),
        "peers": peer_figures(PeerResult.load(folder / "peers-4x200Mbit.json")),
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
