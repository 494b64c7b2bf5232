"""What each rank of `loss.py` and `tradeoff.py` runs: one training of the reference model, and its loss over time.

    torchrun … benchmarks/slow-networks/loss_ranks.py JOB.json

Phases: build model, data and the way in which ranks synchronise; train, keeping a copy of the shared parameters every
so many steps, with the time and the bytes until then; only afterwards measure the held-out loss of each copy, so that
measuring takes no time of the training. Rank 0 writes what came out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from ways import Way

import paceline
from paceline.parallel.local_sgd.outer_loop import OuterLoop
from paceline.testing.netlab.lab_network import parse_traffic
from paceline.tools.models import corpus as corpora
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss
from paceline.tools.train.lr_schedule import cosine_lr

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
CLIP = 1.0
HELD_OUT = 512
"""Windows of the held-out text that count."""


class Training:
    """One rank's part of a training.

    Args:
        way: how ranks synchronise. seed: of parameters and data. batch: windows of a rank. size: name of the model's.
    """

    def __init__(self, way: Way, seed: int, batch: int, size: str) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        corpus, shape = corpora.load_corpus(None), gpt_size(size)
        self.way = way
        self.batches = TrainingWindows(corpus.train, batch, shape.context, rank=rank, size=ranks, seed=seed)
        self.held_out = HeldOutWindows(corpus.held_out, 16, shape.context, limit=HELD_OUT)
        torch.manual_seed(seed)
        self.net = GPT(shape)
        self.model, clip = self._wrap()
        self.clip = clip
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=way.lr, **ADAMW)
        self.loop = self._loop()
        self._gradients_nbytes = 0.0  # sent so far for gradients, headers aside

    def _wrap(self) -> tuple[nn.Module, Callable[[], object]]:
        way = self.way
        if way.kind == "ddp":
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", ".*broadcast_buffers", FutureWarning
                )  # its successor is too young
                model = DistributedDataParallel(
                    self.net,
                    bucket_cap_mb=way.bucket_mib,
                    gradient_as_bucket_view=True,
                    broadcast_buffers=False,
                    static_graph=True,
                    init_sync=False,
                )
            return model, lambda: nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        model = paceline.DataParallel(
            self.net, sync=paceline.Sync(bucket_mib=way.bucket_mib, compression=_compression(way.gradients))
        )
        return model, lambda: model.clip_grad_norm_(CLIP)

    def _loop(self) -> OuterLoop | None:
        if self.way.kind in ("ddp", "gradients"):
            return None
        kind = {"local": paceline.LocalSGD, "diloco": paceline.DiLoCo}[self.way.kind]
        options = dict(self.way.options)
        options["compression"] = _compression(options.get("compression", "int4"))
        return kind(self.model, self.optimizer, **options)

    def step(self, number: int, steps: int) -> None:
        """Take step `number`, counted from 0, of `steps` in all."""
        for group in self.optimizer.param_groups:
            group["lr"] = cosine_lr(number, steps=steps, warmup=max(1, steps // 20), peak=self.way.lr)
        batch = self.batches.at(number)
        loss_of(self.model(batch.inputs), batch.targets).backward()
        self.clip()
        self.optimizer.step()
        self._count()
        self.optimizer.zero_grad()

    def _count(self) -> None:
        """Add what a step sends for gradients."""
        ranks, nbytes = dist.get_world_size(), sum(param.nbytes for param in self.net.parameters())
        if isinstance(self.model, paceline.DataParallel):
            self._gradients_nbytes += self.model.timings.sent_nbytes
        else:
            self._gradients_nbytes += 2 * (ranks - 1) / ranks * nbytes

    @property
    def foretold(self) -> float:
        """Bytes that a host should have sent so far, headers aside."""
        return float(self.loop.sent_nbytes) if self.loop is not None else self._gradients_nbytes

    def shared(self) -> dict[str, Tensor]:
        """Return copies of the parameters that all ranks share."""
        held = self.loop.shared() if self.loop is not None else dict(self.net.named_parameters())
        return {name: each.detach().clone() for name, each in held.items()}

    @torch.no_grad()
    def loss(self, parameters: dict[str, Tensor]) -> float:
        """Return the held-out loss with these parameters, in nats per token."""
        for name, param in self.net.named_parameters():
            param.copy_(parameters[name])
        total, count = summed_token_loss(self.net, self.held_out)
        return total / count


def _compression(told: str | dict[str, Any] | None) -> paceline.Compression | str | None:
    return paceline.Compression(**told) if isinstance(told, dict) else told


def _sent() -> int:
    """Return what this host has sent over its network so far."""
    return parse_traffic(Path("/proc/net/dev").read_text()).sent


def train(training: Training, steps: int, every: int) -> list[dict[str, Any]]:
    """Train, and return a point every so many steps: step, seconds and bytes until then, and the parameters.

    Each rank keeps the parameters of those points whose loss it will measure.
    """
    points: list[dict[str, Any]] = []
    dist.barrier()
    before, started = _sent(), time.perf_counter()

    def keep(step: int) -> None:
        seconds, sent = time.perf_counter() - started, _sent() - before
        told = {"step": step, "seconds": seconds, "sent": sent, "foretold": training.foretold}
        mine = len(points) % dist.get_world_size() == dist.get_rank()
        points.append({**told, "parameters": training.shared() if mine else None})

    with training.loop or nullcontext():
        for number in range(steps):
            training.step(number, training.way.steps)
            if every and (number + 1) % every == 0 and number + 1 < steps:
                keep(number + 1)
                if dist.get_rank() == 0:
                    print("tick", flush=True)
    if every:
        keep(steps)
    dist.barrier()
    return points


def measured(training: Training, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of the slowest rank and the host that sent most, with their losses; ranks share the work."""
    table = torch.tensor([[point["seconds"], point["sent"]] for point in points], dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    losses = torch.zeros(len(points), dtype=torch.float64)
    for index, point in enumerate(points):
        if point["parameters"] is not None:
            losses[index] = training.loss(point["parameters"])
    dist.all_reduce(losses)
    rows = zip(points, table.tolist(), losses.tolist(), strict=True)
    return [
        {"step": point["step"], "seconds": seconds, "sent": sent, "foretold": point["foretold"], "loss": loss}
        for point, (seconds, sent), loss in rows
    ]


def timed(training: Training, steps: int) -> list[float]:
    """Return what each of so many steps takes on the slowest rank."""
    seconds = []
    with training.loop or nullcontext():
        for number in range(steps + 2):
            started = time.perf_counter()
            training.step(number, training.way.steps)
            seconds.append(time.perf_counter() - started)
    table = torch.tensor(seconds[2:], dtype=torch.float64)  # DDP lays out its buckets anew in the second
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()


def main(job_file: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    way = Way(**job["way"])
    training = Training(way, job["seed"], job["batch"], job["size"])
    if job["timed"]:
        result: Any = timed(training, job["timed"])
    else:
        result = measured(training, train(training, job.get("steps", way.steps), job["every"]))
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    del training
    gc.collect()  # torch's DDP must be gone before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
