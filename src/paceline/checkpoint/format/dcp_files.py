"""Files of torch.distributed.checkpoint (DCP), written so that it reads them, with checksums for our own manifest.

    .metadata        pickle of torch's `Metadata`: where the boxes of each tensor, and values, are
    __<rank>_0.distcp    records of torch.save, one per box or value, one after another

A record of torch.save is a zip archive, in which the tensor's bytes are contiguous and not compressed: this is where
our own reader finds them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import RankPiece, StoredFile
from paceline.checkpoint.format.tensor_files import ChecksummedFile, bytes_of
from paceline.checkpoint.parts.state_parts import TensorPart

__all__ = ["dcp_file", "dcp_metadata", "write_dcp"]


def dcp_file(rank: int, number: int = 0) -> str:
    """Return the name of a file of a rank, as DCP names it."""
    return f"__{rank}_{number}.distcp"


class _Record:
    """What torch.save writes to; the write of the tensor's own memory gets checksums of its own.

    Args:
        file: the file.
        data: bytes of the tensor.
    """

    def __init__(self, file: ChecksummedFile, data: memoryview) -> None:
        self._file, self._data = file, data
        self._address = _address(data)
        self.found = (file.at, "")
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if len(view) == len(self._data) and len(view) and _address(view) == self._address:
                self.found = self._file.write_tensor(view)
                return len(view)
            return self._file.write(view)
        except OSError as error:
            self.failure = error  # torch.save raises one of its own after it
            raise

    def flush(self) -> None:
        pass


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0


def write_dcp(
    path: Path,
    parts: Mapping[str, TensorPart],
    values: Mapping[str, bytes],
    read: Callable[[str], Tensor] | None = None,
) -> tuple[StoredFile, dict[str, tuple[int, int]]]:
    """Write parts of tensors, contiguous on the CPU, and values to a new file; flush it to the disk.

    Args:
        path: the file; it must not exist.
        parts: by label; with `read`, their data are on the device "meta".
        values: what DCP calls bytes, by name: further records of torch.save.
        read: returns the data of a part, contiguous on the CPU, by its label; called once for each.

    Returns:
        Its description, and start and length of the record of each value.

    Raises:
        OSError: it can't be written.
    """
    with ChecksummedFile(path) as file:
        for label, part in parts.items():
            start, tensor = file.at, part.data if read is None else read(label)
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # of a view, torch.save would write all that it is a view of
            record = _Record(file, bytes_of(tensor))
            try:
                torch.save(tensor, record)  # type: ignore[arg-type] # it only writes
            except RuntimeError as error:
                raise record.failure or error from None
            if tensor.numel() and not record.found[1]:
                raise RuntimeError(f"torch.save has not written the memory of {part.name!r} in one piece")
            file.add(label, part, record.found, (start, file.at - start))
        records = {}
        for name, value in values.items():
            start = file.at
            file.write(value)
            records[name] = (start, file.at - start)
        return file.finish(), records


def dcp_metadata(
    pieces: Sequence[RankPiece],
    path_of: Callable[[str], tuple[str | int, ...]],
    prefix: str = "",
    aliases: Mapping[str, str] | None = None,
) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        pieces: of all ranks.
        path_of: returns the path of keys in the nested state that a name stands for.
        prefix: of the paths of files.
        aliases: further names of tensors, which have the same records, by name.
    """
    # Imported here: it takes half a second, and most checkpoints are not DCP's.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for piece in pieces:
        for file, stored in piece.files.items():
            for chunk in stored.chunks.values():
                offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                properties = TensorProperties(getattr(torch, chunk.dtype))
                entry = tensors.setdefault(
                    chunk.tensor, TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
                )
                assert isinstance(entry, TensorStorageMetadata)
                assert chunk.item is not None
                if (index := MetadataIndex(chunk.tensor, offsets)) not in storage:  # else from a replica
                    entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
                    storage[index] = _StorageInfo(prefix + file, *chunk.item)
        for name, (file, start, length) in piece.records.items():
            tensors[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = _StorageInfo(prefix + file, start, length)
    for name, first in (aliases or {}).items():
        entry = tensors[name] = tensors[first]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            storage[MetadataIndex(name, chunk.offsets)] = storage[MetadataIndex(first, chunk.offsets)]
    planner = {name: path_of(name) for name in tensors}
    return pickle.dumps(Metadata(tensors, planner, storage, StorageMeta(), CURRENT_DCP_VERSION))
