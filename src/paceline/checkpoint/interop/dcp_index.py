"""Index of a checkpoint of torch.distributed.checkpoint (DCP): what its ``.metadata`` describes.

`.metadata` is a pickle, which could run any code. It is read by an unpickler that knows the few classes of DCP's
metadata, each as an inert record of its attributes, so that nothing is imported or called. Whatever else a file names
is refused. The records become an index only if they are consistent.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from paceline.checkpoint.format.manifest import METADATA
from paceline.checkpoint.parts.boxes import Box
from paceline.errors import DamagedCheckpoint, UsageError

__all__ = ["DcpChunk", "DcpIndex", "DcpItem", "DcpTensor"]

_WRITER = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class DcpItem:
    """A record of torch.save in a file.

    Attributes:
        file: path from the folder of the checkpoint.
        start, nbytes: where it is in the file.
        transforms: names of stream extensions that it was written through, such as a compression.
    """

    file: str
    start: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class DcpChunk:
    """A stored box of a tensor."""

    box: Box
    item: DcpItem


@dataclass(frozen=True)
class DcpTensor:
    """A tensor: dtype, shape and its stored boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[DcpChunk]


@dataclass(frozen=True)
class DcpIndex:
    """Tensors and values of a checkpoint.

    Attributes:
        tensors: by name.
        values: records of everything else, by name.
        paths: by name, the keys that lead to it in the nested state that was saved.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpItem]
    paths: Mapping[str, tuple[str | int, ...]] = field(repr=False)

    @classmethod
    def from_pickle(cls, data: bytes) -> DcpIndex:
        """Return the index in the content of ``.metadata``.

        Raises:
            DamagedCheckpoint: it is truncated or inconsistent.
            UsageError: it names a class or function that is no part of DCP's metadata; nothing was called.
        """
        try:
            return _index(_MetadataUnpickler(data).load())
        except UsageError:
            raise
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{METADATA}: {error}") from error
        except Exception as error:  # a damaged pickle raises anything
            raise DamagedCheckpoint(f"{METADATA} is invalid: {error!r:.200}") from error

    def items(self) -> Iterable[tuple[str, DcpItem]]:
        """Yield each record with the name of what it holds."""
        for name, tensor in self.tensors.items():
            yield from ((name, chunk.item) for chunk in tensor.chunks)
        yield from self.values.items()

    @property
    def optimizers(self) -> list[str]:
        """The prefixes of the names of optimizers, such as ``"optimizer."``."""
        found: dict[str, None] = {}
        for name in self.paths:
            parts = name.split(".")
            if "param_groups" in parts:
                found["".join(f"{part}." for part in parts[: parts.index("param_groups")])] = None
        return list(found)

    @property
    def writers(self) -> int:
        """Number of ranks that wrote files, as far as their names show it; at least 1."""
        found = {match[1] for _, item in self.items() if (match := _WRITER.fullmatch(item.file))}
        return max(1, len(found))


# ------------------------------------------------------------------ the pickle


class _Record:
    """An object of the pickle: its attributes, or what it was made with."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDS = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_StorageInfo", "_StoragePrefix",
}  # fmt: skip
_RECORD_MODULES = {
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
}  # fmt: skip
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads a pickle of DCP's metadata; every class is a `_Record` of its own, which nothing else uses."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or function; UsageError: it is no part of the metadata."""
        key = f"{module}.{name}"
        if key not in self._kinds:
            self._kinds[key] = _stand_in(module, name)
        return self._kinds[key]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: DCP's metadata has no such references."""
        raise UsageError(f"{METADATA} refers to {pid!r:.60}, outside of it", remedy=_REMEDY)


_REMEDY = "nothing of it was run; don't load this file with other programs unless you trust its origin"


def _stand_in(module: str, name: str) -> Any:
    if module in _RECORD_MODULES and name in _RECORDS:
        return type(name, (_Record,), {})
    if module in _RECORD_MODULES and name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
        return _function(lambda number: number)
    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    if (module, name) == ("torch", "Size"):
        return _function(lambda sizes=(): tuple(sizes))
    if (module, name) == ("torch.serialization", "_get_layout"):
        return _function(lambda layout: layout)
    if (module, name) == ("collections", "OrderedDict"):
        return type(name, (OrderedDict,), {})
    if module.partition(".")[0] == "pathlib" and name in _PATHS:
        return _function(lambda *parts: str(PurePosixPath(*map(str, parts))))
    if (module, name) in (("builtins", "set"), ("builtins", "frozenset")):
        return _function(lambda items=(): tuple(items))
    raise UsageError(
        f"{METADATA} names {module}.{name}, which is no part of the metadata of torch.distributed.checkpoint",
        remedy=_REMEDY,
    )


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of its own for each unpickler, since a pickle can set attributes of what it names."""
    return lambda *arguments: call(*arguments)


# ------------------------------------------------------------------ from records to the index


def _index(metadata: Any) -> DcpIndex:
    found = _attributes(metadata, "Metadata")
    items = {
        (index["fqn"], _sizes(index.get("offset") or ())): _item(info)
        for index, info in (
            (_attributes(key, "MetadataIndex"), value) for key, value in found["storage_data"].items()
        )
    }
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, DcpItem] = {}
    for name, stored in found["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise DamagedCheckpoint(f"{name!r:.60} is not a name")
        if type(stored).__name__ == "BytesStorageMetadata":
            values[name] = _found(items, name, ())
        else:
            tensors[name] = _tensor(name, _attributes(stored, "TensorStorageMetadata"), items)
    paths = found.get("planner_data") or {}
    return DcpIndex(tensors, values, {name: _path(paths, name) for name in (*tensors, *values)})


def _attributes(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise DamagedCheckpoint(f"{type(record).__name__} in place of {kind}")
    if isinstance(record.state, tuple) and len(record.state) == 2:  # of a class with slots
        return {**(record.state[0] or {}), **(record.state[1] or {})}
    if not isinstance(record.state, dict):
        raise DamagedCheckpoint(f"{kind} without attributes")
    return record.state


def _sizes(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or value < 0 for value in found):
        raise DamagedCheckpoint(f"{found!r:.60} are not sizes")
    return found


def _item(info: Any) -> DcpItem:
    found = _attributes(info, "_StorageInfo")
    file = found["relative_path"]
    if not isinstance(file, str) or not file or "\0" in file:
        raise DamagedCheckpoint(f"{file!r:.60} is not a file name")
    if file.startswith("/") or "\\" in file or ".." in file.split("/"):
        raise DamagedCheckpoint(f"file {file!r:.60} is not in the folder of the checkpoint")
    start, nbytes = _sizes((found["offset"], found["length"]))
    return DcpItem(file, start, nbytes, tuple(map(str, found.get("transform_descriptors") or ())))


def _found(items: Mapping[tuple[str, tuple[int, ...]], DcpItem], name: str, at: tuple[int, ...]) -> DcpItem:
    item = items.get((name, at))
    if item is None:
        raise DamagedCheckpoint(f"no file has {name!r}" + (f" at {list(at)}" if at else ""))
    return item


def _tensor(
    name: str, found: Mapping[str, Any], items: Mapping[tuple[str, tuple[int, ...]], DcpItem]
) -> DcpTensor:
    dtype = found["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{name!r} has dtype {dtype!r:.60}")
    shape = _sizes(found["size"])
    boxes: dict[Box, None] = {}
    for chunk in found["chunks"]:
        each = _attributes(chunk, "ChunkStorageMetadata")
        boxes[Box(_sizes(each["offsets"]), _sizes(each["sizes"]))] = None
    if not _covers(shape, tuple(boxes)):
        raise DamagedCheckpoint(f"the stored boxes of {name!r} do not cover its shape {list(shape)} once")
    return DcpTensor(dtype, shape, [DcpChunk(box, _found(items, name, box.offsets)) for box in boxes])


def _covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether boxes cover every element of a tensor once."""
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return False
        ends = (at + size for at, size in zip(box.offsets, box.sizes, strict=True))
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            return False
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.offsets)
    open_boxes: list[Box] = []
    for box in ordered:  # those that end before this one begins overlap none of the later ones
        start = box.offsets[:1]
        open_boxes = [each for each in open_boxes if not start or each.offsets[0] + each.sizes[0] > start[0]]
        if any(each.intersection(box) is not None for each in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _path(paths: Any, name: str) -> tuple[str | int, ...]:
    found = paths.get(name) if isinstance(paths, dict) else None
    if isinstance(found, tuple) and found and all(type(part) in (str, int) for part in found):
        return found
    return tuple(name.split("."))
