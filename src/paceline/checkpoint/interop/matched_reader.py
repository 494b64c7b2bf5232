"""A checkpoint of another program under the names of Paceline's objects, as `RestorePlan` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.checkpoint.format.manifest import Manifest, RankPiece
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_reader import Read, TensorInfo
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles

__all__ = ["MatchedReader"]


@dataclass
class MatchedReader:
    """A DCP checkpoint under the names of Paceline's objects, a `RunReader` of one rank.

    Attributes:
        stored: the reader.
        manifest: of one rank.
        first: the piece of that rank.
        tensors: names in the checkpoint by name.
        values: packed values by name.
        made: tensors that are part of packed values, by label.
    """

    stored: DcpReader
    manifest: Manifest
    first: RankPiece
    tensors: Mapping[str, str]
    values: Mapping[str, Any]
    made: Mapping[str, Tensor]

    @property
    def files(self) -> CheckpointFiles:
        """Files of the checkpoint."""
        return self.stored.files

    def piece(self, rank: int) -> RankPiece:
        """Return the piece of the manifest of a rank."""
        return self.first

    def verify_rest(self, rank: int) -> None:
        """Do nothing: records are verified whole when they are read."""

    def own(self, rank: int, name: str) -> Tensor:
        """Return a tensor of a rank's own state."""
        return self.made[name]

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self.tensors

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor; KeyError: there is no such tensor."""
        return self.stored.info(self.tensors[name])

    def read(self, reads: Sequence[Read]) -> None:
        """Read boxes of tensors, see `DcpReader.read`."""
        self.stored.read([Read(self.tensors[each.name], each.box, each.into) for each in reads])

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, into new memory."""
        return self.made[name] if name in self.made else self.stored.tensor(self.tensors[name], box)

    def value_names(self) -> Iterable[str]:
        """Return the names of plain values."""
        return self.values

    def value(self, name: str) -> Any:
        """Return a plain value, as `plain_values.pack` returns it; KeyError: there is none."""
        return self.values[name]

    def close(self) -> None:
        """Close the files."""
        self.stored.close()
