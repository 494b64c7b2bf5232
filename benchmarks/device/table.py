"""Fill the tables in README.md from the results that are there: ``python benchmarks/device/table.py``."""

from __future__ import annotations

import json
from pathlib import Path

from bench_harness.markdown import fill, table
from paceline.tools.plan.memory.training_subject import TrainingSetting

HERE = Path(__file__).parent
MIB = 1 << 20


def overhead(result: Path) -> str:
    """Return the table of steps, bare and wrapped."""
    rows = []
    for row in json.loads(result.read_text(encoding="utf-8"))["rows"]:
        for name, ms in row["step_ms"].items():
            ratio = row["ratio"].get(name)
            shown = f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})" if ratio else ""
            rows.append([row["model"], name, f"{ms:.2f}", shown, f"{row['peak_nbytes'][name] / MIB:.1f}"])
    return table(["model", "", "step, ms", "÷ bare (95 % interval)", "peak, MiB"], rows, words=2)


def memory(result: Path) -> str:
    """Return the table of predicted and measured peaks."""
    rows = []
    for row in json.loads(result.read_text(encoding="utf-8"))["rows"]:
        sizes = [f"{row[name] / MIB:.1f}" for name in ("predicted_nbytes", "measured_nbytes")]
        rows.append(
            [
                row["model"],
                TrainingSetting.from_json(row["setting"]).name,
                *sizes,
                f"{100 * row['error']:+.2f} %",
            ]
        )
    return table(["model", "setting", "predicted, MiB", "measured, MiB", "off by"], rows, words=2)


def main() -> None:
    """Fill the tables of those results that are there."""
    readme = HERE / "README.md"
    for name, told in (("overhead", overhead), ("memory", memory)):
        result = HERE / f"{name}.json"
        if result.exists():
            readme.write_text(fill(readme.read_text(encoding="utf-8"), name, told(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
