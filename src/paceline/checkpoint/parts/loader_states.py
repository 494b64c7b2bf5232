"""States of loaders and other objects that are neither models nor optimizers.

    object                              saved                                on another number of ranks
    paceline.Loader                     rank 0's, which is that of all       dealt to the present ranks
    Mosaic's StreamingDataLoader        rank 0's, which is that of all       dealt by Mosaic where it can, else refused
    any other iterable                  every rank's own                     refused
    with a `rank_state_dict`            rank 0's, and every rank's own       loaded without the own one
    anything else                       rank 0's, and every rank's digest    rank 0's

Libraries are known by the names of their classes, so that none of them is imported.

[Note: Mosaic] A StreamingDataset orders the samples of an epoch independently of the number of ranks; its state counts
those that all ranks have used. With ``batching_method="random"`` the rest can be dealt to any number of ranks. With
``"stratified"`` and ``"per_stream"`` the order consists of global batches, so their size must stay; with another one
samples are left out and repeated. With ``"device_per_stream"`` it consists of ranks' batches, dealt to nodes: even with
the same global batch size samples are left out.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from paceline.checkpoint.parts.rank_digests import state_digest
from paceline.data.loader import Loader
from paceline.errors import UsageError

__all__ = [
    "ObjectState",
    "check_moves",
    "check_others_move",
    "check_savable",
    "check_states",
    "collect_state",
    "continues_with_dataset",
    "is_hugging_face_stream",
    "is_loader",
    "is_paceline_loader",
    "load_state",
    "plain_state",
]

log = logging.getLogger("paceline.checkpoint")

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_LOADER = "paceline_loader"  # in the saved state of a foreign loader: its class
_ANEW = "pass the loader under another name, such as {name}_2=…, which starts the epoch anew"


class ObjectState(NamedTuple):
    """The state of an object.

    Attributes:
        common: what rank 0 saves for all ranks.
        own: what this rank saves for itself; None: nothing.
        digest: of `common`, where it should be the same on all ranks; empty: it was not computed.
    """

    common: Any
    own: Any = None
    digest: str = ""


def is_loader(other: Any) -> bool:
    """Return whether an object is a loader, dataset or sampler with a state."""
    return hasattr(other, "state_dict") and hasattr(type(other), "__iter__")


def is_paceline_loader(other: Any) -> bool:
    """Return whether an object is a `Loader`, or one that an integration wraps."""
    return isinstance(other, Loader) or isinstance(getattr(other, "loader", None), Loader)


def is_hugging_face_stream(other: Any) -> bool:
    """Return whether an object is an IterableDataset of Hugging Face's datasets."""
    return _is_a(other, "datasets", "IterableDataset")


def continues_with_dataset(loader: Any, others: Iterable[Any]) -> bool:
    """Return whether a DataLoader without state continues because its dataset does, which is one of `others`.

    In workers it does not: they have copies of the dataset.
    """
    dataset = getattr(loader, "dataset", None)
    in_process = getattr(loader, "num_workers", 0) == 0
    return in_process and isinstance(dataset, IterableDataset) and any(each is dataset for each in others)


def check_savable(name: str, other: Any) -> None:
    """Check that the state of an object can be requested; warn of a loader whose state is incomplete.

    Raises:
        UsageError: its `state_dict` needs arguments, as a StreamingDataset's does.
    """
    try:
        needed = [
            each.name
            for each in inspect.signature(other.state_dict).parameters.values()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # it has no signature in Python
        return
    if needed:
        raise UsageError(
            f"the state_dict() of {name}, a {type(other).__qualname__}, needs {' and '.join(needed)}, which its loader "
            "knows",
            remedy="pass the loader that reads it, such as streaming.StreamingDataLoader",
        )
    sampler = getattr(other, "sampler", None)
    if (
        _is_foreign_loader(other)
        and isinstance(sampler, _RANDOM_SAMPLERS)
        and not hasattr(sampler, "state_dict")
    ):
        log.warning(
            "the sampler of %r, a %s, draws an order that is not part of the loader's state: a resumed run may go on "
            "in another one, with samples repeated and left out; pass shuffle=True instead, or a sampler with a state",
            name,
            type(sampler).__qualname__,
        )


# ------------------------------------------------------------------ live recovery


def check_moves(name: str, loader: Any) -> None:
    """Check that a loader can continue in the same process when ranks leave or join.

    Args:
        name: of the loader.
        loader: any iterable; its ``rejoin()`` deals the rest of the epoch to the ranks of a new world.

    Raises:
        UsageError: it has none.
    """
    if not callable(getattr(loader, "rejoin", None)):
        raise UsageError(
            f"live recovery with the loader {name!r}, a {type(loader).__qualname__}, which has no rejoin(): when ranks "
            "leave or join, the rest of its epoch can't be dealt to the new ranks, so samples would be used twice or "
            "never",
            remedy="use a paceline.Loader; or start with --recovery restart, and paceline.Checkpoint resumes it on the "
            "same number of ranks",
        )


def check_others_move(others: Mapping[str, Any], moved: Iterable[Any]) -> None:
    """Check that loaders and schedulers of a checkpoint can continue when ranks leave or join.

    Args:
        others: objects of the checkpoint that are neither models nor optimizers, by name.
        moved: objects whose state joining ranks get, and whose ``rejoin()`` is called in a new world.

    Raises:
        UsageError: names a loader that can't, or one of them that is not among `moved`.
    """
    known = {id(each) for each in moved}
    for name, each in others.items():
        if is_loader(each):
            check_moves(name, each)
            problem = "with other ranks it would go on serving the batches of the ranks before"
        elif isinstance(each, LRScheduler):
            problem = "in a rank that joins it would start anew, with another learning rate"
        else:
            continue
        if id(each) not in known:
            raise UsageError(
                f"live recovery without {name!r}, a {type(each).__qualname__}: the checkpoint saves it, but {problem}",
                remedy="pass it to paceline.Elastic too",
            )


# ------------------------------------------------------------------ save


def collect_state(name: str, other: Any, rank: int, ranks: int) -> ObjectState:
    """Return the state of an object; all ranks call this.

    Raises:
        UsageError: the state contains values that can't be saved.
    """
    if hasattr(other, "rank_state_dict"):
        return ObjectState(other.state_dict() if rank == 0 else None, other.rank_state_dict())
    state = other.state_dict()
    if not _is_foreign_loader(other):
        return ObjectState(state, digest=state_digest(name, state))
    kind = type(other).__qualname__
    if not _is_mosaic_loader(other):
        own = {"state": state, "workers": _workers(other)}
        generator = getattr(other, "generator", None)
        if isinstance(generator, torch.Generator):  # from which it also draws seeds of workers
            own["generator"] = generator.get_state()
        return ObjectState({_LOADER: kind}, own)
    common = {_LOADER: kind, "state": state, **_mosaic_order(other, ranks)}
    return ObjectState(common, digest=state_digest(name, state))


def plain_state(common: Any, own: Any) -> Any:
    """Return what ``state_dict()`` of an object has returned, from what is saved of it."""
    return (own or common)["state"] if _saved_kind(common) else common


# ------------------------------------------------------------------ check


def check_states(
    others: Mapping[str, Any], states: Sequence[Mapping[str, Any]], rank: int, ranks: int, path: str
) -> None:
    """Check that the saved states fit these objects and this number of ranks.

    A loader may be left out, or replaced by one under another name: that starts the epoch anew, with a warning.

    Args:
        others: the objects, by name.
        states: every rank's part of the checkpoint, by rank.
        rank, ranks: this rank, and the present number of ranks.
        path: of the checkpoint.

    Raises:
        UsageError: names the object.
    """
    saved = states[0]["others"]
    left_out = [name for name in saved if name not in others and _saved_kind(saved[name])]
    new = [name for name in others if name not in saved and left_out and is_loader(others[name])]
    for name in [*others, *saved]:
        if (name in others) != (name in saved) and name not in left_out and name not in new:
            where = "in the checkpoint {!r} only" if name in saved else "not in the checkpoint {!r}"
            raise UsageError(
                f"object {name!r} is {where.format(path)}",
                remedy="pass to paceline.Checkpoint what the run that wrote it passed, under the same names",
            )
    for name, other in others.items():
        if name in saved:
            _check_kind(name, other, saved[name], len(states), ranks)
            if _saved_kind(saved[name]):
                _check_loader(name, other, states, rank, ranks)
    for name in left_out if rank == 0 else ():
        log.warning(
            "the loader %r of the checkpoint, a %s, is not part of this run: the epoch starts anew%s",
            name,
            _saved_kind(saved[name]),
            f", with {', '.join(map(repr, new))}" if new else "",
        )


def _check_kind(name: str, other: Any, common: Any, saved_ranks: int, ranks: int) -> None:
    """Raise unless a state was saved from an object of this class; known for foreign loaders only."""
    saved, kind = _saved_kind(common), type(other).__qualname__
    here = kind if _is_foreign_loader(other) else ""
    if saved == here or (
        not saved and saved_ranks == ranks == 1
    ):  # of one rank, all is known: older checkpoints
        return
    if saved:
        found = f"a {saved}, not by a {kind}"
    else:
        found = "another kind of object, or by a version of Paceline that saved rank 0's state only"
    raise UsageError(f"the state of {name!r}, a {kind}, was saved by {found}", remedy=_ANEW.format(name=name))


def _check_loader(name: str, loader: Any, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
    """Raise unless the state of a foreign loader fits."""
    common, saved_ranks = states[0]["others"][name], len(states)
    subject = f"the loader {name!r}, a {type(loader).__qualname__}, was saved by {_ranks(saved_ranks)}"
    if not _is_mosaic_loader(loader):
        if saved_ranks != ranks:
            raise UsageError(
                f"{subject}, and its state can't be dealt to {ranks}",
                remedy=f"resume on {_ranks(saved_ranks)}; or {_ANEW.format(name=name)}. A paceline.Loader can be "
                "resumed on any number of ranks",
            )
        workers = states[rank]["own"][name]["workers"]
        if workers != _workers(loader):
            raise UsageError(
                f"{subject} with num_workers={workers}; here it has num_workers={_workers(loader)}",
                remedy=f"keep num_workers={workers}; or {_ANEW.format(name=name)}",
            )
    elif saved_ranks != ranks:
        here, there = _mosaic_order(loader, ranks), {key: common[key] for key in ("batching", "samples")}
        if here["batching"] not in ("random", "stratified", "per_stream") or (
            here["batching"] != "random" and here != there
        ):
            raise UsageError(
                f"{subject} with {there['samples']} samples per step, and with batching_method={here['batching']!r} "
                f"its state can't be dealt to {ranks} with {here['samples']}",
                remedy=f'resume on {_ranks(saved_ranks)}; or {_ANEW.format(name=name)}. With "random" any number of '
                'ranks continues, with "stratified" and "per_stream" any that have the same samples per step together',
            )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


# ------------------------------------------------------------------ load


def load_state(name: str, other: Any, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
    """Load the state of an object, once `check_states` has accepted it."""
    if name not in states[0]["others"]:  # a loader that starts anew
        return
    common = states[0]["others"][name]
    own = states[rank].get("own", {}).get(name) if len(states) == ranks else None
    if hasattr(other, "rank_state_dict"):
        other.load_state_dict(common, own)
        return
    if _saved_kind(common):
        saved = own or common
        if "generator" in saved and isinstance(other.generator, torch.Generator):
            other.generator.set_state(saved["generator"].clone())
        common = saved["state"]
        if common is None:  # a StreamingDataLoader of another dataset than Mosaic's
            log.warning(
                "the loader %r, a %s, has no state: its epoch starts anew", name, type(other).__qualname__
            )
            return
    if is_hugging_face_stream(other):
        other.set_epoch(common["epoch"])  # it ignores states of other epochs
    other.load_state_dict(common)


# ------------------------------------------------------------------ kinds of objects


def _is_a(other: Any, package: str, name: str) -> bool:
    return any(
        each.__name__ == name and each.__module__.partition(".")[0] == package for each in type(other).__mro__
    )


def _is_foreign_loader(other: Any) -> bool:
    return is_loader(other) and not hasattr(other, "rank_state_dict") and not is_paceline_loader(other)


def _is_mosaic_loader(other: Any) -> bool:
    return _is_a(other, "streaming", "StreamingDataLoader")


def _saved_kind(common: Any) -> str:
    """Return the class of the foreign loader that saved a state; empty: it was no such loader."""
    return common.get(_LOADER, "") if isinstance(common, Mapping) else ""


def _workers(loader: Any) -> int:
    return getattr(loader, "num_workers", 0)


def _mosaic_order(loader: Any, ranks: int) -> dict[str, Any]:
    """Return what the order of a StreamingDataset's samples depends on besides its state; see [Note: Mosaic]."""
    dataset = loader.dataset
    replication = getattr(dataset, "replication", None) or 1
    return {
        "batching": getattr(dataset, "batching_method", "random"),
        "samples": (getattr(dataset, "batch_size", None) or 0) * ranks // replication,
    }
