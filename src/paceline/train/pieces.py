"""Optimizer state as pieces: this range of elements of that parameter, flattened, has this state.

Every strategy's state can be said so, whole or cut, so a checkpoint fits any number of ranks and any strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.sync.engine import DataParallel
from paceline.sync.shard import ShardedOptimizer

__all__ = ["StatePiece", "load_pieces", "pieces_of"]


@dataclass(frozen=True)
class StatePiece:
    """The optimizer's state of a part of one parameter.

    Attributes:
        name: the parameter's.
        start, stop: the elements start … stop - 1 of the flattened parameter.
        state: flat tensors of stop - start elements (``exp_avg``), or of none where it belongs to the whole
            parameter (``step``).
    """

    name: str
    start: int
    stop: int
    state: Mapping[str, Tensor]


def pieces_of(model: DataParallel, optimizer: ShardedOptimizer, rank: int) -> list[StatePiece]:
    """Return the state that `rank` answers for; over all ranks every element occurs once.

    `optimizer` has all trained parameters of `model`, in their order.
    """
    packed = optimizer.state_dict()
    if "shards" in packed:
        return [
            StatePiece(name, part["start"], part["stop"], part["state"])
            for name, parts in packed["shards"].items()
            for part in parts
        ]
    pieces = []
    for index, (name, param) in enumerate(_trained(model, optimizer)):
        start, stop = _own_range(param, rank)
        if index in packed["state"] and start < stop:
            state = {key: _flat(value) for key, value in packed["state"][index].items()}
            pieces.append(StatePiece(name, start, stop, state))
    return pieces


def load_pieces(
    model: DataParallel, optimizer: ShardedOptimizer, pieces: Iterable[StatePiece], rank: int
) -> None:
    """Give `optimizer` the state that the `pieces` of all ranks that saved it make up together.

    Raises:
        UsageError: elements of a parameter are missing.
    """
    pieces_of_name: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        pieces_of_name.setdefault(piece.name, []).append(piece)
    packed = optimizer.state_dict()
    if "shards" in packed:
        packed["shards"] = {
            name: [{"start": part.start, "stop": part.stop, "state": dict(part.state)} for part in parts]
            for name, parts in pieces_of_name.items()
        }
    else:
        packed["state"] = {
            index: _joined(name, param, pieces_of_name[name], rank)
            for index, (name, param) in enumerate(_trained(model, optimizer))
            if name in pieces_of_name
        }
    optimizer.load_state_dict(packed)


def _trained(model: DataParallel, optimizer: ShardedOptimizer) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) in the order in which the optimizer numbers them: the module's.

    The parameters are the optimizer's: while FSDP2 has a module gathered, the module shows other tensors.
    """
    names = [name for name, param in model.module.named_parameters() if param.requires_grad]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return list(zip(names, params, strict=True))


def _own_range(param: Tensor, rank: int) -> tuple[int, int]:
    """Return start and stop of what `rank` answers for: its rows of a sharded parameter, all on rank 0 else."""
    if not isinstance(param, DTensor):
        return (0, param.numel()) if rank == 0 else (0, 0)
    rows, row_numel = param.shape[0], param[0].numel() if param.dim() > 1 else 1
    first = min(rows, rank * -(-rows // param.device_mesh.size()))
    return first * row_numel, first * row_numel + param.to_local().numel()


def _flat(value: Any) -> Tensor:
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.flatten() if value.dim() else value


def _joined(name: str, param: Tensor, pieces: Iterable[StatePiece], rank: int) -> dict[str, Tensor]:
    """Return the state of `param` put together from `pieces`, cut to this rank's rows if it is sharded."""
    joined: dict[str, Tensor] = {}
    covered = 0
    for piece in pieces:
        covered += piece.stop - piece.start
        for key, value in piece.state.items():
            if value.dim() == 0:
                joined[key] = value
            else:
                whole = joined.setdefault(key, value.new_zeros(param.numel()))
                whole[piece.start : piece.stop] = value
    if covered != param.numel():
        raise UsageError(
            f"the checkpoint's optimizer state covers {covered} of {param.numel()} elements of {name!r}",
            remedy="a file of it is missing or damaged: start anew with --overwrite",
        )
    return {key: value if value.dim() == 0 else _like(param, value, rank) for key, value in joined.items()}


def _like(param: Tensor, whole: Tensor, rank: int) -> Tensor:
    if not isinstance(param, DTensor):
        return whole.view(param.shape)
    start, stop = _own_range(param, rank)
    local = whole[start:stop].view(param.to_local().shape).to(param.device)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
