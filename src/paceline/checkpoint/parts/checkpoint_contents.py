"""What is in a checkpoint: taken from models, optimizers and the rest on each rank, and given back to them.

manifest.weights   per model: its files, further names of weights
manifest.states    per rank:
    optimizers     per optimizer: the options of each group (the same on all ranks), and this rank's pieces
    random         this rank's generators
    compressed     per model: what compression of its gradients has left out on this rank
    own            per object that has a `rank_state_dict`: this rank's, such as its local parameters
    others, extra, engines, epoch    of rank 0 only: states of all other objects; what of a model's state is no tensor;
                   what its engine has counted and learnt; epochs done

The state of every generator of random numbers that a training draws from on this rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.checkpoint.format.manifest import Manifest, state_file
from paceline.checkpoint.format.state_tree import pack, unpack
from paceline.checkpoint.format.verified_reader import VerifiedReader
from paceline.checkpoint.parts.model_weights import check_weights, load_weights, part_names, part_of
from paceline.checkpoint.parts.named_objects import NamedObjects, bare
from paceline.checkpoint.parts.optimizer_state import check_optimizer, load_optimizer, optimizer_state
from paceline.errors import CheckpointError, UsageError
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.local_sgd.outer_loop import OuterLoop

__all__ = ["CheckpointContents", "contents_of", "places_of", "random_state", "set_random_state", "take_up"]


@dataclass(frozen=True)
class CheckpointContents:
    """What one rank has of a checkpoint.

    Attributes:
        files: its files, with the tensors in each.
        weights: per model, the files of all ranks, and further names of weights.
        state: everything else, as JSON can say it.
    """

    files: dict[str, dict[str, Tensor]]
    weights: dict[str, dict[str, Any]]
    state: Any


def contents_of(subjects: NamedObjects, rank: int, ranks: int, *, epoch: int) -> CheckpointContents:
    """Return what `rank` answers for; all ranks call this, since sharded weights are gathered.

    Raises:
        UsageError: an object's state holds what no checkpoint can.
    """
    files: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    for name, model in subjects.models.items():
        part = part_of(model, rank, ranks, _shared(model, subjects))
        names = part_names(name, part.parts)
        weights[name], extra[name] = {"files": names, "aliases": part.aliases}, part.rest
        if rank < part.parts:
            files[names[rank]] = dict(part.tensors)
    state: dict[str, Any] = {
        "optimizers": {
            name: optimizer_state(optimizer, subjects.name_of_param, rank, ranks)
            for name, optimizer in subjects.optimizers.items()
        },
        "random": random_state(),
        "compressed": {
            name: kept
            for name, model in subjects.models.items()
            if isinstance(model, DataParallel) and (kept := model.engine.residuals.state())
        },
        "own": {
            name: each.rank_state_dict()
            for name, each in subjects.others.items()
            if hasattr(each, "rank_state_dict")
        },
    }
    if rank == 0:
        state["others"] = {name: each.state_dict() for name, each in subjects.others.items()}
        state["extra"], state["epoch"] = extra, epoch
        state["engines"] = {
            name: {"step": model.engine.step, "reference": model.engine.weights.reference}
            for name, model in subjects.models.items()
            if isinstance(model, DataParallel)
        }
    packed, tensors = pack(state)
    if tensors:
        files[state_file(rank)] = tensors
    return CheckpointContents(files, weights, packed)


def take_up(
    path: Path, manifest: Manifest, reader: VerifiedReader, subjects: NamedObjects, rank: int, ranks: int
) -> int:
    """Check that an intact checkpoint fits, then give everything its part of it; return the epochs done.

    Raises:
        UsageError: it is of other objects; nothing was changed.
        CheckpointError: it makes no sense.
    """
    try:
        states = [
            unpack(state, lambda label, number=number: reader.tensor(state_file(number), label))
            for number, state in enumerate(manifest.states)
        ]
        first = states[0]
        groups = {name: told["groups"] for name, told in first["optimizers"].items()}
        pieces = {
            name: [piece for state in states for piece in state["optimizers"][name]["pieces"]]
            for name in groups
        }
        places = {name: places_of(manifest, name) for name in manifest.weights}
        _check(path, manifest, subjects, groups, first["others"], places)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        raise CheckpointError(f"{str(path)!r} makes no sense: {error!r:.200}") from error
    for name, model in subjects.models.items():
        load_weights(model, lambda weight, where=places[name]: reader.tensor(*where[weight]))
        if isinstance(model, DataParallel) and name in first["engines"]:
            told = first["engines"][name]
            model.engine.step, model.engine.weights.reference = told["step"], told["reference"]
            kept = [state.get("compressed", {}).get(name, {}) for state in states]
            model.engine.residuals.load(kept)
            model.engine.replicas_differ = False
        if first["extra"][name]:
            bare(model).load_state_dict(first["extra"][name], strict=False)
    for name, optimizer in subjects.optimizers.items():
        load_optimizer(optimizer, groups[name], pieces[name], subjects.name_of_param, rank)
    for name, other in subjects.others.items():  # last: one may have more to say of model and optimizer
        _give_back(name, other, states, rank, ranks)
    if rank < len(states):
        set_random_state(states[rank]["random"])
    return first["epoch"]


def _give_back(name: str, other: Any, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
    """Load an object's state: rank 0's, and with it this rank's own where it has one and the ranks are the same."""
    state = states[0]["others"][name]
    if not hasattr(other, "rank_state_dict"):
        other.load_state_dict(state)
        return
    same = len(states) == ranks
    other.load_state_dict(state, states[rank].get("own", {}).get(name) if same else None)


def _shared(model: nn.Module, subjects: NamedObjects) -> Mapping[str, Tensor]:
    """Return the parameters of a model whose ranks train apart, as they share them; of others nothing."""
    loops = [each for each in subjects.others.values() if isinstance(each, OuterLoop)]
    return {
        name: theta for loop in loops if loop.module is bare(model) for name, theta in loop.shared().items()
    }


def places_of(manifest: Manifest, model: str) -> dict[str, tuple[str, str]]:
    """Return the file and the label of every weight of a model."""
    told = manifest.weights[model]
    places = {label: (file, label) for file in told["files"] for label in manifest.files[file].tensors}
    return places | {alias: places[label] for alias, label in told["aliases"].items()}


def _check(
    path: Path,
    manifest: Manifest,
    subjects: NamedObjects,
    groups: Mapping[str, Any],
    others: Mapping[str, Any],
    places: Mapping[str, Mapping[str, tuple[str, str]]],
) -> None:
    """Raise unless what was saved is what is here."""
    kinds = (
        ("model", subjects.models, manifest.weights),
        ("optimizer", subjects.optimizers, groups),
        ("object", subjects.others, others),
    )
    for kind, mine, saved in kinds:
        for name in [*mine, *saved]:
            if (name in mine) != (name in saved):
                where = "is in the checkpoint {} only" if name in saved else "is not in the checkpoint {}"
                raise UsageError(
                    f"{kind} {name!r} {where.format(repr(str(path)))}",
                    remedy="give paceline.Checkpoint what the run that wrote it gave, under the same names",
                )
    for name, model in subjects.models.items():
        stored = {
            weight: manifest.files[file].tensors[label] for weight, (file, label) in places[name].items()
        }
        kind_of = {weight: (one.dtype, one.shape) for weight, one in stored.items()}
        check_weights(model, kind_of, f"the checkpoint {str(path)!r}")
    for name, optimizer in subjects.optimizers.items():
        check_optimizer(name, optimizer, groups[name], subjects.name_of_param)


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators, and of the present GPU's."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 — the one that programs share
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on drawing where `state` was taken."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
