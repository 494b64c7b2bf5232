"""Shares learnt from measured speeds: two ranks, one of which takes three times as long for every sample.

    python benchmarks/loader/shares.py

Both ranks train the same small model, and then sleep for every sample of the batch, rank 1 three times as long: as
devices of these speeds would compute, without taking this machine's cores from each other. Epochs with equal shares
and with ``shares="measured"`` take turns in the same processes. A contestant's first epoch is told apart: in it nothing
is known yet. After the timed epochs each trains one more, in which gradients are held against one process. Writes
``shares.json`` beside this file.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
SAMPLES, WIDTH, HIDDEN, BATCH, ROUNDS, REDEAL = 4096, 32, 64, 64, 12, 8
SECONDS_PER_SAMPLE = (2e-4, 6e-4)


def build() -> nn.Sequential:
    """Return the same model every time."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 1)).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (model(x) - y).square().mean()


class Trainer:
    """A model that is trained on batches of one loader.

    Args:
        shares: of the loader.
        options: more of them.
    """

    def __init__(self, shares: str | None, **options: Any) -> None:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
        self.data = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(SAMPLES))
        self.loader = paceline.Loader(self.data, BATCH, shares=shares, **options)
        self.model = paceline.DataParallel(build())
        self.optim = paceline.ShardedOptimizer(self.model, torch.optim.SGD, lr=1e-3)

    def epoch(self, *, checked: bool = False) -> tuple[float, float, int]:
        """Train one epoch; return its seconds, the largest error of a gradient if checked, and the samples used."""
        dist.barrier()
        started, used, worst = time.perf_counter(), 0, 0.0
        for batch in self.loader:
            x, y, numbers = batch
            time.sleep(SECONDS_PER_SAMPLE[dist.get_rank()] * batch.samples)
            self.model.backward(loss_of(self.model, x, y), samples=batch.samples)
            if checked:
                worst = max(worst, self._error(numbers))
            self.optim.step()
            self.optim.zero_grad()
            used += batch.samples
        seconds = time.perf_counter() - started
        found = torch.tensor([seconds, worst], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        counted = torch.tensor(used)
        dist.all_reduce(counted)
        return float(found[0]), float(found[1]), int(counted)

    def _error(self, numbers: Tensor) -> float:
        """Return how far this step's gradient is from that of one process over all ranks' samples."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, numbers.tolist())
        together = [number for each in told for number in each]
        reference = copy.deepcopy(self.model.module)
        reference.zero_grad()
        x, y = self.data.tensors[0][together], self.data.tensors[1][together]
        loss_of(reference, x, y).backward()
        pairs = zip(self.model.module.parameters(), reference.parameters(), strict=True)
        off, size = zip(
            *((float((a.grad - b.grad).norm()), float(b.grad.norm())) for a, b in pairs), strict=True
        )
        return sum(each**2 for each in off) ** 0.5 / sum(each**2 for each in size) ** 0.5


def rank_main(out: str) -> None:
    """Let the contestants take turns on this rank; rank 0 writes."""
    paceline.init("gloo")
    torch.set_num_threads(1)
    logging.getLogger("paceline.data").setLevel(logging.INFO)
    contestants = {
        "equal": Trainer(None),
        "measured, between epochs": Trainer("measured"),
        f"measured, every {REDEAL} steps": Trainer("measured", redeal_every=REDEAL),
    }
    rows: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "error": 0.0, "shares": []} for name in contestants
    }
    for number in range(ROUNDS):
        names = list(contestants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds, _, used = contestants[name].epoch()
            row = rows[name]
            row["seconds"].append(seconds)
            dealt = contestants[name].loader.state_dict()["dealt"]["parts"]
            row["shares"].append([round(part / sum(dealt), 3) for part in dealt])
            if used != SAMPLES:
                raise RuntimeError(f"{name}: {used} samples used of {SAMPLES}")
        if dist.get_rank() == 0:
            print(number, {name: round(row["seconds"][-1], 2) for name, row in rows.items()}, flush=True)
    for name, row in rows.items():
        row["error"] = contestants[name].epoch(checked=True)[1]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    paceline.shutdown()


def main() -> None:
    """Start the ranks, compare, write."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        run_ranks([__file__, str(found)], 2, timeout=1200)
        rows = json.loads(found.read_text(encoding="utf-8"))
    equal = rows["equal"]["seconds"]
    for row in rows.values():
        ratio = ratio_of(equal[1:], row["seconds"][1:])
        row["times_faster"] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
        row["first_epoch_times_faster"] = median(equal) / row["seconds"][0]
    result = result_head("measured-shares") | {
        "settings": {
            "ranks": 2,
            "samples": SAMPLES,
            "batch_size": BATCH,
            "model": f"{WIDTH}-{HIDDEN}-{HIDDEN}-1, float64",
            "seconds_per_sample": SECONDS_PER_SAMPLE,
            "rounds": ROUNDS,
        },
        "rows": rows,
    }
    write_json(HERE / "shares.json", result)
    for name, row in rows.items():
        print(name, row["times_faster"], row["first_epoch_times_faster"], row["error"], row["shares"][-1])


if __name__ == "__main__":
    rank_main(sys.argv[1]) if len(sys.argv) > 1 else main()
