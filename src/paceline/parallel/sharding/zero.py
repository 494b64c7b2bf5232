"""`ShardedOptimizer`: every rank updates its N-th of the parameters and gathers the rest (ZeRO-1).

    backward                      step(), part by part
    reduce-scatter per bucket  →  wait for its buckets  →  update own shard  →  all-gather, under way during the next

Optimizer state exists only for the own shard, so it takes 1/N of the memory and the update 1/N of the time
(Rajbhandari et al., ZeRO, arXiv 1910.02054 §5.1). Shards cut through parameters, so the update must be
elementwise: what happens to a number may depend on that number's own past only. That is checked.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.cost_model.bucket_layout import update_parts
from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.bucket import Bucket, ShardPiece, storage_numel
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.step_guard import ConsumesShards
from paceline.parallel.sharding.elementwise_probe import elementwise_keys, is_elementwise, probe
from paceline.parallel.sharding.reshard import (
    StateOf,
    cut,
    flatten_state,
    gather,
    joined,
    unflatten_state,
    whole_part,
)

__all__ = ["ShardedOptimizer"]

_Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class ShardedOptimizer(torch.optim.Optimizer, ConsumesShards):
    """Runs any elementwise torch optimizer on this rank's shard of a `DataParallel` model.

    Where the model's strategy shards nothing, or shards parameters itself, it is that optimizer on all of
    them, so a program need not change with the strategy. Learning-rate schedulers, parameter groups and
    closures work as with any torch optimizer. ``step()`` uses the gradients up: a sharded model starts the
    next backward from zero even without ``zero_grad()``.

    Args:
        model: the wrapped model.
        optimizer: the class, for example ``torch.optim.AdamW``.
        params: parameters or groups, as any torch optimizer takes them; None: all that are trained.
        options: passed to `optimizer`: ``lr``, ``betas``, ``fused`` …

    Raises:
        UsageError: the optimizer is no class, is not elementwise or rejects the options, or parameters are not the
            model's.

    Example:
        >>> optim = ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: type[torch.optim.Optimizer],
        params: _Params | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, DataParallel):
            raise UsageError(
                f"ShardedOptimizer({type(model).__name__}, ...)",
                remedy="wrap the model: paceline.DataParallel(model)",
            )
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            kind = getattr(optimizer, "__name__", type(optimizer).__name__)
            raise UsageError(
                f"ShardedOptimizer(model, {kind}, ...): that is no optimizer's class",
                remedy="pass the class and its options: ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)",
            )
        engine = model.engine
        self._engine = engine
        self._class, self._options = optimizer, options
        tried = probe(optimizer, options)
        given = list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
        super().__init__(cast(Any, given), dict(tried.defaults))
        self._check_owned(model)
        self._whole: torch.optim.Optimizer | None = None
        if self._reducer is None:
            self._update_whole()
        elif not self.can_shard:
            raise UsageError(
                f"{optimizer.__name__} is not elementwise, so it can't update parts of parameters",
                remedy="use an elementwise optimizer (SGD, Adam, AdamW, RMSprop …) or another strategy",
            )
        self._parts: list[_Part] = []
        self._loaded: dict[str, list[dict[str, Any]]] = {}
        self._expected: list[list[dist.Work]] = []  # receives of the other shards, posted before the update
        if engine.tuner is not None:
            engine.tuner.attach(self)

    @property
    def _reducer(self) -> Reducer | None:
        """The engine, where it leaves each rank a shard of the gradients."""
        return self._engine if self._engine.sharded else None

    @cached_property
    def can_shard(self) -> bool:
        """Whether the optimizer may update parts of parameters: whether it is elementwise."""
        return is_elementwise(self._class, self._options)

    @cached_property
    def _elementwise(self) -> frozenset[str]:
        """The names of what the state has of every element, rather than of a whole parameter."""
        return elementwise_keys(self._class, self._options)

    def _update_whole(self) -> None:
        """From now on be the optimizer of whole parameters."""
        self._whole = self._class(self.param_groups, **self._options)
        self._whole.param_groups = self.param_groups  # one list: schedulers change what the update reads
        self.state = self._whole.state

    def _check_owned(self, model: DataParallel) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if not model.engine.holds(param):
                    raise UsageError(
                        f"a parameter of shape {list(param.shape)} is not one of the model's",
                        remedy="pass parameters of the wrapped model",
                    )

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard with the synchronised gradients and gather the other ranks' shards.

        Args:
            closure: evaluates the model again and returns the loss, as for torch's optimizers.

        Returns:
            The closure's result, or None.
        """
        if self._whole is not None:
            done = self._whole.step(closure) if closure is not None else self._whole.step()
            if self._engine.tuner is not None:
                self._engine.drop()  # as where it shards: a program must not depend on what is chosen
            return done
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        reducer = self._reducer
        assert reducer is not None, "without an inner optimizer the model is sharded"
        if reducer.unsynced:
            reducer.synchronise()
        if reducer.settled:  # no backward yet: nothing to update
            self._update(reducer)
        return result

    def _update(self, reducer: Reducer) -> None:
        """Part by part: wait for the sums, update the own shard, send it to the others; then wait for theirs."""
        parts = self._parts or self._build(reducer)
        flats = [bucket.params for bucket in reducer.buckets if bucket.params is not None]
        if not self._expected:  # an update that raised has posted them already
            self._expected = [reducer.comm.expect_parts(flat) for flat in flats]
        exposed, under_way = 0.0, []
        recorder = step_state.recorder_of(reducer.comm)
        arriving = iter(self._expected)
        for part in parts:
            exposed += sum(reducer.launch_queue.arrive(bucket) for bucket in part.buckets)
            part.update(self.param_groups)
            for flat in part.flats():
                launched = time.perf_counter()
                pending = reducer.comm.all_gather(flat, next(arriving))
                if recorder is not None:
                    sent = flat.nbytes * (reducer.comm.size - 1) / reducer.comm.size
                    recorder.launched("gather", len(under_way), flat.nbytes, sent, None, launched)
                under_way.append(pending)
        started = time.perf_counter()
        step_state.begin_wait()
        for number, pending in enumerate(under_way):
            pending.wait()
            if recorder is not None:
                recorder.arrived("gather", number, pending.ended, time.perf_counter())
        step_state.end_wait()
        self._expected = []
        seconds = time.perf_counter() - started
        timings = reducer.timings
        timings.calls += len(flats)
        nbytes = sum(flat.nbytes for flat in flats)
        timings.nbytes += nbytes
        timings.sent_nbytes += nbytes * (reducer.comm.size - 1) / reducer.comm.size
        reducer.note_waiting(exposed + seconds)
        timings.call_seconds.extend([seconds / len(flats)] * len(flats) if flats else [])
        reducer.drop()

    def _build(self, reducer: Reducer) -> list[_Part]:
        """Return the parts of the update: this rank's shards of some buckets each, with any loaded state."""
        group_of = {id(param): at for at, group in enumerate(self.param_groups) for param in group["params"]}
        full = [bucket for bucket in reducer.buckets if bucket.slots]
        for members in update_parts([bucket.flat.nbytes for bucket in full]):
            buckets = [full[index] for index in members]
            pieces: list[list[tuple[ShardPiece, torch.nn.Parameter]]] = [[] for _ in self.param_groups]
            for piece in (
                p for bucket in buckets for p in bucket.pieces(reducer.comm.rank, reducer.comm.size)
            ):
                at = group_of.get(id(piece.slot.param))
                if at is not None:
                    pieces[at].append((piece, torch.nn.Parameter(piece.data)))
            groups = [
                {**_options_of(group), "params": [param for _, param in held]}
                for group, held in zip(self.param_groups, pieces, strict=True)
            ]
            part = _Part(buckets, pieces, self._class(groups, **self._options))
            for piece, param in part.flat_pieces():
                if piece.slot.name in self._loaded:
                    held = self._loaded[piece.slot.name]
                    state = cut(piece.slot.name, piece.start, piece.stop, held, self._elementwise)
                    part.optimizer.state[param] = state
            self._parts.append(part)
        self._loaded = {}
        return self._parts

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; buckets stay where they are."""
        if self._reducer is not None:
            self._reducer.drop()
        super().zero_grad(set_to_none)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the options of each group and this rank's shards of the state.

        Returns:
            ``{"param_groups": [options …], "shards": {parameter name: [{"start", "stop", "state"} …]}}``,
            `start` and `stop` counting elements of the flattened parameter. Unsharded, the plain optimizer's.
        """
        if self._whole is not None:
            return self._whole.state_dict()
        return {"param_groups": [_options_of(group) for group in self.param_groups], "shards": self.shards()}

    def shards(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return this rank's shards of the state, as in `state_dict`; None where nothing is sharded."""
        if self._whole is not None:
            return None
        if not self._parts:
            return self._loaded
        shards: dict[str, list[dict[str, Any]]] = {}
        for part in self._parts:
            for piece, param in part.flat_pieces():
                state = dict(part.optimizer.state[param])
                held = {"start": piece.start, "stop": piece.stop, "state": state}
                shards.setdefault(piece.slot.name, []).append(held)
        return shards

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether `optimizer` is this one, or what it updates whole parameters with."""
        return optimizer is self or optimizer is self._whole

    @property
    def movable(self) -> bool:
        """Whether the state can move to another layout now: not before loaded shards were taken up."""
        return self._whole is not None or not (self._expected or self._loaded)

    def gather_state(self) -> StateOf:
        """Return the whole state of every parameter, in the form of `paceline.parallel.sharding.reshard`; all ranks
        call this."""
        if self._whole is not None:
            held = [(name, param, self._whole.state.get(param)) for name, param in self._named()]
            return {
                name: flatten_state(state, param, self._elementwise) for name, param, state in held if state
            }
        held = [
            (piece, part.optimizer.state.get(param, {}))
            for part in self._parts
            for piece, param in part.flat_pieces()
        ]
        return gather(held, [bucket for part in self._parts for bucket in part.buckets], self._engine.comm)

    def resume_state(self, state_of: StateOf) -> None:
        """Go on with a state that was gathered, in the layout that the engine has now."""
        self._parts, self._loaded, self._whole = [], {}, None
        held = [(name, param) for name, param in self._engine.named_parameters() if name in state_of]
        if self._reducer is None:
            self._update_whole()
            self.state.update((param, unflatten_state(state_of[name], param)) for name, param in held)
            return
        self.state = defaultdict(dict)
        self._loaded = {name: [whole_part(state_of[name], param)] for name, param in held}
        self._build(self._reducer)

    def forget_state(self) -> None:
        """Begin with a fresh state."""
        if self._whole is not None:
            self._whole.state.clear()
        self._parts, self._loaded = [], {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state, whole or in shards, whatever the layout is now.

        Shards of one or of all ranks are cut to fit however many ranks there are. Where each rank updates whole
        parameters, it asks the others for their shards; so all ranks call this.

        Raises:
            UsageError: the number of groups differs, or a part of the state is missing (told at the first step, where
                there are shards).
        """
        options = state_dict["param_groups"]
        if len(options) != len(self.param_groups):
            raise UsageError(
                f"the state has {len(options)} parameter groups, this optimizer {len(self.param_groups)}"
            )
        if self._whole is not None:
            self._whole.load_state_dict(self._in_whole(state_dict) if "shards" in state_dict else state_dict)
            self.param_groups, self.state = self._whole.param_groups, self._whole.state
            return
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(_options_of(loaded))
        self._loaded = (
            state_dict["shards"] if "shards" in state_dict else self._as_shards(state_dict["state"])
        )
        self._parts = []

    def _in_whole(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state in shards as torch's optimizers have it, with the shards of all ranks."""
        parts_of = joined(self._engine.comm.gather_objects(state_dict["shards"]))
        state: dict[int, dict[str, Any]] = {}
        for index, (name, param) in enumerate(self._named()):
            if name in parts_of:
                whole = cut(name, 0, storage_numel(param), parts_of[name], self._elementwise)
                state[index] = unflatten_state(whole, param)
        at = itertools.count()
        groups = [
            {**_options_of(loaded), "params": [next(at) for _ in group["params"]]}
            for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _as_shards(self, state: dict[int, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Return what torch's optimizers have as the one shard of a whole parameter each."""
        return {
            name: [whole_part(flatten_state(state[index], param, self._elementwise), param)]
            for index, (name, param) in enumerate(self._named())
            if index in state
        }

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of all groups, in the order of torch's state dictionaries, with their names."""
        name_of = {id(param): name for name, param in self._engine.named_parameters()}
        return [(name_of[id(param)], param) for group in self.param_groups for param in group["params"]]


@dataclass(frozen=True)
class _Part:
    """This rank's shards of some buckets, updated together.

    Attributes:
        buckets: the buckets.
        pieces: per parameter group, the pieces in the shards, each with the parameter that the optimizer sees.
        optimizer: of these pieces.
    """

    buckets: list[Bucket]
    pieces: list[list[tuple[ShardPiece, torch.nn.Parameter]]]
    optimizer: torch.optim.Optimizer

    def flats(self) -> list[torch.Tensor]:
        """Return the buckets' parameters."""
        return [bucket.params for bucket in self.buckets if bucket.params is not None]

    def flat_pieces(self) -> list[tuple[ShardPiece, torch.nn.Parameter]]:
        """Return the pieces of all groups."""
        return [pair for held in self.pieces for pair in held]

    def update(self, groups: Sequence[dict[str, Any]]) -> None:
        """Run the optimizer with the options that `groups` have now."""
        if not any(self.pieces):
            return
        for group, mine, held in zip(groups, self.optimizer.param_groups, self.pieces, strict=True):
            mine.update(_options_of(group))
            for piece, param in held:
                param.grad = piece.grad.to(param.dtype) if piece.slot.used else None
        self.optimizer.step()


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
