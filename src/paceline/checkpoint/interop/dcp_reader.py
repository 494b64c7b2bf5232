"""Reads checkpoints that plain `torch.distributed.checkpoint` (DCP) has written, without a manifest of Paceline's.

Each box of a tensor, and each value, is a record of torch.save: a zip archive whose entries have CRC-32 checksums. A
record is read whole, verified, and loaded with ``weights_only=True``, so that no file runs code.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, METADATA, piece_name
from paceline.checkpoint.interop.dcp_index import DcpChunk, DcpIndex, DcpItem, DcpTensor
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_reader import Read, TensorInfo
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles, OpenFile
from paceline.errors import DamagedCheckpoint, UsageError

__all__ = ["DcpReader", "is_plain_dcp"]

_THREADS = 4
_AT_ONCE_NBYTES = 256 << 20  # of records that threads hold, unless one is larger

log = logging.getLogger("paceline.checkpoint")

_CLASS = re.compile(r"GLOBAL ([\w.]+)")
"""What torch names in the message about a class or function that it does not call."""

_Part = tuple[Box, Tensor | None]
"""The box that a record and a read have in common, and the part of the tensor to fill."""


def is_plain_dcp(files: CheckpointFiles) -> bool:
    """Return whether a checkpoint was written by DCP alone: it has ``.metadata`` and nothing of Paceline's."""
    return _exists(files, METADATA) and not any(
        _exists(files, name) for name in (MANIFEST, CHECKSUM, piece_name(0))
    )


def _exists(files: CheckpointFiles, name: str) -> bool:
    try:
        files.open(name).close()
    except OSError:
        return False
    return True


class DcpReader:
    """The contents of a DCP checkpoint, under its own names; its files stay open until `close`.

    Args:
        files: its files.

    Raises:
        DamagedCheckpoint: ``.metadata`` is missing, truncated or inconsistent.
        UsageError: ``.metadata`` holds something else than metadata of DCP.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        try:
            data = files.read(METADATA)
        except OSError as error:
            raise DamagedCheckpoint(f"{METADATA} can't be read: {error.strerror or error}") from error
        self.index = DcpIndex.from_pickle(data)
        self._open: dict[str, OpenFile] = {}
        self._warned = False

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    # ------------------------------------------------------------------ what there is

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self.index.tensors

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor; KeyError: there is no such tensor."""
        tensor = self.index.tensors[name]
        return TensorInfo(tensor.dtype, tensor.shape)

    def load_value(self, name: str) -> Any:
        """Return a value as it was saved.

        Raises:
            DamagedCheckpoint: its file differs from what was written, or can't be read.
            UsageError: it is an object of a class, which would run code; names it.
        """
        return self._load(name, self.index.values[name])

    # ------------------------------------------------------------------ reading

    def read(self, reads: Sequence[Read]) -> None:
        """Read boxes of tensors; the tensors to fill are valid once this returns.

        Raises:
            DamagedCheckpoint: a file differs from what was written, or can't be read; names the file and the tensor.
            UsageError: a tensor was written through a stream extension, or is no plain tensor.
            KeyError: there is no such tensor.
        """
        jobs: dict[tuple[str, DcpItem], tuple[DcpChunk, list[_Part]]] = {}
        for each in reads:
            tensor = self.index.tensors[each.name]
            wanted, into = _as_real(tensor, each.box), each.into
            if into is not None and into.is_complex():
                into = torch.view_as_real(into)
            for chunk in tensor.chunks:
                common = _as_real(tensor, chunk.box).intersection(wanted)
                if common is not None:
                    part = (common, None if into is None else into[common.index_in(wanted)])
                    jobs.setdefault((each.name, chunk.item), (chunk, []))[1].append(part)
        for wave in _waves(jobs):
            with ThreadPoolExecutor(_THREADS) as pool:
                for done in [pool.submit(self._fill, job[0], *jobs[job]) for job in wave]:
                    done.result()

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, into new memory; errors as for `read`."""
        info = self.info(name)
        box = Box.whole(info.shape) if box is None else box
        found = torch.empty(box.sizes, dtype=info.dtype)
        self.read([Read(name, box, found)])
        return found

    def verify(self) -> None:
        """Read every record, and verify it; errors as for `read`."""
        self.read([Read(name, Box.whole(tensor.shape), None) for name, tensor in self.index.tensors.items()])
        for name, item in self.index.items():
            if name in self.index.values or not item.nbytes:
                self._record(name, item)

    def _fill(self, name: str, chunk: DcpChunk, parts: Sequence[_Part]) -> None:
        """Copy from a record to the tensors to fill."""
        tensor, found = self.index.tensors[name], self._load(name, chunk.item)
        if not isinstance(found, Tensor) or found.layout is not torch.strided:
            raise UsageError(
                f"{name!r} was saved as a {type(found).__name__}", remedy="save it as a dense tensor"
            )
        if found.dtype is not tensor.dtype or tuple(found.shape) != chunk.box.sizes:
            raise DamagedCheckpoint(
                f"{chunk.item.file}: {name!r} is {found.dtype} {list(found.shape)} in place of {tensor.dtype} "
                f"{list(chunk.box.sizes)}"
            )
        real = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
        for common, target in parts:
            if target is not None:
                target.copy_(real[common.index_in(_as_real(tensor, chunk.box))])

    # ------------------------------------------------------------------ records

    def _load(self, name: str, item: DcpItem) -> Any:
        record = self._record(name, item)
        try:
            return torch.load(record, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            match = _CLASS.search(str(error))
            kind = match[1] if match else "more than plain values"
            raise UsageError(
                f"{item.file}: {name!r} holds {kind}, which is not read, since it can run code",
                remedy="save plain numbers, strings, tensors, and lists and dicts of them",
            ) from error
        except Exception as error:  # of a record whose checksums are right, but whose structure is not
            raise DamagedCheckpoint(f"{item.file}: {name!r} can't be loaded: {error!r:.200}") from error

    def _record(self, name: str, item: DcpItem) -> io.BytesIO:
        """Return a record in memory, once its checksums match."""
        if item.transforms:
            raise UsageError(
                f"{item.file}: {name!r} was written through {', '.join(item.transforms)}, which is not read",
                remedy="load it with torch.distributed.checkpoint, and save it without stream extensions",
            )
        record = self._copy(name, item)
        try:
            with zipfile.ZipFile(record) as archive:
                entries = archive.infolist()
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                    raise DamagedCheckpoint(f"{item.file}: {name!r} is compressed, as torch.save never does")
                if all(entry.CRC == 0 for entry in entries):
                    self._warn_unverified()
                elif (wrong := archive.testzip()) is not None:
                    raise DamagedCheckpoint(f"{item.file}: wrong checksum of {name!r} ({wrong})")
        except DamagedCheckpoint:
            raise
        except (zipfile.BadZipFile, ValueError, EOFError, RuntimeError, OSError) as error:
            raise DamagedCheckpoint(f"{item.file}: {name!r} is no record of torch.save: {error}") from error
        record.seek(0)
        return record

    def _copy(self, name: str, item: DcpItem) -> io.BytesIO:
        """Return the bytes of a record in memory."""
        file = self._file(item.file)
        if item.start + item.nbytes > file.nbytes:
            raise DamagedCheckpoint(
                f"{item.file} has {file.nbytes} bytes, where {name!r} ends at {item.start + item.nbytes}"
            )
        record = io.BytesIO()
        if item.nbytes:
            record.seek(item.nbytes - 1)
            record.write(b"\0")
        try:
            with record.getbuffer() as memory:
                file.read_into(item.start, memory)
        except (OSError, EOFError) as error:
            raise DamagedCheckpoint(f"{item.file} can't be read: {error}") from error
        return record

    def _file(self, name: str) -> OpenFile:
        if name not in self._open:
            try:
                self._open[name] = self.files.open(name)
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{name} is missing") from None
            except OSError as error:
                raise DamagedCheckpoint(f"{name} can't be read: {error.strerror or error}") from error
        return self._open[name]

    def _warn_unverified(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s was written without checksums (torch.serialization.set_crc32_options): damage is not detected",
                self.files.location,
            )


def _waves(jobs: Iterable[tuple[str, DcpItem]]) -> Iterator[list[tuple[str, DcpItem]]]:
    """Yield records, in the order of the files, that are read at once."""
    wave: list[tuple[str, DcpItem]] = []
    held = 0
    for name, item in sorted(jobs, key=lambda job: (job[1].file, job[1].start)):
        if wave and held + item.nbytes > _AT_ONCE_NBYTES:
            yield wave
            wave, held = [], 0
        wave.append((name, item))
        held += item.nbytes
    if wave:
        yield wave


def _as_real(tensor: DcpTensor, box: Box) -> Box:
    """Return a box of a tensor with complex numbers as pairs of real ones, which it may have already."""
    if not tensor.dtype.is_complex or len(box.sizes) > len(tensor.shape):
        return box
    return Box((*box.offsets, 0), (*box.sizes, 2))
