"""Write what was found into the tables of README.md.

    python benchmarks/tuner/table.py

Reads the JSON files beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measure import SETTINGS

from bench_harness.markdown import fill, table
from paceline.tools.bench.step.step_strategies import AUTO, NO_SYNC, StrategyVariant
from paceline.tools.bench.turn_statistics import RoundTimes, median_ratio, round_times

HERE = Path(__file__).parent
COLUMNS = ["", "s per step", "auto ÷", "DDP's default ÷"]
SUMMARY = [
    "network",
    "auto settled on",
    "after steps",
    "best of the sweep",
    "auto ÷ best",
    "auto ÷ Paceline's default",
    "torch DDP's default ÷ auto",
    "÷ best",
]


@dataclass(frozen=True)
class Found:
    """One file: the contestants' rounds, and what auto said."""

    settings: dict[str, Any]
    searched: int
    sentences: list[str]
    settled: StrategyVariant
    rounds: dict[StrategyVariant, list[RoundTimes]]

    @classmethod
    def load(cls, path: Path) -> Found:
        """Return what `measure.py` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        entries = [StrategyVariant.from_json(each) for each in record["entries"]]
        rounds = {
            entry: [round_times(turn) for turn in turns]
            for entry, turns in zip(entries, record["seconds"], strict=True)
        }
        return cls(record["settings"], record["searched"], record["sentences"], _entry(record), rounds)

    def seconds(self, entry: StrategyVariant) -> float:
        """Return the median step."""
        return median(each.step for each in self.rounds[entry])

    @property
    def best(self) -> StrategyVariant:
        """The point of the sweep with the least median step; not torch's."""
        ours = [entry for entry in self.rounds if entry.strategy not in (AUTO, NO_SYNC, "ddp")]
        return min(ours, key=self.seconds)


def _entry(record: dict[str, Any]) -> StrategyVariant:
    """Return what auto settled on, as an entry of the sweep has it."""
    plan = record["settled"]["plan"]
    size = float(plan["bucket_mib"])
    if plan["shard"] == "optimizer":
        return StrategyVariant("sharded", size)
    if size == 0 or not plan["overlap"]:
        return StrategyVariant(
            {(True, 0.0): "overlap", (False, 0.0): "naive"}.get((plan["overlap"], size), "flat")
        )
    return StrategyVariant("bucketed", size)


def summary_row(name: str, found: Found) -> list[str]:
    """Return the line of a setting."""
    auto, usual, torchs = StrategyVariant(AUTO), StrategyVariant("bucketed", 25.0), StrategyVariant("ddp")
    rounds = found.rounds
    return [
        name,
        found.settled.label,
        str(found.searched),
        found.best.label,
        f"{median_ratio(rounds[auto], rounds[found.best]):.3f}",
        f"{median_ratio(rounds[auto], rounds[usual]):.3f}",
        f"{median_ratio(rounds[torchs], rounds[auto]):.3f}",
        f"{median_ratio(rounds[torchs], rounds[found.best]):.3f}",
    ]


def sweep(found: Found) -> str:
    """Return the table of a setting, the fastest first."""
    auto, torchs = found.rounds[StrategyVariant(AUTO)], found.rounds[StrategyVariant("ddp")]
    rows = [
        [
            f"**{entry.label}**" if entry.strategy == AUTO else entry.label,
            f"{found.seconds(entry):.3g}",
            f"{median_ratio(auto, rounds):.3f}",
            f"{median_ratio(torchs, rounds):.3f}",
        ]
        for entry, rounds in sorted(found.rounds.items(), key=lambda each: found.seconds(each[0]))
    ]
    return table(COLUMNS, rows)


def main() -> None:
    """Fill the tables."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    all_found = {name: Found.load(HERE / f"{name}.json") for name in SETTINGS}
    titles = {
        "4x1Gbit": "4 hosts, 1 Gbit/s",
        "4x200Mbit": "4 hosts, 200 Mbit/s",
        "one-host": "one host, 2 ranks",
    }
    rows = [summary_row(titles[name], found) for name, found in all_found.items()]
    text = fill(text, "summary", table(SUMMARY, rows, words=2))
    for name, found in all_found.items():
        text = fill(text, name, sweep(found))
        text = fill(text, f"{name} said", "\n".join(f"> {said}" for said in found.sentences))
    readme.write_text(text, encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    main()
