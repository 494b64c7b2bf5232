"""Whole matrices for optimizers, where every rank holds rows of each (FSDP2): assembled at an owner, and sent back.

    every rank                         owner of a matrix                  every rank
    rows of gradients and parameters → assembles, updates it        →     rows of the updated parameters

Matrices go in buckets of about 25 MiB of gradients, whoever owns them: two all-to-alls per bucket and step, whatever
the number of matrices. The matrices of a bucket are dealt to owners so that their updates cost about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from paceline._core.step_state import step_state
from paceline._core.units import MIB
from paceline.cost_model.bucket_assignment import deal_to_owners, plan_buckets
from paceline.errors import UsageError
from paceline.parallel.sharding.blocks import Block, update_cost
from paceline.parallel.sharding.update_units import StatePrecision, UpdateUnit

__all__ = ["OwnerExchange", "local_rows", "plan_exchanges"]

_BUCKET_NBYTES = 25 * MIB


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A sharded parameter and its owner.

    Attributes:
        blocks: that are updated by themselves.
        owner: rank in the group.
    """

    blocks: list[Block]
    owner: int

    @property
    def param(self) -> DTensor:
        param = self.blocks[0].param
        assert isinstance(param, DTensor), "FSDP2 has sharded it"
        return param


class OwnerExchange:
    """Brings the rows of some matrices to their owners and back.

    Args:
        matrices: of one dtype, device and mesh.
        precision: of what the optimizer holds.

    Attributes:
        units: what this rank updates.
    """

    def __init__(self, matrices: Sequence[_Matrix], precision: StatePrecision) -> None:
        self._matrices = list(matrices)
        param = self._matrices[0].param
        self._group = param.device_mesh.get_group(param.device_mesh.ndim - 1)
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._whole: dict[int, tuple[Tensor, Tensor | None]] = {}  # by place in `_matrices`
        self.units = [
            unit
            for at, matrix in enumerate(self._matrices)
            if matrix.owner == self._rank
            for unit in self._units_of(at, matrix, precision)
        ]

    def _units_of(self, at: int, matrix: _Matrix, precision: StatePrecision) -> list[UpdateUnit]:
        # Before the first exchange the matrix is not here; only its shape counts then, and the master follows later.
        param = matrix.param
        self._whole[at] = torch.zeros(param.shape, dtype=param.dtype, device=param.device), None
        units = []
        for block in matrix.blocks:

            def data(block: Block = block) -> Tensor:
                return block.of(self._whole[at][0])

            def grad(block: Block = block) -> Tensor | None:
                whole = self._whole[at][1]
                return None if whole is None else block.of(whole)

            units.append(UpdateUnit(block.name, block.start, block.stop, data, grad, precision))
        return units

    def owned_nbytes(self) -> list[int]:
        """Return the bytes of the matrices of each rank."""
        owned = [0] * self._size
        for matrix in self._matrices:
            owned[matrix.owner] += matrix.param.numel() * matrix.param.element_size()
        return owned

    def release(self) -> None:
        """Free the assembled matrices, between steps."""
        for unit in self.units:
            unit.inner.grad = None
            if not unit.copied:
                unit.inner.data = unit.inner.data.new_empty(0)
        self._whole.clear()

    def gather(self) -> None:
        """Assemble the matrices of this rank; a collective."""
        used = [matrix.param.grad is not None for matrix in self._matrices]
        sent, counts = self._packed(used)
        received = [self._rows_numel(rank, used) for rank in range(self._size)]
        arrived = _exchange(sent, counts, received, self._group)
        self._whole = {
            at: (
                torch.empty(matrix.param.shape, dtype=matrix.param.dtype, device=matrix.param.device),
                torch.empty(matrix.param.shape, dtype=matrix.param.dtype, device=matrix.param.device)
                if used[at]
                else None,
            )
            for at, matrix in self._mine()
        }
        start = 0
        for rank in range(self._size):
            for at, matrix in self._mine():
                first, count = _rows(matrix.param, rank, self._size)
                for whole in self._whole[at]:
                    if whole is not None:
                        part = whole[first : first + count]
                        part.copy_(arrived[start : start + part.numel()].view_as(part))
                        start += part.numel()
        for unit in self.units:
            unit.follow_memory()

    def scatter(self) -> None:
        """Send the rows of the updated matrices to the ranks that hold them; a collective."""
        parts, counts = [], []
        for rank in range(self._size):
            before = len(parts)
            for at, matrix in self._mine():
                first, count = _rows(matrix.param, rank, self._size)
                parts.append(self._whole[at][0][first : first + count].reshape(-1))
            counts.append(sum(part.numel() for part in parts[before:]))
        received = [
            sum(self._own_rows(m).numel() for m in self._matrices if m.owner == rank)
            for rank in range(self._size)
        ]
        arrived = _exchange(_joined(parts, self._matrices[0].param), counts, received, self._group)
        start = 0
        for rank in range(self._size):
            for matrix in self._matrices:
                if matrix.owner == rank:
                    own = self._own_rows(matrix)
                    own.copy_(arrived[start : start + own.numel()].view_as(own))
                    start += own.numel()
        self.release()

    def _mine(self) -> list[tuple[int, _Matrix]]:
        return [(at, matrix) for at, matrix in enumerate(self._matrices) if matrix.owner == self._rank]

    @staticmethod
    def _own_rows(matrix: _Matrix) -> Tensor:
        return _local(matrix.param)

    def _packed(self, used: Sequence[bool]) -> tuple[Tensor, list[int]]:
        """Return this rank's rows for every owner, and the number of elements for each."""
        parts: list[Tensor] = []
        counts = []
        for owner in range(self._size):
            before = len(parts)
            for at, matrix in enumerate(self._matrices):
                if matrix.owner == owner:
                    parts.append(self._own_rows(matrix).reshape(-1))
                    grad = matrix.param.grad
                    if used[at] and grad is not None:
                        parts.append(_local(grad).reshape(-1).to(parts[-1].dtype))
            counts.append(sum(part.numel() for part in parts[before:]))
        return _joined(parts, self._matrices[0].param), counts

    def _rows_numel(self, rank: int, used: Sequence[bool]) -> int:
        """Return the elements that a rank sends to this one."""
        total = 0
        for at, matrix in self._mine():
            width = matrix.param.shape[1:].numel()
            total += _rows(matrix.param, rank, self._size)[1] * width * (2 if used[at] else 1)
        return total


def plan_exchanges(blocks_of_params: Sequence[list[Block]], precision: StatePrecision) -> list[OwnerExchange]:
    """Return the exchanges of sharded parameters, in buckets; the same on all ranks.

    Raises:
        UsageError: a parameter is not cut along dimension 0 only.
    """
    for blocks in blocks_of_params:
        _check_placements(blocks[0])
    params = [blocks[0].param for blocks in blocks_of_params]
    sizes = [param.numel() * param.element_size() for param in params]
    kinds = [(param.dtype, str(param.device), id(_mesh_of(param))) for param in params]
    loads: dict[Any, list[float]] = {}
    exchanges = []
    for members in plan_buckets(range(len(params)), sizes, kinds, _BUCKET_NBYTES):
        mesh = _mesh_of(params[members[0]])
        costs = [update_cost(blocks_of_params[at]) for at in members]
        owners = deal_to_owners(costs, costs, loads.setdefault(kinds[members[0]], [0.0] * mesh.size(-1)))
        matrices = [_Matrix(blocks_of_params[at], owner) for at, owner in zip(members, owners, strict=True)]
        exchanges.append(OwnerExchange(matrices, precision))
    return exchanges


def local_rows(name: str, param: DTensor, precision: StatePrecision) -> UpdateUnit | None:
    """Return this rank's rows of a sharded parameter as a unit, for elementwise optimizers; None if it has none."""
    local = param.to_local()
    if local.numel() == 0:
        return None
    _check_placements(Block(name, param, 0, 0))  # type: ignore[arg-type]
    size, rank = param.device_mesh.size(-1), param.device_mesh.get_local_rank(param.device_mesh.ndim - 1)
    first, _ = _rows(param, rank, size)
    width = param.numel() // param.shape[0]

    def grad() -> Tensor | None:
        return None if param.grad is None else _local(param.grad)

    start = first * width
    return UpdateUnit(name, start, start + local.numel(), lambda: _local(param), grad, precision)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, without a gradient function."""
    assert isinstance(tensor, DTensor), "FSDP2 has sharded it"
    return tensor.to_local().detach()


def _mesh_of(param: Tensor) -> Any:
    assert isinstance(param, DTensor), "FSDP2 has sharded it"
    return param.device_mesh


def _rows(param: DTensor, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank, and the number of its rows."""
    rows = param.shape[0]
    each = -(-rows // size)
    first = min(rows, rank * each)
    return first, min(rows, first + each) - first


def _check_placements(block: Block) -> None:
    param = block.param
    assert isinstance(param, DTensor), "FSDP2 has sharded it"
    *others, last = param.placements
    if last != Shard(0) or any(placement.is_shard() for placement in others):
        raise UsageError(
            f"parameter {block.name!r} is a DTensor with placements {param.placements}, which the optimizer can't "
            "assemble",
            remedy="shard parameters along dimension 0 of one mesh dimension only",
        )


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=like.dtype, device=like.device)


def _exchange(sent: Tensor, counts: list[int], received: list[int], group: Any) -> Tensor:
    """Send `counts[r]` elements of `sent` to rank r; return what arrives, `received[r]` from rank r."""
    into = sent.new_empty(sum(received))
    with step_state.waiting_for_peers():
        dist.all_to_all_single(into, sent, received, counts, group=group)
    return into
