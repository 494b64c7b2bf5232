"""One machine's part in another library's training, a contestant of `peers.py`: the loop, and copies of parameters.

The library's script calls `play` under the Python that the library is installed into.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import save_file
from training import Training, seconds_of, wait_until

from paceline.testing.netlab.lab_network import parse_traffic
from paceline.tools.train.lr_schedule import cosine_lr

__all__ = ["Part", "play"]


@dataclass(frozen=True)
class Part:
    """Where a rank is, and what it is asked for.

    Attributes:
        rank, ranks: which rank, of how many; rank k runs on host k.
        port: this one and the next ninety-nine are free on every host.
        folder: of all hosts. settings: of the contestant. kept: what has to live as long as the process.
    """

    rank: int
    ranks: int
    port: int
    folder: Path
    settings: dict[str, Any]
    kept: list[object] = field(default_factory=list)


def play(attach: Callable[[Part, Training], object]) -> NoReturn:
    """Train as the job file says, on the rank that is the second argument, until somebody ends this process.

    Args:
        attach: has the library take part in the training's steps from now on.
    """
    job, rank = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    part = Part(rank, job["ranks"], job["port"], Path(job["folder"]), job["settings"])
    training = Training(rank, job["seed"], part.settings["lr"], seconds_of(rank, job["fastest"]))
    attach(part, training)
    wait_until(job["at"])
    began, before, copies = time.monotonic(), parse_traffic(Path("/proc/net/dev").read_text()), 0
    while True:
        past = time.monotonic() - began
        if copies < job["copies"] and past >= (copies + 1) * job["seconds"] / job["copies"]:
            copies += 1
            passed = parse_traffic(Path("/proc/net/dev").read_text()) - before
            told = {"steps": training.made, "seconds": past, "sent": passed.sent, "received": passed.received}
            tensors = {name: each.detach().clone() for name, each in training.net.named_parameters()}
            save_file(tensors, part.folder / f"copy-{rank}-{copies}.safetensors")
            (part.folder / f"worker-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
        share = cosine_lr(int(min(1.0, past / job["seconds"]) * 999), steps=1000, warmup=50, peak=1.0)
        training.step(share)
