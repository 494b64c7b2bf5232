"""Training whose ranks recover live, and log the samples of their steps: tiny GPT with dropout on windows of text.

Its ranks are started by ``paceline run live_training.py FOLDER STRATEGY``; alone, it is the undisturbed run.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline
from bench_harness.fault_injection.saved_training import CONTEXT, SAMPLES, Windows, append_line, logged
from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.world.live_file import LiveFile

__all__ = ["EPOCHS", "PROGRAM", "SAVE_EVERY", "VIRTUAL_RANKS", "digests", "used_once_by_leaves"]

PROGRAM = str(Path(__file__).resolve())
VIRTUAL_RANKS, MICRO_BATCH, EPOCHS, SAVE_EVERY = 6, 2, 6, 10


class PhaseFile:
    """File that names what this process does; who ends it can read when that was."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def enter(self, phase: str) -> None:
        """Name what begins now."""
        os.pwrite(self._file, phase.ljust(12).encode(), 0)


def main(folder: Path, strategy: str) -> None:
    """Train to the end."""
    torch.set_num_threads(1)
    paceline.init()
    corpus = load_corpus(None)
    torch.manual_seed(0)
    net = GPT(gpt_size("tiny", vocabulary=corpus.vocabulary, context=CONTEXT), dropout=0.1)
    model = paceline.DataParallel(net, sync=strategy, virtual_ranks=VIRTUAL_RANKS)
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=1000)
    loader = paceline.Loader(Windows(corpus.train), MICRO_BATCH, virtual_ranks=VIRTUAL_RANKS)
    checkpoint = paceline.Checkpoint(
        folder / "checkpoint", model, optimizer, scheduler, loader, every=SAVE_EVERY
    )
    checkpoint.load()
    phase = PhaseFile(folder / f"phase-{os.getpid()}")
    with paceline.Elastic(model, optimizer, scheduler, loader, checkpoint=checkpoint) as elastic:
        for batches in loader.steps(epochs=EPOCHS):
            with elastic.attempt():
                phase.enter("data")
                place = {"step": elastic.step, "world": _world()}
                for batch in batches:
                    numbers, windows = batch
                    samples = numbers.tolist()[: batch.samples]
                    append_line(_lines(folder), **place, epoch=loader.epoch, samples=samples)
                    phase.enter("forward")
                    loss = token_loss(model(windows[:, :-1]), windows[:, 1:])
                    phase.enter("backward")  # and the exchange, in the last one
                    model.backward(loss, samples=batch.samples)
                phase.enter("update")
                model.clip_grad_norm_(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            phase.enter("save" if elastic.step % SAVE_EVERY == 0 else "between")
    append_line(_lines(folder), digest=_digest(model), steps=elastic.step, ranks=model.comm.size)
    checkpoint.close()
    paceline.shutdown()


def _lines(folder: Path) -> Path:
    return folder / f"steps-{os.getpid()}.jsonl"


def _world() -> int:
    """Return the number of the present world."""
    file = LiveFile.from_environment(os.environ)
    world = None if file is None else file.read()
    return 0 if world is None else world.epoch


def _digest(model: paceline.DataParallel) -> str:
    """Return a digest of the weights and buffers."""
    found = hashlib.sha256()
    for value in model.module.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def digests(folder: Path) -> set[str]:
    """Return the digests with which processes of a run have ended."""
    return {line["digest"] for line in logged(folder, "steps-*.jsonl") if "digest" in line}


def used_once_by_leaves(folder: Path) -> bool:
    """Return whether the steps that led to the end used every sample once per epoch.

    Of a step that was repeated, the newest world counts: in it, each virtual rank must have run once.
    """
    of_step: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for line in logged(folder, "steps-*.jsonl"):
        if "samples" in line:
            of_step[line["step"]][line["world"]].append(line)
    used: Counter[int] = Counter()
    for worlds in of_step.values():
        last = worlds[max(worlds)]
        if len(last) != VIRTUAL_RANKS:
            return False
        used.update(line["epoch"] * SAMPLES + number for line in last for number in line["samples"])
    return used == Counter(range(EPOCHS * SAMPLES))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
