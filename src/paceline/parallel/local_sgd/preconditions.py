"""May the ranks of a model part? What training apart asks of model, numbers and compression, before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.comm import Comm
from paceline.parallel.engine.reducer import Reducer

__all__ = ["check_numbers", "check_synchronisable", "engine_to_part"]


def check_numbers(warmup: object, mix: object, piece_mib: object) -> None:
    """Raise a `UsageError` for the first that is out of range."""
    if type(warmup) is not int or warmup < 0:
        raise UsageError(f"warmup={warmup!r}", remedy="give a whole number of local steps, 0 or more")
    if not isinstance(mix, int | float) or not 0 <= mix < 1:
        raise UsageError(
            f"mix={mix!r}", remedy="give the share of local parameters that stays, from 0 to below 1"
        )
    if not isinstance(piece_mib, int | float) or not piece_mib > 0:
        raise UsageError(f"piece_mib={piece_mib!r}", remedy="give MiB above 0, such as 8")


def engine_to_part(model: nn.Module, comm: Comm) -> Reducer | None:
    """Return the engine that must keep gradients to each rank; None where it has other ranks, or there is none.

    Raises:
        UsageError: it shares some ranks beside this one with `comm`, but not all; or it shards.
    """
    if not isinstance(model, DataParallel) or model.comm.size == 1:
        return None
    inner, outer = model.comm.ranks, comm.ranks
    if len(inner & outer) == 1:
        return None
    if inner != outer:
        raise UsageError(
            f"the model synchronises gradients among ranks {sorted(inner)}, this {sorted(outer)}",
            remedy="give the group of ranks that are in the same place of each of the model's groups",
        )
    if model.engine.tuner is not None:
        raise UsageError(
            "sync='auto' seeks the fastest way to synchronise gradients, which are not synchronised here",
            remedy="use 'bucketed'",
        )
    if model.engine.splits_gradients:
        raise UsageError(
            f"sync={model.plan.name!r} leaves each rank a part of the gradient, so no rank can train on its own",
            remedy="use 'bucketed'; or shard within a group of ranks, and synchronise these groups: group=",
        )
    return model.engine


def check_synchronisable(
    name: str, params: Mapping[str, Tensor], compression: Compression | None
) -> list[str]:
    """Return the trained parameters that are not compressed, by name.

    Args:
        name: of what takes them, for messages. params: of the model, by name. compression: of what is sent.

    Raises:
        UsageError: a parameter can't be synchronised so, or compressed so; it is named.
    """
    trained = {each: param for each, param in params.items() if param.requires_grad}
    if not trained:
        raise UsageError(f"{name}: the model has no parameter that is trained", remedy="unfreeze some")
    device = next(iter(trained.values())).device
    for each, param in trained.items():
        if isinstance(param, DTensor) or not param.is_floating_point():
            kind = "sharded" if isinstance(param, DTensor) else str(param.dtype).removeprefix("torch.")
            raise UsageError(
                f"{name}: parameter {each!r} is {kind}",
                remedy="use a model whose ranks hold real, whole parameters",
            )
        if param.device != device:
            raise UsageError(
                f"{name}: parameter {each!r} is on {param.device}, others on {device}",
                remedy="keep the model on one device",
            )
    if compression is None:
        return []
    if compression.name == "powersgd":
        raise UsageError(
            f"{name} with powersgd, which follows a gradient from step to step",
            remedy="use int4 or int8: pseudo-gradients are sent rarely",
        )
    exempt = [each for each, param in trained.items() if compression.exempts(each, param)]
    for each, param in trained.items():
        if each not in exempt:
            compression.check_supported(each, param)
    return exempt
