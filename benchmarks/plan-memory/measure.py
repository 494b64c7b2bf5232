"""How far `paceline plan memory` is from what training takes, over models, strategies and precisions.

    python benchmarks/plan-memory/measure.py

Each case is predicted in this process, on tensors without memory, then run by real ranks over gloo, whose CPU allocator
reports every block it gives out. Both are about the same: building, wrapping, two steps. Cases on 64 devices are
predicted only. Writes ``accuracy.json`` beside this file; ``table.py`` makes the tables of it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction
from paceline.tools.plan.memory.memory_fit import SAFE_SHARE
from paceline.tools.plan.memory.memory_prediction import predict_memory
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
_LONG: dict[str, Any] = {"context": 256}

MEASURED: list[tuple[str, TrainingSetting]] = [
    ("tiny", TrainingSetting(strategy="alone", ranks=1, batch=8)),
    ("tiny", TrainingSetting(strategy="bucketed", ranks=2, batch=8, autocast="bf16")),
    ("tiny", TrainingSetting(strategy="bucketed", ranks=2, batch=4, accumulate=4)),
    ("tiny", TrainingSetting(strategy="sharded", ranks=4, batch=4)),
    ("mini", TrainingSetting(strategy="naive", ranks=2, batch=4)),
    ("mini", TrainingSetting(strategy="sharded", ranks=2, batch=4, autocast="bf16")),
    ("mini", TrainingSetting(strategy="full-shard", ranks=4, batch=2)),
    ("mini", TrainingSetting(strategy="full-shard", ranks=2, batch=8, checkpointing=True)),
    ("44m", TrainingSetting(strategy="alone", ranks=1, batch=2, **_LONG)),
    ("44m", TrainingSetting(strategy="bucketed", ranks=2, batch=2, **_LONG)),
    ("44m", TrainingSetting(strategy="sharded", ranks=2, batch=2, **_LONG)),
    ("44m", TrainingSetting(strategy="full-shard", ranks=2, batch=2, gather="bf16", **_LONG)),
    ("small", TrainingSetting(strategy="alone", ranks=1, batch=1, optimizer="sgd", **_LONG)),
    ("small", TrainingSetting(strategy="full-shard", ranks=2, batch=1, checkpointing=True, **_LONG)),
    ("models:mlp", TrainingSetting(strategy="alone", ranks=1, batch=256, optimizer="sgd")),
    ("models:mlp", TrainingSetting(strategy="flat", ranks=2, batch=256, optimizer="sgd-momentum")),
    ("models:mlp", TrainingSetting(strategy="sharded", ranks=3, batch=64)),
    ("models:conv_net", TrainingSetting(strategy="alone", ranks=1, batch=16)),
    ("models:conv_net", TrainingSetting(strategy="bucketed", ranks=2, batch=16, autocast="bf16")),
    ("models:conv_net", TrainingSetting(strategy="full-shard", ranks=2, batch=8, optimizer="sgd-momentum")),
    ("models:encoder", TrainingSetting(strategy="alone", ranks=1, batch=4)),
    ("models:encoder", TrainingSetting(strategy="bucketed", ranks=2, batch=4, checkpointing=True)),
    ("models:encoder", TrainingSetting(strategy="sharded", ranks=2, batch=4, autocast="bf16")),
    ("models:recurrent", TrainingSetting(strategy="alone", ranks=1, batch=4, context=32)),
    ("models:gpt2", TrainingSetting(strategy="bucketed", ranks=2, batch=4)),
]
PREDICTED: list[tuple[str, TrainingSetting]] = [
    (
        "medium",
        TrainingSetting(
            strategy=strategy, ranks=64, batch=8, context=1024, autocast="bf16", backend="nccl", device="cuda"
        ),
    )
    for strategy in ("bucketed", "sharded", "full-shard")
] + [
    (
        "xxl",
        TrainingSetting(
            strategy="full-shard",
            ranks=64,
            batch=1,
            context=1024,
            gather="bf16",
            backend="nccl",
            device="cuda",
        ),
    )
]


def main(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE
    / "accuracy.json",
    only: Annotated[str, typer.Option(help="Cases of models whose names begin so.")] = "",
) -> None:
    """Predict and measure every case."""
    out = out.absolute()
    chosen = [case for case in MEASURED if case[0].startswith(only) and _is_there(case[0])]
    if not chosen:
        names = dict.fromkeys(name for name, _ in MEASURED)
        raise UsageError(f"--only {only}: no model is called so", remedy=f"there are {', '.join(names)}")
    check_writable(out, make_folder=True)
    os.chdir(HERE)  # where the models are imported from, by ranks too
    checks = []
    for name, setting in chosen:
        checked = check_prediction(resolve_subject(name), setting, run_ranks)
        checks.append(checked.facts())
        typer.echo(f"{name:18} {setting.name:48} {100 * checked.error:+8.3f} %")
    result = result_head("plan-memory-accuracy", ("paceline", "torch", "transformers")) | {
        "checks": checks,
        "predicted_only": [_predicted(*case) for case in PREDICTED if case[0].startswith(only)],
        **_summary(checks),
    }
    write_json(out, result)
    typer.echo(out)


def _is_there(name: str) -> bool:
    """Tell whether what a case needs is installed."""
    return name != "models:gpt2" or importlib.util.find_spec("transformers") is not None


def _predicted(name: str, setting: TrainingSetting) -> dict[str, Any]:
    prediction = predict_memory(resolve_subject(name), setting)
    steps = prediction.timeline.steps()
    typer.echo(f"{name:18} {setting.name:48} {steps.peak().nbytes / 2**30:8.3f} GiB")
    return {
        "model": name,
        "setting": setting.to_json(),
        "parameters": prediction.parameters,
        "steps_nbytes": steps.peak().nbytes,
        "prediction_seconds": round(prediction.seconds, 1),
    }


def _summary(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst error, and how many cases would wrongly be said to fit."""
    errors = [abs(each["error"]) for each in checks]
    wrong = [each for each in checks if each["measured_nbytes"] > each["predicted_nbytes"] / SAFE_SHARE]
    return {
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "false_fits": len(wrong),
    }


if __name__ == "__main__":
    run_program(main)
