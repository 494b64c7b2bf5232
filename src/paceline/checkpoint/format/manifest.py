"""The page of a checkpoint that says what belongs to it, read without torch.

    step-00000200/
        manifest.json            this page
        manifest.json.xxh128     its checksum, as ``xxhsum -H2`` prints it
        model.safetensors        the weights; of a large model a part from each rank, as Hugging Face names them
        state-rank<k>.safetensors  the tensors of rank k's part of everything else

Nothing is believed: the page counts only if its checksum fits, and whatever it says about files is checked against
their sizes and checksums before a byte of them is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from paceline.errors import DamagedCheckpoint, UsageError

__all__ = ["FORMAT", "MANIFEST", "SUM", "Manifest", "StoredObject", "TensorFile", "nbytes_of", "state_file"]

FORMAT = 1
MANIFEST = "manifest.json"
SUM = "manifest.json.xxh128"

_ITEM_NBYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def state_file(rank: int) -> str:
    """Return the name of the file with the tensors of `rank`'s part of everything that is no weight."""
    return f"state-rank{rank}.safetensors"


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor.

    Raises:
        ValueError: a dtype that no checkpoint holds.
    """
    if dtype not in _ITEM_NBYTES:
        raise ValueError(f"dtype {dtype!r}")
    return _ITEM_NBYTES[dtype] * math.prod(shape)


@dataclass(frozen=True)
class StoredObject:
    """A tensor in a file: the bytes start … stop - 1 of the whole file, and their xxh3 checksum (64 bits, hex)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: str


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors: its header, then the tensors, side by side to its end."""

    nbytes: int
    header_nbytes: int
    header_checksum: str
    tensors: Mapping[str, StoredObject]

    @classmethod
    def of(cls, plain: Any) -> TensorFile:
        """Return the file that `plain` tells of.

        Raises:
            KeyError, TypeError, ValueError: it tells of no file that could be.
        """
        header = _whole(plain["header_nbytes"])
        at, tensors = header, {}
        for label, told in plain["tensors"].items():
            shape = tuple(_whole(each) for each in told["shape"])
            start, stop = _whole(told["start"]), _whole(told["stop"])
            if start != at or stop - start != nbytes_of(told["dtype"], shape):
                raise ValueError(f"tensor {label!r} at {start} to {stop}")
            tensors[label] = StoredObject(told["dtype"], shape, start, stop, _text(told["checksum"]))
            at = stop
        if _whole(plain["nbytes"]) != at:
            raise ValueError(f"{plain['nbytes']} bytes, where {at} are told of")
        return cls(at, header, _text(plain["header_checksum"]), tensors)


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint.

    Attributes:
        step: optimizer steps so far.
        facts: what the program wanted to be remembered.
        files: every file of tensors by name.
        weights: per model, the files that its weights are in, and further names of weights that have several.
        states: of each rank, everything else, as `tree.pack` returns it.
        written: when (ISO 8601), and by which versions.
    """

    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, TensorFile]
    weights: Mapping[str, Mapping[str, Any]]
    states: Sequence[Any]
    written: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks wrote it."""
        return len(self.states)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors with their headers."""
        return sum(file.nbytes for file in self.files.values())

    # ------------------------------------------------------------------ to the disk

    def text(self) -> bytes:
        """Return the page."""
        plain = {"format": FORMAT, **asdict(self)}
        return json.dumps(plain, indent=1, allow_nan=False).encode() + b"\n"

    @staticmethod
    def sum_of(text: bytes) -> bytes:
        """Return the line that goes with the page."""
        return f"{xxh3_128_hexdigest(text)}  {MANIFEST}\n".encode()

    # ------------------------------------------------------------------ from the disk

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of the checkpoint in `folder`, once its checksum fits.

        Raises:
            DamagedCheckpoint: it is not there, not whole, or says what can't be.
            UsageError: it is of a newer format.
        """
        try:
            text, told = (folder / MANIFEST).read_bytes(), (folder / SUM).read_bytes()
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{Path(error.filename).name} is missing") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{MANIFEST} can't be read: {error.strerror}") from error
        if cls.sum_of(text) != told:
            raise DamagedCheckpoint(f"{MANIFEST} and its checksum do not fit")
        return cls.of(text)

    @classmethod
    def of(cls, text: bytes) -> Manifest:
        """Return the manifest that `text` is.

        Raises:
            DamagedCheckpoint: it says what can't be.
            UsageError: it is of a newer format.
        """
        try:
            plain = json.loads(text, parse_constant=_refuse)
            number = _whole(plain["format"])
            if number > FORMAT:
                raise UsageError(
                    f"a checkpoint of format {number}; this version of Paceline reads up to {FORMAT}",
                    remedy="update Paceline, or name another folder to start anew",
                )
            return cls._of(plain)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise DamagedCheckpoint(f"{MANIFEST} makes no sense: {error!r:.200}") from error

    @classmethod
    def _of(cls, plain: Any) -> Manifest:
        files = {_plain_name(name): TensorFile.of(told) for name, told in plain["files"].items()}
        weights = {}
        for model, told in plain["weights"].items():
            parts = [_text(name) for name in told["files"]]
            known = {label for name in parts for label in files[name].tensors}
            aliases = {name: _text(label) for name, label in told["aliases"].items()}
            if missing := set(aliases.values()) - known:
                raise ValueError(f"weight {min(missing)!r} is in no file")
            weights[model] = {"files": parts, "aliases": aliases}
        states = plain["states"]
        if not isinstance(states, list) or not states or not isinstance(plain["facts"], dict):
            raise TypeError("states or facts")
        return cls(_whole(plain["step"]), plain["facts"], files, weights, states, dict(plain["written"]))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} where a whole number is due")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where a text is due")
    return value


def _plain_name(name: str) -> str:
    """Return the name of a file, once it can't lead out of the folder."""
    if "/" in name or "\0" in name or not name.endswith(".safetensors"):
        raise ValueError(f"file {name!r:.60}")
    return name
