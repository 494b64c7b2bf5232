"""What merges brought on all ranks: counted, logged, raised, at once or, on an accelerator, one local step later.

[Note: results of an accelerator] Where collectives are ordered on a stream, the host waits for none of them in a step.
It reads the result of a merge after the next local step: who was left out, and whether a rank's model has changed. A
rank that was left out has made that step with an optimizer state that is not finite. So then it drops the state, takes
θ' once more and goes on without that step. A rank whose model has changed has weight 0 until all ranks raise.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch

from paceline.errors import SyncError
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd.model_fragment import ModelFragment
from paceline.parallel.local_sgd.sync_result import SyncResult
from paceline.parallel.local_sgd.synchronised_model import CHANGE_REMEDY
from paceline.parallel.sharding.zero import ShardedOptimizer

__all__ = ["MergeResults"]

log = logging.getLogger("paceline.parallel")


class MergeResults:
    """The results of merges, as the host knows them.

    Args:
        user: class of the outer loop, for messages.
        comm: the ranks.
        optimizer: the inner one.
        fragments: of the model.

    Attributes:
        rejected: per rank, how often its pseudo-gradient was not finite.
        change: what has changed in the model or optimizer of this rank, if anything.
    """

    def __init__(
        self, user: str, comm: Comm, optimizer: torch.optim.Optimizer, fragments: Sequence[ModelFragment]
    ) -> None:
        self._user, self._comm, self._optimizer, self._fragments = user, comm, optimizer, fragments
        self._unread: deque[tuple[int, int]] = deque()  # fragment, step of the merge
        self.rejected: dict[int, int] = {}
        self.change = ""

    def forget_unread(self) -> None:
        """Read no result of an earlier block."""
        self._unread.clear()

    def read_later(self, fragment: int, step: int) -> None:
        """Register a merge after local step `step` whose result only the device knows yet."""
        self._unread.append((fragment, step))

    def read(self) -> list[int]:
        """Read the registered results; return the fragments of this rank that were left out.

        Raises:
            SyncError: see `raise_if_changed`.
        """
        left_out = []
        while self._unread:
            number, step = self._unread.popleft()
            result = self._fragments[number].read_result()
            self.raise_if_changed(result, step)
            if self.note(result, number, step):
                self._fragments[number].take_shared()
                left_out.append(number)
        return left_out

    def note(self, result: SyncResult, number: int, step: int) -> bool:
        """Count and log what was left out; return whether it was this rank's, whose optimizer state is then dropped."""
        for rank in result.rejected:
            self.rejected[rank] = self.rejected.get(rank, 0) + 1
        if result.rejected and self._comm.rank == 0:
            log.warning(
                "step %d: the pseudo-gradient of rank %s is NaN or infinite and was left out",
                step,
                ", ".join(map(str, result.rejected)),
            )
        mine = self._comm.rank in result.rejected
        if mine:
            self._reset_optimizer(self._fragments[number], step)
        return mine

    def raise_if_changed(self, result: SyncResult, step: int) -> None:
        """Raise, on all ranks, if the model or optimizer of one can no longer be synchronised.

        Raises:
            SyncError: naming that rank, and on it the change.
        """
        if not result.changed:
            return
        mine = self._comm.rank in result.changed
        raise SyncError(
            f"{self._user}: {self.change if mine else 'its model or optimizer has changed'}",
            rank=self._comm.rank if mine else result.changed[0],
            step=step,
            remedy=CHANGE_REMEDY,
        )

    def _reset_optimizer(self, fragment: ModelFragment, step: int) -> None:
        """Log which parameters of this rank were not finite, and drop the optimizer state computed from them."""
        bad = fragment.bad_names
        log.warning(
            "rank %d, step %d: %s is NaN or infinite; this rank takes the other ranks' parameters",
            self._comm.rank,
            step,
            ", ".join(map(repr, bad[:3])) + (", …" if len(bad) > 3 else ""),
        )
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.forget_state()
        for _, param in fragment.params:
            self._optimizer.state.pop(param, None)
