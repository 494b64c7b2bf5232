"""Memory predicted by `paceline plan memory` and measured in training, over models, strategies and precisions.

    python benchmarks/plan-memory/plan_memory.py run [--only tiny]
    python benchmarks/plan-memory/plan_memory.py table

Each case is predicted in this process, on tensors without memory, then run by real ranks over gloo, whose CPU allocator
reports every block it gives out. Both build, wrap and train for two steps. Cases on 64 devices are predicted only.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline._core.format import format_bytes
from paceline.errors import UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.memory_benchmark import check_prediction
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.plan.memory.memory_fit import SAFE_SHARE
from paceline.tools.plan.memory.memory_prediction import predict_memory
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject

Train = TrainingSetting
Long = partial(TrainingSetting, context=256)
Cuda = partial(TrainingSetting, ranks=64, context=1024, backend="nccl", device="cuda")

MEASURED: list[tuple[str, TrainingSetting]] = [
    ("tiny", Train(strategy="alone", ranks=1, batch=8)),
    ("tiny", Train(strategy="bucketed", ranks=2, batch=8, autocast="bf16")),
    ("tiny", Train(strategy="bucketed", ranks=2, batch=4, accumulate=4)),
    ("tiny", Train(strategy="sharded", ranks=4, batch=4)),
    ("mini", Train(strategy="naive", ranks=2, batch=4)),
    ("mini", Train(strategy="sharded", ranks=2, batch=4, autocast="bf16")),
    ("mini", Train(strategy="full-shard", ranks=4, batch=2)),
    ("mini", Train(strategy="full-shard", ranks=2, batch=8, checkpointing=True)),
    ("44m", Long(strategy="alone", ranks=1, batch=2)),
    ("44m", Long(strategy="bucketed", ranks=2, batch=2)),
    ("44m", Long(strategy="sharded", ranks=2, batch=2)),
    ("44m", Long(strategy="full-shard", ranks=2, batch=2, gather="bf16")),
    ("small", Long(strategy="alone", ranks=1, batch=1, optimizer="sgd")),
    ("small", Long(strategy="full-shard", ranks=2, batch=1, checkpointing=True)),
    ("tiny", Train(strategy="alone", ranks=1, batch=4, optimizer="muon")),
    ("mini", Train(strategy="bucketed", ranks=2, batch=4, optimizer="muon")),
    ("mini", Train(strategy="sharded", ranks=4, batch=2, optimizer="muon")),
    ("mini", Train(strategy="full-shard", ranks=4, batch=2, optimizer="muon")),
    ("mini", Train(strategy="sharded", ranks=2, batch=4, dtype="bf16", master_weights="fp32")),
    (
        "mini",
        Train(strategy="full-shard", ranks=2, batch=4, optimizer="muon", dtype="bf16", master_weights="fp32"),
    ),
    ("models:mlp", Train(strategy="alone", ranks=1, batch=256, optimizer="sgd")),
    ("models:mlp", Train(strategy="flat", ranks=2, batch=256, optimizer="sgd-momentum")),
    ("models:mlp", Train(strategy="sharded", ranks=3, batch=64)),
    ("models:conv_net", Train(strategy="alone", ranks=1, batch=16)),
    ("models:conv_net", Train(strategy="bucketed", ranks=2, batch=16, autocast="bf16")),
    ("models:conv_net", Train(strategy="full-shard", ranks=2, batch=8, optimizer="sgd-momentum")),
    ("models:encoder", Train(strategy="alone", ranks=1, batch=4)),
    ("models:encoder", Train(strategy="bucketed", ranks=2, batch=4, checkpointing=True)),
    ("models:encoder", Train(strategy="sharded", ranks=2, batch=4, autocast="bf16")),
    ("models:recurrent", Train(strategy="alone", ranks=1, batch=4, context=32)),
    ("models:gpt2", Train(strategy="bucketed", ranks=2, batch=4)),
]
PREDICTED: list[tuple[str, TrainingSetting]] = [
    *(
        ("medium", Cuda(strategy=name, batch=8, autocast="bf16"))
        for name in ("bucketed", "sharded", "full-shard")
    ),
    ("xxl", Cuda(strategy="full-shard", batch=1, gather="bf16")),
]

bench = Benchmark(__file__, docs=["memory.md"])


@bench.run
def run(
    only: Annotated[str, Option(help="Cases of models whose names start so.")] = "",
    json_file: JsonOption = None,
) -> None:
    """Predict and measure every case."""
    absent = "models:gpt2" if importlib.util.find_spec("transformers") is None else ""
    chosen = [case for case in MEASURED if case[0].startswith(only) and case[0] != absent]
    if not chosen:
        names = ", ".join(dict.fromkeys(name for name, _ in MEASURED))
        raise UsageError(f"--only {only}: no model is called so", remedy=f"there are {names}")
    path = bench.output(json_file, "accuracy").absolute()
    os.chdir(bench.folder)  # where the models are imported from, by ranks too
    checks, predicted = [], []
    for name, setting in chosen:
        checked = check_prediction(resolve_subject(name), setting, run_ranks)
        checks.append(checked.facts())
        print(f"{name:18} {setting.name:48} {100 * checked.error:+8.3f} %", flush=True)
    for name, setting in PREDICTED:
        if name.startswith(only):
            predicted.append(predict(name, setting))
    errors = [abs(each["error"]) for each in checks]
    wrong = [each for each in checks if each["measured_nbytes"] > each["predicted_nbytes"] / SAFE_SHARE]
    bench.write(
        path,
        "plan-memory-accuracy",
        {"only": only},
        packages=("paceline", "torch", "transformers"),
        checks=checks,
        predicted_only=predicted,
        median_error=median(errors),
        worst_error=max(errors),
        false_fits=len(wrong),  # cases that would wrongly be said to fit
    )


def predict(name: str, setting: TrainingSetting) -> dict[str, Any]:
    """Return the prediction of a case that can't be measured here."""
    prediction = predict_memory(resolve_subject(name), setting)
    nbytes = prediction.timeline.steps().peak().nbytes
    print(f"{name:18} {setting.name:48} {nbytes / 2**30:8.3f} GiB", flush=True)
    return {
        "model": name,
        "setting": setting.to_json(),
        "parameters": prediction.parameters,
        "steps_nbytes": nbytes,
        "prediction_seconds": round(prediction.seconds, 1),
    }


@bench.tables
def tables() -> dict[str, str]:
    """Return the tables of predicted and measured memory and of what was only predicted, and a summary."""
    result = bench.read("accuracy")
    checks, many = [], []
    for row in result["checks"]:
        setting = TrainingSetting.from_json(row["setting"])
        sizes = [format_bytes(row[f"{kind}_nbytes"]) for kind in ("predicted", "measured")]
        model = row["model"].removeprefix("models:")
        checks.append([model, setting.name, str(setting.batch), *sizes, f"{100 * row['error']:+.2f} %"])
    for row in result["predicted_only"]:
        setting = TrainingSetting.from_json(row["setting"])
        cells = [f"{setting.batch} × {setting.context}", format_bytes(row["steps_nbytes"])]
        many.append([row["model"], setting.name, *cells, f"{row['prediction_seconds']:.0f}"])
    summary = (
        f"Over {len(result['checks'])} cases a prediction is off by {100 * result['median_error']:.3f} % (median), "
        f"{100 * result['worst_error']:.2f} % (worst).\nOn the smallest device of which it says that a case fits, "
        f"{result['false_fits']} of them would not have."
    )
    return {
        "accuracy": table(["model", "how", "batch", "predicted", "measured", "off by"], checks),
        "summary": summary,
        "many": table(["model", "how", "tokens a device", "a device", "seconds to predict"], many),
    }


if __name__ == "__main__":
    bench.main()
