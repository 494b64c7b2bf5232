"""Training that saves checkpoints, logs the samples of its steps, and can have a fault: mini GPT on windows of text.

Its ranks are started by `paceline run saved_training.py FOLDER`. The global batch is the same for any number of ranks
that divides it. ``FAULT_ON=host1 FAULT="fail_at(rank={rank}, step=14)"`` has the rank there fail. ``SAVE_EVERY=100``
sets the steps between two checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paceline
from paceline.checkpoint.interop.weights_export import read_weights
from paceline.errors import PeerFailed
from paceline.testing import fault_injection
from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size

__all__ = ["LOST", "PROGRAM", "Windows", "append_line", "logged", "used_once", "weight_difference"]

PROGRAM = str(Path(__file__).resolve())
SAMPLES, CONTEXT, GLOBAL_BATCH, EPOCHS, EVERY = 240, 64, 12, 4, 3
STALL, LOST = 5.0, 3.0  # of `paceline.Watchdog`


class Windows(torch.utils.data.Dataset):
    """Windows of text, each with its number."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        start = number * 1000
        return number, torch.from_numpy(self.tokens[start : start + CONTEXT + 1].astype(np.int64))


def main(folder: Path) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    world = paceline.init("paceline")
    corpus = load_corpus(None)
    torch.manual_seed(0)
    model = paceline.DataParallel(
        GPT(gpt_size("mini", vocabulary=corpus.vocabulary, context=CONTEXT)), sync="sharded"
    )
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    loader = paceline.Loader(Windows(corpus.train), GLOBAL_BATCH // world.size)
    every = int(os.environ.get("SAVE_EVERY", EVERY))
    checkpoint = paceline.Checkpoint(folder / "checkpoint", model, optim, loader, every=every)
    pid_file = folder / f"pid-{world.rank}"
    host = os.uname().nodename
    if host == os.environ.get("FAULT_ON"):
        fault_injection.arm(os.environ["FAULT"].format(rank=world.rank))
    place = {"rank": world.rank, "size": world.size, "host": host}
    try:
        with paceline.Watchdog(stall=STALL, lost=LOST):
            for batch in checkpoint.resume(loader, epochs=EPOCHS):
                if not pid_file.exists() or pid_file.read_text() != str(os.getpid()):
                    pid_file.write_text(str(os.getpid()))  # of a rank that trains now
                numbers, windows = batch
                mean = token_loss(model(windows[:, :-1]), windows[:, 1:])
                model.backward(mean, samples=batch.samples)
                optim.step()
                optim.zero_grad()
                samples = numbers.tolist()[: batch.samples]
                step = {"epoch": checkpoint.epoch, "step": checkpoint.step, "samples": samples}
                append_line(folder / f"steps-{host}-{world.rank}.jsonl", **place, **step)
    except PeerFailed as error:
        append_line(
            folder / f"errors-{host}.jsonl", **place, named=error.rank, on=error.host, kind=error.kind
        )
        raise
    checkpoint.close()
    paceline.shutdown()


def append_line(path: Path, **facts: Any) -> None:
    """Append a line to a file, at once; it is whole even if the line before it was cut off."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"\n" + json.dumps({"at": time.monotonic(), **facts}).encode())
    os.close(file)


def logged(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the lines of all files of that pattern, by time."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob(pattern)]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: line["at"])


def used_once(folder: Path) -> bool:
    """Return whether the steps that led to the end used every sample once per epoch.

    Of a step that was repeated, the last time counts.
    """
    of_step: dict[int, dict[int, list[int]]] = {}
    for line in logged(folder, "steps-*.jsonl"):
        step = of_step.setdefault(line["step"], {})
        if line["rank"] in step or any(rank >= line["size"] for rank in step):
            step.clear()
        step[line["rank"]] = [line["epoch"] * SAMPLES + number for number in line["samples"]]
    used = Counter(number for step in of_step.values() for samples in step.values() for number in samples)
    return used == Counter(range(EPOCHS * SAMPLES))


def weight_difference(folder: Path, other: Path) -> float:
    """Return the largest difference of a weight between the ends of two runs; 0: equal to the bit."""
    ours, theirs = (read_weights(each / "checkpoint") for each in (folder, other))
    if ours.keys() != theirs.keys():
        raise ValueError(f"{folder} and {other} hold different weights")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
