"""Outcomes of torch's own hooks for compressed gradients over gloo, on CPUs.

    python benchmarks/peers/hooks.py run
    python benchmarks/peers/hooks.py table

A small model is trained with DistributedDataParallel on two processes, with each hook; rank 0's end is the outcome.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from typing import Annotated

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.tools.cli.shared_options import JsonOption

RANKS, STEPS, TIMEOUT_SECONDS = 2, 12, 60
BUCKET_MIB = {"several buckets": 0.3, "one bucket": 25.0}
HOOKS = {
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
    "powerSGD_hook": powerSGD_hook.powerSGD_hook,
    "batched_powerSGD_hook": powerSGD_hook.batched_powerSGD_hook,
    "quantization_pertensor_hook": quantization_hooks.quantization_pertensor_hook,
    "quantization_perchannel_hook": quantization_hooks.quantization_perchannel_hook,
}

bench = Benchmark(__file__)


@bench.run
def run(
    only: Annotated[str, Option(help="Hooks whose name contains this.")] = "", json_file: JsonOption = None
) -> None:
    """Train with all hooks."""
    path = bench.output(json_file, "hooks")
    rows = []
    for name in (each for each in HOOKS if only in each):
        outcomes = {}
        for buckets, mib in BUCKET_MIB.items():
            outcomes[buckets] = outcome(name, mib)
            print(f"{name}, {buckets}: {outcomes[buckets]}", flush=True)
        rows.append({"hook": name, "outcomes": outcomes})
    settings = {"ranks": RANKS, "steps": STEPS, "bucket_mib": BUCKET_MIB, "timeout": TIMEOUT_SECONDS}
    bench.write(path, "torch-hooks", settings, rows=rows)


def outcome(name: str, bucket_mib: float) -> str:
    """Return how rank 0 of a training with a hook ends."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        command = [sys.executable, __file__, "train", name, str(bucket_mib), f"file://{folder}/rendezvous"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        try:
            output, errors = ranks[0].communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"hangs for {TIMEOUT_SECONDS} s"
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    code = ranks[0].returncode
    if code < 0:
        last = [line for line in errors.splitlines() if "what():" in line or "enforce fail" in line]
        return f"ends by {signal.Signals(-code).name}: {last[-1].strip() if last else ''}"
    return output.strip()


def train(name: str, bucket_mib: float, rendezvous: str, rank: int) -> None:
    """Train on this rank with a hook, and print the outcome."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
    )
    state = dist.group.WORLD
    if "powerSGD" in name:
        state = powerSGD_hook.PowerSGDState(state, matrix_approximation_rank=2, start_powerSGD_iter=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        model.register_comm_hook(state, HOOKS[name])
        for _ in range(STEPS):
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:  # noqa: BLE001 — whatever it is, it is the result
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        root = re.split(r"(?:RuntimeError: Got the following error [^:]+: )+", message)[
            -1
        ]  # behind callbacks
        print("raises " + re.split(r"\. |:\s*$", root)[0], flush=True)
        os._exit(0)  # the other rank may hang in a collective
    print("works", flush=True)
    dist.destroy_process_group()


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md."""
    rows = [[f"`{row['hook']}`", *row["outcomes"].values()] for row in bench.read("hooks")["rows"]]
    return {"hooks": table(["", *BUCKET_MIB], rows, words=3)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], float(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        bench.main()
