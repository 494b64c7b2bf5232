"""Fill the tables in README.md and docs/data.md from the results: ``python benchmarks/loader/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench_harness.markdown import fill, table
from bench_harness.turns import ratio_of
from paceline._core.format import format_seconds

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "data.md"


def read(name: str) -> dict[str, Any]:
    """Return the result of that name."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def overhead() -> str:
    """Return the table of both loaders' times."""
    rows = []
    for row in read("overhead")["rows"]:
        times = row["microseconds_a_batch"]
        shown = [f"{times[name]:.0f} µs" for name in ("torch", "paceline")]
        alone = [ratio_of(each["paceline"], each["torch"]).median for each in row["seconds"]]
        rows.append(
            [str(row["workers"]), *shown, _ratio(row["ratio"]), f"{min(alone):.3f} to {max(alone):.3f}"]
        )
    columns = ["workers", "torch, a batch", "Paceline", "ratio (95 % interval)", "in single processes"]
    return table(columns, rows)


def start() -> str:
    """Return one sentence about the start of a huge epoch."""
    found = read("overhead")["start"]
    return (
        f"The first batch of an epoch over 10⁹ samples is there after {format_seconds(found['seconds_median'])} "
        f"(median of 21; at most {format_seconds(found['seconds_most'])}), with {found['nbytes_most'] / 1e6:.1f} MB "
        "at most for loader, epoch and batch."
    )


def exact() -> str:
    """Return the table of gradient errors."""
    rows = [[row["name"], str(row["steps"]), _error(row["error"])] for row in read("exact")["rows"]]
    return table(["training", "steps", "largest error"], rows)


def _error(error: float) -> str:
    return f"{error:.0%}" if error > 1e-3 else f"{error:.0e}"


def shares() -> str:
    """Return the table of epochs with equal and with measured shares."""
    found = read("shares")
    rows = []
    for name, row in found["rows"].items():
        faster = row["times_faster"]
        told = (
            f"{faster['median']:.2f} ({faster['low']:.2f} to {faster['high']:.2f})" if name != "equal" else ""
        )
        first = f"{row['first_epoch_times_faster']:.2f}" if name != "equal" else ""
        last = " ".join(f"{share:.2f}" for share in row["shares"][-1])
        rows.append([name, last, first, told, _error(row["error"])])
    columns = [
        "shares",
        "at the end",
        "first epoch, times faster",
        "later epochs, times faster",
        "gradient error",
    ]
    return table(columns, rows)


def main() -> None:
    """Fill the tables."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, block in (
        ("overhead", overhead()),
        ("start", start()),
        ("exact", exact()),
        ("shares", shares()),
    ):
        text = fill(text, name, block)
    readme.write_text(text, encoding="utf-8")
    docs = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(fill(fill(docs, "exact", exact()), "shares", shares()), encoding="utf-8")


if __name__ == "__main__":
    main()
