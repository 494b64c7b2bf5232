"""Token corpora of the reference model, split into a training part and a held-out part.

| path                      | tokens                                    | held out                        |
|---------------------------|-------------------------------------------|---------------------------------|
| None                      | sources of the Python standard library    | last tenth                      |
| a file                    | its bytes, memory-mapped                  | last tenth                      |
| a folder                  | bytes of its text files, sorted by path   | last tenth                      |
| a ``.bin`` file (nanoGPT) | 16-bit token numbers, memory-mapped       | last tenth                      |
| a folder of ``train.bin`` | likewise                                  | its ``val.bin``, or last tenth  |

The held-out part is contiguous, so that no window of it overlaps one that was trained on.
"""

from __future__ import annotations

import platform
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

__all__ = ["Corpus", "check_corpus", "load_corpus", "standard_library"]

Tokens = NDArray[np.uint8 | np.uint16]

STDLIB_NBYTES = 8_000_000
FOLDER_NBYTES = 2**30
NOT_TEXT = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo"})  # deliberately odd examples
NOT_TEXT |= {"encodings", "pydoc_data"}  # tables
NOT_TEXT |= {"site-packages", "dist-packages", "__pycache__"}  # not the standard library


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        name: of the source.
        train: ``[tokens]`` of uint8 (bytes) or uint16 (token numbers).
        held_out: likewise, never trained on.
    """

    name: str
    train: Tokens
    held_out: Tokens

    @property
    def is_text(self) -> bool:
        """Whether a token is a byte of text."""
        return self.train.dtype == np.uint8

    @cached_property
    def vocabulary(self) -> int:
        """The smallest vocabulary that fits: 256 for bytes, the largest token number + 1 otherwise."""
        if self.is_text:
            return 256
        chunk = 1 << 24
        parts = (
            tokens[at : at + chunk]
            for tokens in (self.train, self.held_out)
            for at in range(0, len(tokens), chunk)
        )
        return max(int(part.max()) for part in parts) + 1

    @cached_property
    def fingerprint(self) -> int:
        """CRC-32 of the lengths and of 64 samples of 4096 tokens of each part."""
        crc = zlib.crc32(f"{self.train.dtype} {len(self.train)} {len(self.held_out)}".encode())
        for tokens in (self.train, self.held_out):
            for start in np.linspace(0, max(0, len(tokens) - 4096), 64).astype(np.int64):
                crc = zlib.crc32(np.ascontiguousarray(tokens[start : start + 4096]).data, crc)
        return crc

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`; just token 0 for token numbers, whose vocabulary is unknown."""
        return list(text.encode()) if self.is_text else [0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; token numbers are written as numbers."""
        if self.is_text:
            return bytes(tokens).decode("utf-8", errors="replace")
        return " ".join(str(token) for token in tokens)


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Return the corpus at `path`, or the sources of the Python standard library for None.

    Raises:
        UsageError: nothing exists there, or it can't be read as tokens.
    """
    if path is None:
        return standard_library()
    path = Path(path)
    try:
        if path.is_dir():
            return _token_file(path / "train.bin") if (path / "train.bin").is_file() else _folder(path)
        if path.is_file():
            return _token_file(path) if path.suffix == ".bin" else _split(str(path), _mapped(path, np.uint8))
    except OSError as error:
        raise UsageError(f"can't read data {str(path)!r}: {error.strerror}") from error
    raise UsageError(
        f"no data at {str(path)!r}: no such file or folder",
        remedy="give a text file, a folder of text files or a nanoGPT .bin file, or leave it out",
    )


def standard_library(limit_nbytes: int = STDLIB_NBYTES) -> Corpus:
    """Return the sources of this Python's standard library: real text that is on every machine.

    Tests and tables are left out. Files are ordered by the checksum of their paths, which mixes the packages, so the
    held-out tenth has some of every kind.

    Args:
        limit_nbytes: the most bytes; the file that would exceed it, and all after it, are left out.

    Raises:
        UsageError: this Python has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
    names = [
        name
        for name in names
        if not NOT_TEXT.intersection(name.split("/")) and not name.startswith("config-")
    ]
    parts: list[bytes] = []
    nbytes = 0
    for name in sorted(names, key=lambda name: (zlib.crc32(name.encode()), name)):
        text = (root / name).read_bytes()
        if nbytes + len(text) > limit_nbytes:
            break
        parts.append(text)
        nbytes += len(text)
    if not nbytes:
        raise UsageError(
            f"no Python sources in {str(root)!r}", remedy="name a text file or folder as the data"
        )
    title = f"standard library of Python {platform.python_version()}"
    return _split(title, np.frombuffer(b"".join(parts), np.uint8))


def check_corpus(corpus: Corpus, *, batch: int, context: int, ranks: int) -> None:
    """Refuse a corpus with less than a global batch of different windows, or without a held-out window.

    Args:
        corpus: the tokens.
        batch: windows of a rank's batch.
        context: tokens of a window.
        ranks: number of ranks.

    Raises:
        UsageError: names the available and the required windows.
    """
    windows, held_out = (max(0, (len(tokens) - 1) // context) for tokens in (corpus.train, corpus.held_out))
    available = f"{corpus.name} has {len(corpus.train)} tokens to train on, {windows} windows of {context}"
    if windows < ranks:
        raise UsageError(
            f"more ranks than data: {ranks} ranks, but {available}", remedy="use fewer ranks or more data"
        )
    if windows < batch * ranks:
        raise UsageError(
            f"less data than one batch: {available}, but {ranks} ranks x {batch} windows make a batch",
            remedy="use a smaller batch, a shorter context or more data",
        )
    if not held_out:
        raise UsageError(
            f"{corpus.name} holds out {len(corpus.held_out)} tokens, but a window has {context} + 1",
            remedy="use a shorter context or more data",
        )


def _split(name: str, tokens: Tokens) -> Corpus:
    cut = len(tokens) - len(tokens) // 10
    return Corpus(name, tokens[:cut], tokens[cut:])


def _mapped(path: Path, dtype: type[np.uint8 | np.uint16]) -> Tokens:
    nbytes, width = path.stat().st_size, np.dtype(dtype).itemsize
    if nbytes == 0:
        raise UsageError(
            f"data {str(path)!r} is an empty file",
            remedy="give a text file, a folder of text files or a nanoGPT .bin file, or leave it out",
        )
    if nbytes % width:
        raise UsageError(
            f"data {str(path)!r} has {nbytes} bytes: not whole 16-bit token numbers",
            remedy="a .bin file is what nanoGPT's prepare.py writes; rename it if it is text",
        )
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _token_file(path: Path) -> Corpus:
    held_out = path.with_name("val.bin")
    if path.name == "train.bin" and held_out.is_file():
        return Corpus(str(path), _mapped(path, np.uint16), _mapped(held_out, np.uint16))
    return _split(str(path), _mapped(path, np.uint16))


def _folder(path: Path) -> Corpus:
    files = [
        file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file.relative_to(path))
    ]
    nbytes = sum(file.stat().st_size for file in files)
    if nbytes > FOLDER_NBYTES:
        raise UsageError(
            f"folder {str(path)!r} holds {nbytes} bytes, more than {FOLDER_NBYTES}",
            remedy="join its files into one: a file is memory-mapped, so its size does not matter",
        )
    texts = (file.read_bytes() for file in files)
    joined = b"".join(text for text in texts if b"\0" not in text[:8192])
    if not joined:
        raise UsageError(
            f"folder {str(path)!r} holds no text", remedy="name a file, or a folder with text files"
        )
    return _split(str(path), np.frombuffer(joined, np.uint8))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
