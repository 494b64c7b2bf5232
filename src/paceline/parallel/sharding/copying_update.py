"""Updates of ranks that keep copies of their right neighbours' shards, for live recovery.

Each rank updates its own part and the copy by the same optimizer; both lie in the model's buckets. An update whose
confirmation fails is *held*: it waits for a decision (see [Note: confirmation] in `neighbour_exchange`). The optimizer
keeps what it needs, and parameters raise where they are used, so that the program can end its step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.parallel.buckets.neighbour_exchange import NeighbourExchange
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.sharding.optimizer_probe import group_options
from paceline.parallel.sharding.sharded_layout import ShardedLayout
from paceline.parallel.sharding.update_groups import UpdateGroup, copied, take_over

__all__ = ["CopyingUpdate", "HeldUpdate"]


class _FailedGather:
    """A gather that raises where it is waited for.

    Args:
        error: what it raises.
    """

    def __init__(self, error: Exception) -> None:
        self.ended: float | None = None
        self._error = error

    def poll(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Raise the error."""
        raise self._error


class HeldUpdate:
    """An update of loaded groups that has not been applied.

    Args:
        groups: the groups.
        args, kwargs: of the optimizer's ``step``.
    """

    def __init__(self, groups: Sequence[UpdateGroup], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._groups, self._args, self._kwargs = groups, args, kwargs

    @torch.no_grad()
    def apply(self, outer: Sequence[dict[str, Any]]) -> None:
        """Update parameters and state.

        Args:
            outer: parameter groups of the `ShardedOptimizer`, which get what the optimizer changes in its own; what
                the program has set meanwhile stays.
        """
        seen: set[int] = set()
        for group in self._groups:
            before = {index: copied(group_options(mine)) for index, mine in group.param_groups()}
            group.run(self._args, self._kwargs)
            for index, mine in group.param_groups():
                if index not in seen:
                    seen.add(index)
                    now = group_options(mine)
                    take_over(
                        outer[index], {k: v for k, v in now.items() if not _same(v, before[index].get(k))}
                    )


class CopyingUpdate(ShardedLayout):
    """The part of `ShardedOptimizer` that keeps a copy of the right neighbour's shard.

    Attributes:
        held: an update that waits for a decision; None: there is none.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.held: HeldUpdate | None = None
        super().__init__(params, defaults)

    def keep_copy(self) -> None:
        """Keep a copy of the right neighbour's shard from now on, where there are shards.

        All ranks call this, between two steps, for all optimizers of a model.
        """
        own = self._gather() if self._reducer is not None and self._groups else None
        self._engine.keep_copies()
        if own is not None:  # the next step builds the copy
            self._loaded, self._loaded_everywhere, self._groups = own, True, []

    def _update_with_copy(
        self, reducer: Reducer, neighbours: NeighbourExchange, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Update the own part and the copy of the neighbour's, once all ranks hold the sums of both; send the own part.

        From the confirmation on this raises no error of other ranks: parameters do where they are used.
        """
        if self.held is not None:  # of the same gradients
            return
        groups, gather = self._groups[::-1], reducer.parameter_gather
        if reducer.readopt_parameters():
            for group in groups:
                group.follow_buckets()
        flats = [flat for group in groups for flat in group.flats()]
        if not neighbours.is_decided(reducer.step):
            gather.wait_for(flats)
            for each in reducer.consumers.optimizers:  # a collective, which must not come between two updates
                if isinstance(each, CopyingUpdate) and each._must_build(reducer):
                    each._build()
            reducer.note_waiting(reducer.launch_queue.wait_all())
        options = [group_options(group) for group in self.param_groups]
        error = neighbours.confirm(reducer.step)
        for group in groups:
            group.load(options)
        if error is not None:
            self.held = HeldUpdate(groups, args, kwargs)
            for flat in flats:
                gather.add(flat, _FailedGather(error))
        else:
            for group in groups:
                group.run(args, kwargs)
            self._keep_group_state(groups)
            self._check_states_of_copies(neighbours, groups)
            self._gather_others(reducer, neighbours, flats)
        reducer.consume(self)
        with contextlib.suppress(Exception):  # what failed raises later: at the latest in the next backward
            gather.leave_in_flight()

    def _gather_others(
        self, reducer: Reducer, neighbours: NeighbourExchange, flats: Sequence[torch.Tensor]
    ) -> None:
        """Start gathering what neither this rank nor its copy has updated; a failure raises where it is used."""
        comm, gather, timings = reducer.comm, reducer.parameter_gather, reducer.timings
        recorder = step_state.recorder_of(comm)
        if comm.size == 2 or neighbours.local:
            return
        others = (comm.shards - 2) / comm.shards
        for flat in flats:
            started = time.perf_counter()
            try:
                pending = neighbours.all_gather(flat)
            except Exception as error:  # noqa: BLE001 - the update is applied
                gather.add(flat, _FailedGather(error))
                continue
            if recorder is not None:
                recorder.launched("gather", gather.launched, flat.nbytes, flat.nbytes * others, None, started)
            gather.add(flat, pending)
            timings.calls += 1
            timings.nbytes += flat.nbytes
            timings.sent_nbytes += flat.nbytes * others

    def _check_states_of_copies(self, neighbours: NeighbourExchange, groups: Sequence[UpdateGroup]) -> None:
        """Check the states once per build, as without copies, but go on if ranks are gone."""
        if self._states_checked or neighbours.local:
            return
        try:
            self._check_states(groups)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001 - the update is applied
            self._states_checked = True

    @property
    def divided(self) -> bool:
        """Whether ranks hold different parts of the state, as from the first step on where there are shards."""
        return self._reducer is not None and bool(self._groups)

    def _must_build(self, reducer: Reducer) -> bool:
        """Return whether its first step builds its groups."""
        built = bool(self._groups) or self._needs_arguments
        return not built and reducer.consumers.taken_over(self) is None

    # ------------------------------------------------------------------ a step that others have not ended

    def end_step(self) -> None:
        """Update without other ranks if the confirmation of this round was called, and this has not updated since."""
        reducer = self._reducer
        if reducer is None or (neighbours := reducer.neighbours) is None or self.held is not None:
            return
        decided = reducer.has_result and neighbours.is_decided(reducer.step)
        if decided and any(slot.used for slot in reducer.consumers.slots_of(self)):
            neighbours.local = True
            self.step()

    def apply_held(self) -> None:
        """Apply the update that is held."""
        held, self.held = self.held, None
        if held is not None:
            self._engine.parameter_gather.abandon()
            held.apply(self.param_groups)

    def discard_held(self) -> None:
        """Give up the update that is held."""
        self.held = None


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and one == other
