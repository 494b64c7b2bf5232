"""Collects the contents of a checkpoint from models, optimizers and other objects, and restores them.

tensors            by name: weights, optimizer state, tensors in states; each rank has parts of them
manifest.optimizers    per optimizer, the options of each group, with the names of its parameters
state of a rank
    random         its random generators
    compressed     per model: its compression residuals
    own            per object with a `rank_state_dict`: its own, such as its local parameters; per loader whose state
                   belongs to a rank: its own; see parts/loader_states
    digests        per object whose state should be the same on all ranks: its digest
    others, extra, engines, epoch, between_epochs    of rank 0 only: states of all other objects; entries of a model's
                   state_dict that are not tensors; counters, loss weights and arithmetic of its engine; completed
                   epochs, and whether the next one had not begun
    partial, ignored, notes    of rank 0, if another program wrote it: other objects may be missing; names of what
                   belongs to no object; what the log should say
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.format.dcp_files import dcp_file
from paceline.checkpoint.format.manifest_index import OWN
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.dcp_names import DcpNames, dcp_values
from paceline.checkpoint.parts.loader_states import (
    check_states,
    collect_state,
    is_loader,
    is_paceline_loader,
    load_state,
    plain_state,
)
from paceline.checkpoint.parts.model_weights import (
    check_weights,
    collect_weights,
    fill_weights,
    plan_weights,
    weight_names,
)
from paceline.checkpoint.parts.named_objects import NamedObjects, unwrap
from paceline.checkpoint.parts.optimizer_parts import collect_optimizer
from paceline.checkpoint.parts.optimizer_restore import OptimizerPlan, plan_optimizer
from paceline.checkpoint.parts.optimizer_state_pieces import check_optimizer
from paceline.checkpoint.parts.state_parts import StateParts
from paceline.checkpoint.parts.state_reader import RunReader
from paceline.errors import CheckpointError, UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.local_sgd.outer_loop import OuterLoop
from paceline.parallel.virtual_ranks.arithmetic_probe import warn_of_other_arithmetic
from paceline.parallel.virtual_ranks.virtual_reducer import VirtualRankReducer
from paceline.world.accelerator import find_accelerator, used_accelerator
from paceline.world.plain_values import unpack

__all__ = ["CheckpointContents", "RestorePlan", "collect_contents", "engine_state"]

log = logging.getLogger("paceline.checkpoint")


@dataclass(frozen=True)
class CheckpointContents:
    """What a rank writes.

    Attributes:
        parts: its tensors and values.
        state: its own state, as JSON values.
        shared: on rank 0, entries of the manifest that come from the objects.
        values: with ``container="dcp"``, what is written besides tensors, by name, encoded.
        names: with ``container="dcp"``, the names in its files, on rank 0.
    """

    parts: StateParts
    state: Any
    shared: Mapping[str, Any]
    values: Mapping[str, bytes] = field(default_factory=dict)
    names: DcpNames = field(default_factory=DcpNames)

    @property
    def container(self) -> str:
        """The kind of its files."""
        return self.shared["container"]


@torch.no_grad()
def collect_contents(
    objects: NamedObjects,
    rank: int,
    ranks: int,
    *,
    epoch: int,
    between_epochs: bool = False,
    container: str = "safetensors",
) -> CheckpointContents:
    """Return what `rank` writes; nothing is gathered, but all ranks call this.

    Args:
        objects: to save.
        rank, ranks: the rank, and the number of ranks.
        epoch: number of completed epochs.
        between_epochs: the next one has not begun.
        container: ``"safetensors"``, or ``"dcp"``.

    Raises:
        UsageError: an object's state contains values that can't be saved.
        SyncError: the latest update of a model was wrong, which a GPU reports late.
    """
    engines = {
        name: model.engine for name, model in objects.models.items() if isinstance(model, DataParallel)
    }
    for engine in engines.values():
        engine.settle()
        engine.parameter_gather.wait_all()
    parts = StateParts(rank)
    aliases: dict[str, dict[str, str]] = {}
    extra: dict[str, Any] = {}
    loops = [each for each in objects.others.values() if isinstance(each, OuterLoop)]
    for name, model in objects.models.items():
        instead = {
            key: theta
            for loop in loops
            if loop.module is unwrap(model)
            for key, theta in loop.shared().items()
        }
        aliases[name], extra[name] = collect_weights(name, model, parts, rank, ranks, instead)
    groups = {
        name: collect_optimizer(name, optimizer, objects.param_names, parts, ranks)
        for name, optimizer in objects.optimizers.items()
    }
    others = {name: collect_state(name, each, rank, ranks) for name, each in objects.others.items()}
    own: dict[str, Any] = {
        "random": _random_state(),
        "compressed": {
            name: residuals for name, engine in engines.items() if (residuals := engine.residuals.state())
        },
        "own": {name: each.own for name, each in others.items() if each.own is not None},
        "digests": {name: each.digest for name, each in others.items() if each.digest},
    }
    state = parts.add_packed(f"{OWN}{rank}", own)
    shared: dict[str, Any] = {"aliases": aliases, "container": container}
    if rank == 0:
        common = {
            "others": {name: each.common for name, each in others.items()},
            "extra": extra,
            "epoch": epoch,
            "between_epochs": between_epochs,
            "engines": {name: engine_state(engine) for name, engine in engines.items()},
        }
        state |= parts.add_packed(f"{OWN}0", common)
        shared["optimizers"] = {
            name: parts.add_packed(f"{name}.param_groups", each) for name, each in groups.items()
        }
    if container != "dcp":
        return CheckpointContents(parts, state, shared)
    optimizers = shared.get("optimizers", {})
    nested: dict[str, Any] = {}
    if rank == 0:
        nested = {name: plain_state(each, state["own"].get(name)) for name, each in state["others"].items()}
        nested |= {name: each for name, each in state["extra"].items() if each}
    values = dcp_values(optimizers, nested, parts.values, parts.tensors().__getitem__)
    names = DcpNames(aliases, optimizers, nested)
    return CheckpointContents(parts.in_files(dcp_file(rank), dcp_file(rank, 1)), state, shared, values, names)


def engine_state(engine: Reducer) -> dict[str, Any]:
    """Return the plain values of an engine by which a resumed run computes the same bits."""
    state = {"step": engine.step, "reference": float(engine.weights.reference)}
    return state | ({"arithmetic": engine.arithmetic} if isinstance(engine, VirtualRankReducer) else {})


@dataclass
class RestorePlan:
    """What a rank restores from a checkpoint: made and verified before anything is changed.

    Args:
        reader: of the checkpoint.
        objects: to restore.
        rank, ranks: this rank, and the number of ranks.

    Raises:
        UsageError: the checkpoint belongs to other objects.
        DamagedCheckpoint: it is not intact, as far as this rank reads it.
    """

    reader: RunReader
    objects: NamedObjects
    rank: int
    ranks: int
    optimizers: dict[str, OptimizerPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        manifest, reader, objects = self.reader.manifest, self.reader, self.objects
        try:
            self.first = self._unpacked(0)
            groups = {name: unpack(packed, reader.tensor) for name, packed in manifest.optimizers.items()}
            self._check_objects(groups)
            for name, optimizer in objects.optimizers.items():
                self.optimizers[name] = plan_optimizer(
                    name,
                    optimizer,
                    groups[name],
                    objects.param_names,
                    reader,
                    self.rank,
                    self.ranks,
                    self._written,
                )
            # A number of ranks that shrinks takes over the residuals of others; see `ResidualState.load`.
            self.states = {
                rank: self.first if rank == 0 else self._unpacked(rank)
                for rank in range(manifest.ranks)
                if rank % self.ranks == self.rank
            }
            if not self.first.get("partial"):
                check_states(objects.others, self._rank_states, self.rank, self.ranks, reader.files.location)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, UsageError):
                raise
            raise CheckpointError(
                f"the contents of {reader.files.location!r} are invalid: {error!r:.200}"
            ) from error
        reads = [read for plan in self.optimizers.values() for read in plan.reads]
        for name, model in objects.models.items():
            reads += plan_weights(name, model, self.rank, self.ranks)
        reader.read(reads)
        for rank in range(manifest.ranks):  # a damaged header makes no difference here, but to other programs
            if rank % self.ranks == self.rank:
                reader.verify_rest(rank)

    def _written(self, name: str) -> list[Box] | None:
        """Return what this rank has written of a tensor; None: another number of ranks wrote the checkpoint."""
        manifest = self.reader.manifest
        stored = manifest.tensors.get(name)
        if stored is None or manifest.ranks != self.ranks:
            return None
        layout = manifest.layouts[stored.layout]
        return [Box(tuple(offsets), tuple(sizes)) for rank, offsets, sizes in layout if rank == self.rank]

    def _unpacked(self, rank: int) -> dict[str, Any]:
        """Return the state of a rank."""

        def lookup(label: str) -> Tensor:
            return self.reader.own(rank, label)

        return {name: unpack(value, lookup) for name, value in self.reader.piece(rank).state.items()}

    def restore(self) -> int:
        """Restore all objects; return the number of completed epochs.

        Raises:
            DamagedCheckpoint: a file has changed since it was verified.
        """
        objects, first, ranks = self.objects, self.first, self.reader.manifest.ranks
        for name, model in objects.models.items():
            fill_weights(name, model, self.reader)
            if isinstance(model, DataParallel) and name in first["engines"]:
                saved = first["engines"][name]
                model.engine.step, model.engine.weights.reference = saved["step"], saved["reference"]
                compressed = [self.states.get(rank, {}).get("compressed", {}) for rank in range(ranks)]
                model.engine.residuals.load([each.get(name, {}) for each in compressed])
                model.engine.replicas_differ, model.engine.failure = False, ""
                if isinstance(model.engine, VirtualRankReducer) and self.rank == 0:
                    warn_of_other_arithmetic(model.engine.arithmetic, saved.get("arithmetic", {}))
            if first["extra"][name]:
                unwrap(model).load_state_dict(first["extra"][name], strict=False)
        for plan in self.optimizers.values():
            plan.load()
        for name, other in objects.others.items():  # last: their states may set those of model and optimizer
            foreign = is_loader(other) and not is_paceline_loader(other)
            if not (first.get("partial") and foreign):  # whose state another program has saved in its own way
                load_state(name, other, self._rank_states, self.rank, self.ranks)
        if "random" in (state := self.states.get(self.rank, {})):
            _set_random_state(state["random"])
        if self.rank == 0 and first.get("partial"):
            self._log_partial()
        return first["epoch"]

    def _log_partial(self) -> None:
        """Log what a checkpoint of another program lacks, and what of it belongs to no object."""
        objects, first, path = self.objects, self.first, self.reader.files.location
        for note in first.get("notes", []):
            log.warning("%s: %s", path, note)
        if missing := [
            name
            for name, other in objects.others.items()
            if name not in first["others"] or (is_loader(other) and not is_paceline_loader(other))
        ]:
            log.warning("%s has no state of %s, which begins anew", path, ", ".join(missing))
        unused = [name for name in first["others"] if name not in objects.others]
        if ignored := [*unused, *first.get("ignored", [])]:
            log.info("%s has more than this run; ignored: %s", path, ", ".join(ignored))

    @property
    def _rank_states(self) -> list[dict[str, Any]]:
        """The states of all ranks that wrote the checkpoint, as far as this one has read them."""
        states = [self.states.get(rank, {}) for rank in range(self.reader.manifest.ranks)]
        return [self.first, *states[1:]]

    def _check_objects(self, groups: Mapping[str, Any]) -> None:
        """Raise unless the checkpoint holds the models and optimizers."""
        manifest, path, objects = self.reader.manifest, self.reader.files.location, self.objects
        kinds = (
            ("model", objects.models, manifest.aliases),
            ("optimizer", objects.optimizers, groups),
        )
        for kind, here, saved in kinds:
            for name in [*here, *saved]:
                if (name in here) != (name in saved):
                    where = (
                        f"is in the checkpoint {path!r} only"
                        if name in saved
                        else f"is not in the checkpoint {path!r}"
                    )
                    raise UsageError(
                        f"{kind} {name!r} {where}",
                        remedy="pass to paceline.Checkpoint what the run that wrote it passed, under the same names",
                    )
        for name, other in objects.others.items():
            lacks = self.first.get("partial") and name not in self.first["others"]
            if lacks and hasattr(other, "rank_state_dict"):
                raise UsageError(
                    f"{name!r} is not in the checkpoint {path!r}, and has copies of the weights of before",
                    remedy="fill the model before it is created: paceline.import_weights(model, path)",
                )
        for name, model in objects.models.items():
            weights = saved_weights(self.reader, name)
            if self.first.get("partial"):  # of tied weights it may have one
                for first, others in weight_names(model).items():
                    weights |= {each: weights[first] for each in others if first in weights}
            check_weights(model, weights, f"the checkpoint {path!r}")
        for name, optimizer in objects.optimizers.items():
            check_optimizer(name, optimizer, groups[name], objects.param_names)


def saved_weights(reader: RunReader, model: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of a model's weights in a checkpoint, under all their names."""
    manifest, prefix = reader.manifest, f"{model}."
    found = {
        name[len(prefix) :]: (tensor.dtype, tuple(tensor.shape))
        for name, tensor in manifest.tensors.items()
        if name.startswith(prefix)
    }
    return found | {alias: found[first] for alias, first in manifest.aliases[model].items()}


def _random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators, and of the current accelerator's."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 — the one that programs share
        "torch": torch.get_rng_state(),
    }
    kind = used_accelerator()
    if kind is not None:
        state[kind] = torch.get_device_module(kind).get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"].clone())
    kind = find_accelerator()
    if kind is not None and kind in state:
        torch.get_device_module(kind).set_rng_state(state[kind].clone())
