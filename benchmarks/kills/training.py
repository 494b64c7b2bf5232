"""A training that notes which samples it used, and what ended it: the mini GPT on windows of text, watched and saved.

Run by kills.py and failover.py as the ranks of a world: ``python training.py FOLDER``. The global batch is the same for
any number of ranks that divides it. ``FAULT_ON=host1 FAULT="fail_at(rank={rank}, step=14)"`` has the rank there fail.
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
from paceline.errors import PeerFailed
from paceline.testing import fault_injection
from paceline.tools.models import corpus as corpora
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size

SAMPLES, CONTEXT, GLOBAL_BATCH, EPOCHS, EVERY = 240, 64, 12, 4, 3
STALL, LOST = 5.0, 3.0
"""Seconds that `paceline.Watchdog` waits for a rank that stands still, and for a process or host that is silent."""


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
    """Train to the end from wherever the newest checkpoint is."""
    world = paceline.init("paceline")
    corpus = corpora.load_corpus(None)
    torch.manual_seed(0)
    model = paceline.DataParallel(
        GPT(gpt_size("mini", vocabulary=corpus.vocabulary, context=CONTEXT)), sync="sharded"
    )
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    loader = paceline.Loader(Windows(corpus.train), GLOBAL_BATCH // world.size)
    keep = paceline.Checkpoint(folder / "checkpoint", model, optim, loader, every=EVERY)
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    host = os.uname().nodename
    if host == os.environ.get("FAULT_ON"):
        fault_injection.arm(os.environ["FAULT"].format(rank=world.rank))
    place = {"rank": world.rank, "size": world.size, "host": host}
    try:
        with paceline.Watchdog(stall=STALL, lost=LOST):
            for batch in keep.resume(loader, epochs=EPOCHS):
                numbers, windows = batch
                mean = token_loss(model(windows[:, :-1]), windows[:, 1:])
                model.backward(mean, samples=batch.samples)
                optim.step()
                optim.zero_grad()
                step = {"epoch": keep.epoch, "step": keep.step, "samples": numbers.tolist()[: batch.samples]}
                note(folder / f"steps-{host}-{world.rank}.jsonl", **place, **step)
    except PeerFailed as error:
        note(folder / f"told-{host}.jsonl", **place, named=error.rank, on=error.host, kind=error.kind)
        raise
    keep.close()
    paceline.shutdown()


def note(path: Path, **facts: Any) -> None:
    """Append a line to a file, at once and whole; what a line before it lacks does no harm to it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"\n" + json.dumps({"at": time.monotonic(), **facts}).encode())
    os.close(file)


def noted(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the lines of all files of that pattern, by time."""
    lines = [
        line for path in folder.glob(pattern) for line in path.read_text().splitlines() if line.endswith("}")
    ]
    return sorted((json.loads(line) for line in lines), key=lambda told: told["at"])


def used_once(folder: Path) -> bool:
    """Tell whether the steps that led to the end used every sample once an epoch.

    Of a step that was taken again, the last time counts.
    """
    of_step: dict[int, dict[int, list[int]]] = {}
    for told in noted(folder, "steps-*.jsonl"):
        step = of_step.setdefault(told["step"], {})
        if told["rank"] in step or any(rank >= told["size"] for rank in step):
            step.clear()
        step[told["rank"]] = [told["epoch"] * SAMPLES + number for number in told["samples"]]
    used = Counter(number for step in of_step.values() for samples in step.values() for number in samples)
    return used == Counter(range(EPOCHS * SAMPLES))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
