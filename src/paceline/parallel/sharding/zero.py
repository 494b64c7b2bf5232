"""`ShardedOptimizer`: every rank updates 1/N of the parameters and gathers the rest (ZeRO-1).

    backward                      step(), one group of buckets after another
    reduce-scatter per bucket  →  wait for its buckets  →  update own shard  →  all-gather, overlaps the next group

Optimizer state exists for the own shard only: 1/N of the memory, and the update takes 1/N of the time (Rajbhandari et
al., ZeRO, arXiv 1910.02054 §5.1). Shards cut through parameters, so the update must be elementwise: a new number may
depend on that number's own history only. This is checked by trying the optimizer.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.cost_model.bucket_assignment import update_parts
from paceline.errors import UsageError
from paceline.parallel.engine.bucket import Bucket, ShardPiece, storage_numel
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.unsynchronised_step_guard import ConsumesShards
from paceline.parallel.sharding import optimizer_resharding
from paceline.parallel.sharding.optimizer_resharding import Shards, StateOf

__all__ = ["ShardedOptimizer"]

_Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


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
        defaults = optimizer_resharding.defaults_with(optimizer, options)
        given = list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
        super().__init__(cast(Any, given), defaults)
        for param in (param for group in self.param_groups for param in group["params"]):
            if not self._engine.holds(param):
                raise UsageError(
                    f"a parameter of shape {list(param.shape)} is not one of the model's",
                    remedy="pass parameters of the wrapped model",
                )
        self._whole: torch.optim.Optimizer | None = None
        if self._reducer is None:
            self._update_whole()
        elif not self.can_shard:
            raise UsageError(
                f"{optimizer.__name__} is not elementwise, so it can't update parts of parameters",
                remedy="use an elementwise optimizer (SGD, Adam, AdamW, RMSprop …) or another strategy",
            )
        self._groups: list[_BucketGroup] = []
        self._loaded: Shards = {}
        self._expected: list[list[dist.Work]] = []  # receives of the other shards, posted before the update
        if self._engine.tuner is not None:
            self._engine.tuner.attach(self)

    @property
    def _reducer(self) -> Reducer | None:
        """The engine, if it leaves each rank a shard of the gradients."""
        return self._engine if self._engine.sharded else None

    @cached_property
    def can_shard(self) -> bool:
        """Whether the optimizer is elementwise, so that it may update parts of parameters."""
        return optimizer_resharding.is_elementwise(self._class, self._options)

    @cached_property
    def _elementwise(self) -> frozenset[str]:
        """Names of the per-element entries of the state."""
        return optimizer_resharding.elementwise_keys(self._class, self._options)

    def _update_whole(self) -> None:
        """Update whole parameters from now on."""
        self._whole = self._class(self.param_groups, **self._options)
        self._whole.param_groups = self.param_groups  # one list: schedulers change what the update reads
        self.state = self._whole.state

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard with the synchronised gradients and gather the other ranks' shards.

        Args:
            closure: evaluates the model again and returns the loss, as for torch's optimizers.

        Returns:
            The closure's result, or None.
        """
        if self._whole is not None:
            result = self._whole.step(closure) if closure is not None else self._whole.step()
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
            self._update(reducer)
        return result

    def _update(self, reducer: Reducer) -> None:
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
        others = (reducer.comm.size - 1) / reducer.comm.size
        expected = iter(self._expected)
        for group in groups:
            exposed += sum(reducer.launch_queue.wait_for(bucket) for bucket in group.buckets)
            group.update(self.param_groups)
            for flat in group.flats():
                launched = time.perf_counter()
                pending = reducer.comm.all_gather(flat, next(expected))
                if recorder is not None:
                    sent = flat.nbytes * others
                    recorder.launched("gather", len(gathering), flat.nbytes, sent, None, launched)
                gathering.append(pending)
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

    def _build(self, reducer: Reducer) -> list[_BucketGroup]:
        """Create the groups of buckets with this rank's shards and any loaded state."""
        group_of = {id(param): at for at, group in enumerate(self.param_groups) for param in group["params"]}
        full = [bucket for bucket in reducer.buckets if bucket.slots]
        rank, size = reducer.comm.rank, reducer.comm.size
        for members in update_parts([bucket.flat.nbytes for bucket in full]):
            buckets = [full[index] for index in members]
            param_groups = [{**_options_of(group), "params": []} for group in self.param_groups]
            pieces: list[tuple[ShardPiece, torch.nn.Parameter]] = []
            for piece in (p for bucket in buckets for p in bucket.pieces(rank, size)):
                at = group_of.get(id(piece.slot.param))
                if at is not None:
                    pieces.append((piece, torch.nn.Parameter(piece.data)))
                    param_groups[at]["params"].append(pieces[-1][1])
            built = _BucketGroup(buckets, pieces, self._class(param_groups, **self._options))
            for piece, param in pieces:
                name = piece.slot.name
                if name in self._loaded:
                    state = optimizer_resharding.slice_state(
                        name, piece.start, piece.stop, self._loaded[name], self._elementwise
                    )
                    built.optimizer.state[param] = state
            self._groups.append(built)
        self._loaded = {}
        return self._groups

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
            and `stop` count elements of the flattened parameter. Unsharded, the state of the plain optimizer.
        """
        if self._whole is not None:
            return self._whole.state_dict()
        return {"param_groups": [_options_of(group) for group in self.param_groups], "shards": self.shards()}

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

    def _pieces_with_state(self) -> list[tuple[ShardPiece, dict[str, Any]]]:
        return [
            (piece, group.optimizer.state[param]) for group in self._groups for piece, param in group.pieces
        ]

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` is this one, or the one that updates whole parameters for it."""
        return optimizer is self or optimizer is self._whole

    @property
    def movable(self) -> bool:
        """Whether the state can move to another layout now: not before loaded shards were used."""
        return self._whole is not None or not (self._expected or self._loaded)

    def gather_state(self) -> StateOf:
        """Return the whole state of every parameter, in the form of `optimizer_resharding`; a collective."""
        if self._whole is not None:
            held = [(name, param, self._whole.state.get(param)) for name, param in self._named()]
            return {
                name: optimizer_resharding.flatten_state(state, param, self._elementwise)
                for name, param, state in held
                if state
            }
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        return optimizer_resharding.gather_state(self._pieces_with_state(), buckets, self._engine.comm)

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
        self._groups, self._loaded = [], {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, whole or in shards, into the present layout.

        Shards of one or of all ranks are cut to fit any number of ranks. If each rank updates whole parameters, it
        gathers the other ranks' shards, so all ranks must call this.

        Raises:
            UsageError: the number of groups differs, or a part of the state is missing (if sharded, raised by the
                first step).
        """
        options = state_dict["param_groups"]
        if len(options) != len(self.param_groups):
            raise UsageError(
                f"the state has {len(options)} parameter groups, this optimizer {len(self.param_groups)}"
            )
        if self._whole is not None:
            self._whole.load_state_dict(self._unsharded(state_dict) if "shards" in state_dict else state_dict)
            self.param_groups, self.state = self._whole.param_groups, self._whole.state
            return
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(_options_of(loaded))
        if "shards" in state_dict:
            self._loaded = state_dict["shards"]
        else:
            self._loaded = {
                name: [
                    optimizer_resharding.whole_shard(
                        optimizer_resharding.flatten_state(
                            state_dict["state"][index], param, self._elementwise
                        ),
                        param,
                    )
                ]
                for index, (name, param) in enumerate(self._named())
                if index in state_dict["state"]
            }
        self._groups = []

    def _unsharded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a sharded state in torch's format, with the shards of all ranks."""
        shards_of = optimizer_resharding.merge_shards(self._engine.comm.gather_objects(state_dict["shards"]))
        state: dict[int, dict[str, Any]] = {}
        for index, (name, param) in enumerate(self._named()):
            if name in shards_of:
                whole = optimizer_resharding.slice_state(
                    name, 0, storage_numel(param), shards_of[name], self._elementwise
                )
                state[index] = optimizer_resharding.unflatten_state(whole, param)
        at = itertools.count()
        groups = [
            {**_options_of(loaded), "params": [next(at) for _ in group["params"]]}
            for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of all groups with their names, in the order of torch's state dictionaries."""
        name_of = {id(param): name for name, param in self._engine.named_parameters()}
        return [(name_of[id(param)], param) for group in self.param_groups for param in group["params"]]


@dataclass(frozen=True)
class _BucketGroup:
    """This rank's shards of some buckets, updated together.

    Attributes:
        buckets: the buckets.
        pieces: of parameters in these shards, each with the parameter that the optimizer updates.
        optimizer: of the pieces.
    """

    buckets: list[Bucket]
    pieces: list[tuple[ShardPiece, torch.nn.Parameter]]
    optimizer: torch.optim.Optimizer

    def flats(self) -> list[torch.Tensor]:
        """Return the buckets' parameters."""
        return [bucket.params for bucket in self.buckets if bucket.params is not None]

    def follow_buckets(self) -> None:
        """Update the pieces in their buckets' present buffers, which replaced others."""
        for piece, param in self.pieces:
            buffer, start = piece.slot.bucket.params, piece.slot.start
            assert buffer is not None, "sharded buckets hold parameters"
            param.data = buffer[start + piece.start : start + piece.stop]

    def update(self, groups: Sequence[dict[str, Any]]) -> None:
        """Run the optimizer with the present options of `groups`."""
        if not self.pieces:
            return
        for group, mine in zip(groups, self.optimizer.param_groups, strict=True):
            mine.update(_options_of(group))
        for piece, param in self.pieces:
            param.grad = piece.grad.to(param.dtype) if piece.slot.used else None
        self.optimizer.step()


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
