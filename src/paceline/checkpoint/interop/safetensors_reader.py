"""Reads safetensors files as Hugging Face's libraries write them: one file, or several with an index of their names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline._core.json_codec import decode
from paceline.checkpoint.format.tensor_files import CODES
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_reader import Read, TensorInfo
from paceline.errors import UsageError

__all__ = ["INDEX_SUFFIX", "SafetensorsReader"]

INDEX_SUFFIX = ".safetensors.index.json"

_DTYPES = {code: getattr(torch, name) for name, code in CODES.items() if name != "complex128"}


class _Index(TypedDict):
    weight_map: dict[str, str]


class SafetensorsReader:
    """The tensors in safetensors files; the files stay mapped until `close`.

    The format has no checksums: only headers and sizes are verified.

    Args:
        path: a file, or a folder: ``model.safetensors`` in it, else the files that its index lists, else all.

    Raises:
        UsageError: a file that the index lists is missing or lacks a tensor, two have the same tensor, or one can't be
            read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        found = _files(path)
        if isinstance(found, dict):
            self._file_of = found
        else:
            for file in found:
                for name in self._open(file).keys():  # noqa: SIM118 — it is no mapping
                    if name in self._file_of:
                        raise UsageError(
                            f"{self._file_of[name].name} and {file.name} in {str(path)!r} have a tensor {name!r}",
                            remedy="name the file to use",
                        )
                    self._file_of[name] = file
        self._info = {name: self._read_info(name) for name in self._file_of}

    def close(self) -> None:
        """Release the files."""
        self._files.clear()

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._file_of

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor; KeyError: there is no such tensor."""
        return self._info[name]

    def read(self, reads: Sequence[Read]) -> None:
        """Read boxes of tensors.

        Raises:
            UsageError: a file can't be read.
            KeyError: there is no such tensor.
        """
        for each in reads:
            if each.into is not None:
                each.into.copy_(self._box(each.name, each.box))

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, into new memory; errors as for `read`."""
        info = self._info[name]
        found = self._box(name, Box.whole(info.shape) if box is None else box)
        return torch.empty(found.shape, dtype=found.dtype).copy_(found)  # not in the mapped file

    def _box(self, name: str, box: Box) -> Tensor:
        file, shape = self._file_of[name], self._info[name].shape
        try:
            if box == Box.whole(shape):
                return self._open(file).get_tensor(name)
            return self._open(file).get_slice(name)[box.index_in(Box.whole(shape))]
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise _unreadable(file, error) from error

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError, ValueError, TypeError) as error:
                raise _unreadable(file, error) from error
        return self._files[file]

    def _read_info(self, name: str) -> TensorInfo:
        file = self._file_of[name]
        try:
            found = self._open(file).get_slice(name)
            code, shape = found.get_dtype(), tuple(found.get_shape())
        except SafetensorError as error:
            raise UsageError(
                f"{str(file)!r} has no tensor {name!r}, which the index lists there",
                remedy="get the files and their index from one place",
            ) from error
        if code not in _DTYPES:
            raise UsageError(
                f"{name!r} in {str(file)!r} has the dtype {code}",
                remedy="convert it to a dtype that torch has",
            )
        return TensorInfo(_DTYPES[code], shape)


def _unreadable(file: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{str(file)!r} can't be read as safetensors: {error}",
        remedy="convert a file of torch.save to safetensors first, if it is trusted",
    )


def _files(path: Path) -> list[Path] | dict[str, Path]:
    """Return the files to read; with an index, the file of each tensor."""
    if not path.is_dir():
        return [path]
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise UsageError(
            f"{str(path)!r} has several indexes: {', '.join(each.name for each in indexes)}",
            remedy="name a folder with one model",
        )
    return _read_index(indexes[0]) if indexes else sorted(path.glob("*.safetensors"))


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, all of which exist in the folder of the index."""
    try:
        files = decode(json.loads(path.read_text(encoding="utf-8")), _Index, path.name)["weight_map"]
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{str(path)!r} is not an index of safetensors files: {error}", remedy="get it anew"
        ) from error
    for name, file in files.items():
        if not file or Path(file).name != file or "\\" in file or "\0" in file:
            raise UsageError(
                f"{str(path)!r} names the file {file!r} for {name!r}, which is not in its folder",
                remedy="don't use this index: it was not written by a library",
            )
    missing = sorted({file for file in files.values() if not (path.parent / file).is_file()})
    if missing:
        raise UsageError(
            f"{path.name} lists {missing[0]!r}, which is missing in {str(path.parent)!r}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            remedy="get the missing files too",
        )
    return {name: path.parent / file for name, file in files.items()}
