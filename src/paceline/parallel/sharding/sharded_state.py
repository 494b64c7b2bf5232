"""The state of a `ShardedOptimizer`: saved, gathered, loaded and moved between layouts."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.sharding import optimizer_resharding as resharding
from paceline.parallel.sharding.blocks import Block, blocks_of
from paceline.parallel.sharding.optimizer_probe import OptimizerProbe, group_options, probe_optimizer
from paceline.parallel.sharding.optimizer_resharding import Shards
from paceline.parallel.sharding.update_groups import UpdateGroup, on_device, saved_options
from paceline.parallel.sharding.update_units import MASTER, StatePrecision, UpdateUnit

__all__ = ["ShardedState"]


class ShardedState(torch.optim.Optimizer):
    """The part of `ShardedOptimizer` that knows its state, in every layout.

    A layout is one of three: an optimizer of torch's on the parameters (`_plain`), or update groups (`_groups`) of this
    rank's shards, or of blocks that every rank updates.
    """

    _engine: Reducer
    _class: type[torch.optim.Optimizer]
    _options: dict[str, Any]
    _precision: StatePrecision
    _rows: dict[str, list[int]]  # of each block, by parameter name

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._plain: torch.optim.Optimizer | None = None
        self._groups: list[UpdateGroup] = []
        self._loaded: Shards = {}  # used by the next step
        self._loaded_everywhere = True  # every rank has the whole of `_loaded`
        self._consolidated: dict[str, Any] | None = None
        self._probes: dict[str, OptimizerProbe] = {}
        self._step_arguments: dict[str, Any] = {}  # of the trials
        super().__init__(params, defaults)

    # ------------------------------------------------------------------ implemented by ShardedLayout

    def _choose_layout(self) -> None:
        raise NotImplementedError

    def _build(self) -> list[UpdateGroup]:
        raise NotImplementedError

    def _check_group(self, group: Mapping[str, Any]) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ what the state belongs to

    @property
    def _reducer(self) -> Reducer | None:
        """The engine, if it leaves each rank a shard of the gradients."""
        return self._engine if self._engine.sharded else None

    @property
    def _probe(self) -> OptimizerProbe:
        """What trying the optimizer with the options of every group has shown."""
        return reduce(or_, map(self._probe_of, self.param_groups), OptimizerProbe())

    def _probe_of(self, group: Mapping[str, Any]) -> OptimizerProbe:
        options = {key: value for key, value in sorted(group_options(group).items()) if key != "lr"}
        known = self._probes.get(repr(options))
        if known is None:
            known = probe_optimizer(
                self._class, self._options, group, self._engine.device, self._step_arguments
            )
            self._probes[repr(options)] = known
        return known

    @property
    def _elementwise(self) -> frozenset[str]:
        """Names of the state's entries that have one value per element."""
        return self._probe.elementwise | {MASTER}

    @property
    def _updates_in_place(self) -> bool:
        """Whether every rank updates all blocks, in update groups."""
        return self._plain is None and self._reducer is None and not self._engine.splits_gradients

    def _blocks_of(self, group: Mapping[str, Any]) -> list[Block]:
        """Return the blocks of a group's parameters, in the order of torch's state dictionaries."""
        name_of = {id(param): name for name, param in self._engine.named_parameters()}
        named = [(name_of[id(param)], param) for param in group["params"]]
        return [block for name, param in named for block in blocks_of(name, param, self._rows.get(name))]

    def _blocks(self) -> list[Block]:
        return [block for group in self.param_groups for block in self._blocks_of(group)]

    def _units_with_state(
        self, *, in_copy: bool = False, copy: bool = True
    ) -> Iterator[tuple[UpdateUnit, dict[str, Any]]]:
        """Yield this rank's units, or those of the copy of its neighbour's shard, with their flattened state."""
        elementwise = self._elementwise
        for group in self._groups:
            for unit in [unit for unit in group.units if unit.in_copy == in_copy]:
                state = {**group.state_of(unit), **unit.extra_state()}
                yield unit, resharding.flatten_state(state, unit.like, elementwise, copy=copy)

    # ------------------------------------------------------------------ save

    def state_dict(self) -> dict[str, Any]:
        """Return the options of each group and this rank's shards of the state.

        Returns:
            ``{"param_groups": [options …], "shards": {parameter name: [{"start", "stop", "state"} …]}}``, where `start`
            and `stop` count elements of the flattened parameter. Unsharded, or right after `consolidate_state_dict` on
            the rank that it names, the state in torch's format, as of the plain optimizer; with `split`, as of one
            whose parameters are the blocks.
        """
        return self.own_state_dict() if self._consolidated is None else self._consolidated

    def own_state_dict(self) -> dict[str, Any]:
        """Return what `state_dict` returns on a rank for which nothing was consolidated."""
        if self._plain is not None:
            return self._plain.state_dict()
        if self._updates_in_place and self._groups:
            return self._in_torchs_format(self._own_shards(), self.param_groups)
        options = [saved_options(group) for group in self.param_groups]
        return {"param_groups": options, "shards": self.held_shards()}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state, in torch's format, on rank `to`; all ranks must call this.

        There, `state_dict` returns it until the next step or load, as with torch's `ZeroRedundancyOptimizer`. The plain
        optimizer loads it, and so does a `ShardedOptimizer` on any number of ranks.
        """
        comm, whole = self._engine.comm, None
        if self._plain is None and (self._groups or self._ready_to_build):
            if not self._groups:
                self._build()
            shards = self._gather(to)
            whole = self._in_torchs_format(shards, self.param_groups) if comm.rank == to else None
        elif self._plain is None:
            whole = self._unsharded(self.own_state_dict())
        elif self._engine.splits_gradients:  # the parameters are sharded, and the state with them
            whole = resharding.with_whole_tensors(self.own_state_dict())
        self._consolidated = whole if comm.rank == to else None

    @property
    def _ready_to_build(self) -> bool:
        return self._reducer is None or self._reducer.has_buckets

    def is_per_element(self, key: str, value: object, numel: int) -> bool:
        """Return whether an entry in the state of `numel` flattened elements has one value for each.

        Args:
            key: of the entry.
            value: its value.
            numel: number of elements.
        """
        return resharding.is_per_element(key, value, numel, self._elementwise)

    @property
    def in_shards(self) -> bool:
        """Whether the state is in shards; False: in torch's format."""
        return self._plain is None

    @property
    def has_blocks(self) -> bool:
        """Whether a shard is a matrix with a state of its own, whole or a block of a parameter; else any elements."""
        return self._plain is None and self._probe.whole

    def block_ranges(self) -> set[tuple[str, int, int]]:
        """Return parameter, start and stop of what is updated as one matrix; elementwise optimizers may cut it."""
        return {(block.name, block.start, block.stop) for block in self._blocks()}

    def shards(self) -> Shards | None:
        """Return this rank's shards of the state, which the next step changes; None where it is in torch's format.

        Of what every rank updates, each returns its share: over all ranks, every element once.
        """
        if self._plain is not None:
            return None
        if self._groups:
            return self._own_shards(share=True, copy=False)
        comm, everywhere = self._engine.comm, self._loaded_everywhere
        return resharding.in_memory(
            {
                name: parts
                for number, (name, parts) in enumerate(self._loaded.items())
                if not everywhere or number % comm.shards == comm.shard
            }
        )

    def held_shards(self) -> Shards:
        """Return all shards of the state that this rank has: until a step uses loaded ones, those."""
        return self._own_shards() if self._groups else resharding.in_memory(self._loaded)

    def copied_shards(self) -> Shards:
        """Return the copy of the right neighbour's shards of the state, if this rank keeps one."""
        return self._own_shards(in_copy=True)

    def _own_shards(self, *, share: bool = False, in_copy: bool = False, copy: bool = True) -> Shards:
        shards: Shards = {}
        comm = self._engine.comm
        for number, (unit, state) in enumerate(self._units_with_state(in_copy=in_copy, copy=copy)):
            if share and unit.replicated and number % comm.shards != comm.shard:
                continue
            shard = {"start": unit.start, "stop": unit.stop, "state": state}
            shards.setdefault(unit.name, []).append(shard)
        return shards

    def _gather(self, to: int | None = None) -> Shards:
        """Return the whole state of every parameter from this layout; a collective."""
        if self._plain is not None:
            held = [(block, self._plain.state.get(block.param)) for block in self._blocks()]
            return {
                block.name: [
                    resharding.whole_shard(
                        resharding.flatten_state(state, block.param, self._elementwise), block.param
                    )
                ]
                for block, state in held
                if state
            }
        if self._updates_in_place:
            return self.held_shards()
        comm, units = self._engine.comm, list(self._units_with_state())
        if self._probe.whole or self._reducer is None:
            return resharding.gather_owned(self._own_shards(), comm, to=to)
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        return resharding.gather_state(units, buckets, comm, self._elementwise, to=to)

    # ------------------------------------------------------------------ load

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in torch's format or in shards, into the present layout.

        Shards of one or of all ranks are cut to fit any number of ranks. If each rank updates whole parameters, it
        gathers the other ranks' shards, so all ranks must call this.

        Raises:
            UsageError: the groups differ, or a part of the state is missing (if sharded, raised by the first step).
        """
        self._consolidated = None
        if self._plain is not None:
            self._check_groups(state_dict["param_groups"])
            self._load_plain(self._unsharded(state_dict) if "shards" in state_dict else state_dict)
            return
        if "shards" not in state_dict:
            self._check_groups(state_dict["param_groups"])
            self._check_sizes(state_dict["param_groups"])
        groups = self._merged_groups(state_dict["param_groups"])
        if "shards" not in state_dict:
            elementwise = reduce(or_, map(self._probe_of, groups)).elementwise | {MASTER}
            loaded = self._in_shards(state_dict, elementwise)
        elif self._updates_in_place:
            loaded = resharding.merge_shards(self._engine.comm.gather_values(state_dict["shards"]))
        else:
            loaded = state_dict["shards"]
        self._take_over(groups, loaded, everywhere="shards" not in state_dict or self._updates_in_place)

    def load_shards(self, param_groups: Sequence[Mapping[str, Any]], shards: Shards) -> None:
        """Load a state in shards of which every rank has all, into a layout that is not torch's; no collective.

        Args:
            param_groups: options of each group.
            shards: of all parameters; per-element entries may be `StoredEntry` objects.

        Raises:
            UsageError: the groups differ.
        """
        self._consolidated = None
        self._take_over(self._merged_groups(param_groups), shards, everywhere=True)

    def _check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        if len(saved) != len(self.param_groups):
            raise UsageError(
                f"the state has {len(saved)} parameter groups, this optimizer {len(self.param_groups)}"
            )

    def _merged_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return this optimizer's groups with the options of saved ones."""
        self._check_groups(saved)
        groups = [
            {**group, **copy.deepcopy(saved_options(options))}
            for group, options in zip(self._bare_groups(), saved, strict=True)
        ]
        for group in groups:
            self._check_group(group)
        return groups

    def _take_over(self, groups: Sequence[Mapping[str, Any]], loaded: Shards, *, everywhere: bool) -> None:
        for group, new in zip(self.param_groups, groups, strict=True):
            group.clear()
            group.update(new)
        self._loaded, self._loaded_everywhere, self._groups = loaded, everywhere, []

    def _load_plain(self, state_dict: dict[str, Any]) -> None:
        plain = self._plain
        assert plain is not None, "the layout is plain"
        plain.load_state_dict(state_dict)
        self.param_groups, self.state = plain.param_groups, plain.state
        for param, state in self.state.items():
            state.pop(MASTER, None)
            state.update(resharding.sharded_like(param, state))

    def _load_unit(self, group: UpdateGroup, unit: UpdateUnit, options: Mapping[str, Any]) -> None:
        """Give a unit its part of the loaded state, if there is one.

        Raises:
            UsageError: elements are missing, or belong to other blocks.
        """
        if unit.name not in self._loaded:
            return
        state = resharding.slice_state(
            unit.name, unit.start, unit.stop, self._loaded[unit.name], self._elementwise
        )
        shaped = resharding.unflatten_state(state, unit.like)
        unit.take_extra_state(shaped)
        group.state_of(unit).update(on_device(shaped, unit.inner, options))

    def _bare_groups(self) -> list[dict[str, Any]]:
        """Return the groups without what a state replaces."""
        kept = ("params", "param_names")
        return [{key: group[key] for key in kept if key in group} for group in self.param_groups]

    def _check_sizes(self, saved: Sequence[Mapping[str, Any]]) -> None:
        for number, (group, theirs) in enumerate(zip(self.param_groups, saved, strict=True)):
            here = len(self._blocks_of(group))
            if len(theirs["params"]) != here:
                raise UsageError(
                    f"group {number} has {len(theirs['params'])} parameters in the state, "
                    f"{here} in this optimizer"
                )

    def _in_shards(self, state_dict: dict[str, Any], elementwise: frozenset[str]) -> Shards:
        """Return a state in torch's format with each block's as a shard."""
        saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
        shards: Shards = {}
        for saved_id, block in zip(saved_ids, self._blocks(), strict=True):
            state = state_dict["state"].get(saved_id)
            if state is not None:
                flat = resharding.flatten_state(state, block.like, elementwise)
                shard = {"start": block.start, "stop": block.stop, "state": flat}
                shards.setdefault(block.name, []).append(shard)
        return shards

    def _unsharded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a sharded state in torch's format, with the shards of all ranks; a collective."""
        shards = resharding.merge_shards(self._engine.comm.gather_values(state_dict["shards"]))
        return self._in_torchs_format(shards, state_dict["param_groups"])

    def _in_torchs_format(self, shards: Shards, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a whole state as the plain optimizer with the groups' `options` has it."""
        at = itertools.count()
        groups = [
            {**saved_options(saved), "params": [next(at) for _ in self._blocks_of(group)]}
            for group, saved in zip(self.param_groups, options, strict=True)
        ]
        state: dict[int, dict[str, Any]] = {}
        for index, block in enumerate(self._blocks()):
            if block.name in shards:
                flat = resharding.slice_state(
                    block.name, block.start, block.stop, shards[block.name], self._elementwise
                )
                if flat:
                    state[index] = resharding.unflatten_state(flat, block.like)
        return {"state": state, "param_groups": groups}

    # ------------------------------------------------------------------ another layout

    @property
    def movable(self) -> bool:
        """Whether the state can move to another layout now: not before loaded shards were used."""
        return self._plain is not None or not self._loaded

    def gather_state(self) -> Shards:
        """Return the whole state of every parameter; a collective."""
        return self._gather()

    def resume_state(self, state: Shards) -> None:
        """Continue from a gathered state, in the layout that the engine has now."""
        self._groups, self._loaded, self._plain = [], {}, None
        self.state = defaultdict(dict)
        self._choose_layout()
        named = {block.name for block in self._blocks()}
        kept = {name: shards for name, shards in state.items() if name in named}
        if self._plain is None:
            self._loaded, self._loaded_everywhere = kept, True
            if self._ready_to_build:
                self._build()
        else:
            held = [block for block in self._blocks() if block.name in kept]
            for block in held:
                (shard,) = kept[block.name]
                self._plain.state[block.param].update(resharding.unflatten_state(shard["state"], block.param))

    def forget_state(self) -> None:
        """Start from a fresh state."""
        if self._plain is not None:
            self._plain.state.clear()
        self._groups, self._loaded, self._consolidated = [], {}, None
