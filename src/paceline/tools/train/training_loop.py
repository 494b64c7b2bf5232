"""The loop of ``paceline train``: an ordinary PyTorch training loop.

Each step: set the learning rate; for each micro-batch get data, run forward and backward (gradients are
synchronised in the last one); clip; update. Around it: held-out loss, log, checkpoint.

With local SGD (`--every`) all of this runs inside the outer loop's context manager, which synchronises in the update.
It is left after the last step: the held-out loss and checkpoint that follow are of the final parameters. A run resumed
from there enters the context manager again, with the outer loop's momentum and the residuals of compression.
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
from paceline.data.leaf_random import seed_between_steps, seed_leaf
from paceline.errors import PacelineError
from paceline.health.watchdog import Watchdog
from paceline.profiling.profiler import time_metrics
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.train.lr_schedule import cosine_lr
from paceline.tools.train.training_job import TrainingJob
from paceline.tools.train.training_progress import TrainingProgress
from paceline.world.control_collectives import gather_rows, sum_over_ranks

__all__ = ["run_training"]


@dataclass(kw_only=True)
class StepMeasurement:
    """Measurements of one optimizer step on this rank.

    Attributes:
        losses: loss·samples of each micro-batch, scalars on the device.
        samples: number of windows.
        lr: learning rate of the update.
        grad_norm: norm of the global gradient before clipping; None: nothing is clipped.
        seconds: wall time.
        exposed_seconds: part of `seconds` in which this rank was blocked on communication.
    """

    losses: list[torch.Tensor]
    samples: int
    lr: float
    grad_norm: torch.Tensor | None
    seconds: float
    exposed_seconds: float


def run_training(job: TrainingJob, progress: TrainingProgress, watchdog: Watchdog | None = None) -> float:
    """Train to the last step and return the final held-out loss in nats per token; collective.

    Args:
        job: this rank's part.
        progress: shows the progress.
        watchdog: knows the slowest rank; None: it is not shown.

    Raises:
        PacelineError: the loss or a parameter is no longer finite; earlier checkpoints are kept.
    """
    measured, recoveries = None, job.elastic.recoveries
    with ExitStack() as stack:
        if job.loop is not None:
            stack.enter_context(job.loop)
        while True:
            with job.elastic.attempt():
                last = job.step >= job.settings.steps
                if recoveries != job.elastic.recoveries:
                    measured, recoveries = None, job.elastic.recoveries
                if job.first_val_loss is None:
                    job.val_loss = job.first_val_loss = _evaluate(job, progress)
                elif job.reported < job.step:
                    if last:
                        stack.close()
                        job.count_bytes(step=False)
                    _after_step(job, measured, progress, watchdog, last=last)
                    job.report(job.step)
                elif not last:
                    measured = take_step(job)
                else:
                    break
        if job.val_loss is None:  # restarted after a failure behind the last step
            job.val_loss = _evaluate(job, progress)
    return job.val_loss


def _after_step(
    job: TrainingJob,
    measured: StepMeasurement | None,
    progress: TrainingProgress,
    watchdog: Watchdog | None,
    *,
    last: bool,
) -> None:
    """Evaluate, log, show and save as due after a step."""
    record: dict[str, Any] = {"step": job.step}
    if job.step == 1:
        record["val_loss"] = job.first_val_loss
    if last or _is_due(job.step, job.settings.eval_every):
        record["val_loss"] = job.val_loss = _evaluate(job, progress)
    if "val_loss" in record or _is_due(job.step, job.settings.log_every):
        record |= _global_measurements(job, measured)
        if job.world.rank == 0 and len(record) > 1:
            metrics = {name: value for name, value in record.items() if name != "step"}
            job.metrics.add(job.step, metrics)
            job.loggers.log(metrics, job.step)
    progress.step(record, watchdog.slowest() if watchdog is not None and progress.live else None)
    if last or _is_due(job.step, job.settings.checkpoint_every):
        _check_finite(job)
        job.save(wait=last)


def take_step(job: TrainingJob) -> StepMeasurement:
    """Do one optimizer step."""
    started = time.perf_counter()
    settings, model, optimizer, micro_batches = job.settings, job.model, job.optimizer, job.batches.rounds
    lr = cosine_lr(job.step, steps=settings.steps, warmup=settings.warmup, peak=settings.lr)
    for group in optimizer.param_groups:
        group["lr"] = lr

    virtual = settings.virtual_ranks is not None
    losses, samples = [], 0
    for micro in range(micro_batches):
        step_state.enter_phase("data")
        batch = job.batches.at(job.step, micro).to(job.world.device)
        if virtual:
            seed_leaf(settings.seed, 0, job.step, job.batches.leaves[micro])
        step_state.enter_phase("outside")
        loss = loss_of(model(batch.inputs), batch.targets)
        with model.accumulate() if micro < micro_batches - 1 and not virtual else nullcontext():
            model.backward(loss, samples=batch.samples)
        losses.append(loss.detach() * batch.samples)
        samples += batch.samples
    if virtual:
        seed_between_steps(settings.seed, 0, job.step)

    loop_exposed = -_loop_exposed_seconds(job)
    norm = model.clip_grad_norm_(settings.clip) if settings.clip else None
    optimizer.step()
    exposed = model.timings.exposed_seconds + loop_exposed + _loop_exposed_seconds(job)
    optimizer.zero_grad()
    job.count_bytes()
    return StepMeasurement(
        losses=losses,
        samples=samples,
        lr=lr,
        grad_norm=norm,
        seconds=time.perf_counter() - started,
        exposed_seconds=exposed,
    )


def _loop_exposed_seconds(job: TrainingJob) -> float:
    return 0.0 if job.loop is None else job.loop.exposed_seconds


def _exact_sum(values: torch.Tensor) -> float:
    """Return the sum, which does not depend on the order of the values; NaN if one is not finite."""
    return math.fsum(values.flatten().tolist()) if values.isfinite().all() else math.nan


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(job: TrainingJob, progress: TrainingProgress) -> float:
    val_loss = job.evaluate()
    progress.held_out(job.step, val_loss)
    return val_loss


def _global_measurements(job: TrainingJob, measured: StepMeasurement | None) -> dict[str, Any]:
    """Return the measurements of a step over all ranks; nothing if a rank has lost its own; collective.

    Raises:
        PacelineError: the loss is no longer finite.
    """
    own = torch.full((3 + job.most_micro_batches,), math.nan, dtype=torch.float64)
    if measured is not None:
        own[:3] = torch.tensor([measured.samples, measured.seconds, measured.exposed_seconds])
        own[3:] = 0.0
        own[3 : 3 + len(measured.losses)] = torch.stack(measured.losses).cpu()
    rows = torch.stack(gather_rows(own))
    if measured is None or rows[:, 0].isnan().any():
        return {}
    seconds, exposed = rows[:, 1], rows[:, 2]
    samples = rows[:, 0].sum().item()
    loss = _exact_sum(rows[:, 3:]) / samples
    if not math.isfinite(loss):
        raise _divergence(job, f"the loss is {loss}")
    visible = step_state.sees_waiting
    times = time_metrics(seconds, exposed if visible else torch.full_like(exposed, math.nan))
    return {
        "loss": loss,
        "lr": measured.lr,
        "grad_norm": None if measured.grad_norm is None else float(measured.grad_norm),
        "samples": round(samples),
        **times,
        "samples_per_second": samples / times["step_seconds"],
        "tokens_per_second": samples * job.size.context / times["step_seconds"],
        **({"exposed_share": min(1.0, (exposed.sum() / seconds.sum()).item())} if visible else {}),
        **job.sent_bytes.state(),
    }


def _check_finite(job: TrainingJob) -> None:
    """Raise on every rank if any rank holds a parameter that is not finite: such a state is not worth saving."""
    local = [param.to_local() if isinstance(param, DTensor) else param for param in job.model.parameters()]
    broken = sum(not torch.isfinite(param).all() for param in local)
    if sum_over_ranks(torch.tensor([float(broken)])).item():
        raise _divergence(job, "parameters are no longer finite, so no checkpoint is written")


def _divergence(job: TrainingJob, cause: str) -> PacelineError:
    return PacelineError(
        f"{cause}: training diverged",
        step=job.step,
        remedy="use a smaller --lr, or clip the gradient with --clip 1",
    )
