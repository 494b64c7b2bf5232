"""The cost of wrapping a model on one GPU: training steps of the bare model, of ours and of torch DDP, in turns.

    python benchmarks/device/overhead.py run
    python benchmarks/device/overhead.py table

A world of one on NCCL, bf16 autocast. Every variant has a model and a fused optimizer of its own; a turn is some steps
between two CUDA events. The bare model is measured twice: the ratio of its two variants shows the noise. Without a GPU,
``--device cpu --small --json FILE`` tries the program on models whose times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
from models import Workload, images, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import Ratio, ratios_to, seconds_of, take_turns
from paceline.errors import UsageError
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

STEPS, BAR, BARE = 5, 1.01, "bare"
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BARE: lambda net: net,
    "bare again": lambda net: net,
    "paceline": lambda net: paceline.DataParallel(net),
    "torch DDP": lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True),
}

bench = Benchmark(__file__)


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Turns of each variant.")] = 40,
    device: Annotated[str, Option(help="cuda, or cpu to try the program.")] = "cuda",
    small: Annotated[bool, Option(help="Models that mean nothing, to try the program.")] = False,
    images_at_once: Annotated[int, Option(min=1, help="Batch of the ResNet-50.")] = 128,
    texts_at_once: Annotated[int, Option(min=1, help="Batch of the GPT, 1024 tokens each.")] = 8,
    json_file: JsonOption = None,
) -> None:
    """Time steps, bare and wrapped."""
    if device == "cpu" and json_file is None:
        raise UsageError("a result from a CPU is none", remedy="try it with --json elsewhere.json")
    path = bench.output(json_file, "overhead")
    world = paceline.init("nccl" if device == "cuda" else "gloo", device=device)
    workloads = [images(images_at_once, 224), tokens(texts_at_once, 1024)]
    if small:
        workloads = [images(2, 64), tokens(1, 64, "tiny")]
    with ProgressBar("overhead", (rounds + 1) * len(workloads)) as tick:
        rows = [measure(each, torch.device(world.device), rounds, tick) for each in workloads]
    settings = {"rounds": rounds, "steps": STEPS, "autocast": "bf16"}
    bench.write(path, "device-overhead", settings, bar=BAR, rows=rows)
    print(overhead(rows))
    paceline.shutdown()


def measure(
    workload: Workload, device: torch.device, rounds: int, tick: Callable[[], object]
) -> dict[str, Any]:
    """Return times, ratios and peaks of all variants of a workload."""
    turns, parameters = {}, 0
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        model = wrap(workload.build().to(device))
        parameters = sum(param.numel() for param in model.parameters())
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        turns[name] = lambda model=model, optim=optim: turn(model, optim)
    inputs, targets = (tensor.to(device) for tensor in workload.draw())

    def turn(model: nn.Module, optim: torch.optim.Optimizer) -> tuple[float, int]:
        """Return the seconds of a step, and the bytes that a turn takes beyond what was held before."""

        def steps() -> None:
            for _ in range(STEPS):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = workload.loss(model(inputs), targets)
                loss.backward()
                optim.step()
                optim.zero_grad()

        if device.type == "cpu":
            return seconds_on(device, steps) / STEPS, 0
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = seconds_on(device, steps) / STEPS
        return seconds, torch.cuda.max_memory_allocated(device) - held

    found = take_turns(turns, rounds, tick)
    seconds = {name: [each for each, _ in pairs] for name, pairs in found.items()}
    return {
        "model": workload.name,
        "parameters": parameters,
        "batch_size": workload.batch_size,
        "step_ms": {name: median(each) * 1e3 for name, each in seconds.items()},
        "ratio": ratios_to(seconds, BARE),
        "peak_nbytes": {name: max(peak for _, peak in pairs) for name, pairs in found.items()},
        "seconds": seconds,
    }


def seconds_on(device: torch.device, work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes on the device."""
    if device.type == "cpu":
        return seconds_of(work)
    torch.cuda.synchronize(device)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def overhead(rows: list[dict[str, Any]]) -> str:
    """Return the table of steps, bare and wrapped."""
    cells = []
    for row in rows:
        for name, ms in row["step_ms"].items():
            ratio = "" if name == BARE else f"{Ratio(**row['ratio'][name]):.4f}"
            peak = f"{row['peak_nbytes'][name] / (1 << 20):.1f}"
            cells.append([row["model"], name, f"{ms:.2f}", ratio, peak])
    return table(["model", "", "step, ms", "÷ bare (95 % interval)", "peak, MiB"], cells, words=2)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md, if there is a result."""
    return {name: overhead(result["rows"]) for name, result in bench.find("overhead").items()}


if __name__ == "__main__":
    bench.main()
