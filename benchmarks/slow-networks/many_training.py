"""What each rank of `many.py` runs: DiLoCo on the tiny model, watched and saved, and a note of every step.

    python many_training.py FOLDER STEPS EVERY

The host named by ``SLOW_ON`` takes three times as long for every step as it would.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.tools.models import corpus as corpora
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import TrainingWindows

BATCH, SEED = 2, 0
STALL, LOST = 60.0, 10.0
"""Many processes share few cores here, so a rank may be silent for long without being lost."""


def main(folder: Path, steps: int, every: int) -> None:
    """Train to the end from wherever the newest checkpoint is."""
    world = paceline.init("gloo")
    torch.set_num_threads(1)
    corpus, size = corpora.load_corpus(None), gpt_size("tiny")
    torch.manual_seed(SEED)
    model = paceline.DataParallel(GPT(size), sync="bucketed")
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    outer = paceline.DiLoCo(model, optim, every=every)
    keep = paceline.Checkpoint(folder / "checkpoint", model, optim, outer=outer)
    keep.load()
    batches = TrainingWindows(corpus.train, BATCH, size.context, rank=world.rank, size=world.size, seed=SEED)
    host, notes = os.uname().nodename, folder / f"steps-{os.uname().nodename}.jsonl"
    with paceline.Watchdog(stall=STALL, lost=LOST), outer:
        while keep.step < steps:
            started = time.perf_counter()
            batch = batches.at(keep.step)
            loss = loss_of(model(batch.inputs), batch.targets)
            model.backward(loss, samples=batch.samples)
            optim.step()
            optim.zero_grad()
            if host == os.environ.get("SLOW_ON") and keep.step % every:  # else it waited for others as well
                time.sleep(2 * (time.perf_counter() - started))
            told = {"step": keep.step, "size": world.size, "loss": loss.item(), "at": time.time()}
            with notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
            if keep.step % (2 * every) == 0:
                keep.save()
    keep.save(wait=True)
    keep.close()
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    end = {
        "size": world.size,
        "sum": float(flat.double().sum()),
        "sent": outer.sent_nbytes,
        "syncs": outer.syncs,
    }
    (folder / f"end-{host}.json").write_text(json.dumps(end), encoding="utf-8")
    paceline.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
