"""What torch's own hooks for compressed gradients do over gloo, on CPUs.

    python benchmarks/peers/hooks.py

Trains a small model with DistributedDataParallel on two processes, with each hook, and writes what became of it
into the table of README.md.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from bench_harness.markdown import fill, table

README = Path(__file__).with_name("README.md")
RANKS, STEPS, PATIENCE_SECONDS = 2, 12, 60
BUCKETS = {"several buckets": 0.3, "one bucket": 25.0}
HOOKS = {
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
    "powerSGD_hook": powerSGD_hook.powerSGD_hook,
    "batched_powerSGD_hook": powerSGD_hook.batched_powerSGD_hook,
    "quantization_pertensor_hook": quantization_hooks.quantization_pertensor_hook,
    "quantization_perchannel_hook": quantization_hooks.quantization_perchannel_hook,
}


def train(name: str, bucket_mib: float, rendezvous: str, rank: int) -> None:
    """Train on this rank with a hook; say what happens."""
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
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        root = re.split(r"(?:RuntimeError: Got the following error [^:]+: )+", said)[-1]  # behind callbacks
        print("raises " + re.split(r"\. |:\s*$", root)[0], flush=True)
        os._exit(0)  # the other rank may hang in a collective
    print("works", flush=True)
    dist.destroy_process_group()


def outcome(name: str, bucket_mib: float) -> str:
    """Return what became of a training with a hook, on rank 0."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        command = [sys.executable, __file__, name, str(bucket_mib), f"file://{folder}/rendezvous"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        try:
            said, complaints = ranks[0].communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"hangs for {PATIENCE_SECONDS} s"
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    code = ranks[0].returncode
    if code < 0:
        last = [line for line in complaints.splitlines() if "what():" in line or "enforce fail" in line]
        return f"ends by {signal.Signals(-code).name}: {last[-1].strip() if last else ''}"
    return said.strip()


def main() -> None:
    """Try all hooks, and fill the table."""
    rows = []
    for name in HOOKS:
        rows.append([f"`{name}`", *(outcome(name, mib) for mib in BUCKETS.values())])
        print(*rows[-1], sep=" | ", flush=True)
    block = table(["", *BUCKETS], rows, words=3)
    README.write_text(fill(README.read_text(encoding="utf-8"), "hooks", block), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
