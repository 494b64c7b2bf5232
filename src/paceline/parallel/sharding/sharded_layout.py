"""What a rank updates for a `ShardedOptimizer`: flat shards of buckets, whole matrices, or all parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from paceline.cost_model.bucket_assignment import update_parts
from paceline.errors import PacelineError, UsageError
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.sharding.blocks import Block, Split, resolve_split, update_cost
from paceline.parallel.sharding.optimizer_probe import group_options, takes_arguments
from paceline.parallel.sharding.owner_exchange import OwnerExchange, local_rows, plan_exchanges
from paceline.parallel.sharding.sharded_state import ShardedState
from paceline.parallel.sharding.update_groups import (
    UpdateGroup,
    copied,
    flat_units,
    owned_units,
    take_over,
    units_in_place,
    zero_with_grad,
)
from paceline.parallel.sharding.update_units import UpdateUnit
from paceline.world.accelerator import has_streams

__all__ = ["ShardedLayout"]


class ShardedLayout(ShardedState):
    """The part of `ShardedOptimizer` that checks its parameters and divides them among ranks."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._exchanges: list[OwnerExchange] = []
        self._states_checked = False
        self._needs_arguments = False  # a trial without them failed
        self._registered = False
        super().__init__(params, defaults)

    # ------------------------------------------------------------------ checks

    def _check_split(self, split: Split | None) -> None:
        """Resolve `split`, before any state exists."""
        for group in self.param_groups:
            self._check_held(group)
        if not split:
            return
        if not self._probe.whole and not self._probe.refusal:
            raise UsageError(
                f"split={dict(split)!r} with {self._class.__name__}, which is elementwise: it sees no matrices",
                remedy="pass split to the optimizer that needs whole matrices",
            )
        name_of = {id(param): name for name, param in self._engine.named_parameters()}
        held = {name_of[id(p)]: p for group in self.param_groups for p in group["params"]}
        self._rows = resolve_split(split, held)

    def _check_held(self, group: Mapping[str, Any]) -> None:
        for param in group["params"]:
            if not self._engine.holds(param):
                raise UsageError(
                    f"a parameter of shape {list(param.shape)} is not one of the model's",
                    rank=self._engine.comm.rank,
                    step=self._engine.step,
                    remedy="pass parameters of the wrapped model; update others with an optimizer of their own",
                )

    def _check_group(self, group: Mapping[str, Any], *, in_step: bool = False) -> None:
        self._check_held(group)
        if self._plain is not None or self._reducer is None:
            return
        probe = self._probe_of(group)
        if probe.failed and takes_arguments(self._class) and not in_step:
            self._needs_arguments = True  # `step` tries it with its own
        elif probe.refusal:
            raise UsageError(
                f"{self._class.__name__} can't update parameters on different ranks: {probe.refusal}",
                remedy="use an optimizer that updates each parameter by itself (AdamW, Muon …), or another strategy",
            )

    def _check_accepted(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise for the first block that the optimizer rejects, such as a bias with Muon; tried without memory."""
        for group in groups:
            blocks = self._blocks_of(group)
            if self._rejection(blocks, group) is None:
                continue
            for block in blocks:
                if (rejection := self._rejection([block], group)) is not None:
                    raise UsageError(
                        f"{self._class.__name__} rejects parameter {block.name!r}, shape {list(block.like.shape)}: "
                        f"{rejection}",
                        rank=self._engine.comm.rank,
                        remedy="pass params=, for example those of paceline.matrix_parameters(model), and split= for "
                        "parameters that are several matrices",
                    )

    def _rejection(self, blocks: Sequence[Block], group: Mapping[str, Any]) -> str | None:
        """Return what the optimizer's constructor says about the shapes of blocks; None: it accepts them."""
        options = {
            **copied(group_options(group)),
            "params": [torch.nn.Parameter(each.like) for each in blocks],
        }
        try:
            self._class([options], **self._options)
        except ValueError as error:
            return str(error)
        except Exception:  # noqa: BLE001 - it has other objections to parameters without memory
            return None
        return None

    def _raise_together(self, problem: str, before: str, *, remedy: str) -> None:
        """Raise a `UsageError` on all ranks if any has a problem; a collective."""
        problems = self._engine.comm.gather_values(problem)
        rank = next((rank for rank, text in enumerate(problems) if text), None)
        if rank is not None:
            raise UsageError(before + problems[rank], rank=rank, step=self._engine.step, remedy=remedy)

    # ------------------------------------------------------------------ layout

    def _register(self) -> None:
        """Reserve the gradients of the parameters; where parameters have owners, with the costs of their updates."""
        engine = self._engine
        costs: dict[int, float | None] = {id(p): None for group in self.param_groups for p in group["params"]}
        if (self._reducer is not None or engine.tuner is not None) and self._probe.whole:
            by_param: dict[int, list[Any]] = {}
            for block in self._blocks():
                by_param.setdefault(id(block.param), []).append(block)
            costs.update((key, update_cost(blocks)) for key, blocks in by_param.items())
        if engine.sharded and engine.has_buckets and not engine.consumers.fits_buckets(costs):
            raise UsageError(
                f"{self._class.__name__} needs whole parameters, and the buckets were built for another optimizer",
                rank=engine.comm.rank,
                step=engine.step,
                remedy="build all optimizers of a model before its first backward",
            )
        engine.consumers.assign(self, costs, built=engine.has_buckets)
        self._registered = True

    def _choose_layout(self) -> None:
        """Update the parameters by an optimizer of torch's where nothing else is needed."""
        if self._reducer is not None:
            return
        params = [param for group in self.param_groups for param in group["params"]]
        copies = any(map(self._precision.copies, params))
        sharded = self._engine.splits_gradients and any(isinstance(param, DTensor) for param in params)
        if sharded and copies and self._probe.refusal:
            raise UsageError(
                f"{self._class.__name__} can't update copies of sharded parameters: {self._probe.refusal}",
                remedy="leave out master_dtype and offload",
            )
        if not (copies or self._rows or (sharded and self._probe.whole)):
            self._plain = self._class(self.param_groups, **self._options)
            self._plain.param_groups = self.param_groups  # one list: schedulers change what the update reads
            self.state = self._plain.state

    def _build(self) -> list[UpdateGroup]:
        """Create the update groups of this rank, with any loaded state; a collective.

        Raises:
            UsageError: on all ranks, if elements of the loaded state are missing or can't be read on any.
        """
        if self._reducer is not None:
            built = self._shard_groups(self._reducer)
        else:
            built = [self._group(self._units_here(), [])]
        problem = ""
        index_of = self._index_by_name()
        for group in built:
            for unit in group.units:
                try:
                    self._load_unit(group, unit, self.param_groups[index_of[unit.name]])
                except PacelineError as error:
                    problem = problem or str(error).partition("\n")[0]
        self._raise_together(
            problem, "", remedy="load an intact checkpoint, or shards of all ranks that wrote the state"
        )
        if self._probe.changes_groups or takes_arguments(self._class):
            here = {index for group in built for index in group.indices}
            missing = [index for index in range(len(self.param_groups)) if index not in here]
            zeros = {index: [zero_with_grad(self._engine.device)] for index in missing}
            built.append(UpdateGroup([], missing, self._inner(zeros)))
        for exchange in self._exchanges:
            exchange.release()
        self._groups, self._loaded, self._states_checked = built, {}, False
        return self._groups

    def _shard_groups(self, reducer: Reducer) -> list[UpdateGroup]:
        """Return the groups of this rank's parts of buckets."""
        held = self._index_by_name()
        full = [b for b in reducer.buckets if b.slots and any(slot.name in held for slot in b.slots)]
        comm, blocks, neighbours = reducer.comm, {}, reducer.neighbours
        for block in self._blocks():
            blocks.setdefault(block.name, []).append(block)
        sizes, groups = [bucket.flat.nbytes for bucket in full], []
        for members in update_parts(sizes, accelerator=has_streams(reducer.device)):
            units: list[UpdateUnit] = []
            for shard in [comm.shard] if neighbours is None else [comm.shard, neighbours.right]:
                for bucket in (full[index] for index in members):
                    if bucket.whole:
                        held_here = owned_units(bucket, shard, comm.shards, blocks, self._precision)
                    else:
                        held_here = flat_units(bucket, shard, comm.shards, self._precision)
                    for unit in held_here:
                        unit.in_copy = shard != comm.shard
                    units += held_here
            groups.append(
                self._group([u for u in units if u.name in held], [full[index] for index in members])
            )
        return groups

    def _units_here(self) -> list[UpdateUnit]:
        """Return the blocks that this rank updates where the engine does not cut buckets."""
        by_param: dict[int, list[Any]] = {}
        for block in self._blocks():
            by_param.setdefault(id(block.param), []).append(block)
        sharded = [blocks for blocks in by_param.values() if isinstance(blocks[0].param, DTensor)]
        whole = [block for blocks in by_param.values() for block in blocks if blocks not in sharded]
        units = units_in_place(whole, self._precision)
        if sharded and self._probe.whole:
            self._exchanges = plan_exchanges(sharded, self._precision)
            return units + [unit for exchange in self._exchanges for unit in exchange.units]
        rows = (local_rows(block.name, cast(DTensor, block.param), self._precision) for (block,) in sharded)
        return units + [unit for unit in rows if unit is not None]

    def _group(self, units: list[UpdateUnit], buckets: list[Any]) -> UpdateGroup:
        index_of, held = self._index_by_name(), {}
        for unit in units:
            held.setdefault(index_of[unit.name], []).append(unit.inner)
        return UpdateGroup(units, sorted(held), self._inner(held), buckets)

    def _index_by_name(self) -> dict[str, int]:
        """Return the index of each parameter's group."""
        return {
            block.name: at for at, group in enumerate(self.param_groups) for block in self._blocks_of(group)
        }

    def _inner(self, held: Mapping[int, list[torch.nn.Parameter]]) -> torch.optim.Optimizer | None:
        """Return an optimizer of the `held` parameters, by the index of their outer group; None for none."""
        groups = [
            {**copied(group_options(self.param_groups[index])), "params": held[index]}
            for index in sorted(held)
        ]
        return self._class(groups, **self._options) if groups else None

    # ------------------------------------------------------------------ after an update

    def _keep_group_state(self, groups: Sequence[UpdateGroup]) -> None:
        """Take over what the inner optimizers have changed in their groups; see [Note: groups] in `update_groups`."""
        seen: set[int] = set()
        for group in groups:
            for index, mine in group.param_groups():
                if index not in seen:
                    seen.add(index)
                    take_over(self.param_groups[index], group_options(mine))

    def _check_states(self, groups: Sequence[UpdateGroup]) -> None:
        """Raise on all ranks if the state of any part is not as in the trial; once per build."""
        self._states_checked = True
        probe = self._probe
        if probe.whole:
            return
        misfits = (
            f"{unit.name!r}: {misfit}"
            for group in groups
            for unit in group.units
            if (misfit := probe.misfit(group.state_of(unit), unit.inner.numel()))
        )
        self._raise_together(
            next(misfits, ""),
            f"{self._class.__name__} can't update parts of parameters: its state is not like that of small ones: ",
            remedy="use an elementwise optimizer (SGD, Adam, AdamW, RMSprop …) or another strategy",
        )
