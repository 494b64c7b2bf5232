"""`ShardedOptimizer`: every rank updates 1/N of the parameters and gathers the rest (ZeRO-1).

    backward                      step(), one group of buckets after another
    reduce-scatter per bucket  →  wait for its buckets  →  update own shard  →  all-gather, overlaps the next group

Optimizer state exists for the own shard only: 1/N of the memory, and the update takes 1/N of the time (Rajbhandari et
al., ZeRO, arXiv 1910.02054 §5.1). Shards cut through parameters, so the update must be elementwise: a new number may
depend on that number's own history only. This is checked by trying the optimizer (`optimizer_probe`).
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.cost_model.bucket_assignment import update_parts
from paceline.errors import UsageError
from paceline.parallel.buckets.grad_slot import ShardPiece, storage_numel
from paceline.parallel.engine.grad_scaler import hand_on_scale, skips_on_device
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.unsynchronised_step_guard import ConsumesShards
from paceline.parallel.sharding import optimizer_resharding
from paceline.parallel.sharding.bucket_group import (
    BucketGroup,
    copied,
    on_device,
    saved_options,
    take_over,
    zero_with_grad,
)
from paceline.parallel.sharding.optimizer_probe import (
    OptimizerProbe,
    check_options,
    group_options,
    probe_optimizer,
    takes_arguments,
)
from paceline.parallel.sharding.optimizer_resharding import Shards, StateOf
from paceline.world.accelerator import has_streams

__all__ = ["ShardedOptimizer"]

_Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.nn.Parameter]]


class WrappedModel(Protocol):
    """A `paceline.DataParallel`, as its optimizer sees it."""

    @property
    def engine(self) -> Reducer: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


class ShardedOptimizer(torch.optim.Optimizer, ConsumesShards):
    """Runs any elementwise torch optimizer on this rank's shard of a `DataParallel` model.

    If the model's strategy shards nothing, or shards the parameters themselves, it is that optimizer on all of them, so
    a program need not change with the strategy. Learning-rate schedulers, parameter groups and closures work as with
    any torch optimizer. ``step()`` consumes the gradients: a sharded model starts the next backward from zero even
    without ``zero_grad()``.

    Args:
        model: the `DataParallel`.
        optimizer: the class, for example ``torch.optim.AdamW``.
        params: parameters or groups, as for any torch optimizer; None: all trainable ones.
        options: passed to `optimizer`: ``lr``, ``betas``, ``fused`` …

    Raises:
        UsageError: `optimizer` is not a class, is not elementwise or rejects the options, or parameters are not the
            model's.
        TypeError, ValueError: `params` are not parameters, or there are none, as with any torch optimizer.

    Example:
        >>> optim = ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        model: WrappedModel,
        optimizer: type[torch.optim.Optimizer],
        params: _Params | None = None,
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
        self._whole: torch.optim.Optimizer | None = None
        self._groups: list[BucketGroup] = []
        self._states_checked = False
        self._loaded: Shards = {}
        self._consolidated: dict[str, Any] | None = None
        self._expected: list[list[dist.Work]] = []  # receives of the other shards, posted before the update
        self._probes: dict[str, OptimizerProbe] = {}
        self._step_arguments: dict[str, Any] = {}  # of the trials
        self._needs_arguments = False  # a trial without them failed
        defaults = check_options(optimizer, options)
        given = params if params is not None else [p for p in model.parameters() if p.requires_grad]
        super().__init__(cast(Any, given), defaults)
        if self._reducer is None:
            self._update_whole()
        if self._engine.tuner is not None:
            self._engine.tuner.attach(self)

    @property
    def _reducer(self) -> Reducer | None:
        """The engine, if it leaves each rank a shard of the gradients."""
        return self._engine if self._engine.sharded else None

    @property
    def can_shard(self) -> bool:
        """Whether the optimizer is elementwise, so that it may update parts of parameters."""
        return not self._probe.refusal

    @property
    def skips_on_device(self) -> bool:
        """Whether ``step()`` changes nothing where ``found_inf`` is 1, without the host reading it; not on CPUs."""
        if self._engine.device.type == "cpu":
            return False
        if self._whole is not None:
            return skips_on_device(self._whole)
        return bool(self._groups) and all(group.skips_on_device() for group in self._groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As `skips_on_device`, for scalers."""
        return self.skips_on_device

    @property
    def _probe(self) -> OptimizerProbe:
        """What trying the optimizer with the options of every group has shown."""
        return reduce(or_, map(self._probe_of, self.param_groups))

    def _probe_of(self, group: Mapping[str, Any]) -> OptimizerProbe:
        options = {key: value for key, value in sorted(group_options(group).items()) if key != "lr"}
        known = self._probes.get(repr(options))
        if known is None:
            known = probe_optimizer(
                self._class, self._options, group, self._engine.device, self._step_arguments
            )
            self._probes[repr(options)] = known
        return known

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, at any time; all ranks must call this.

        Raises:
            UsageError: a parameter is not one of the model's, or the group's options make the optimizer one that can't
                update parts of parameters.
        """
        if self._whole is not None:
            self._whole.add_param_group(param_group)  # its groups are this one's
        else:
            super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except UsageError:
            del self.param_groups[-1]
            raise
        if self._groups:  # the next step builds them anew
            self._loaded, self._groups = self.shards() or {}, []
        self._consolidated = None

    def _check_group(self, group: Mapping[str, Any], *, in_step: bool = False) -> None:
        for param in group["params"]:
            if not self._engine.holds(param):
                raise UsageError(
                    f"a parameter of shape {list(param.shape)} is not one of the model's",
                    rank=self._engine.comm.rank,
                    step=self._engine.step,
                    remedy="pass parameters of the wrapped model; update others with an optimizer of their own",
                )
        if self._whole is not None or self._reducer is None:
            return
        probe = self._probe_of(group)
        if probe.failed and takes_arguments(self._class) and not in_step:
            self._needs_arguments = True  # `step` tries it with its own
        elif probe.refusal:
            raise UsageError(
                f"{self._class.__name__} can't update parts of parameters: {probe.refusal}",
                remedy="use an elementwise optimizer (SGD, Adam, AdamW, RMSprop …) or another strategy",
            )

    def _update_whole(self) -> None:
        """Update whole parameters from now on."""
        self._whole = self._class(self.param_groups, **self._options)
        self._whole.param_groups = self.param_groups  # one list: schedulers change what the update reads
        self.state = self._whole.state

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's shard with the synchronised gradients and gather the other ranks' shards.

        Args:
            closure: evaluates the model again and returns the loss, as for torch's optimizers.
            kwargs: passed to the optimizer's ``step``, which if sharded is called once per part of the shard.

        Returns:
            The closure's result, or None.
        """
        self._consolidated = None
        if self._whole is not None:
            with hand_on_scale(self, [self._whole]):
                result = (
                    self._whole.step(**kwargs) if closure is None else self._whole.step(closure, **kwargs)
                )
            if self._engine.tuner is not None:
                self._engine.drop()  # as when sharded: a program must not depend on the chosen plan
            return result
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        reducer = self._reducer
        assert reducer is not None, "without an inner optimizer the model is sharded"
        if reducer.unsynced:
            reducer.synchronise()
        if reducer.has_buckets:  # otherwise no backward has run: nothing to update
            if self._needs_arguments:
                self._try_with(kwargs)
            inner = [group.optimizer for group in self._groups if group.optimizer is not None]
            with hand_on_scale(self, inner):
                self._update(reducer, () if closure is None else (lambda: result,), kwargs)
        return result

    def _try_with(self, arguments: dict[str, Any]) -> None:
        """Try the optimizer again, with arguments of its ``step``; all ranks find the same."""
        self._step_arguments = arguments
        self._probes.clear()
        for group in self.param_groups:
            self._check_group(group, in_step=True)
        self._needs_arguments = False

    def _update(self, reducer: Reducer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Per group: wait for the sums, update the own shard, send it; then wait for the other ranks' shards."""
        moved = reducer.readopt_parameters()
        groups = self._groups or self._build(reducer)
        if moved:
            for group in groups:
                group.follow_buckets()
        flats = [flat for group in groups for flat in group.flats()]
        if not self._expected:  # else posted by an update that raised
            self._expected = [reducer.comm.post_part_receives(flat) for flat in flats]
        exposed, gathering = 0.0, []
        recorder = step_state.recorder_of(reducer.comm)
        others = (reducer.comm.shards - 1) / reducer.comm.shards
        expected = iter(self._expected)
        options = [group_options(group) for group in self.param_groups]
        for group in groups:
            exposed += sum(reducer.launch_queue.wait_for(bucket) for bucket in group.buckets)
            group.update(options, args, kwargs)
            for flat in group.flats():
                launched = time.perf_counter()
                pending = reducer.comm.all_gather(flat, next(expected))
                if recorder is not None:
                    sent = flat.nbytes * others
                    recorder.launched("gather", len(gathering), flat.nbytes, sent, None, launched)
                gathering.append(pending)
        self._keep_group_state(groups)
        started = time.perf_counter()
        step_state.begin_wait()
        for number, pending in enumerate(gathering):
            pending.wait()
            if recorder is not None:
                recorder.completed("gather", number, pending.ended, time.perf_counter())
        step_state.end_wait()
        self._expected = []
        seconds = time.perf_counter() - started
        timings, nbytes = reducer.timings, sum(flat.nbytes for flat in flats)
        timings.calls += len(flats)
        timings.nbytes += nbytes
        timings.sent_nbytes += nbytes * others
        reducer.note_waiting(exposed + seconds)
        timings.call_seconds.extend([seconds / len(flats)] * len(flats) if flats else [])
        reducer.drop()
        if not self._states_checked:
            self._check_states(groups)

    def _keep_group_state(self, groups: Sequence[BucketGroup]) -> None:
        """Take over what the inner optimizers have changed in their groups; see [Note: groups] in `bucket_group`."""
        seen: set[int] = set()
        for group in groups:
            for index, mine in group.param_groups():
                if index not in seen:
                    seen.add(index)
                    take_over(self.param_groups[index], group_options(mine))

    def _check_states(self, groups: Sequence[BucketGroup]) -> None:
        """Raise on all ranks if the state of any piece is not as in the trial; once per build."""
        probe = self._probe
        misfits = (
            f"{piece.slot.name!r}: {misfit}"
            for group in groups
            for piece, param in group.pieces
            if (misfit := probe.misfit(group.state_of(param), param.numel()))
        )
        self._raise_together(
            next(misfits, ""),
            f"{self._class.__name__} can't update parts of parameters: its state is not like that of small ones: ",
            remedy="use an elementwise optimizer (SGD, Adam, AdamW, RMSprop …) or another strategy",
        )
        self._states_checked = True

    def _raise_together(self, problem: str, before: str, *, remedy: str) -> None:
        """Raise a `UsageError` on all ranks if any has a problem; a collective."""
        problems = self._engine.comm.gather_values(problem)
        rank = next((rank for rank, text in enumerate(problems) if text), None)
        if rank is not None:
            raise UsageError(before + problems[rank], rank=rank, step=self._engine.step, remedy=remedy)

    def _build(self, reducer: Reducer) -> list[BucketGroup]:
        """Create the groups of buckets with this rank's shards and any loaded state; a collective.

        Raises:
            UsageError: on all ranks, if elements of the loaded state are missing on any.
        """
        group_of = {id(param): at for at, group in enumerate(self.param_groups) for param in group["params"]}
        full = [bucket for bucket in reducer.buckets if bucket.slots]
        shard, shards = reducer.comm.shard, reducer.comm.shards
        probe, built, problem = self._probe, [], ""
        sizes = [bucket.flat.nbytes for bucket in full]
        for members in update_parts(sizes, accelerator=has_streams(reducer.device)):
            buckets = [full[index] for index in members]
            pieces: list[tuple[ShardPiece, torch.nn.Parameter]] = []
            held: dict[int, list[torch.nn.Parameter]] = {}
            for piece in (p for bucket in buckets for p in bucket.pieces(shard, shards)):
                at = group_of.get(id(piece.slot.param))
                if at is not None:
                    pieces.append((piece, torch.nn.Parameter(piece.data)))
                    held.setdefault(at, []).append(pieces[-1][1])
            group = BucketGroup(buckets, pieces, sorted(held), self._inner(held))
            for piece, param in pieces:
                name = piece.slot.name
                if name in self._loaded:
                    try:
                        state = optimizer_resharding.slice_state(
                            name, piece.start, piece.stop, self._loaded[name], probe.elementwise
                        )
                    except UsageError as error:
                        problem = problem or str(error).partition("\n")[0]
                        continue
                    options = self.param_groups[group_of[id(piece.slot.param)]]
                    group.state_of(param).update(on_device(state, param, options))
            built.append(group)
        self._raise_together(problem, "", remedy="load the shards of all ranks that wrote the state")
        if probe.changes_groups or takes_arguments(self._class):
            here = {index for group in built for index in group.indices}
            missing = [index for index in range(len(self.param_groups)) if index not in here]
            zeros = {index: [zero_with_grad(reducer.device)] for index in missing}
            built.append(BucketGroup([], [], missing, self._inner(zeros)))
        self._groups, self._loaded, self._states_checked = built, {}, False
        return self._groups

    def _inner(self, held: Mapping[int, list[torch.nn.Parameter]]) -> torch.optim.Optimizer | None:
        """Return an optimizer of the `held` parameters, by the index of their outer group; None for none."""
        groups = [
            {**copied(group_options(self.param_groups[index])), "params": held[index]}
            for index in sorted(held)
        ]
        return self._class(groups, **self._options) if groups else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; buckets stay allocated."""
        if self._reducer is not None:
            self._reducer.drop()
        super().zero_grad(set_to_none)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the options of each group and this rank's shards of the state.

        Returns:
            ``{"param_groups": [options …], "shards": {parameter name: [{"start", "stop", "state"} …]}}``, where `start`
            and `stop` count elements of the flattened parameter. Unsharded, or right after `consolidate_state_dict` on
            the rank that it names, the state in torch's format, as of the plain optimizer.
        """
        if self._consolidated is not None:
            return self._consolidated
        if self._whole is not None:
            return self._whole.state_dict()
        options = [saved_options(group) for group in self.param_groups]
        return {"param_groups": options, "shards": self.shards()}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state, in torch's format, on rank `to`; all ranks must call this.

        There, `state_dict` returns it until the next step or load, as with torch's `ZeroRedundancyOptimizer`. The plain
        optimizer loads it, and so does a `ShardedOptimizer` on any number of ranks.
        """
        comm, reducer = self._engine.comm, self._reducer
        whole = None
        if reducer is not None and reducer.has_buckets:
            groups = self._groups or self._build(reducer)
            buckets = [bucket for group in groups for bucket in group.buckets]
            elementwise = self._probe.elementwise
            state_of = optimizer_resharding.gather_state(
                self._pieces_with_state(), buckets, comm, elementwise, to=to
            )
            whole = self._in_torchs_format(state_of, self.param_groups) if comm.rank == to else None
        elif reducer is not None:
            whole = self._unsharded(self.state_dict())
        elif self._engine.splits_gradients:  # the parameters are sharded, and the state with them
            whole = optimizer_resharding.with_whole_tensors(self.state_dict())
        self._consolidated = whole if comm.rank == to else None

    def shards(self) -> Shards | None:
        """Return this rank's shards of the state, as in `state_dict`; None if nothing is sharded."""
        if self._whole is not None:
            return None
        if not self._groups:
            return self._loaded
        shards: Shards = {}
        for piece, state in self._pieces_with_state():
            shard = {"start": piece.start, "stop": piece.stop, "state": dict(state)}
            shards.setdefault(piece.slot.name, []).append(shard)
        return shards

    @property
    def replica(self) -> int:
        """Which of the copies of its shards this rank holds; of those of one shard, number 0 writes checkpoints."""
        return self._engine.comm.replica

    def _pieces_with_state(self) -> list[tuple[ShardPiece, dict[str, Any]]]:
        return [(piece, group.state_of(param)) for group in self._groups for piece, param in group.pieces]

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` is this one, or the one that updates whole parameters for it."""
        return optimizer is self or optimizer is self._whole

    @property
    def movable(self) -> bool:
        """Whether the state can move to another layout now: not before loaded shards were used."""
        return self._whole is not None or not (self._expected or self._loaded)

    def gather_state(self) -> StateOf:
        """Return the whole state of every parameter, in the form of `optimizer_resharding`; a collective."""
        elementwise = self._probe.elementwise
        if self._whole is not None:
            held = [(name, param, self._whole.state.get(param)) for name, param in self._named()]
            return {
                name: optimizer_resharding.flatten_state(state, param, elementwise)
                for name, param, state in held
                if state
            }
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        return optimizer_resharding.gather_state(
            self._pieces_with_state(), buckets, self._engine.comm, elementwise
        )

    def resume_state(self, state_of: StateOf) -> None:
        """Continue from a gathered state, in the layout that the engine has now."""
        self._groups, self._loaded, self._whole = [], {}, None
        held = [(name, param) for name, param in self._engine.named_parameters() if name in state_of]
        if self._reducer is None:
            self._update_whole()
            self.state.update(
                (param, optimizer_resharding.unflatten_state(state_of[name], param)) for name, param in held
            )
            return
        self.state = defaultdict(dict)
        self._loaded = {
            name: [optimizer_resharding.whole_shard(state_of[name], param)] for name, param in held
        }
        self._build(self._reducer)

    def forget_state(self) -> None:
        """Start from a fresh state."""
        if self._whole is not None:
            self._whole.state.clear()
        self._groups, self._loaded, self._consolidated = [], {}, None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in torch's format or in shards, into the present layout.

        Shards of one or of all ranks are cut to fit any number of ranks. If each rank updates whole parameters, it
        gathers the other ranks' shards, so all ranks must call this.

        Raises:
            UsageError: the groups differ, or a part of the state is missing (if sharded, raised by the first step).
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(
                f"the state has {len(saved)} parameter groups, this optimizer {len(self.param_groups)}"
            )
        self._consolidated = None
        if self._whole is not None:
            self._whole.load_state_dict(self._unsharded(state_dict) if "shards" in state_dict else state_dict)
            self.param_groups, self.state = self._whole.param_groups, self._whole.state
            for param, state in self.state.items():
                state.update(optimizer_resharding.sharded_like(param, state))
            return
        if "shards" not in state_dict:
            self._check_sizes(saved)
        groups = [
            {**group, **copy.deepcopy(saved_options(options))}
            for group, options in zip(self._bare_groups(), saved, strict=True)
        ]
        for group in groups:
            self._check_group(group)
        if "shards" in state_dict:
            loaded = state_dict["shards"]
        else:
            loaded = self._in_shards(state_dict, reduce(or_, map(self._probe_of, groups)).elementwise)
        for group, new in zip(self.param_groups, groups, strict=True):
            group.clear()
            group.update(new)
        self._loaded, self._groups = loaded, []

    def _bare_groups(self) -> list[dict[str, Any]]:
        """Return the groups without what a state replaces."""
        kept = ("params", "param_names")
        return [{key: group[key] for key in kept if key in group} for group in self.param_groups]

    def _check_sizes(self, saved: Sequence[Mapping[str, Any]]) -> None:
        for number, (group, theirs) in enumerate(zip(self.param_groups, saved, strict=True)):
            if len(theirs["params"]) != len(group["params"]):
                raise UsageError(
                    f"group {number} has {len(theirs['params'])} parameters in the state, "
                    f"{len(group['params'])} in this optimizer"
                )

    def _in_shards(self, state_dict: dict[str, Any], elementwise: frozenset[str]) -> Shards:
        """Return the state of a plain optimizer with each parameter's as its only shard."""
        saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
        states = state_dict["state"]
        return {
            name: [
                optimizer_resharding.whole_shard(
                    optimizer_resharding.flatten_state(states[saved_id], param, elementwise), param
                )
            ]
            for saved_id, (name, param) in zip(saved_ids, self._named(), strict=True)
            if saved_id in states
        }

    def _unsharded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a sharded state in torch's format, with the shards of all ranks; a collective."""
        shards_of = optimizer_resharding.merge_shards(self._engine.comm.gather_values(state_dict["shards"]))
        elementwise = self._probe.elementwise
        state_of = {
            name: optimizer_resharding.slice_state(
                name, 0, storage_numel(param), shards_of[name], elementwise
            )
            for name, param in self._named()
            if name in shards_of
        }
        return self._in_torchs_format(state_of, state_dict["param_groups"])

    def _in_torchs_format(self, state_of: StateOf, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a whole state as the plain optimizer with the groups' `options` has it."""
        at = itertools.count()
        groups = [
            {**saved_options(saved), "params": [next(at) for _ in group["params"]]}
            for group, saved in zip(self.param_groups, options, strict=True)
        ]
        state = {
            index: optimizer_resharding.unflatten_state(state_of[name], param)
            for index, (name, param) in enumerate(self._named())
            if state_of.get(name)
        }
        return {"state": state, "param_groups": groups}

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of all groups with their names, in the order of torch's state dictionaries."""
        name_of = {id(param): name for name, param in self._engine.named_parameters()}
        return [(name_of[id(param)], param) for group in self.param_groups for param in group["params"]]
