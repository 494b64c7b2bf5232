"""What a checkpoint costs: the stall of a save beside torch.save, saving and loading beside the disk's own speed.

python benchmarks/checkpoint/disk.py [--size 44m] [--turns 9] [--folder DIR]

One process holds a GPT with the state of AdamW. In each turn, one after the other: an asynchronous
`paceline.Checkpoint` save
(the time that training stops, and the time until the checkpoint is complete), `torch.save` of the same state, and dd
of as many bytes that end on the disk (conv=fsync). Then as many turns of loading: `Checkpoint.load`, which reads and
checks every byte, and dd of the same files, each from a disk whose cache was dropped (as root). Writes disk.json
beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
BLOCK_NBYTES = 4 << 20


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def training(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has taken a step."""
    torch.manual_seed(0)
    net = GPT(gpt_size(size))
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optim.step()
    optim.zero_grad()
    return net, optim


def dd(*arguments: str) -> None:
    """Copy with dd, the disk's own speed."""
    subprocess.run(["dd", f"bs={BLOCK_NBYTES}", *arguments], check=True, stderr=subprocess.DEVNULL)


def forget() -> None:
    """Have the kernel drop what it holds of files, as far as this process may ask for it."""
    os.sync()
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def saving(
    keep: paceline.Checkpoint, net: torch.nn.Module, optim: torch.optim.Optimizer, place: Path
) -> dict[str, float]:
    """Return the seconds of one turn of saving."""
    keep.step += 1
    os.sync()
    started = time.perf_counter()
    keep.save()
    stall = time.perf_counter() - started
    keep.wait()
    told = {"stall": stall, "save": time.perf_counter() - started}
    while (
        len(list(keep.folder.glob("step-*"))) > 2
    ):  # older ones are removed meanwhile, which nobody waits for
        time.sleep(0.01)
    os.sync()
    state = {"model": net.state_dict(), "optimizer": optim.state_dict()}
    told["torch.save"] = seconds(lambda: torch.save(state, place / "torch.pt"))
    (place / "torch.pt").unlink()
    os.sync()
    blocks = -(-sum(file.stat().st_size for file in files(keep)) // BLOCK_NBYTES)
    told["dd"] = seconds(lambda: dd("if=/dev/zero", f"of={place / 'dd'}", f"count={blocks}", "conv=fsync"))
    (place / "dd").unlink()
    return told


def files(keep: paceline.Checkpoint) -> list[Path]:
    """Return the files of tensors in the newest checkpoint."""
    return sorted(CheckpointFolder(keep.folder).complete()[0].glob("*.safetensors"))


def loading(keep: paceline.Checkpoint) -> dict[str, float]:
    """Return the seconds of one turn of loading."""
    forget()
    told = {"load": seconds(keep.load)}
    forget()
    told["dd"] = seconds(lambda: [dd(f"if={file}", "of=/dev/null") for file in files(keep)])
    return told


def ratio(turns: list[dict[str, float]], ours: str, theirs: str) -> dict[str, float]:
    """Return the median ratio of two times, with its interval."""
    found = ratio_of([turn[ours] for turn in turns], [turn[theirs] for turn in turns])
    return {"median": found.median, "low": found.low, "high": found.high}


def main() -> None:
    """Measure and write disk.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="44m")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, help="On the disk to be measured; else the one of temporary files."
    )
    options = parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns {options.turns}: give 1 or more")
    with tempfile.TemporaryDirectory(prefix="paceline-disk-", dir=options.folder) as folder:
        place = Path(folder)
        net, optim = training(options.size)
        keep = paceline.Checkpoint(place / "run", net, optim)
        first = saving(keep, net, optim, place)
        saved = [saving(keep, net, optim, place) for _ in range(options.turns)]
        loaded = [loading(keep) for _ in range(options.turns)]
        nbytes = sum(file.stat().st_size for file in files(keep))
        keep.close()
    result: dict[str, Any] = result_head("checkpoint-disk") | {
        "parameters": sum(param.numel() for param in net.parameters()), "nbytes": nbytes,
        "first save": first, "saves": saved, "loads": loaded,
        "stall / torch.save": ratio(saved, "stall", "torch.save"), "save / dd": ratio(saved, "save", "dd"),
        "load / dd": ratio(loaded, "load", "dd"),
    }  # fmt: skip
    write_json(HERE / "disk.json", result)
    for name in ("stall / torch.save", "save / dd", "load / dd"):
        print(name, {key: round(value, 3) for key, value in result[name].items()})


if __name__ == "__main__":
    main()
