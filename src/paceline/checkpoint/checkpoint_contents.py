"""Collects the contents of a checkpoint from models, optimizers and other objects, and restores them.

manifest.weights   per model: its files, and further names of weights
manifest.states    per rank:
    optimizers     per optimizer: the options of each group (the same on all ranks), and this rank's pieces
    random         this rank's random generators
    compressed     per model: this rank's compression residuals
    own            per object with a `rank_state_dict`: this rank's, such as its local parameters; per loader whose
                   state belongs to a rank: this rank's; see parts/loader_states
    digests        per object whose state should be the same on all ranks: its digest
    others, extra, engines, epoch, between_epochs    of rank 0 only: states of all other objects; entries of a model's
                   state_dict that are not tensors; counters, loss weights and arithmetic of its engine; completed
                   epochs, and whether the next one had not begun
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import StoredWeights, state_file
from paceline.checkpoint.model_weights import check_weights, load_weights, weight_files, weights_part
from paceline.checkpoint.named_objects import NamedObjects, unwrap
from paceline.checkpoint.newest_checkpoint import ResumePoint
from paceline.checkpoint.optimizer_state_pieces import check_optimizer, load_optimizer, optimizer_state
from paceline.checkpoint.parts.loader_states import check_states, collect_state, load_state
from paceline.errors import CheckpointError, UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.local_sgd.outer_loop import OuterLoop
from paceline.parallel.virtual_ranks.arithmetic_probe import warn_of_other_arithmetic
from paceline.parallel.virtual_ranks.virtual_reducer import VirtualRankReducer
from paceline.world.accelerator import find_accelerator, used_accelerator
from paceline.world.plain_values import pack, unpack

__all__ = ["CheckpointContents", "collect_contents", "restore_contents"]


@dataclass(frozen=True)
class CheckpointContents:
    """A rank's part of a checkpoint.

    Attributes:
        files: the tensors of each of its files.
        weights: per model, of all ranks.
        state: everything else, as JSON values.
    """

    files: dict[str, dict[str, Tensor]]
    weights: dict[str, StoredWeights]
    state: Any


def collect_contents(
    objects: NamedObjects, rank: int, ranks: int, *, epoch: int, between_epochs: bool = False
) -> CheckpointContents:
    """Return the part of `rank`; all ranks call this, since sharded weights are gathered.

    Raises:
        UsageError: an object's state contains values that can't be saved.
        SyncError: the latest update of a model was wrong, which a GPU reports late.
    """
    engines = {
        name: model.engine for name, model in objects.models.items() if isinstance(model, DataParallel)
    }
    for engine in engines.values():
        engine.settle()
    files: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, StoredWeights] = {}
    extra: dict[str, Any] = {}
    loops = [each for each in objects.others.values() if isinstance(each, OuterLoop)]
    for name, model in objects.models.items():
        shared = {
            key: theta
            for loop in loops
            if loop.module is unwrap(model)
            for key, theta in loop.shared().items()
        }
        part = weights_part(model, rank, ranks, shared)
        names = weight_files(name, part.parts)
        weights[name], extra[name] = StoredWeights(names, part.aliases), part.extra
        if rank < part.parts:
            files[names[rank]] = dict(part.tensors)
    others = {name: collect_state(name, each, rank, ranks) for name, each in objects.others.items()}
    state: dict[str, Any] = {
        "optimizers": {
            name: optimizer_state(optimizer, objects.param_names, rank, ranks)
            for name, optimizer in objects.optimizers.items()
        },
        "random": _random_state(),
        "compressed": {
            name: residuals for name, engine in engines.items() if (residuals := engine.residuals.state())
        },
        "own": {name: each.own for name, each in others.items() if each.own is not None},
        "digests": {name: each.digest for name, each in others.items() if each.digest},
    }
    if rank == 0:
        state["others"] = {name: each.common for name, each in others.items()}
        state["extra"], state["epoch"], state["between_epochs"] = extra, epoch, between_epochs
        state["engines"] = {
            name: {"step": engine.step, "reference": float(engine.weights.reference)}
            | ({"arithmetic": engine.arithmetic} if isinstance(engine, VirtualRankReducer) else {})
            for name, engine in engines.items()
        }
    packed, tensors = pack(state)
    if tensors:
        files[state_file(rank)] = tensors
    return CheckpointContents(files, weights, packed)


def restore_contents(found: ResumePoint, objects: NamedObjects, rank: int, ranks: int) -> int:
    """Check that an intact checkpoint matches `objects`, then restore them; return the number of completed epochs.

    Raises:
        UsageError: it belongs to other objects; nothing was changed.
        CheckpointError: its contents are invalid.
    """
    manifest, reader = found.manifest, found.reader
    try:
        states = [
            unpack(state, lambda label, number=number: reader.tensor(state_file(number), label))
            for number, state in enumerate(manifest.states)
        ]
        first = states[0]
        groups = {name: saved["groups"] for name, saved in first["optimizers"].items()}
        pieces = {
            name: [piece for state in states for piece in state["optimizers"][name]["pieces"]]
            for name in groups
        }
        _check_objects(found, objects, groups)
        check_states(objects.others, states, rank, ranks, str(found.path))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        raise CheckpointError(f"the contents of {str(found.path)!r} are invalid: {error!r:.200}") from error
    for name, model in objects.models.items():
        locations = manifest.weight_locations(name)
        load_weights(model, lambda weight, where=locations: reader.tensor(*where[weight]))
        if isinstance(model, DataParallel) and name in first["engines"]:
            saved = first["engines"][name]
            model.engine.step, model.engine.weights.reference = saved["step"], saved["reference"]
            model.engine.residuals.load([state.get("compressed", {}).get(name, {}) for state in states])
            model.engine.replicas_differ, model.engine.failure = False, ""
            if isinstance(model.engine, VirtualRankReducer) and rank == 0:
                warn_of_other_arithmetic(model.engine.arithmetic, saved.get("arithmetic", {}))
        if first["extra"][name]:
            unwrap(model).load_state_dict(first["extra"][name], strict=False)
    for name, optimizer in objects.optimizers.items():
        load_optimizer(optimizer, groups[name], pieces[name], objects.param_names)
    for name, other in objects.others.items():  # last: their states may set those of model and optimizer
        load_state(name, other, states, rank, ranks)
    if rank < len(states):
        _set_random_state(states[rank]["random"])
    return first["epoch"]


def _check_objects(found: ResumePoint, objects: NamedObjects, groups: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint holds the models and optimizers of `objects`."""
    manifest, path = found.manifest, str(found.path)
    kinds = (
        ("model", objects.models, manifest.weights),
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
    for name, model in objects.models.items():
        stored = {
            weight: manifest.files[file].tensors[label]
            for weight, (file, label) in manifest.weight_locations(name).items()
        }
        kind_of = {weight: (tensor.dtype, tuple(tensor.shape)) for weight, tensor in stored.items()}
        check_weights(model, kind_of, f"the checkpoint {path!r}")
    for name, optimizer in objects.optimizers.items():
        check_optimizer(name, optimizer, groups[name], objects.param_names)


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
