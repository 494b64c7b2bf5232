"""The cost of a checkpoint: its save beside torch.save and the disk's own speed, its loading beside the disk's.

    python benchmarks/checkpoint/disk.py run --turns 11      (as root: drops the disk's cache before loading)
    python benchmarks/checkpoint/disk.py table

One process trains a GPT with AdamW. A turn is an asynchronous `paceline.Checkpoint` save with a step of the optimizer
right after it, which waits until the state is copied, `torch.save` of the same state, and dd of as many bytes that are
on the disk at the end (conv=fsync). As many turns of loading follow: `Checkpoint.load`, which checks every byte, and dd
of the same files.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.progress import progress
from bench_harness.turns import Ratio, ratio_of, seconds_of
from paceline._core.format import format_bytes, format_seconds
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import gpt_size

BLOCK_NBYTES = 4 << 20
COMPARED = {  # turns, own time, the other's time
    "training waits for a save": ("saves", "stall", "torch.save"),
    "a save, until it is complete": ("saves", "save", "dd"),
    "loading, every byte checked": ("loads", "load", "dd"),
}

bench = Benchmark(__file__, docs=["checkpoint-costs.md"])


@bench.run
def run(
    size: Annotated[str, Option(help="Size of the GPT.")] = "44m",
    turns: Annotated[int, Option(min=1, help="Turns of saving, and of loading.")] = 9,
    folder: Annotated[
        Path | None, Option(help="On the disk to measure; default: of temporary files.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time saving and loading."""
    path = bench.output(json_file, "disk")
    torch.manual_seed(0)
    net = GPT(gpt_size(size))
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    optim.zero_grad()

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": optim.state_dict()}

    with tempfile.TemporaryDirectory(prefix="paceline-disk-", dir=folder) as place:
        checkpoint = paceline.Checkpoint(Path(place, "run"), net, optim)
        first, *saves = [save_turn(checkpoint, optim, state) for _ in progress("saves", range(turns + 1))]
        loads = [load_turn(checkpoint) for _ in progress("loads", range(turns))]
        nbytes = sum(file.stat().st_size for file in tensor_files(checkpoint))
        checkpoint.close()
    parts: dict[str, Any] = {
        "parameters": sum(param.numel() for param in net.parameters()),
        "nbytes": nbytes,
        "first save": first,
        "saves": saves,
        "loads": loads,
    }
    for name, own, other in COMPARED.values():
        times = ([turn[key] for turn in parts[name]] for key in (own, other))
        parts[f"{own} / {other}"] = vars(ratio_of(*times))
    print(disk(bench.write(path, "checkpoint-disk", {"size": size, "turns": turns}, **parts)))


def save_turn(
    checkpoint: paceline.Checkpoint, optim: torch.optim.Optimizer, state_of: Callable[[], dict[str, Any]]
) -> dict[str, float]:
    """Return the seconds of one turn of saving."""
    os.sync()
    started = time.perf_counter()
    checkpoint.save()
    optim.step()  # there are no gradients: it does nothing but wait
    stall = time.perf_counter() - started
    checkpoint.wait()
    seconds = {"stall": stall, "save": time.perf_counter() - started}
    while len(list(checkpoint.folder.glob("step-*"))) > 2:  # older ones are removed in the background
        time.sleep(0.01)
    os.sync()
    state, place = state_of(), checkpoint.folder.parent
    seconds["torch.save"] = seconds_of(lambda: torch.save(state, place / "torch.pt"))
    (place / "torch.pt").unlink()
    os.sync()
    blocks = -(-sum(file.stat().st_size for file in tensor_files(checkpoint)) // BLOCK_NBYTES)
    seconds["dd"] = seconds_of(
        lambda: dd("if=/dev/zero", f"of={place / 'dd'}", f"count={blocks}", "conv=fsync")
    )
    (place / "dd").unlink()
    return seconds


def load_turn(checkpoint: paceline.Checkpoint) -> dict[str, float]:
    """Return the seconds of one turn of loading."""
    drop_cache()
    seconds = {"load": seconds_of(checkpoint.load)}
    drop_cache()
    seconds["dd"] = seconds_of(
        lambda: [dd(f"if={file}", "of=/dev/null") for file in tensor_files(checkpoint)]
    )
    return seconds


def tensor_files(checkpoint: paceline.Checkpoint) -> list[Path]:
    """Return the files of tensors in the newest checkpoint."""
    store = LocalFolder(checkpoint.folder)
    return sorted(store.files(store.names()[0]).path.glob("*.safetensors"))


def dd(*arguments: str) -> None:
    """Copy with dd."""
    subprocess.run(["dd", f"bs={BLOCK_NBYTES}", *arguments], check=True, stderr=subprocess.DEVNULL)


def drop_cache() -> None:
    """Write all files to the disk, and drop the kernel's cache of them where permitted."""
    os.sync()
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def disk(result: dict[str, Any]) -> str:
    """Return the table of times beside those of torch.save and dd."""
    rows = []
    for what, (turns, own, other) in COMPARED.items():
        ours, theirs = (format_seconds(median(turn[key] for turn in result[turns])) for key in (own, other))
        rows.append([what, ours, f"{other} {theirs}", str(Ratio(**result[f"{own} / {other}"]))])
    return (
        f"{table(['', 'Paceline', 'beside it', 'ratio (95 % interval)'], rows)}\n\n"
        f"{format_bytes(result['nbytes'])}: a GPT of {result['parameters'] / 1e6:.0f} M parameters with AdamW, "
        f"one process; medians of {len(result['saves'])} turns. The first save, which takes its memory, holds "
        f"training up for {format_seconds(result['first save']['stall'])}."
    )


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md and docs/checkpoint-costs.md."""
    return {"disk": disk(bench.read("disk"))}


if __name__ == "__main__":
    bench.main()
