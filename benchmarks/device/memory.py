"""Predicted peak memory of a training step beside what CUDA's allocator gave out, on one GPU.

    python benchmarks/device/memory.py run
    python benchmarks/device/memory.py table

Each setting is predicted without running it, then run in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.errors import UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject

BF16, PICTURES = {"autocast": "bf16"}, "models:picture_step"
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("44m", {"strategy": "alone"}),
    ("44m", {}),
    ("small", {"strategy": "alone"}),
    ("small", {}),
    ("44m", BF16),
    ("small", BF16),
    ("medium", BF16),
    ("medium", BF16 | {"checkpointing": True}),
    ("small", {"optimizer": "sgd-momentum"}),
    ("small", {"batch": 4, "accumulate": 2}),
    (PICTURES, {"batch": 32}),
    (PICTURES, {"batch": 32} | BF16),
]
"""Model, and what differs from `COMMON`."""

COMMON = {"backend": "nccl", "device": "cuda", "strategy": "bucketed", "batch": 8}

bench = Benchmark(__file__)


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Predict, run, compare."""
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device", remedy="run it where there is one")
    path = bench.output(json_file and json_file.resolve(), "memory")
    os.chdir(bench.folder)  # where the ranks find `models`
    rows = []
    for name, options in SETTINGS:
        checked = check_prediction(resolve_subject(name), TrainingSetting(**COMMON | options), run_ranks)
        rows.append(checked.facts())
        print(f"{name}, {checked.setting.name}: {100 * checked.error:+.2f} %", flush=True)
    bench.write(path, "device-memory", {}, rows=rows)


def memory(rows: list[dict[str, Any]]) -> str:
    """Return the table of predicted and measured peaks."""
    cells = []
    for row in rows:
        sizes = [f"{row[name] / (1 << 20):.1f}" for name in ("predicted_nbytes", "measured_nbytes")]
        setting = TrainingSetting.from_json(row["setting"]).name
        cells.append([row["model"], setting, *sizes, f"{100 * row['error']:+.2f} %"])
    return table(["model", "setting", "predicted, MiB", "measured, MiB", "off by"], cells, words=2)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md, if there is a result."""
    return {name: memory(result["rows"]) for name, result in bench.find("memory").items()}


if __name__ == "__main__":
    bench.main()
