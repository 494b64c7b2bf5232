"""Each rank of `many.py`: DiLoCo on the tiny model, with watchdog and checkpoints, and a record of every step.

    python many_training.py FOLDER STEPS EVERY

It imports no more than a training does, because `many.py` times how soon 16 processes are up on two cores. On the host
named by ``SLOW_ON`` every step takes three times as long.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import TrainingWindows


def main(folder: Path, steps: int, every: int) -> None:
    """Train to the end from wherever the newest checkpoint is."""
    world = paceline.init("gloo")
    torch.set_num_threads(1)
    corpus, size = load_corpus(None), gpt_size("tiny")
    torch.manual_seed(0)
    model = paceline.DataParallel(GPT(size), sync="bucketed")
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    outer = paceline.DiLoCo(model, optim, every=every)
    checkpoint = paceline.Checkpoint(folder / "checkpoint", model, optim, outer=outer)
    checkpoint.load()
    batches = TrainingWindows(corpus.train, 2, size.context, rank=world.rank, size=world.size)
    host = os.uname().nodename
    # Many processes share few cores, so a rank may be silent for long without being lost.
    with paceline.Watchdog(stall=60.0, lost=10.0), outer:
        while checkpoint.step < steps:
            started = time.perf_counter()
            batch = batches.at(checkpoint.step)
            loss = token_loss(model(batch.inputs), batch.targets)
            model.backward(loss, samples=batch.samples)
            optim.step()
            optim.zero_grad()
            # not where parameters are exchanged, which includes waiting for others
            if host == os.environ.get("SLOW_ON") and checkpoint.step % every:
                time.sleep(2 * (time.perf_counter() - started))
            step = {"step": checkpoint.step, "size": world.size, "loss": loss.item(), "at": time.time()}
            with (folder / f"steps-{host}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(step) + "\n")
            if checkpoint.step % (2 * every) == 0:
                checkpoint.save()
    checkpoint.save(wait=True)
    checkpoint.close()
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    end = {"sum": float(flat.double().sum()), "sent": outer.sent_nbytes}
    (folder / f"end-{host}.json").write_text(json.dumps(end), encoding="utf-8")
    paceline.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
