"""Install the libraries that Paceline is compared with, each into a virtual environment of its own.

    python benchmarks/peers/set_up.py [FOLDER]

The folder lies outside the repository. torch is the version that constraints.txt pins, for all of them; Paceline is
installed beside each library, for its reference model. What is there already is left alone.
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
}


def main(
    folder: Annotated[Path, typer.Argument(help="Where the environments are made.")] = HOMES,
    only: Annotated[str, typer.Option(help="torchft or hivemind; else both.")] = "",
) -> None:
    """Make the environments."""
    if only not in ("", *PEERS):
        raise typer.BadParameter(f"{only!r} is none of {', '.join(PEERS)}", param_hint="--only")
    for name, requirements in PEERS.items():
        if only in ("", name):
            install(folder / name, requirements)
            print(folder / name)


def install(home: Path, requirements: list[str]) -> None:
    """Make one environment: torch first, so that nothing replaces the build that is wanted."""
    python, pins = home / "bin" / "python", home / "constraints.txt"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pins.write_text(without(requirements, (ROOT / "constraints.txt").read_text(encoding="utf-8")))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--constraint", str(pins)]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, *requirements, "--editable", str(ROOT)], check=True)


def without(requirements: list[str], constraints: str) -> str:
    """Return the constraints but for those of packages that the requirements pin otherwise."""
    own = {requirement.partition("==")[0] for requirement in requirements}
    return "\n".join(line for line in constraints.splitlines() if line.partition("==")[0] not in own) + "\n"


if __name__ == "__main__":
    typer.run(main)
