"""Fills models with weights from state_dicts, checkpoints and safetensors files: each rank reads what it holds."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.interop.dcp_models import bare_name
from paceline.checkpoint.interop.weights_source import WeightsSource, use_weights
from paceline.checkpoint.parts.boxes import Box, box_of_shard
from paceline.checkpoint.parts.model_weights import check_weights, weight_names, weights_of
from paceline.checkpoint.parts.named_objects import unwrap
from paceline.checkpoint.parts.state_reader import Read, TensorInfo
from paceline.errors import UsageError

__all__ = ["import_weights"]

_AT_ONCE_NBYTES = 256 << 20  # of weights that are read before they are copied to the model

log = logging.getLogger("paceline.checkpoint")


def import_weights(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> None:
    """Fill a model with weights; all ranks call this, before training.

    Of safetensors files, a rank reads only what it holds of the model. Checkpoints are verified whole first.

    Args:
        model: any module, wrapped or not; floating-point weights are cast to its dtypes. A model of transformers
            accepts what its ``from_pretrained`` does, with or without the prefix of the base model.
        source: a state_dict of the bare module, a safetensors file, a folder of such files (as Hugging Face's), a
            checkpoint of Paceline's or of torch.distributed.checkpoint, or a run's folder, by path or URL.

    Raises:
        UsageError: the weights belong to another model, or can't be read; nothing was changed.
        DamagedCheckpoint: the checkpoint is not intact.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> import_weights(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    """
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(tensor, Tensor):
                raise UsageError(
                    f"{name!r} of the state_dict is a {type(tensor).__name__}, not a tensor",
                    remedy="pass a state_dict of the bare module",
                )
        names = {name: name for name in source}
        _import(model, WeightsSource(_DictReader(source), names, {}, "the state_dict"))
    else:
        use_weights(source, "model", lambda weights: _import(model, weights), reads_cache=True)


class _DictReader:
    """The tensors of a state_dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._tensors[name].dtype, tuple(self._tensors[name].shape))

    def read(self, reads: Sequence[Read]) -> None:
        for each in reads:
            if each.into is not None:
                each.into.copy_(self.tensor(each.name, each.box))

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor if box is None else tensor[box.index_in(Box.whole(tensor.shape))]


def _import(model: nn.Module, weights: WeightsSource) -> None:
    found = _match(model, weights)
    if weights.has_checksums:
        weights.verify()  # by all ranks, so that all of them use the same checkpoint
    _fill(model, weights, found)


def _match(model: nn.Module, weights: WeightsSource) -> dict[str, str]:
    """Return the name in the source of each weight, by its first name in the model.

    Raises:
        UsageError: one is missing, or has another shape; or the source has more.
    """
    groups, bare = weight_names(model), unwrap(model)
    there = {bare_name(name): name for name in [*weights.names, *weights.aliases]}
    found, further = _best_match(groups, there, str(getattr(bare, "base_model_prefix", "") or ""))
    ignored = [re.compile(each) for each in getattr(bare, "_keys_to_ignore_on_load_unexpected", None) or ()]
    further = [name for name in further if not any(each.search(name) for each in ignored)]
    own = {name: tensor.dtype for name, tensor in weights_of(model)[0].items()}
    kinds = {}
    for first, name in found.items():
        dtype, shape = weights.info(name)
        if dtype.is_floating_point and own[first].is_floating_point:
            dtype = own[first]
        kinds |= {each: (str(dtype).removeprefix("torch."), shape) for each in groups[first]}
    for name in further:
        dtype, shape = weights.info(name)
        kinds[name] = (str(dtype).removeprefix("torch."), shape)
    check_weights(model, kinds, weights.location)
    return found


def _best_match(
    groups: Mapping[str, Sequence[str]], there: Mapping[str, str], prefix: str
) -> tuple[dict[str, str], list[str]]:
    """Return the name in the source of each weight, and names of the source that the model lacks.

    Args:
        groups: all names of each weight of the model by its first one.
        there: names in the source by bare name.
        prefix: of the base model, if it is one of transformers: files of the base model lack it, others have it.
    """
    exact: tuple[dict[str, str], list[str]] = ({}, [])
    for change in (str, lambda name: name.removeprefix(f"{prefix}."), lambda name: f"{prefix}.{name}"):
        wanted = {first: [change(bare_name(name)) for name in names] for first, names in groups.items()}
        found = {
            first: there[known[0]]
            for first, names in wanted.items()
            if (known := [name for name in names if name in there])
        }
        used = {name for names in wanted.values() for name in names}
        further = [stored for name, stored in there.items() if name not in used]
        if change is str:
            exact = found, further
        if len(found) == len(groups):
            if change is not str and further:
                log.warning("not in this model, and ignored: %s", ", ".join(sorted(further)))
                further = []
            return found, further
        if not prefix:
            break
    return exact


@torch.no_grad()
def _fill(model: nn.Module, weights: WeightsSource, found: Mapping[str, str]) -> None:
    """Copy weights to the model, of sharded ones this rank's shard."""
    targets = []
    for first, tensor in weights_of(model)[0].items():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.is_meta:
            raise UsageError(
                f"{first!r} is on the device meta, which holds no values",
                remedy="give the model memory first: model.to_empty(device=…)",
            )
        box = box_of_shard(first, tensor) if isinstance(tensor, DTensor) else Box.whole(tensor.shape)
        if box.numel:
            targets.append((found[first], box, local))
    for batch in _batches(targets):
        reads, later = [], []
        for name, box, local in batch:
            dtype = weights.info(name).dtype
            in_place = local.device.type == "cpu" and local.is_contiguous() and local.dtype is dtype
            into = local if in_place else torch.empty(box.sizes, dtype=dtype)
            reads.append(weights.read(name, box, into))
            later += [] if in_place else [(local, into)]
        weights.reader.read(reads)
        for local, into in later:
            local.copy_(into)


_Target = tuple[str, Box, Tensor]


def _batches(targets: Iterable[_Target]) -> Iterator[list[_Target]]:
    """Yield what is read at once."""
    batch: list[_Target] = []
    nbytes = 0
    for target in targets:
        if batch and nbytes + target[2].nbytes > _AT_ONCE_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(target)
        nbytes += target[2].nbytes
    if batch:
        yield batch
