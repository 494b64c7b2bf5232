"""`NonFiniteGuard`: keeps the optimizer from stepping on NaN or infinite gradients, and names their source."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import torch

from paceline.errors import NonFiniteGradient, UsageError, unknown
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.ddp import DistributedDataParallel
from paceline.parallel.engine.grad_norm import global_norm, note_norm
from paceline.parallel.engine.gradient_finite_check import FiniteCheck, NonFiniteReport

__all__ = ["NonFiniteGuard"]

log = logging.getLogger("paceline.health")

_ACTIONS = ("skip", "stop")


class NonFiniteGuard:
    """Checks the synchronised gradient before every optimizer step, and prevents steps on NaN or infinity.

    It hooks onto the optimizer and wraps nothing. Every rank measures its own gradient before the reduction, so
    messages name the parameters and the ranks whose own gradient was not finite. Where the gradient is clipped by
    ``model.clip_grad_norm_``, ``source=False`` saves that measurement too.

    Args:
        model: the wrapped model.
        optimizer: its optimizer: one of torch's, or a `ShardedOptimizer`.
        action: ``"skip"`` drops the gradients on all ranks, so that this step changes nothing, with a warning;
            ``"stop"`` raises on all ranks, parameters and gradients untouched.
        in_a_row: number of consecutive skipped steps that raises as well.
        source: measure each rank's gradient from the first step on. False: only after a first gradient that was
            not finite, for which the ranks with a non-finite loss are named; until then the norm of the gradient
            decides, which clipping computes anyway.

    Attributes:
        skipped: number of skipped steps.
        latest: report on the latest gradient that was not finite; None before the first.

    Raises:
        UsageError: `action` is unknown, `in_a_row` is less than 1, the model is not wrapped, or the optimizer
            belongs to another model.
        NonFiniteGradient: from ``optimizer.step()``, on all ranks alike.

    Example:
        >>> guard = NonFiniteGuard(model, optim, "skip", in_a_row=5)
    """

    def __init__(
        self,
        model: DataParallel | DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        action: Literal["skip", "stop"] = "skip",
        *,
        in_a_row: int = 10,
        source: bool = True,
    ) -> None:
        if action not in _ACTIONS:
            raise unknown("action", action, _ACTIONS)
        if not isinstance(in_a_row, int) or in_a_row < 1:
            raise UsageError(f"in_a_row={in_a_row!r} is not a number of steps", remedy="pass 1 or more")
        check_optimizer_owned("NonFiniteGuard", model, optimizer)
        self.skipped = 0
        self.latest: NonFiniteReport | None = None
        self._model, self._action, self._limit = model, action, in_a_row
        self._consecutive = 0
        model.engine.finite_check = FiniteCheck(_largest_number(model), measures=source)
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Stop checking."""
        self._hook.remove()
        self._model.engine.finite_check = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        engine = self._model.engine
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UsageError(
                "NonFiniteGuard can't check a gradient that step(closure) computes",
                rank=engine.comm.rank,
                step=engine.step,
                remedy="run backward before step(), without a closure",
            )
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler makes this optimizer skip the step
        check = engine.finite_check
        if check is not None and not check.measures and engine.non_finite is None and check.norm is None:
            note_norm(engine, global_norm(engine))  # no clipping has computed it
        if engine.non_finite is None:
            self._consecutive = 0
            return
        self.latest = engine.non_finite
        if check is not None:
            check.measures = True  # so that the next report names its source
        if self._action == "stop":
            raise _error(self.latest, "")
        self.skipped += 1
        self._consecutive += 1
        count = self._consecutive
        if count >= self._limit:
            raise _error(
                self.latest, f", the {count}th step in a row" if count > 3 else f", {count} in a row"
            )
        if engine.comm.rank == 0 or engine.local_only:
            log.warning("step %d is skipped: %s (%d in a row)", self.latest.step, self.latest, count)
        engine.drop()
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None


def _largest_number(model: DataParallel | DistributedDataParallel) -> float:
    """Return the smallest maximum of the dtypes that gradients are stored or reduced in."""
    dtypes = {param.dtype for param in model.parameters() if param.requires_grad}
    dtypes |= {model.engine.reduce_dtype} - {None}
    return min((torch.finfo(dtype).max for dtype in dtypes if dtype is not None), default=math.inf)


def _error(report: NonFiniteReport, suffix: str) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"{report}{suffix}",
        rank=report.ranks[0] if report.ranks else None,
        step=report.step,
        remedy="inspect that rank's batch and loss; else lower the learning rate, or clip the gradient",
    )
