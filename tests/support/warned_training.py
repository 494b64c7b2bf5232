"""A training whose ranks are warned: it logs its steps, and can pause at the moments at which a warning is difficult.

    warned_training.py FOLDER [EPOCHS] [PAUSE] [OPTION=VALUE …]       # under a launcher, or alone

Every process appends lines to ``FOLDER/<pid>.log``: ``begun``, ``step N``, ``end`` with a digest of the weights. A
file ``FOLDER/hold-<place>`` makes each rank wait at that place (load, first, save, epoch, last) until it is gone,
after a line ``at <place>``; a number in it is the step from which on they wait. A file ``FOLDER/notice`` is the
cloud's notice.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline

__all__ = ["PROGRAM", "Lines", "hold", "newest", "train"]

PROGRAM = str(Path(__file__).resolve())
SAMPLES = 240


class Noted:
    """A stateful object of the checkpoint, whose state is slow to make or to load where that is to be held up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        hold(self.folder, "save")
        return {"noted": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        hold(self.folder, "load")


def hold(folder: Path, place: str, step: int = 0) -> None:
    """Wait while there is a file that asks for it, and whose step, if it has one, is reached."""
    file = folder / f"hold-{place}"
    try:
        first = int(file.read_text() or 0)
    except FileNotFoundError:
        return
    if step >= first:
        note(folder, f"at {place}")
        while file.exists():
            time.sleep(0.005)


def note(folder: Path, line: str) -> None:
    """Append a line, at once."""
    file = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def train(
    folder: Path,
    *,
    epochs: int = 3,
    pause: float = 0.002,
    workers: int = 0,
    sync: str = "sharded",
    **options: Any,
) -> None:
    """Train, from the newest checkpoint if there is one, to the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    model = paceline.DataParallel(net, sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    loader = paceline.Loader(data, 12 // model.comm.size, num_workers=workers)
    options = {"every": 1000, "notice": (folder / "notice").exists} | options
    checkpoint = paceline.Checkpoint(
        folder / "checkpoint", model, optim, loader, noted=Noted(folder), **options
    )
    note(folder, "begun")
    epoch = 0
    for batch in checkpoint.resume(loader, epochs=epochs):
        hold(folder, "first", checkpoint.step)
        if checkpoint.epoch > epoch:
            epoch = checkpoint.epoch
            hold(folder, "epoch")
        model.backward(model(batch).square().mean(), samples=batch.samples)
        optim.step()
        optim.zero_grad()
        note(folder, f"step {checkpoint.step}")
        time.sleep(pause)
    hold(folder, "last")
    checkpoint.close()
    flat = torch.cat([param.detach().flatten() for param in model.whole_parameters()])
    note(folder, f"end {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}")


class Lines:
    """What the processes of a training have noted.

    Args:
        folder: of the training.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def by_process(self) -> dict[int, list[str]]:
        """Return the lines of each process."""
        found = defaultdict(list)
        for path in self.folder.glob("*.log"):
            found[int(path.stem)] = path.read_text().splitlines()
        return found

    def steps(self) -> dict[int, list[int]]:
        """Return the steps that each process has done."""
        return {
            pid: [int(line[5:]) for line in lines if line.startswith("step ")]
            for pid, lines in self.by_process().items()
        }

    def last_step(self) -> int:
        """Return the newest step that any process has done."""
        return max((step for steps in self.steps().values() for step in steps), default=0)

    def count(self, line: str) -> int:
        """Return how many processes have noted a line that begins like this."""
        return sum(any(each.startswith(line) for each in lines) for lines in self.by_process().values())

    def digests(self) -> set[str]:
        """Return the digests with which processes have ended."""
        return {line[4:] for lines in self.by_process().values() for line in lines if line.startswith("end ")}


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0: there is none."""
    return max(
        (int(path.name[5:]) for path in (folder / "checkpoint").glob("step-" + "[0-9]" * 8)), default=0
    )


def main(folder: Path, epochs: str = "3", pause: str = "0.002", *options: str) -> None:
    """Train as a rank that a launcher started, or alone."""
    torch.set_num_threads(1)
    paceline.init(device="cpu")
    given = dict(option.split("=") for option in options)
    values = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    train(folder, epochs=int(epochs), pause=float(pause), **values)
    paceline.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
