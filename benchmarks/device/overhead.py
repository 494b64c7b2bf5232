"""What wrapping a model costs on one GPU: training steps of the bare model, of ours and of torch DDP, in turns.

    python benchmarks/device/overhead.py

A world of one on NCCL, bf16 autocast. Every contestant has a model and a fused optimizer of its own; a turn is some
steps between two CUDA events; a round is a turn of each, and every second round runs backwards. The bare model takes
part twice: what its second self seems to cost is the noise. Writes ``overhead.json`` beside this file. With
``--device cpu --small`` the program can be tried without a GPU, on models that mean nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from models import Workload, images, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from bench_harness.program import run_program
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.turn_statistics import turn_order
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
STEPS, BAR = 5, 1.01
BARE = "bare"
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BARE: lambda net: net,
    "bare again": lambda net: net,
    "paceline": lambda net: paceline.DataParallel(net),
    "torch DDP": lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True),
}

Out = Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant.")] = 40,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the program.")] = "cuda",
    small: Annotated[bool, typer.Option(help="Models that mean nothing, to try the program.")] = False,
    images_at_once: Annotated[int, typer.Option(min=1, help="Batch of the ResNet-50.")] = 128,
    texts_at_once: Annotated[int, typer.Option(min=1, help="Batch of the GPT, 1024 tokens each.")] = 8,
    out: Out = HERE / "overhead.json",
) -> None:
    """Time steps, bare and wrapped."""
    if device == "cpu" and out == HERE / "overhead.json":
        raise UsageError("a result from a CPU is none", remedy="try it with --out elsewhere.json")
    check_writable(out, make_folder=True)
    world = paceline.init("nccl" if device == "cuda" else "gloo", device=device)
    workloads = [images(2, 64), tokens(1, 64, "tiny")] if small else [images(images_at_once, 224)]
    if not small:
        workloads.append(tokens(texts_at_once, 1024))
    with ProgressBar("overhead", (rounds + 1) * len(workloads)) as tick:
        rows = [take_turns(each, world.device, rounds, tick) for each in workloads]
    result = result_head("device-overhead", ["paceline", "torch"])
    result |= {"settings": {"rounds": rounds, "steps": STEPS, "autocast": "bf16"}, "bar": BAR, "rows": rows}
    write_json(out, result)
    for row in rows:
        print(row["model"], row["step_ms"], row["ratio"])
    paceline.shutdown()


class Contestant:
    """A model in its wrapping, and its optimizer."""

    def __init__(self, workload: Workload, wrapper: Callable[[nn.Module], nn.Module], device: str) -> None:
        torch.manual_seed(0)
        self.workload, self.device = workload, torch.device(device)
        self.model = wrapper(workload.build().to(device))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Make one training step."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.workload.loss(self.model(inputs), targets)
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that `work` takes on the device."""
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    torch.cuda.synchronize(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def take_turns(workload: Workload, device: str, rounds: int, tick: Callable[[], object]) -> dict[str, Any]:
    """Return what all contestants took."""
    everyone = {name: Contestant(workload, wrap, device) for name, wrap in WRAPPERS.items()}
    names = list(everyone)
    inputs, targets = (tensor.to(device) for tensor in workload.draw())
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0)
    gc.collect()
    gc.disable()
    for number in range(rounds + 1):
        for place in turn_order(len(names), number):
            name = names[place]
            taken, peak = turn(everyone[name], inputs, targets)
            if number:  # the first round is warming up
                seconds[name].append(taken)
                peaks[name] = max(peaks[name], peak)
        gc.collect()
        tick()
    gc.enable()
    ratios = {name: ratio_of(each, seconds[BARE]) for name, each in seconds.items() if name != BARE}
    return {
        "model": workload.name,
        "parameters": sum(param.numel() for param in everyone[BARE].model.parameters()),
        "batch_size": workload.batch_size,
        "step_ms": {name: median(each) * 1e3 for name, each in seconds.items()},
        "ratio": {name: {"median": r.median, "low": r.low, "high": r.high} for name, r in ratios.items()},
        "peak_nbytes": peaks,
        "seconds": seconds,
    }


def turn(contestant: Contestant, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return seconds of a step, over a turn of some, and the bytes that they took beyond what was held before."""
    gpu = contestant.device.type == "cuda"
    held = torch.cuda.memory_allocated(contestant.device) if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats(contestant.device)

    def steps() -> None:
        for _ in range(STEPS):
            contestant.step(inputs, targets)

    taken = timed(steps, contestant.device) / STEPS
    return taken, torch.cuda.max_memory_allocated(contestant.device) - held if gpu else 0


if __name__ == "__main__":
    run_program(main)
