"""One training of a reference model, usually `mini`, by a method of synchronising, and its held-out loss on the way.

`loss.py`, `loss_settings.py` and `tradeoff.py` share it. A rank keeps copies of the shared parameters every so many
steps, with the time and the bytes until then; the held-out loss of each copy is measured only afterwards, so that it
takes no time of the training.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import paceline
from bench_harness.ranks import interface_bytes, tuned_ddp
from paceline.tools.bench.device_clock import slowest_rank
from paceline.tools.bench.step.step_worker import print_tick
from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss
from paceline.tools.train.lr_schedule import cosine_lr
from paceline.tools.train.traffic_counter import float32_gradient_nbytes

SIZE, BATCH, CLIP = "mini", 2, 1.0
HELD_OUT = 512  # windows
PARAMETERS = gpt_size(SIZE).parameters()
FACTS: dict[str, Any] = {"size": SIZE, "batch": BATCH, "threads": 1, "parameters": PARAMETERS}
"""Of the training, for the settings of a result."""

DETAIL, EARLY = 0.6, 5
"""Before this share of the steps, `loss.py` and `loss_settings.py` measure only every so many-th point of a curve."""


def method(name: str, kind: str, lr: float, **others: Any) -> dict[str, Any]:
    """Return a method of synchronising, as JSON.

    Args:
        name: in tables.
        kind: ``"ddp"``: torch's; ``"gradients"``: every step, by Paceline; ``"local"``, ``"diloco"``: parameters every
            so many steps, averaged or by DiLoCo.
        lr: largest learning rate, the best that was found for the method.
        others: `steps` in all, which the schedule ends with; `gradients`: their compression, a name or settings of
            `paceline.Compression`, for torch's DDP ``"fp16"``; `options` of `LocalSGD` or `DiLoCo`; `bucket_mib` of
            gradients.
    """
    defaults = {"steps": 600, "gradients": None, "options": {}, "bucket_mib": 5.0}
    return {"name": name, "kind": kind, "lr": lr, **defaults, **others}


DDP = method("torch DDP", "ddp", 1e-3)
DDP_FP16 = method("torch DDP, fp16 hook", "ddp", 1e-3, gradients="fp16")


# ---------------------------------------------------------------------- a rank


def train_as_rank(job: dict[str, Any]) -> Any:
    """Return the curve of a training on rank 0, or with `timed` the seconds of so many steps."""
    dist.init_process_group("gloo")
    training = Training(job["method"], job["seed"], job.get("size", SIZE))
    result: Any = (
        training.timed(job["timed"]) if job["timed"] else training.curve(job["every"], job.get("early", 1))
    )
    first = dist.get_rank() == 0
    dist.barrier()
    del training
    gc.collect()  # torch's DDP must be gone before its process group
    dist.destroy_process_group()
    return result if first else None


class Training:
    """One rank's part of a training.

    Args:
        method: of synchronising. seed: of parameters and data. name: of the model's size.
    """

    def __init__(self, method: dict[str, Any], seed: int, name: str = SIZE) -> None:
        corpus, size, self.method = load_corpus(None), gpt_size(name), method
        self.parameters = size.parameters()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.batches = TrainingWindows(
            corpus.train, BATCH, size.context, rank=self.rank, size=self.ranks, seed=seed
        )
        self.held_out = HeldOutWindows(corpus.held_out, 16, size.context, limit=HELD_OUT)
        torch.manual_seed(seed)
        self.net = GPT(size)
        if method["kind"] == "ddp":
            model = tuned_ddp(self.net, method["bucket_mib"])
            if method["gradients"] == "fp16":
                model.register_comm_hook(None, fp16_compress_hook)
            self.model: nn.Module = model
        else:
            sync = paceline.Sync(
                bucket_mib=method["bucket_mib"], compression=compression_of(method["gradients"])
            )
            self.model = paceline.DataParallel(self.net, sync=sync)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=method["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.loop = None
        if method["kind"] in ("local", "diloco"):
            options = {"compression": "int4"} | method["options"]
            options["compression"] = compression_of(options["compression"])
            outer = {"local": paceline.LocalSGD, "diloco": paceline.DiLoCo}[method["kind"]]
            self.loop = outer(self.model, self.optimizer, **options)
        self.gradients_nbytes = 0.0  # sent so far, without headers

    def step(self, number: int) -> None:
        """Take step `number`, counted from 0."""
        steps = self.method["steps"]
        for group in self.optimizer.param_groups:
            group["lr"] = cosine_lr(number, steps=steps, warmup=max(1, steps // 20), peak=self.method["lr"])
        batch = self.batches.at(number)
        token_loss(self.model(batch.inputs), batch.targets).backward()
        if isinstance(self.model, paceline.DataParallel):
            self.model.clip_grad_norm_(CLIP)
        else:
            nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        self.optimizer.step()
        if isinstance(self.model, paceline.DataParallel):
            self.gradients_nbytes += self.model.timings.sent_nbytes
        else:
            self.gradients_nbytes += float32_gradient_nbytes(self.parameters, self.ranks)
        self.optimizer.zero_grad()

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of each of so many steps on the slowest rank."""
        seconds = []
        with self.loop or nullcontext():
            for number in range(steps + 2):
                started = time.perf_counter()
                self.step(number)
                seconds.append(time.perf_counter() - started)
        return slowest_rank(seconds[2:], "cpu")  # DDP lays out its buckets anew in the second

    def curve(self, every: int, early: int = 1) -> list[dict[str, Any]]:
        """Train, and return a point every so many steps: step, loss, and until then seconds, bytes and expected bytes.

        Before the share `DETAIL` of the steps, only every `early`-th of these points is measured. Seconds are the
        slowest rank's, bytes those of the host that sent most. Each rank measures the loss of the points whose
        parameters it has kept.
        """
        points: list[dict[str, Any]] = []
        kept: dict[int, dict[str, Tensor]] = {}
        steps = self.method["steps"]
        dist.barrier()
        before, started = interface_bytes(), time.perf_counter()

        def keep(step: int) -> None:
            seconds, sent = time.perf_counter() - started, (interface_bytes() - before).sent
            expected = float(self.loop.sent_nbytes) if self.loop is not None else self.gradients_nbytes
            if len(points) % self.ranks == self.rank:
                kept[len(points)] = self.shared()
            points.append({"step": step, "seconds": seconds, "sent": sent, "foretold": expected})

        with self.loop or nullcontext():
            for done in range(1, steps + 1):
                self.step(done - 1)
                if done % every == 0 and done < steps:
                    if done >= DETAIL * steps or done % (every * early) == 0:
                        keep(done)
                    print_tick()
        keep(steps)
        dist.barrier()
        for name in ("seconds", "sent"):
            largest = slowest_rank([point[name] for point in points], "cpu")
            points = [point | {name: value} for point, value in zip(points, largest, strict=True)]
        losses = torch.zeros(len(points), dtype=torch.float64)
        for index, parameters in kept.items():
            losses[index] = self.loss(parameters)
        dist.all_reduce(losses)
        return [point | {"loss": loss} for point, loss in zip(points, losses.tolist(), strict=True)]

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


def compression_of(settings: str | dict[str, Any] | None) -> paceline.Compression | str | None:
    """Return the compression with these settings, or of this name."""
    return paceline.Compression(**settings) if isinstance(settings, dict) else settings


# ---------------------------------------------------------------------- results


def sent_until(points: list[dict[str, Any]]) -> list[float]:
    """Return the bytes that a host has sent until each point: at its interface, or without a network the expected."""
    on_network = points[-1]["sent"] > points[-1]["foretold"] / 2
    return [point["sent" if on_network else "foretold"] for point in points]
