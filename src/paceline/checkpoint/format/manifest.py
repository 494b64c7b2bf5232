"""Manifest of a checkpoint, in pieces: what the checkpoint consists of, and what each rank has written; no torch.

    step-00000200/
        manifest.json              the manifest: where the boxes of each tensor are, and the pieces with their checksums
        manifest.json.xxh128       its checksum, as ``xxhsum -H2`` prints it; written last
        rank-00000.json …          a piece per rank: its files, the checksums of their tensors, its own state
        model.safetensors …        tensors; with ``format="dcp"``, ``.metadata`` and ``__0_0.distcp`` … instead

A rank reads the manifest, the first piece, its own, and the pieces that describe what it needs. Tensors of the same
shape that are cut alike share a layout, so the manifest grows with the number of parameters, not times that of ranks.

A manifest counts only if its checksum matches. Checksums of tensors are per block of 4 MiB, so that a rank that needs
a part of a tensor can verify that part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from xxhash import xxh3_128_hexdigest

from paceline._core.json_codec import Meta, Whole, decode
from paceline.errors import DamagedCheckpoint, UsageError

__all__ = [
    "BLOCK_NBYTES",
    "CHECKSUM",
    "FORMAT",
    "MANIFEST",
    "METADATA",
    "Layout",
    "Manifest",
    "PieceFile",
    "RankPiece",
    "StoredChunk",
    "StoredFile",
    "StoredTensor",
    "item_nbytes",
    "piece_name",
]

FORMAT = 2
MANIFEST = "manifest.json"
CHECKSUM = "manifest.json.xxh128"

METADATA = ".metadata"
"""What torch.distributed.checkpoint writes in place of a manifest, and last, too."""

BLOCK_NBYTES = 4 << 20
"""Bytes of a tensor that have one checksum; a multiple of the size of any element."""

_DIGITS = 16  # of a checksum of 64 bits, in hexadecimal

_ITEM_NBYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

T = TypeVar("T")


def item_nbytes(dtype: str) -> int:
    """Return the bytes of an element of a dtype, such as ``"float32"``.

    Raises:
        ValueError: checkpoints hold no such dtype.
    """
    if dtype not in _ITEM_NBYTES:
        raise ValueError(f"dtype {dtype!r}")
    return _ITEM_NBYTES[dtype]


def piece_name(rank: int) -> str:
    """Return the name of a rank's piece of the manifest."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, contiguous in a file.

    Attributes:
        tensor: its name.
        dtype: of the tensor, such as ``"float32"``.
        shape: of the whole tensor.
        offsets, sizes: the box.
        start: first byte in the file.
        checksums: xxh3 (64 bits, 16 hex digits) of each block of 4 MiB.
        item: with ``format="dcp"``, start and length of the record of torch.save around it.

    Raises:
        ValueError: they contradict each other.
    """

    tensor: str
    dtype: str
    shape: tuple[Whole, ...]
    offsets: tuple[Whole, ...]
    sizes: tuple[Whole, ...]
    start: Whole
    checksums: str
    item: tuple[Whole, Whole] | None = None

    def __post_init__(self) -> None:
        blocks = -(-self.nbytes // BLOCK_NBYTES)
        if len(self.checksums) != blocks * _DIGITS:
            raise ValueError(
                f"{len(self.checksums)} digits of checksums for {blocks} blocks of {self.tensor!r:.60}"
            )
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(f"a box of other dimensions than {self.tensor!r:.60}")
        ends = (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
        if any(end > size for end, size in zip(ends, self.shape, strict=True)):
            raise ValueError(f"a box outside of {self.tensor!r:.60}")

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return item_nbytes(self.dtype) * math.prod(self.sizes)

    def checksum(self, block: int) -> str:
        """Return the checksum of a block."""
        return self.checksums[block * _DIGITS : (block + 1) * _DIGITS]


@dataclass(frozen=True)
class StoredFile:
    """A file with tensors.

    Attributes:
        nbytes: its size.
        rest: xxh3 (64 bits) of all bytes that belong to no tensor, in their order.
        chunks: by label, in the order of their bytes.

    Raises:
        ValueError: sizes and offsets contradict each other.
    """

    nbytes: Whole
    rest: str
    chunks: Mapping[str, StoredChunk]

    def __post_init__(self) -> None:
        end = 0
        for label, chunk in self.chunks.items():
            if chunk.start < end:
                raise ValueError(
                    f"tensor {label!r:.60} starts at {chunk.start}, before the end of the one before"
                )
            end = chunk.start + chunk.nbytes
        if end > self.nbytes:
            raise ValueError(f"{self.nbytes} bytes, where the tensors end at {end}")

    def gaps(self) -> list[tuple[int, int]]:
        """Return start and stop of the bytes that belong to no tensor."""
        found, end = [], 0
        for chunk in self.chunks.values():
            if chunk.start > end:
                found.append((end, chunk.start))
            end = chunk.start + chunk.nbytes
        return [*found, (end, self.nbytes)] if end < self.nbytes else found


@dataclass(frozen=True)
class RankPiece:
    """What one rank has written.

    Attributes:
        files: by name, in the folder of the checkpoint.
        values: plain values of which it has the only copy, by name, see `plain_values.pack`.
        state: its own state, as `plain_values.pack` returns it; the first rank's has what all have in common.
        records: with ``format="dcp"``, file, start and length of the record of each value.

    Raises:
        ValueError: a file lies outside the folder.
    """

    files: Mapping[str, StoredFile]
    values: Mapping[str, Any]
    state: Any
    records: Mapping[str, tuple[str, Whole, Whole]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if name.startswith(("/", ".")) or "\0" in name or ".." in name.split("/"):
                raise ValueError(f"file name {name!r:.60}")

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.nbytes for file in self.files.values())

    def to_json(self) -> bytes:
        """Return its text."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_json(cls, text: bytes, name: str) -> RankPiece:
        """Return the piece with this text.

        Raises:
            DamagedCheckpoint: it is invalid.
        """
        return _valid(name, lambda: msgspec.json.decode(text, type=cls))


@dataclass(frozen=True)
class PieceFile:
    """A piece of the manifest: its file and the checksum of that (xxh3, 128 bits)."""

    name: str
    checksum: str


Layout = Sequence[tuple[Whole, tuple[Whole, ...], tuple[Whole, ...]]]
"""Boxes of tensors that are cut alike: the rank that has written it, offsets, sizes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, and the index of its layout."""

    dtype: str
    shape: tuple[Whole, ...]
    layout: Whole


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: number of optimizer steps.
        facts: the program's own values.
        container: ``"safetensors"``, or ``"dcp"``: the files of torch.distributed.checkpoint.
        nbytes: of all files of tensors.
        pieces: of the manifest, by rank.
        prefix: of the paths of pieces and files, from the folder of the manifest.
        layouts: of tensors.
        tensors: by name; those of a rank's own state are in its piece only.
        values: rank whose piece has a plain value, by name.
        aliases: per model, the first name of each weight that has several, by its other names.
        optimizers: per optimizer, the options of each group, with the names of its parameters.
        extra_files: checksums (xxh3, 128 bits) of further files beside it, such as ``.metadata``, by name.
        metric: by which the best checkpoints are kept; None: it has none.
        metrics: of earlier checkpoints, by name; some were known only after those had been saved.
        written: time (ISO 8601), versions, and seconds that the save has taken.

    Raises:
        ValueError: it contradicts itself.
    """

    step: Whole
    facts: Mapping[str, Any]
    container: str
    nbytes: Whole
    pieces: Annotated[Sequence[PieceFile], Meta(min_length=1)]
    layouts: Sequence[Layout]
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Whole]
    aliases: Mapping[str, Mapping[str, str]]
    optimizers: Mapping[str, Any]
    prefix: str = ""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    metric: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prefix.startswith("/") or ".." in self.prefix.split("/"):
            raise ValueError(f"prefix {self.prefix!r:.60}")
        for name in self.extra_files:
            if "/" in name or "\0" in name:
                raise ValueError(f"file name {name!r:.60}")
        for number, piece in enumerate(self.pieces):
            if piece.name != piece_name(number):
                raise ValueError(f"piece {piece.name!r:.60} in place of {piece_name(number)!r}")
        holders = {rank for layout in self.layouts for rank, *_ in layout} | set(self.values.values())
        if any(rank >= self.ranks for rank in holders):
            raise ValueError(f"tensors of rank {max(holders)}, of {self.ranks} ranks")
        for name, tensor in self.tensors.items():
            if tensor.layout >= len(self.layouts):
                raise ValueError(f"tensor {name!r:.60} has no layout")

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.pieces)

    def to_json(self) -> bytes:
        """Return its text.

        Raises:
            ValueError: it holds what JSON lacks, such as NaN.
        """
        text = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"), allow_nan=False)
        return text.encode() + b"\n"

    @staticmethod
    def checksum_line(text: bytes) -> bytes:
        """Return the content of the checksum file."""
        return f"{xxh3_128_hexdigest(text)}  {MANIFEST}\n".encode()

    @classmethod
    def read(cls, read: Callable[[str], bytes]) -> Manifest:
        """Return the manifest of a checkpoint, once its checksum matches.

        Args:
            read: returns the content of a file of the checkpoint.

        Raises:
            DamagedCheckpoint: it is missing, incomplete or invalid.
            UsageError: it has another format.
        """
        text = _read(read, MANIFEST)
        if cls.checksum_line(text) != _read(read, CHECKSUM):
            raise DamagedCheckpoint(f"{MANIFEST} does not match its checksum")
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Return the manifest with this text; errors as for `read`."""

        def decoded() -> Manifest | int:
            plain = _parse(text)
            number = decode(plain, _Head, MANIFEST).format
            return decode(plain, cls, MANIFEST) if number == FORMAT else number

        found = _valid(MANIFEST, decoded)
        if isinstance(found, Manifest):
            return found
        older = found < FORMAT
        raise UsageError(
            f"a checkpoint of format {found}; this version of Paceline reads format {FORMAT}",
            remedy=("finish the run with the Paceline that began it" if older else "update Paceline")
            + ", or name another folder to start anew",
        )

    def read_piece(self, read: Callable[[str], bytes], rank: int) -> RankPiece:
        """Return a rank's piece, once its checksum matches.

        Raises:
            DamagedCheckpoint: it is missing, incomplete or invalid.
        """
        piece = self.pieces[rank]
        text = _read_intact(read, self.prefix + piece.name, piece.checksum)
        return RankPiece.from_json(text, piece.name)

    def check_extra_files(self, read: Callable[[str], bytes]) -> None:
        """Raise a `DamagedCheckpoint` unless the further files beside it are there and intact."""
        for name, checksum in self.extra_files.items():
            _read_intact(read, name, checksum)


def _read(read: Callable[[str], bytes], name: str) -> bytes:
    """Return the content of a small file; DamagedCheckpoint: it can't be read."""
    try:
        return read(name)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{name} can't be read: {error.strerror or error}") from error


def _read_intact(read: Callable[[str], bytes], name: str, checksum: str) -> bytes:
    """Return the content of a small file; DamagedCheckpoint: it can't be read, or has another checksum."""
    text = _read(read, name)
    if xxh3_128_hexdigest(text) != checksum:
        raise DamagedCheckpoint(f"{name.rpartition('/')[2]} does not match its checksum")
    return text


def _parse(text: bytes) -> Any:
    return json.loads(text, parse_constant=_reject_constant)


def _valid(name: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedCheckpoint(f"{name} is invalid: {reason:.200}") from error


@dataclass(frozen=True)
class _Head:
    format: Whole


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
