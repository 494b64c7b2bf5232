"""Files of frozen weights that an earlier checkpoint has already: they are linked instead of written again.

Whether weights have changed is found by their checksums, in the training thread: this reads them once, where a copy
would read and write them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from paceline.checkpoint.format.manifest import StoredChunk, StoredFile
from paceline.checkpoint.format.tensor_files import block_checksums, bytes_of
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart, dtype_name

__all__ = ["UnchangedFiles"]


class UnchangedFiles:
    """The files of frozen weights of the latest complete checkpoints of this run, of this rank.

    Where two checkpoints are kept, files are linked from the last but one: so there are two copies, and a damaged one
    does not make both checkpoints useless.

    Args:
        keep: number of complete checkpoints that are kept.
    """

    def __init__(self, keep: int) -> None:
        self._complete: deque[tuple[str, Mapping[str, StoredFile]]] = deque(maxlen=min(2, keep))

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint that has the files which `find` returns; empty: there is none."""
        return self._complete[0][0] if len(self._complete) == self._complete.maxlen else ""

    def completed(self, checkpoint: str, files: Mapping[str, StoredFile]) -> None:
        """Record a checkpoint that is complete.

        Args:
            checkpoint: its name.
            files: its files of frozen weights.
        """
        self._complete.append((checkpoint, files))

    def find(self, parts: StateParts) -> dict[str, StoredFile]:
        """Return the files of frozen weights that need not be written, as weights have not changed since."""
        earlier = self._complete[0][1] if self.checkpoint else {}
        return {
            name: known
            for name in parts.frozen & parts.files.keys()
            if (known := earlier.get(name)) is not None and _is_same(parts.files[name], known)
        }


def _is_same(parts: Mapping[str, TensorPart], known: StoredFile) -> bool:
    """Return whether parts have the same elements as a file."""
    return parts.keys() == known.chunks.keys() and all(
        _is_same_part(part, known.chunks[label]) for label, part in parts.items()
    )


def _is_same_part(part: TensorPart, known: StoredChunk) -> bool:
    here = (part.name, dtype_name(part.data), part.shape, part.box.offsets, part.box.sizes)
    if here != (known.tensor, known.dtype, known.shape, known.offsets, known.sizes):
        return False
    return block_checksums(bytes_of(part.data.detach().cpu().contiguous())) == known.checksums
