"""Predicted peaks of a training step beside what CUDA's allocator gave out: ``python benchmarks/device/memory.py``.

One GPU, the reference GPT at three sizes and the ResNet-50 of `models`, with and without autocast, checkpointing and
the wrapper. Each setting is predicted without running it and then run in a process of its own. Writes ``memory.json``
beside this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
PLACES = {"backend": "nccl", "device": "cuda"}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(
        (size, {"strategy": strategy, "batch": 8})
        for size in ("44m", "small")
        for strategy in ("alone", "bucketed")
    ),
    *(
        (size, {"strategy": "bucketed", "batch": 8, "autocast": "bf16"})
        for size in ("44m", "small", "medium")
    ),
    ("medium", {"strategy": "bucketed", "batch": 8, "autocast": "bf16", "checkpointing": True}),
    ("small", {"strategy": "bucketed", "batch": 8, "optimizer": "sgd-momentum"}),
    ("small", {"strategy": "bucketed", "batch": 4, "accumulate": 2}),
    ("models:picture_step", {"strategy": "bucketed", "batch": 32}),
    ("models:picture_step", {"strategy": "bucketed", "batch": 32, "autocast": "bf16"}),
]


def main(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE / "memory.json",
) -> None:
    """Predict, run, compare."""
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device", remedy="run it where there is one")
    out = out.resolve()
    check_writable(out, make_folder=True)
    os.chdir(HERE)  # where the ranks find `models`
    rows = []
    for name, options in SETTINGS:
        checked = check_prediction(resolve_subject(name), TrainingSetting(**PLACES, **options), run_ranks)
        rows.append(checked.facts())
        print(f"{name}, {checked.setting.name}: {100 * checked.error:+.2f} %", flush=True)
    write_json(out, result_head("device-memory", ["paceline", "torch"]) | {"rows": rows})


if __name__ == "__main__":
    run_program(main)
