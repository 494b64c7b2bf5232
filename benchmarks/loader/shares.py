"""Shares learnt from measured speeds: two ranks, one of which takes three times as long for every sample.

    python benchmarks/loader/shares.py run
    python benchmarks/loader/shares.py table

Both ranks train the same small model, and then sleep for every sample of the batch, rank 1 three times as long: as
devices of these speeds would compute, without taking this machine's cores from each other. Epochs with equal shares
and with ``shares="measured"`` take turns in the same processes. A variant's first epoch, in which no speed is known
yet, is reported separately. After the timed epochs each trains one more, in which gradients are compared with one
process.
"""

from __future__ import annotations

import copy
import logging
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import ratio_of, take_turns
from paceline.tools.bench.device_clock import slowest_rank
from paceline.tools.cli.shared_options import JsonOption

SAMPLES, WIDTH, HIDDEN, BATCH, ROUNDS, REDEAL = 4096, 32, 64, 64, 12, 8
SECONDS_PER_SAMPLE = (2e-4, 6e-4)

bench = Benchmark(__file__, docs=["data.md"])


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Time epochs with equal shares and with measured ones."""
    path = bench.output(json_file, "shares")
    rows = bench.start_ranks({}, 2, timeout=1200)
    equal = rows["equal"]["seconds"]
    for row in rows.values():
        row["times_faster"] = vars(ratio_of(equal[1:], row["seconds"][1:]))
        row["first_epoch_times_faster"] = median(equal) / row["seconds"][0]
    settings = {
        "ranks": 2,
        "samples": SAMPLES,
        "batch_size": BATCH,
        "model": f"{WIDTH}-{HIDDEN}-{HIDDEN}-1, float64",
        "seconds_per_sample": SECONDS_PER_SAMPLE,
        "rounds": ROUNDS,
    }
    bench.write(path, "measured-shares", settings, rows=rows)


@bench.rank
def rank(_: dict[str, Any]) -> dict[str, Any] | None:
    """Return seconds and shares of every epoch, and the error of gradients, by variant."""
    paceline.init("gloo")
    logging.getLogger("paceline.data").setLevel(logging.INFO)
    trainers = {
        "equal": Trainer(None),
        "measured, between epochs": Trainer("measured"),
        f"measured, every {REDEAL} steps": Trainer("measured", redeal_every=REDEAL),
    }
    first = dist.get_rank() == 0

    def turn(name: str) -> tuple[float, list[float]]:
        seconds, _, used = trainers[name].epoch()
        if used != SAMPLES:
            raise RuntimeError(f"{name}: {used} samples used of {SAMPLES}")
        if first:
            print(f"{seconds:.2f} s, {name}", flush=True)
        parts = trainers[name].loader.state_dict()["dealt"]["parts"]
        return seconds, [round(part / sum(parts), 3) for part in parts]

    rows = {}
    turns = take_turns({name: lambda name=name: turn(name) for name in trainers}, ROUNDS, warm_up=0)
    for name, epochs in turns.items():
        error = trainers[name].epoch(checked=True)[1]
        rows[name] = {
            "seconds": [each[0] for each in epochs],
            "error": error,
            "shares": [each[1] for each in epochs],
        }
    paceline.shutdown()
    return rows if first else None


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (model(x) - y).square().mean()


class Trainer:
    """A model that is trained on batches of one loader, the same model every time.

    Args:
        shares: of the loader.
        options: other options of the loader.
    """

    def __init__(self, shares: str | None, **options: Any) -> None:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.data = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(SAMPLES))
        self.loader = paceline.Loader(self.data, BATCH, shares=shares, **options)
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
        self.model = paceline.DataParallel(nn.Sequential(*layers, nn.Linear(HIDDEN, 1)).double())
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
                worst = max(worst, self.error(numbers))
            self.optim.step()
            self.optim.zero_grad()
            used += batch.samples
        seconds, worst = slowest_rank([time.perf_counter() - started, worst], "cpu")
        counted = torch.tensor(used)
        dist.all_reduce(counted)
        return seconds, worst, int(counted)

    def error(self, numbers: Tensor) -> float:
        """Return the relative error of this step's gradient, compared with one process over all ranks' samples."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, numbers.tolist())
        together = [number for each in every for number in each]
        reference = copy.deepcopy(self.model.module)
        reference.zero_grad()
        loss_of(reference, self.data.tensors[0][together], self.data.tensors[1][together]).backward()
        found, true = (
            torch.cat([param.grad.flatten() for param in net.parameters()])
            for net in (self.model.module, reference)
        )
        return float((found - true).norm() / true.norm())


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of epochs with equal and with measured shares."""
    rows = []
    for name, row in bench.read("shares")["rows"].items():
        faster = ["", ""]
        if name != "equal":
            later = "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["times_faster"])
            faster = [f"{row['first_epoch_times_faster']:.2f}", later]
        last = " ".join(f"{share:.2f}" for share in row["shares"][-1])
        rows.append([name, last, *faster, f"{row['error']:.0e}"])
    titles = [
        "shares",
        "at the end",
        "first epoch, times faster",
        "later epochs, times faster",
        "gradient error",
    ]
    return {"shares": table(titles, rows)}


if __name__ == "__main__":
    bench.main()
