"""The loop: an ordinary PyTorch training loop.

Each step: set the learning rate; for each micro-batch get data, run forward and backward (gradients are
synchronised in the last one); clip; update. Around it: held-out loss, log, checkpoint.

Where ranks train apart (`--every`), all of this runs inside of the outer loop's block, which synchronises in the
update. The block is left after the last step: held-out loss and checkpoint that follow are of the final parameters. A
run that goes on from there enters a block again, with the outer loop's momentum and what compression still owes.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline._core.step_state import step_state
from paceline.errors import PacelineError
from paceline.health.watchdog import Watchdog
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.train.training_job import Job, cosine
from paceline.tools.train.training_progress import Progress
from paceline.world.object_collectives import sum_over_ranks

__all__ = ["train"]


@dataclass
class Taken:
    """One optimizer step that was taken.

    Attributes:
        loss_sum: Σ loss·samples of this rank, a scalar on the device.
        samples: windows behind it.
        lr: learning rate of the update.
        grad_norm: norm of the global gradient before clipping, None where nothing is clipped.
        seconds: wall time.
        exposed_seconds: in which this rank stood still for communication.
    """

    loss_sum: torch.Tensor
    samples: int
    lr: float
    grad_norm: torch.Tensor | None
    seconds: float
    exposed_seconds: float


def train(job: Job, progress: Progress, watch: Watchdog | None = None) -> float:
    """Train to the last step and return the final held-out loss in nats per token; every rank calls this.

    Args:
        job: this rank's part. progress: shows how it goes. watch: knows which rank is slow, where there is one.

    Raises:
        PacelineError: the loss or a parameter is no longer a number; the checkpoint before it stays.
    """
    if job.first_val_loss is None:
        job.first_val_loss = _evaluate(job, progress)
    if job.step >= job.settings.steps:  # a rank failed after the last step, and all were started again
        return _evaluate(job, progress)
    val_loss = job.first_val_loss
    with ExitStack() as block:
        if job.loop is not None:
            block.enter_context(job.loop)
        while job.step < job.settings.steps:
            taken = take_step(job)
            if last := job.step == job.settings.steps:
                block.close()
                job.count_bytes(step=False)
            val_loss = _after_step(job, taken, val_loss, progress, watch, last=last)
    return val_loss


def _after_step(
    job: Job, taken: Taken, val_loss: float, progress: Progress, watch: Watchdog | None, *, last: bool
) -> float:
    """Evaluate, log, show and save what is due after a step; return the latest held-out loss."""
    record: dict[str, Any] = {"step": job.step}
    if job.step == 1:
        record["val_loss"] = job.first_val_loss
    if last or _is_due(job.step, job.settings.eval_every):
        record["val_loss"] = val_loss = _evaluate(job, progress)
    if "val_loss" in record or _is_due(job.step, job.settings.log_every):
        record |= _measured(job, taken)
        _log(job, record)
    progress.step(record, watch.slowest() if watch is not None and progress.live else None)
    if last or _is_due(job.step, job.settings.checkpoint_every):
        _refuse_diverged(job)
        job.save(wait=last)
    return val_loss


def take_step(job: Job) -> Taken:
    """Do one optimizer step."""
    started = time.perf_counter()
    settings, model, optimizer, micros = job.settings, job.model, job.optimizer, job.batches.rounds
    lr = cosine(job.step, steps=settings.steps, warmup=settings.warmup, peak=settings.lr)
    for group in optimizer.param_groups:
        group["lr"] = lr

    loss_sum, samples = torch.zeros((), device=job.world.device), 0
    for micro in range(micros):
        step_state.enter_phase("data")
        batch = job.batches.at(job.step, micro).to(job.world.device)
        step_state.enter_phase("outside")
        loss = loss_of(model(batch.inputs), batch.targets)
        with model.accumulate() if micro < micros - 1 else nullcontext():
            model.backward(loss, samples=batch.samples)
        loss_sum += loss.detach() * batch.samples
        samples += batch.samples

    in_loop = -_exposed_in_loop(job)
    norm = model.clip_grad_norm_(settings.clip) if settings.clip else None
    optimizer.step()
    exposed = model.timings.exposed_seconds + in_loop + _exposed_in_loop(job)
    optimizer.zero_grad()
    job.count_bytes()
    return Taken(loss_sum, samples, lr, norm, time.perf_counter() - started, exposed)


def _exposed_in_loop(job: Job) -> float:
    """Return for how long this rank has waited for parameters so far."""
    return 0.0 if job.loop is None else job.loop.exposed_seconds


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(job: Job, progress: Progress) -> float:
    val_loss = job.evaluate()
    progress.held_out(job.step, val_loss)
    return val_loss


def _measured(job: Job, taken: Taken) -> dict[str, Any]:
    """Return what `taken` says about all ranks; every rank must call this.

    Raises:
        PacelineError: the loss is no longer a number.
    """
    mine = torch.stack((taken.loss_sum.double(), torch.tensor(taken.samples).to(taken.loss_sum)))
    loss_sum, samples = sum_over_ranks(mine).tolist()
    loss = loss_sum / samples
    if not math.isfinite(loss):
        raise _diverged(job, f"the loss is {loss}")
    return {
        "loss": loss,
        "lr": taken.lr,
        "grad_norm": None if taken.grad_norm is None else float(taken.grad_norm),
        "samples": round(samples),
        "step_seconds": taken.seconds,
        "tokens_per_second": samples * job.size.context / taken.seconds,
        "exposed_share": min(1.0, taken.exposed_seconds / taken.seconds),
        **job.traffic.state(),
    }


def _refuse_diverged(job: Job) -> None:
    """Raise on every rank if some rank holds a parameter that is not finite: that is no state to keep."""
    held = [param.to_local() if isinstance(param, DTensor) else param for param in job.model.parameters()]
    broken = sum(not torch.isfinite(param).all() for param in held)
    if sum_over_ranks(torch.tensor([float(broken)])).item():
        raise _diverged(job, "parameters are no longer finite, so no checkpoint is written")


def _diverged(job: Job, what: str) -> PacelineError:
    return PacelineError(
        f"{what}: training diverged",
        step=job.step,
        remedy="use a smaller --lr, or clip the gradient with --clip 1",
    )


def _log(job: Job, record: dict[str, Any]) -> None:
    if job.world.rank == 0:
        job.scalars.add(record["step"], {name: value for name, value in record.items() if name != "step"})
