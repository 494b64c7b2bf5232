"""`NonFiniteGuard`: keeps the optimizer from stepping on NaN or infinite gradients, and names their source."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from typing import Any, Literal

import torch

from paceline.errors import NonFiniteGradient, UsageError, unknown
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.ddp import DistributedDataParallel
from paceline.parallel.engine.grad_norm import global_norm, note_norm
from paceline.parallel.engine.grad_scaler import skips_on_device
from paceline.parallel.engine.gradient_finite_check import FiniteCheck, LateResult, NonFiniteReport
from paceline.parallel.sharding.zero import ShardedOptimizer

__all__ = ["NonFiniteGuard"]

log = logging.getLogger("paceline.health")

_ACTIONS = ("skip", "stop")


class NonFiniteGuard:
    """Checks the synchronised gradient before every optimizer step, and prevents steps on NaN or infinity.

    It hooks onto the optimizer and wraps nothing. Every rank measures its own gradient before the reduction, so
    messages name the parameters and the ranks whose own gradient was not finite. Where the gradient is clipped by
    ``model.clip_grad_norm_``, ``source=False`` saves that measurement too.

    On a GPU the host does not wait for the result. A fused optimizer (``fused=True``) skips the update there, by
    torch's protocol for scalers, and everything else follows one step late: the counters, the warning, and the error,
    which the next ``optimizer.step()`` raises. Other optimizers can't, so each step then waits for its gradient.

    Args:
        model: the wrapped model.
        optimizer: its optimizer: one of torch's, or a `ShardedOptimizer`.
        action: ``"skip"`` drops the gradients on all ranks, so that this step changes nothing, with a warning;
            ``"stop"`` raises on all ranks, parameters and gradients untouched. (If it raises one step late, parameters
            and optimizer state are those before the bad step, and its gradients are gone.)
        in_a_row: number of consecutive skipped steps that raises as well.
        source: measure each rank's gradient from the first step on. False: only after a first gradient that was
            not finite, for which the ranks with a non-finite loss are named; until then the norm of the gradient
            decides, which clipping computes anyway.

    Raises:
        UsageError: `action` is unknown, `in_a_row` is less than 1, the model is not wrapped, or the optimizer
            belongs to another model.
        NonFiniteGradient: from ``optimizer.step()``, or from `remove` for the last step, on all ranks alike.

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
        self._skipped = 0
        self._latest: NonFiniteReport | None = None
        self._model, self._action, self._limit = model, action, in_a_row
        self._consecutive = 0
        self._unknown: deque[LateResult] = deque()  # results that decided about a step on the device
        self._flag: torch.Tensor | None = None  # that the optimizer has from this guard
        model.engine.settle_result()  # for an earlier guard
        check = model.engine.finite_check = FiniteCheck(_largest_number(model), measures=source)
        self._end = weakref.finalize(self, _report_unread, check, self._unknown)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def skipped(self) -> int:
        """Number of skipped steps; a GPU is waited for."""
        late = self._late_reports() if self._action == "skip" else []
        return self._skipped + sum(report is not None for report in late)

    @property
    def latest(self) -> NonFiniteReport | None:
        """Report on the latest gradient that was not finite, None before the first; a GPU is waited for."""
        found = [report for report in self._late_reports() if report is not None]
        return found[-1] if found else self._latest

    def remove(self) -> None:
        """Stop checking.

        Raises:
            NonFiniteGradient: for the last step, if a GPU reports it only now.
        """
        engine = self._model.engine
        for hook in self._hooks:
            hook.remove()
        if engine.finite_check is not None and engine.finite_check.unread in self._unknown:
            engine.settle_result()
        engine.finite_check = None
        self._end.detach()
        self._act_on_settled()

    def _late_reports(self) -> list[NonFiniteReport | None]:
        """Return what is known of steps that were decided about on the device; one rank may call this alone."""
        engine = self._model.engine
        unread = None if engine.finite_check is None else engine.finite_check.unread
        return [engine.unread_report() if late is unread else late.report for late in self._unknown]

    def _act_on_settled(self) -> None:
        """Count steps that were skipped on the device, and raise if it must."""
        while self._unknown and self._unknown[0].settled:
            self._act(self._unknown.popleft().report)

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
        self._act_on_settled()
        self._after_step(optimizer)  # of a step that raised
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler makes this optimizer skip the step
        check = engine.finite_check
        if check is not None and check.present is not None and engine.non_finite is None:
            if _skips_on_device(optimizer):
                self._unknown.append(check.present)
                self._flag = optimizer.found_inf = check.present.found_inf  # type: ignore[attr-defined]
                return
            engine.settle_result() if engine.local_only else engine.settle()
        elif check is not None and not check.measures and engine.non_finite is None and check.norm is None:
            note_norm(engine, global_norm(engine))  # no clipping has computed it
        self._act(engine.non_finite)
        if engine.non_finite is not None:
            engine.drop()
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._flag is not None and getattr(optimizer, "found_inf", None) is self._flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._flag = None

    def _act(self, report: NonFiniteReport | None) -> None:
        """Count a step that is skipped, or raise; `report` is None if the gradient is finite."""
        if report is None:
            self._consecutive = 0
            return
        engine = self._model.engine
        self._latest = report
        if engine.finite_check is not None:
            engine.finite_check.measures = True  # so that the next report names its source
        if self._action == "stop":
            raise _error(report, "")
        self._skipped += 1
        self._consecutive += 1
        count = self._consecutive
        if count >= self._limit:
            raise _error(report, f", the {count}th step in a row" if count > 3 else f", {count} in a row")
        if engine.comm.rank == 0 or engine.local_only:
            log.warning("step %d is skipped: %s (%d in a row)", report.step, report, count)


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.skips_on_device
    return skips_on_device(optimizer)


def _report_unread(check: FiniteCheck, unknown: deque[LateResult]) -> None:
    """Log that the last step was skipped on the device, when its guard ends before anything has read that."""
    if check.unread in unknown and (report := check.read()) is not None:
        names = ", ".join(report.names[:3]) + (", …" if len(report.names) > 3 else "")
        log.warning("step %d, the last one, is skipped: the gradient of %s is not finite", report.step, names)


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
