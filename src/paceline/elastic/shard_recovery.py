"""Live recovery of sharded state: the shards of one world, from their owners or from copies, become those of the next.

Every member of a layout holds two shards: its own, and a copy of its right neighbour's (`neighbour_exchange`). It keeps
them while worlds are formed, until one trains. In a new world all exchange the shards that each provides, put together
the whole state, and load it; the first step divides it again.

Until the first step of a layout its members hold the whole state. Such a member provides it in place of a shard: as
long as one of them has updated nothing, no other has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.api import Checkpoint
from paceline.checkpoint.parts.model_weights import load_weights, weights_of
from paceline.checkpoint.parts.named_objects import unwrap
from paceline.checkpoint.parts.optimizer_state_pieces import (
    copied_pieces,
    load_optimizer,
    optimizer_groups,
    optimizer_state,
)
from paceline.elastic.training_state import TrainingState
from paceline.elastic.view import Recovery, View
from paceline.errors import UsageError, WorldError
from paceline.parallel.buckets.grad_slot import ShardPiece, shaped_as, storage_numel
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.world.value_collectives import broadcast_value, gather_values

__all__ = ["Exchanged", "ShardRecovery"]

log = logging.getLogger("paceline.elastic")


@dataclass(frozen=True)
class _Shard:
    """A shard of a layout, or the whole state.

    Attributes:
        weights: name of a parameter, start and stop among its stored elements, and their values.
        optimizers: pieces of the state of each optimizer.
        whole: optimizers of which this is the whole state.
    """

    weights: Sequence[tuple[str, int, int, Tensor]]
    optimizers: Mapping[str, Sequence[Any]]
    whole: frozenset[str] = frozenset()

    def packed(self) -> dict[str, Any]:
        """Return it as a plain value."""
        return {
            "weights": [list(each) for each in self.weights],
            "optimizers": {
                name: [list(piece) for piece in pieces] for name, pieces in self.optimizers.items()
            },
            "whole": sorted(self.whole),
        }


@dataclass
class _Layout:
    """The layout in which the objects are.

    Attributes:
        epoch: of its view; −1: the objects are in none.
        members: of that view.
    """

    epoch: int = -1
    members: Sequence[str] = ()


@dataclass
class Exchanged:
    """What all ranks have received.

    Attributes:
        shards: of the layout before, as plain values.
        rest: everything else, of the rank that provides it.
        needed: whether this rank lacks it.
    """

    shards: list[dict[str, Any]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    needed: bool = False


class ShardRecovery:
    """Keeps the state of sharded training through changes of its world.

    Args:
        state: of the run.

    Attributes:
        ended: whether the program has ended its latest attempt, so that objects beside models and optimizers fit them.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._layout = _Layout()
        self._kept: dict[int, dict[int, _Shard]] = {}  # by epoch and index in the layout
        self.ended = True

    @property
    def sharded(self) -> bool:
        """Whether members hold different state."""
        return any(model.plan.shard != "none" for model in self._state.models.values())

    @property
    def held(self) -> bool:
        """Whether there are complete gradients whose update has not been applied."""
        return any(each.held is not None for each in self._optimizers.values())

    @property
    def _optimizers(self) -> dict[str, ShardedOptimizer]:
        found = self._state.objects.optimizers.items()
        return {name: each for name, each in found if isinstance(each, ShardedOptimizer)}

    @property
    def _model(self) -> DataParallel:
        return next(iter(self._state.models.values()))

    # ------------------------------------------------------------------ begin

    def begin(self) -> None:
        """Keep copies from now on; all ranks call this.

        Raises:
            UsageError: the objects can't recover live.
        """
        if not self.sharded:
            return
        self._check()
        for optimizer in self._optimizers.values():
            optimizer.keep_copy()

    def _check(self) -> None:
        models, model = self._state.models, self._model
        strange = [
            name for name, each in self._state.objects.optimizers.items() if name not in self._optimizers
        ]
        if model.plan.shard != "optimizer":
            problem, remedy = f"sync={model.plan.name!r}", 'use "sharded", or "bucketed"'
        elif len(models) > 1:
            problem = f"{len(models)} wrapped models, one of them sharded"
            remedy = "wrap one model, or shard none"
        elif strange:
            problem, remedy = f"{strange[0]!r}, which is no ShardedOptimizer", "use paceline.ShardedOptimizer"
        elif model.engine.device.type != "cpu":
            problem, remedy = f"a sharded model on {model.engine.device.type}", 'use "bucketed"'
        else:
            return
        raise UsageError(f"live recovery with {problem}", rank=model.comm.rank, remedy=remedy)

    def joined(self, view: View) -> None:
        """Record that the objects are in the layout of a view."""
        self._layout = _Layout(view.epoch, view.members)

    def train(self) -> None:
        """Keep the shards of earlier layouts no longer."""
        self._kept = {}

    # ------------------------------------------------------------------ the end of a step

    def wait(self) -> None:
        """Wait for the parameters; raises what a step could not."""
        if self.sharded:
            self._model.wait_for_parameters()

    def settle(self) -> None:
        """After a failure: end an update that has begun, or hold it until the others' progress is known."""
        for optimizer in self._optimizers.values() if self.sharded else ():
            optimizer.end_step()

    def decide(self, *, apply: bool) -> None:
        """Apply the update that is held, or give it up."""
        for optimizer in self._optimizers.values():
            if apply:
                optimizer.apply_held()
            else:
                optimizer.discard_held()

    # ------------------------------------------------------------------ the layout before

    @torch.no_grad()
    def _keep(self, view: View, me: str) -> None:
        """Keep this member's shards of the layout from which the next world is formed."""
        base = view.recovery.base
        self._model.engine.parameter_gather.abandon()
        if self._layout.members and base == self._layout.epoch:
            self._kept[base] = self._held_shards(self._layout.members.index(me), len(self._layout.members))
        self._kept = {epoch: shards for epoch, shards in self._kept.items() if epoch == base}
        self._layout = _Layout()

    def _held_shards(self, index: int, count: int) -> dict[int, _Shard]:
        """Return this member's shards, by index; of several that are the whole state, each is."""
        names, engine = self._state.objects.param_names, self._model.engine
        divided = {name: each for name, each in self._optimizers.items() if each.divided}
        whole = {
            name: optimizer_state(each, names)["pieces"]
            for name, each in self._optimizers.items()
            if name not in divided
        }
        own = {name: optimizer_state(each, names)["pieces"] for name, each in divided.items()}
        copies = {name: copied_pieces(each, names) for name, each in divided.items()}
        if whole or not divided:
            weights = {None: [_whole_weight(name, param) for name, param in engine.trains()]}
            parts = [weights[None], weights[None]]
        else:
            parts = [_weights(engine.pieces()), _weights(engine.copied_pieces())]
        shards = [
            _Shard(part, state | whole, frozenset(whole))
            for part, state in zip(parts, (own, copies), strict=True)
        ]
        return {index: shards[0], (index + 1) % count: shards[1 if count > 1 else 0]}

    # ------------------------------------------------------------------ the next world

    def exchange(self, view: View, me: str) -> Exchanged | None:
        """Exchange the state that the next world is formed of; all participants call this.

        Returns:
            The state; None: it comes from a checkpoint.
        """
        self._keep(view, me)
        recovery: Recovery = view.recovery
        if recovery.origin != "members":
            return None
        kept = self._kept.get(recovery.base, {})
        mine = [kept[index].packed() for index, provider in enumerate(recovery.shards) if provider == me]
        heads = gather_values({"shards": mine, "holds": bool(kept), "ended": self.ended})
        holders = [rank for rank, head in enumerate(heads) if head["holds"]]
        source = next((rank for rank in holders if heads[rank]["ended"]), holders[0])
        if not heads[source]["ended"]:
            log.warning(
                "no rank has ended step %d: what follows the update in it is not repeated", recovery.step
            )
        rest = broadcast_value(self._rest() if view.participants[source] == me else None, source)
        shards = [shard for head in heads for shard in head["shards"]]
        return Exchanged(shards, rest, needed=not (kept and self.ended))

    def _rest(self) -> dict[str, Any]:
        """Return what all members have in common, beside what is divided."""
        objects, engine = self._state.objects, self._model.engine
        divided = {id(param) for _, param in engine.trains()}
        weights, extra = {}, {}
        for name, model in objects.models.items():
            skipped = {key for key, param in unwrap(model).named_parameters() if id(param) in divided}
            tensors, extra[name] = weights_of(model)
            weights[name] = {key: value for key, value in tensors.items() if key not in skipped}
        return {
            "weights": weights,
            "extra": extra,
            "groups": {
                name: optimizer_groups(each, objects.param_names) for name, each in self._optimizers.items()
            },
            "engine": [engine.step, float(engine.weights.reference), engine.weights.agreed],
            "others": {name: each.state_dict() for name, each in objects.others.items()},
        }

    def rejoin(self, view: View, found: Exchanged | None, checkpoint: Checkpoint | None) -> int:
        """Continue in the world of a view; all its members call this. Return the step to train first.

        Args:
            view: the view.
            found: the state; None: it comes from the checkpoint.
            checkpoint: has continued there.

        Raises:
            WorldError: there is no checkpoint.
        """
        self._state.rejoin(whole=False)
        if found is not None:
            self._load(found)
            return view.recovery.step
        loaded = None if checkpoint is None else checkpoint.load()
        if loaded is None:
            raise WorldError(f"the checkpoint of step {view.recovery.step} is gone")
        self.ended = True
        return loaded.step

    @torch.no_grad()
    def _load(self, found: Exchanged) -> None:
        """Load the whole state into objects that have rejoined without any."""
        objects, engine = self._state.objects, self._model.engine
        whole = _join(found.shards, dict(engine.trains()))
        for name, model in objects.models.items():
            values = dict(unwrap(model).state_dict())
            values |= found.rest["weights"][name] if found.needed else {}
            values |= whole if model is self._model else {}
            load_weights(model, values.__getitem__)
            if found.needed and found.rest["extra"][name]:
                unwrap(model).load_state_dict(found.rest["extra"][name], strict=False)
        for name, optimizer in self._optimizers.items():
            groups = optimizer_groups(optimizer, objects.param_names)
            if found.needed:
                groups = found.rest["groups"][name]
            load_optimizer(optimizer, groups, _pieces_of(found.shards, name), objects.param_names)
        if found.needed:
            engine.step, engine.weights.reference, engine.weights.agreed = found.rest["engine"]
            for name, each in objects.others.items():
                each.load_state_dict(found.rest["others"][name])
        self.ended = True


def _weights(pieces: Sequence[ShardPiece]) -> list[tuple[str, int, int, Tensor]]:
    return [(piece.slot.name, piece.start, piece.stop, piece.data) for piece in pieces]


def _whole_weight(name: str, param: Tensor) -> tuple[str, int, int, Tensor]:
    """Return a parameter, flattened as it is stored."""
    real = param.dtype.to_real() if param.is_complex() else param.dtype
    flat = torch.empty(storage_numel(param), dtype=real, device=param.device)
    shaped_as(param, flat).copy_(param)
    return name, 0, flat.numel(), flat


def _join(shards: Sequence[Mapping[str, Any]], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole parameters by name.

    Raises:
        WorldError: elements are missing.
    """
    flats = {name: _whole_weight(name, param)[3] for name, param in params.items()}
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in params}
    for shard in shards:
        for name, start, stop, values in shard["weights"]:
            flats[name][start:stop] = values
            spans[name].append((start, stop))
    for name, flat in flats.items():
        covered = 0
        for start, stop in sorted(spans[name]):
            covered = max(covered, stop) if start <= covered else covered
        if covered < flat.numel():
            raise WorldError(f"of parameter {name!r}, the members have {covered} of {flat.numel()} elements")
    return {name: shaped_as(params[name], flat) for name, flat in flats.items()}


def _pieces_of(shards: Sequence[Mapping[str, Any]], optimizer: str) -> list[Any]:
    """Return the pieces of an optimizer's state that cover each element once."""
    for shard in shards:
        if optimizer in shard["whole"]:
            return shard["optimizers"][optimizer]
    return [piece for shard in shards for piece in shard["optimizers"][optimizer]]
