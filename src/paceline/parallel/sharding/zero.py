"""`ShardedOptimizer`: every rank updates a part of the parameters and gathers the rest (ZeRO-1).

    backward                      step(), one group of buckets after another              next forward
    reduce-scatter per bucket  →  wait for its buckets → update own part → all-gather  →  wait where a bucket is used

Optimizer state exists for the own part only: 1/N of the memory, and the update takes 1/N of the time (Rajbhandari et
al., ZeRO, arXiv 1910.02054 §5.1). Trying the optimizer shows how parameters may be divided (`optimizer_probe`):

- An elementwise one, such as AdamW, updates flat shards that cut through parameters: a new number depends on that
  number's own history only.
- Others, such as Muon, Shampoo or LARS, need whole parameters. Every parameter then has an owner, lies wholly in the
  owner's part of its bucket, and only the owner has its state. The collectives are the same.
- One whose update of a parameter depends on other parameters is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.parallel.engine.grad_scaler import hand_on_scale, skips_on_device
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.unsynchronised_step_guard import ConsumesShards
from paceline.parallel.sharding.blocks import Split
from paceline.parallel.sharding.copying_update import CopyingUpdate
from paceline.parallel.sharding.optimizer_probe import check_options, group_options
from paceline.parallel.sharding.optimizer_resharding import Shards
from paceline.parallel.sharding.update_units import StatePrecision

__all__ = ["ShardedOptimizer"]

_Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.nn.Parameter]]


class WrappedModel(Protocol):
    """A `paceline.DataParallel`, as its optimizer sees it."""

    @property
    def engine(self) -> Reducer: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


class ShardedOptimizer(CopyingUpdate, ConsumesShards):
    """Runs a torch optimizer on this rank's part of a `DataParallel` model.

    If the model's strategy shards nothing, it is that optimizer on all parameters, so a program need not change with
    the strategy. Learning-rate schedulers, parameter groups and closures work as with any torch optimizer. Several of
    them may update different parameters of a model. ``step()`` consumes the gradients: a sharded model starts the next
    backward from zero even without ``zero_grad()``.

    Args:
        model: the `DataParallel`.
        optimizer: the class, for example ``torch.optim.AdamW`` or ``torch.optim.Muon``.
        params: parameters or groups, as for any torch optimizer; None: all trainable ones. See `matrix_parameters`.
        split: for an optimizer of whole matrices, parameters that are several matrices: by pattern of their names (as
            of ``fnmatch``), the number of equal blocks along dimension 0, or the rows of each block. Of a parameter
            [experts, m, n], a block of one expert is a matrix [m, n].
        master_dtype: dtype of a copy of parameters with fewer bits, such as bfloat16, which is updated in their place,
            and of the state; each rank has the copy of its own part. None: parameters themselves are updated.
        stochastic_rounding: round a float32 master to bfloat16 up or down at random, so that the mean is kept; not to
            the nearest.
        offload: keep the state, and a copy of the own part of the parameters, in the memory of the CPU.
        options: passed to `optimizer`: ``lr``, ``betas``, ``fused`` …

    Raises:
        UsageError: `optimizer` is not a class, its update of a parameter depends on others or it rejects the options,
            parameters are not the model's, or `split` fits no parameter.
        TypeError, ValueError: `params` are not parameters, or there are none, as with any torch optimizer.

    Example:
        >>> matrices, rest = paceline.matrix_parameters(model)
        >>> muon = ShardedOptimizer(model, torch.optim.Muon, matrices, lr=0.02)
        >>> adamw = ShardedOptimizer(model, torch.optim.AdamW, rest, lr=3e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        model: WrappedModel,
        optimizer: type[torch.optim.Optimizer],
        params: _Params | None = None,
        *,
        split: Split | None = None,
        master_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        offload: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(getattr(model, "engine", None), Reducer):
            raise UsageError(
                f"ShardedOptimizer({type(model).__name__}, ...)",
                remedy="wrap the model: paceline.DataParallel(model)",
            )
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            kind = getattr(optimizer, "__name__", type(optimizer).__name__)
            raise UsageError(
                f"ShardedOptimizer(model, {kind}, ...): that is not an optimizer class",
                remedy="pass the class and its options: ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)",
            )
        self._engine = model.engine
        self._class, self._options = optimizer, options
        self._precision = StatePrecision(master_dtype, stochastic_rounding, offload)
        self._rows = {}
        self._expected: list[list[dist.Work]] = []  # receives of the other shards, posted before the update
        defaults = check_options(optimizer, options)
        given = params if params is not None else [p for p in model.parameters() if p.requires_grad]
        super().__init__(cast(Any, given), defaults)
        self._check_split(split)
        self._check_accepted(self.param_groups)
        self._register()
        self._choose_layout()
        if self._engine.tuner is not None:
            self._engine.tuner.attach(self)

    @property
    def can_shard(self) -> bool:
        """Whether ranks may update different parameters, or parts of them."""
        return not self._probe.refusal

    @property
    def skips_on_device(self) -> bool:
        """Whether ``step()`` changes nothing where ``found_inf`` is 1, without the host reading it; not on CPUs."""
        if self._engine.device.type == "cpu":
            return False
        if self._plain is not None:
            return skips_on_device(self._plain)
        return bool(self._groups) and all(group.skips_on_device() for group in self._groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As `skips_on_device`, for scalers."""
        return self.skips_on_device

    # ------------------------------------------------------------------ parameters and layout

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, at any time; all ranks must call this.

        Raises:
            UsageError: a parameter is not one of the model's, or the group's options make the optimizer one that can't
                update parts of parameters.
        """
        if self._plain is not None:
            self._plain.add_param_group(param_group)  # its groups are this one's
        else:
            super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            if self._registered:  # not from torch's constructor
                self._check_accepted(self.param_groups[-1:])
                self._register()
        except UsageError:
            del self.param_groups[-1]
            raise
        if self._groups:  # the next step builds them anew, and may deal matrices to other owners
            own = self.held_shards() if self._reducer is not None else self._gather()
            self._loaded, self._loaded_everywhere = own, self._reducer is None
            self._groups, self._exchanges = [], []
        self._consolidated = None

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's part with the synchronised gradients and gather the other ranks' parts.

        The gathers may still be in flight when this returns. Every function of torch's that uses a parameter waits for
        it; see `DataParallel.wait_for_parameters`.

        Args:
            closure: evaluates the model again and returns the loss, as for torch's optimizers.
            kwargs: passed to the optimizer's ``step``, which if sharded is called once per group of buckets.

        Returns:
            The closure's result, or None.
        """
        self._consolidated = None
        self._refuse_taken_over()
        if self._plain is not None:
            with hand_on_scale(self, [self._plain]):
                result = (
                    self._plain.step(**kwargs) if closure is None else self._plain.step(closure, **kwargs)
                )
            if self._engine.tuner is not None:
                self._engine.consume(self)  # as when sharded: a program must not depend on the chosen plan
            return result
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._engine.unsynced:
            self._engine.synchronise()
        if self._ready_to_build:  # otherwise no backward has run: nothing to update
            if self._needs_arguments:
                self._try_with(kwargs)
            if not self._groups:
                self._build()
            inner = [group.optimizer for group in self._groups if group.optimizer is not None]
            args = () if closure is None else (lambda: result,)
            with hand_on_scale(self, inner), torch.no_grad():
                if self._reducer is not None:
                    try:
                        self._update_shards(self._reducer, args, kwargs)
                    except BaseException:  # what was launched is in flight, and may be used
                        self._reducer.parameter_gather.watch()
                        raise
                else:
                    self._update_here(args, kwargs)
        return result

    def _refuse_taken_over(self) -> None:
        """Raise if an optimizer that was built later updates one of the parameters, too."""
        taken = self._engine.consumers.taken_over(self)
        if taken is not None:
            name = next(name for name, param in self._engine.named_parameters() if id(param) == taken)
            raise UsageError(
                f"parameter {name!r} is updated by two optimizers",
                rank=self._engine.comm.rank,
                step=self._engine.step,
                remedy="pass each parameter to one of them, and use the one that was built last",
            )

    def _try_with(self, arguments: dict[str, Any]) -> None:
        """Try the optimizer again, with arguments of its ``step``; all ranks find the same."""
        self._step_arguments = arguments
        self._probes.clear()
        for group in self.param_groups:
            self._check_group(group, in_step=True)
        self._needs_arguments = False

    def _update_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Update blocks where the engine leaves whole gradients, or rows of them (FSDP2)."""
        options = [group_options(group) for group in self.param_groups]
        for exchange in self._exchanges:
            exchange.gather()
        for group in self._groups:
            group.update(options, args, kwargs)
        for exchange in self._exchanges:
            exchange.scatter()
        self._keep_group_state(self._groups)
        if self._engine.tuner is not None:
            self._engine.consume(self)

    def _update_shards(self, reducer: Reducer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Per group: wait for the sums, update the own part, send it; the other ranks' parts are left in flight.

        Buckets fill in backward's order, so the last one holds what the next forward uses first: it is sent first.
        While it is still being reduced, others are updated, and sent in their turn.
        """
        if reducer.neighbours is not None:
            self._update_with_copy(reducer, reducer.neighbours, args, kwargs)
            return
        moved = reducer.readopt_parameters()
        groups, gather = self._groups[::-1], reducer.parameter_gather
        if moved:
            for group in groups:
                group.follow_buckets()
        flats = [flat for group in groups for flat in group.flats()]
        gather.wait_for(flats)
        if not self._expected:  # else posted by an update that raised
            self._expected = [reducer.comm.post_part_receives(flat) for flat in flats]
        first = groups[-1:] if self._probe.whole else groups[:0:-1]  # a matrix takes longer than the last sum
        waiting = [group for group in groups if group not in first]
        exposed = 0.0
        recorder = step_state.recorder_of(reducer.comm)
        others = (reducer.comm.shards - 1) / reducer.comm.shards
        expected = iter(self._expected)
        options = [group_options(group) for group in self.param_groups]
        for group in first:
            exposed += sum(reducer.launch_queue.wait_for(bucket) for bucket in group.buckets)
            group.update(options, args, kwargs)
        for group in groups:
            if group in waiting:
                exposed += sum(reducer.launch_queue.wait_for(bucket) for bucket in group.buckets)
                group.update(options, args, kwargs)
            for flat in group.flats():
                launched = time.perf_counter()
                pending = reducer.comm.all_gather(flat, next(expected))
                if recorder is not None:
                    sent = flat.nbytes * others
                    recorder.launched("gather", gather.launched, flat.nbytes, sent, None, launched)
                gather.add(flat, pending)
        self._expected = []
        self._keep_group_state(groups)
        timings, nbytes = reducer.timings, sum(flat.nbytes for flat in flats)
        timings.calls += len(flats)
        timings.nbytes += nbytes
        timings.sent_nbytes += nbytes * others
        reducer.note_waiting(exposed)
        reducer.consume(self)
        if not self._states_checked:
            self._check_states(groups)
        gather.leave_in_flight()

    def rejoin(self, model: WrappedModel, state: Shards | None = None) -> None:
        """Continue with a model that has rejoined; all ranks call this.

        Args:
            model: the model.
            state: the whole state of every parameter; None: every rank has it.
        """
        state = self._gather() if state is None else state
        self._engine, self._expected, self._exchanges = model.engine, [], []
        self._registered = False
        self._register()
        self.resume_state(state)

    # ------------------------------------------------------------------ the rest

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters; buckets stay allocated."""
        if self._reducer is not None:
            self._reducer.consume(self)
        super().zero_grad(set_to_none)

    @property
    def replica(self) -> int:
        """Which of the copies of its shards this rank holds; of those of one shard, number 0 writes checkpoints."""
        return self._engine.comm.replica

    @property
    def movable(self) -> bool:
        """Whether the state can move to another layout now: not before loaded shards were used."""
        return super().movable and not self._expected

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` is this one, or the one that updates whole parameters for it."""
        return optimizer is self or optimizer is self._plain
