"""Reads tensors of a checkpoint: only what is needed, each byte verified by the rank that uses it.

A read names a box of a tensor. The reader finds the stored boxes that overlap it, reads the blocks of 4 MiB with the
elements in common, compares their checksums, and copies. Where a large block is contiguous in memory, too, it is read
into place; small ones that are neighbours in a file are read together. Several threads read, each from one place on
to another, as a disk likes it: a single one would wait for the disk while it could hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from paceline.checkpoint.format.manifest import BLOCK_NBYTES, Manifest, RankPiece
from paceline.checkpoint.format.stored_boxes import Overlap, StoredBox, as_real, overlaps
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_reader import Read, TensorInfo
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles, OpenFile
from paceline.errors import DamagedCheckpoint

__all__ = ["CheckpointReader"]

_STRIDE_NBYTES = 1 << 20  # read and hashed at once: it stays in the processor's cache in between
_SMALL_NBYTES = 256 << 10  # blocks that are read together with their neighbours in the file
_GAP_NBYTES = 64 << 10  # between neighbours, at most
_THREADS = 4


class CheckpointReader:
    """The contents of a complete checkpoint; its files stay open until `close`.

    Args:
        files: its files.

    Attributes:
        manifest: verified.

    Raises:
        DamagedCheckpoint: the manifest is not intact.
        UsageError: it has another format.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.manifest = Manifest.read(files.read)
        self._pieces: dict[int, RankPiece] = {}
        self._chunks: dict[int, dict[str, list[StoredBox]]] = {}
        self._open: dict[str, OpenFile] = {}
        self._scratch = local()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    # ------------------------------------------------------------------ what there is

    def piece(self, rank: int) -> RankPiece:
        """Return the piece of the manifest that a rank has written.

        Raises:
            DamagedCheckpoint: it is not intact.
        """
        if rank not in self._pieces:
            piece = self.manifest.read_piece(self.files.read, rank)
            found: dict[str, list[StoredBox]] = {}
            for file, stored in piece.files.items():
                for label, chunk in stored.chunks.items():
                    found.setdefault(chunk.tensor, []).append(StoredBox(file, stored.nbytes, label, chunk))
            self._pieces[rank], self._chunks[rank] = piece, found
        return self._pieces[rank]

    def info(self, name: str, rank: int | None = None) -> TensorInfo:
        """Return dtype and shape of a tensor.

        Args:
            name: of the tensor.
            rank: whose own state it belongs to; None: it is one of the manifest.

        Raises:
            KeyError: there is no such tensor.
        """
        if rank is None:
            found = self.manifest.tensors[name]
        else:
            self.piece(rank)
            found = self._chunks[rank][name][0].stored
        return TensorInfo(getattr(torch, found.dtype), tuple(found.shape))

    def names(self) -> Iterable[str]:
        """Return the names of all tensors, except those of ranks' own states."""
        return self.manifest.tensors

    def value_names(self) -> Iterable[str]:
        """Return the names of plain values."""
        return self.manifest.values

    def value(self, name: str) -> Any:
        """Return a plain value, as `plain_values.pack` returned it; KeyError: there is none."""
        return self.piece(self.manifest.values[name]).values[name]

    def own(self, rank: int, name: str) -> Tensor:
        """Read a tensor that belongs to a rank's own state; errors as for `read`."""
        info = self.info(name, rank)
        whole = torch.empty(info.shape, dtype=info.dtype)
        chunks = self._chunks[rank][name]
        wanted = as_real(chunks[0].stored, Box.whole(info.shape))
        self._run(
            self._jobs(overlaps(chunks, wanted, torch.view_as_real(whole) if whole.is_complex() else whole))
        )
        return whole

    # ------------------------------------------------------------------ reading

    def read(self, reads: Sequence[Read]) -> None:
        """Read boxes of tensors; the tensors to fill are valid once this returns.

        Raises:
            DamagedCheckpoint: a file differs from what was written, or can't be read; names the file and the tensor.
            KeyError: there is no such tensor.
        """
        self._run(job for each in reads for job in self._jobs_of(each))

    def tensor(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, into new memory; errors as for `read`."""
        info = self.info(name)
        box = Box.whole(info.shape) if box is None else box
        found = torch.empty(box.sizes, dtype=info.dtype)
        self.read([Read(name, box, found)])
        return found

    def verify(self, rank: int) -> None:
        """Read everything that a rank has written, and verify it; errors as for `read`."""
        self.verify_rest(rank)
        jobs: list[_Job] = []
        for file, stored in self.piece(rank).files.items():
            for label, chunk in stored.chunks.items():
                found = StoredBox(file, stored.nbytes, label, chunk)
                jobs += self._jobs(overlaps([found], found.box, None))
        self._run(jobs)

    def verify_rest(self, rank: int) -> None:
        """Verify what belongs to no tensor in what a rank has written: headers, small files; errors as for `read`.

        With rank 0, also the files beside the manifest.
        """
        if rank == 0:
            self.manifest.check_extra_files(self.files.read)
        for file, stored in self.piece(rank).files.items():
            self._file(file, stored.nbytes)
            self._verify_rest(file, stored.gaps(), stored.rest)

    def _jobs_of(self, each: Read) -> Iterator[_Job]:
        info = self.manifest.tensors[each.name]
        wanted, into = as_real(info, each.box), each.into
        if into is not None and into.is_complex():
            into = torch.view_as_real(into)
        covered = 0
        for rank, offsets, sizes in self.manifest.layouts[info.layout]:
            part = as_real(info, Box(tuple(offsets), tuple(sizes))).intersection(wanted)
            if part is not None:
                covered += part.numel
                self.piece(rank)
                wanted_chunk = (info.dtype, info.shape, tuple(offsets), tuple(sizes))
                chunks = [
                    chunk
                    for chunk in self._chunks[rank].get(each.name, [])
                    if wanted_chunk
                    == (chunk.stored.dtype, chunk.stored.shape, chunk.stored.offsets, chunk.stored.sizes)
                ]
                if len(chunks) != 1:
                    raise DamagedCheckpoint(
                        f"{each.name!r} at {list(offsets)} is not in the piece of rank {rank}"
                    )
                yield from self._jobs(overlaps(chunks, wanted, into))
        if covered != wanted.numel:
            raise DamagedCheckpoint(f"{each.name!r}: {covered} of {wanted.numel} elements are there")

    def _jobs(self, found: Iterable[Overlap]) -> Iterator[_Job]:
        for overlap in found:
            chunk = overlap.chunk
            self._file(chunk.file, chunk.file_nbytes)
            first, stop = overlap.span
            at, end = chunk.stored.start, chunk.stored.start + chunk.stored.nbytes
            for block in range(first // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
                start = at + block * BLOCK_NBYTES
                yield _Job(chunk.file, start, min(start + BLOCK_NBYTES, end), block, overlap)

    def _file(self, name: str, nbytes: int) -> OpenFile:
        if name not in self._open:
            try:
                opened = self.files.open(self.manifest.prefix + name)
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{name} is missing") from None
            except OSError as error:
                raise DamagedCheckpoint(f"{name} can't be read: {error.strerror or error}") from error
            if opened.nbytes != nbytes:
                opened.close()
                raise DamagedCheckpoint(f"{name} has {opened.nbytes} bytes instead of {nbytes}")
            self._open[name] = opened
        return self._open[name]

    def _run(self, jobs: Iterable[_Job]) -> None:
        runs = _neighbours(sorted(jobs, key=lambda job: job[:2]))
        parts = _shares(runs, _THREADS)
        if len(parts) < 2:
            for part in parts:
                self._read_part(part)
            return
        with ThreadPoolExecutor(len(parts)) as pool:
            for done in [pool.submit(self._read_part, part) for part in parts]:
                done.result()

    def _read_part(self, part: Sequence[Sequence[_Job]]) -> None:
        """Read runs of blocks in their order."""
        for name, runs in groupby(part, lambda run: run[0].file):
            with self._open[name].for_thread() as file:
                for run in runs:
                    if len(run) == 1:
                        self._read_block(run[0], file)
                    else:
                        self._read_run(run, file)

    def _read_run(self, run: Sequence[_Job], file: OpenFile) -> None:
        """Read neighbouring blocks, verify them, and copy what is wanted of them."""
        first = run[0].start
        data = self._memory(run[-1].stop - first)
        self._read_bytes(run[0].file, file, first, data)
        for job in run:
            part = data[job.start - first : job.stop - first]
            job.check(xxh3_64_hexdigest(part))
            job.overlap.take(part, job.block * BLOCK_NBYTES)

    def _read_block(self, job: _Job, file: OpenFile) -> None:
        """Read a block into place if it can be, verify it, and copy what is wanted of it otherwise."""
        nbytes = job.stop - job.start
        place = job.overlap.place(job.block * BLOCK_NBYTES, nbytes)
        target = self._memory(nbytes) if place is None else place
        checksum = xxh3_64()
        for at in range(0, nbytes, _STRIDE_NBYTES):
            stride = target[at : at + _STRIDE_NBYTES]
            self._read_bytes(job.file, file, job.start + at, stride)
            checksum.update(stride)
        job.check(checksum.hexdigest())
        if place is None:
            job.overlap.take(target, job.block * BLOCK_NBYTES)

    def _memory(self, nbytes: int) -> memoryview:
        """Return memory of this thread, which the next call overwrites."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = memoryview(bytearray(BLOCK_NBYTES))
        return self._scratch.memory[:nbytes]

    def _read_bytes(self, name: str, file: OpenFile, start: int, target: memoryview) -> None:
        try:
            file.read_into(start, target)
        except EOFError:
            raise DamagedCheckpoint(f"{name} ended while it was read") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{name} can't be read: {error.strerror or error}") from error

    def _verify_rest(self, file: str, gaps: Sequence[tuple[int, int]], expected: str) -> None:
        checksum = xxh3_64()
        for start, stop in gaps:
            for at in range(start, stop, _STRIDE_NBYTES):
                target = self._memory(min(_STRIDE_NBYTES, stop - at))
                self._read_bytes(file, self._open[file], at, target)
                checksum.update(target)
        if checksum.hexdigest() != expected:
            raise DamagedCheckpoint(f"{file}: wrong checksum of what is no tensor in it")


class _Job(NamedTuple):
    """A block of a stored box to read.

    Attributes:
        file: with the block.
        start, stop: its bytes in the file.
        block: its number.
        overlap: what is wanted of the box.
    """

    file: str
    start: int
    stop: int
    block: int
    overlap: Overlap

    def check(self, checksum: str) -> None:
        """Raise a `DamagedCheckpoint` unless this is the checksum of the block."""
        chunk = self.overlap.chunk
        if checksum != chunk.stored.checksum(self.block):
            raise DamagedCheckpoint(f"{self.file}: wrong checksum of tensor {chunk.label!r}")


def _neighbours(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Return runs of small blocks that are neighbours in a file, and large blocks by themselves."""
    runs: list[list[_Job]] = []
    for job in jobs:
        if job.stop - job.start <= _SMALL_NBYTES and runs:
            first, last = runs[-1][0], runs[-1][-1]
            if (
                last.file == job.file
                and last.stop - last.start <= _SMALL_NBYTES
                and job.start - last.stop <= _GAP_NBYTES
                and job.stop - first.start <= BLOCK_NBYTES
            ):
                runs[-1].append(job)
                continue
        runs.append([job])
    return runs


def _shares(runs: Sequence[list[_Job]], count: int) -> list[list[list[_Job]]]:
    """Divide runs, in their order, into at most `count` shares of about as many bytes each."""
    ends = list(accumulate(run[-1].stop - run[0].start for run in runs))
    shares: list[list[list[_Job]]] = [[] for _ in range(count)]
    for run, end in zip(runs, ends, strict=True):
        nbytes = run[-1].stop - run[0].start
        shares[count * (2 * end - nbytes) // (2 * ends[-1] + 1)].append(run)  # by its middle
    return [share for share in shares if share]
