"""Fill the tables in README.md and docs/memory.md from the result: ``python benchmarks/plan-memory/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench_harness.markdown import fill, table
from paceline._core.format import format_bytes
from paceline.tools.plan.memory.training_subject import TrainingSetting

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "memory.md"


def accuracy(result: dict[str, Any]) -> str:
    """Return the table of predicted and measured."""
    rows = []
    for row in result["checks"]:
        setting = TrainingSetting.from_json(row["setting"])
        sizes = format_bytes(row["predicted_nbytes"]), format_bytes(row["measured_nbytes"])
        model = row["model"].removeprefix("models:")
        rows.append([model, setting.name, str(setting.batch), *sizes, f"{100 * row['error']:+.2f} %"])
    return table(["model", "how", "batch", "predicted", "measured", "off by"], rows)


def summary(result: dict[str, Any]) -> str:
    """Return the figures over all cases in a sentence."""
    return (
        f"Over {len(result['checks'])} cases a prediction is off by {100 * result['median_error']:.3f} % (median), "
        f"{100 * result['worst_error']:.2f} % (worst).\nOn the smallest device of which it says that a case fits, "
        f"{result['false_fits']} of them would not have."
    )


def many(result: dict[str, Any]) -> str:
    """Return the table of what was only predicted."""
    rows = []
    for row in result["predicted_only"]:
        setting = TrainingSetting.from_json(row["setting"])
        told = format_bytes(row["steps_nbytes"]), f"{row['prediction_seconds']:.0f}"
        rows.append([row["model"], setting.name, f"{setting.batch} × {setting.context}", *told])
    return table(["model", "how", "tokens a device", "a device", "seconds to predict"], rows)


def main() -> None:
    """Fill the tables."""
    result = json.loads((HERE / "accuracy.json").read_text(encoding="utf-8"))
    for file in (HERE / "README.md", DOCS):
        text = file.read_text(encoding="utf-8")
        for name, made in (("accuracy", accuracy), ("summary", summary), ("many", many)):
            if f"<!-- {name}: begin -->" in text:
                text = fill(text, name, made(result))
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
