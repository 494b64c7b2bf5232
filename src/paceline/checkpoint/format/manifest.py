"""Manifest of a checkpoint: the files that belong to it and the state of each rank; read without torch.

    step-00000200/
        manifest.json              the manifest
        manifest.json.xxh128       its checksum, as ``xxhsum -H2`` prints it
        model.safetensors          weights; of a large model a part from each rank, named as Hugging Face does
        state-rank<k>.safetensors  tensors of rank k's part of everything else

A manifest counts only if its checksum matches; sizes and checksums of files are compared with it before use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from xxhash import xxh3_128_hexdigest

from paceline._core.json_codec import Meta, Whole, decode
from paceline.errors import DamagedCheckpoint, UsageError

__all__ = [
    "CHECKSUM",
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "StoredTensor",
    "StoredWeights",
    "TensorFile",
    "state_file",
]

FORMAT = 1
MANIFEST = "manifest.json"
CHECKSUM = "manifest.json.xxh128"

_ITEM_NBYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def state_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors that are not weights."""
    return f"state-rank{rank}.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: bytes start … stop - 1 of the file, and their xxh3 checksum (64 bits, hex)."""

    dtype: str
    shape: Sequence[Whole]
    start: Whole
    stop: Whole
    checksum: str


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors: its header, then the tensors without gaps.

    Raises:
        ValueError: sizes and offsets contradict each other.
    """

    nbytes: Whole
    header_nbytes: Whole
    header_checksum: str
    tensors: Mapping[str, StoredTensor]

    def __post_init__(self) -> None:
        offset = self.header_nbytes
        for label, tensor in self.tensors.items():
            if tensor.dtype not in _ITEM_NBYTES:
                raise ValueError(f"dtype {tensor.dtype!r} of tensor {label!r}")
            stop = offset + _ITEM_NBYTES[tensor.dtype] * math.prod(tensor.shape)
            if (tensor.start, tensor.stop) != (offset, stop):
                raise ValueError(
                    f"tensor {label!r} at {tensor.start} to {tensor.stop}, not {offset} to {stop}"
                )
            offset = stop
        if self.nbytes != offset:
            raise ValueError(f"{self.nbytes} bytes, where the tensors end at {offset}")


@dataclass(frozen=True)
class StoredWeights:
    """Weights of a model: the files with them, and the stored names of weights that have further names."""

    files: Sequence[str]
    aliases: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: number of optimizer steps.
        facts: the program's own values.
        files: all files of tensors by name.
        weights: per model.
        states: per rank, everything else, as `plain_values.pack` returns it.
        written: time (ISO 8601) and versions.

    Raises:
        ValueError: a file lies outside the folder, or a weight in no file.
    """

    step: Whole
    facts: Mapping[str, Any]
    files: Mapping[str, TensorFile]
    weights: Mapping[str, StoredWeights]
    states: Annotated[Sequence[Any], Meta(min_length=1)]
    written: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if "/" in name or "\0" in name or not name.endswith(".safetensors"):
                raise ValueError(f"file name {name!r:.60}")
        for weights in self.weights.values():
            if missing := set(weights.files) - self.files.keys():
                raise ValueError(f"file {min(missing)!r:.60} is missing")
            stored = {label for name in weights.files for label in self.files[name].tensors}
            if missing := set(weights.aliases.values()) - stored:
                raise ValueError(f"weight {min(missing)!r:.60} is in no file")

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.states)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors with their headers."""
        return sum(file.nbytes for file in self.files.values())

    def weight_locations(self, model: str) -> dict[str, tuple[str, str]]:
        """Return (file, label) of every weight of a model, under all its names."""
        weights = self.weights[model]
        found = {label: (file, label) for file in weights.files for label in self.files[file].tensors}
        return found | {alias: found[label] for alias, label in weights.aliases.items()}

    # ------------------------------------------------------------------ on disk

    def to_json(self) -> bytes:
        """Return the text of the manifest."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False).encode() + b"\n"

    @staticmethod
    def checksum_line(text: bytes) -> bytes:
        """Return the content of the checksum file."""
        return f"{xxh3_128_hexdigest(text)}  {MANIFEST}\n".encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of the checkpoint in `folder`, once its checksum matches.

        Raises:
            DamagedCheckpoint: it is missing, incomplete or invalid.
            UsageError: its format is newer.
        """
        try:
            text, line = (folder / MANIFEST).read_bytes(), (folder / CHECKSUM).read_bytes()
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{Path(error.filename).name} is missing") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{MANIFEST} can't be read: {error.strerror}") from error
        if cls.checksum_line(text) != line:
            raise DamagedCheckpoint(f"{MANIFEST} does not match its checksum")
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Return the manifest with this text.

        Raises:
            DamagedCheckpoint: it is invalid.
            UsageError: its format is newer.
        """
        try:
            plain = json.loads(text, parse_constant=_reject_constant)
            number = decode(plain, _Head, MANIFEST).format
            if number <= FORMAT:
                return decode(plain, cls, MANIFEST)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise DamagedCheckpoint(f"{MANIFEST} is invalid: {reason:.200}") from error
        raise UsageError(
            f"a checkpoint of format {number}; this version of Paceline reads up to {FORMAT}",
            remedy="update Paceline, or name another folder to start anew",
        )


@dataclass(frozen=True)
class _Head:
    format: Whole


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
