"""`NonFiniteGuard`: an optimizer never steps on a gradient that is NaN or infinite, and the rank it came from is named.

What is found where is told in `finite_check`. This is what becomes of it: a hook before the optimizer's step, the
same on all ranks since all know the same.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import torch

from paceline.errors import NonFiniteGradient, UsageError, unknown
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.engine.finite_check import FiniteCheck, NonFiniteReport
from paceline.parallel.engine.grad_norm import global_norm, note_norm

__all__ = ["NonFiniteGuard"]

log = logging.getLogger("paceline.parallel")

_ACTIONS = ("skip", "stop")


class NonFiniteGuard:
    """Looks at the synchronised gradient before every optimizer step, and lets none through that is not finite.

    It hooks onto the optimizer and wraps nothing. Every rank measures what it brings to the sum, so the message
    names the parameters and the ranks whose own gradient was NaN or infinite. Where the gradient is clipped by
    ``model.clip_grad_norm_``, ``source=False`` saves even that.

    Args:
        model: the wrapped model.
        optimizer: its optimizer: a torch one, or `ShardedOptimizer`.
        action: ``"skip"`` drops the gradients on all ranks, so that this step changes nothing, with a warning;
            ``"stop"`` raises on all ranks, parameters and gradients untouched.
        in_a_row: so many skipped steps, one after another, raise all the same.
        source: measure what each rank brings from the first step on; False: only after a first gradient that was
            not finite, of which the ranks are named whose loss was not; until then the norm of the gradient tells,
            which clipping computes anyway.

    Attributes:
        skipped: steps skipped so far.
        latest: what was wrong with the latest gradient that was not finite, None before there was one.

    Raises:
        UsageError: `action` is unknown, `in_a_row` is less than 1, the model is not wrapped, or the optimizer
            is another model's.
        NonFiniteGradient: from ``optimizer.step()``, on every rank alike.

    Example:
        >>> finite = NonFiniteGuard(model, optim, "skip", in_a_row=5)
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer,
        action: Literal["skip", "stop"] = "skip",
        *,
        in_a_row: int = 10,
        source: bool = True,
    ) -> None:
        if action not in _ACTIONS:
            raise unknown("action", action, _ACTIONS)
        if not isinstance(in_a_row, int) or in_a_row < 1:
            raise UsageError(f"in_a_row={in_a_row!r} is no number of steps", remedy="give 1 or more")
        check_optimizer_owned("Finite", model, optimizer)
        self.skipped = 0
        self.latest: NonFiniteReport | None = None
        self._model, self._action, self._most = model, action, in_a_row
        self._row = 0
        model.engine.finite_check = FiniteCheck(_largest(model), measures=source)
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Look no more."""
        self._hook.remove()
        self._model.engine.finite_check = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        engine = self._model.engine
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            raise UsageError(
                "Finite can't look at a gradient that step(closure) computes",
                rank=engine.comm.rank,
                step=engine.step,
                remedy="run backward before step(), without a closure",
            )
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler has this optimizer skip the step by itself
        finite_check = engine.finite_check
        if (
            finite_check is not None
            and not finite_check.measures
            and engine.non_finite is None
            and finite_check.norm is None
        ):
            note_norm(engine, global_norm(engine))  # nobody clipped
        if engine.non_finite is None:
            self._row = 0
            return
        self.latest = engine.non_finite
        if finite_check is not None:
            finite_check.measures = True  # the next one's source is to be known
        if self._action == "stop":
            raise _error(self.latest, "")
        self.skipped += 1
        self._row += 1
        row = self._row
        if row >= self._most:
            raise _error(self.latest, f", the {row}th step in a row" if row > 3 else f", {row} in a row")
        if engine.comm.rank == 0 or engine.local_only:
            log.warning("step %d is skipped: %s (%d in a row)", self.latest.step, self.latest, row)
        engine.drop()
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None


def _largest(model: DataParallel) -> float:
    """Return the largest number of all dtypes that the model's gradients are kept in."""
    kinds = {param.dtype for param in model.parameters() if param.requires_grad}
    kinds |= {model.engine.reduce_dtype} - {None}
    return min((torch.finfo(kind).max for kind in kinds if kind is not None), default=math.inf)


def _error(broken: NonFiniteReport, more: str) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"{broken}{more}",
        rank=broken.ranks[0] if broken.ranks else None,
        step=broken.step,
        remedy="look at that rank's batch and loss; else a smaller learning rate, or clip the gradient",
    )
