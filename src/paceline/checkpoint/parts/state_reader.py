"""What is read of a checkpoint, whichever format it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import Manifest, RankPiece
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles

__all__ = ["Read", "RunReader", "StateReader", "TensorInfo"]


class TensorInfo(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """A box of a tensor to read.

    Attributes:
        name: of the tensor.
        box: the region; of complex numbers, with or without a last dimension of 2.
        into: tensor on the CPU with the shape of the box, to fill; its dtype is the stored one, complex numbers may be
            pairs of real ones. None: the bytes are verified only.
    """

    name: str
    box: Box
    into: Tensor | None


class StateReader(Protocol):
    """Reads the tensors and values of a checkpoint."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors, except those of ranks' own states."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor; KeyError: there is no such tensor."""
        ...

    def read(self, reads: Sequence[Read]) -> None:
        """Read boxes of tensors; the tensors to fill are valid once this returns.

        Raises:
            DamagedCheckpoint: a file differs from what was written, or can't be read; names the file and the tensor.
            KeyError: there is no such tensor.
        """
        ...

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, into new memory; errors as for `read`."""
        ...

    def value_names(self) -> Iterable[str]:
        """Return the names of plain values."""
        ...

    def value(self, name: str) -> Any:
        """Return a plain value, as `plain_values.pack` returned it; KeyError: there is none."""
        ...


class RunReader(StateReader, Protocol):
    """Reads a whole run's checkpoint, with what its ranks have of their own."""

    @property
    def files(self) -> CheckpointFiles:
        """The files of the checkpoint."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint consists of."""
        ...

    def piece(self, rank: int) -> RankPiece:
        """Return the piece of the manifest that a rank has written; DamagedCheckpoint: it is not intact."""
        ...

    def verify_rest(self, rank: int) -> None:
        """Verify what belongs to no tensor in what a rank has written; errors as for `read`."""
        ...

    def own(self, rank: int, name: str) -> Tensor:
        """Read a tensor that belongs to a rank's own state; errors as for `read`."""
        ...
