"""Converts checkpoints between Paceline's format, that of torch.distributed.checkpoint (DCP), and Hugging Face's.

No process group is needed. Tensors are read, verified and written one at a time; the result appears complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from paceline._core import __version__
from paceline._core.files import write_bytes
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.format.dcp_files import dcp_file, dcp_metadata, write_dcp
from paceline.checkpoint.format.manifest import (
    CHECKSUM,
    MANIFEST,
    METADATA,
    RankPiece,
    StoredFile,
    piece_name,
)
from paceline.checkpoint.format.manifest_index import make_manifest
from paceline.checkpoint.format.tensor_files import ChecksummedFile, write_parts
from paceline.checkpoint.interop.conversion import Conversion, LazyPart, of_checkpoint, of_dcp, of_weights
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.interop.staged_folder import staged_folder
from paceline.checkpoint.interop.weights_export import (
    described,
    shards_of,
    write_folder,
)
from paceline.checkpoint.interop.weights_source import (
    WeightsSource,
    holds_checkpoints,
    use_checkpoint,
    use_weights,
)
from paceline.checkpoint.parts.dcp_names import DcpNames, dcp_aliases, dcp_values
from paceline.checkpoint.parts.model_weights import index_text, weight_files
from paceline.checkpoint.storage.stores import local_path
from paceline.errors import UsageError

__all__ = ["FORMATS", "convert_checkpoint"]

FORMATS = ("paceline", "dcp", "hf")
_FILE_NBYTES = 5 * 10**9  # of a file of whole weights

Progress = Callable[[int], AbstractContextManager[Callable[[], object]]]
"""Begins to show the progress of so many tensors, and gives what is called after each."""


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: str,
    progress: Progress,
    *,
    model: str = "model",
    config: str | Path | None = None,
) -> list[str]:
    """Write a checkpoint, or weights, in another format; return notes for the user.

    Args:
        source: a checkpoint of Paceline's or of plain DCP, or a folder of them, whose newest intact one is used, by
            path or URL; a safetensors file, or a folder of such files.
        target: the new checkpoint's own folder; it must not exist.
        to: ``"paceline"``, ``"dcp"``, which has Paceline's manifest too, or ``"hf"``: a folder of weights.
        progress: shows it.
        model: which model; with DCP and Hugging Face as the source, its name in the result.
        config: with ``"hf"``, a folder whose configuration and tokenizer files are copied.

    Raises:
        UsageError: an argument is wrong, or the target can't be written.
        DamagedCheckpoint: the checkpoint is not intact.
    """
    folder = local_path(target)
    if to not in FORMATS:
        raise UsageError(f"{to!r} is not a format", remedy=f"choose one of {', '.join(FORMATS)}")
    if config is not None and to != "hf":
        raise UsageError(f"a configuration for {to!r}", remedy="it belongs to hf only")
    if folder.exists():
        raise UsageError(f"{str(folder)!r} exists already", remedy="name a new folder")
    if to == "hf":
        return _to_hugging_face(source, folder, progress, model, config)
    if not holds_checkpoints(source):
        return use_weights(
            source, model, lambda weights: _write(of_weights(weights, model), folder, to, progress)
        )
    return use_checkpoint(source, lambda reader: _write(_contents(reader, model), folder, to, progress))


def _contents(reader: CheckpointReader | DcpReader, model: str) -> Conversion:
    return of_dcp(reader, model) if isinstance(reader, DcpReader) else of_checkpoint(reader)


def _to_hugging_face(
    source: str | Path, folder: Path, progress: Progress, model: str, config: str | Path | None
) -> list[str]:
    beside = described(config)

    def write(weights: WeightsSource) -> list[str]:
        with progress(len(weights.names)) as advance:
            write_folder(weights, folder, None, _FILE_NBYTES, beside, advance)
        return ["the result has weights only"] if weights.has_checksums else []

    return use_weights(source, model, write)


# ------------------------------------------------------------------ checkpoints


def _write(contents: Conversion, folder: Path, container: str, progress: Progress) -> list[str]:
    """Write a checkpoint of Paceline's, in its own files or in those of DCP."""
    with (
        progress(sum(len(rank.parts) for rank in contents.ranks)) as advance,
        staged_folder(folder, last=CHECKSUM) as staging,
    ):
        write = _write_dcp if container == "dcp" else _write_safetensors
        pieces = write(contents, staging, advance)
        texts = [piece.to_json() for piece in pieces]
        for rank, text in enumerate(texts):
            write_bytes(staging / piece_name(rank), text, private=True)
        written = {
            "at": datetime.now().astimezone().isoformat(timespec="seconds"),
            "paceline": __version__,
            "torch": str(torch.__version__),
        }
        extra: dict[str, bytes] = {}
        if container == "dcp":
            names = DcpNames(contents.aliases, contents.optimizers, contents.nested)
            for piece in pieces:
                names.add_values(piece.values)
            aliases = dcp_aliases(contents.aliases) | names.aliases
            extra[METADATA] = dcp_metadata(pieces, names.path, aliases=aliases)
        for name, content in extra.items():
            write_bytes(staging / name, content, private=True)
        head = {
            "step": contents.step, "facts": {}, "aliases": contents.aliases, "optimizers": contents.optimizers,
            "written": written, **contents.head, "container": "dcp" if container == "dcp" else "safetensors",
            "extra_files": {name: xxh3_128_hexdigest(content) for name, content in extra.items()},
        }  # fmt: skip
        manifest = make_manifest(pieces, texts, head)
        text = manifest.to_json()
        write_bytes(staging / MANIFEST, text, private=True)
        write_bytes(staging / CHECKSUM, manifest.checksum_line(text), private=True)
    return list(contents.notes)


def _reading(parts: Mapping[str, LazyPart], advance: Callable[[], object]) -> Callable[[str], Tensor]:
    """Return what reads a part by its label."""

    def read(label: str) -> Tensor:
        data = parts[label].read().contiguous()
        advance()
        return data

    return read


def _write_dcp(contents: Conversion, folder: Path, advance: Callable[[], object]) -> list[RankPiece]:
    pieces = []
    optimizers, others = contents.optimizers, contents.nested
    for rank, each in enumerate(contents.ranks):
        name = dcp_file(rank)
        parts = {part.part.label: part for part in each.parts}
        values = dcp_values({} if rank else optimizers, {} if rank else others, each.values, contents.tensor)
        described = {label: part.part for label, part in parts.items()}
        stored, found = write_dcp(folder / name, described, values, _reading(parts, advance))
        records = {label: (name, *where) for label, where in found.items()}
        pieces.append(RankPiece({name: stored}, each.values, each.state, records))
    return pieces


def _write_safetensors(contents: Conversion, folder: Path, advance: Callable[[], object]) -> list[RankPiece]:
    files: list[dict[str, dict[str, LazyPart]]] = [{} for _ in contents.ranks]
    indexes: dict[str, bytes] = {}
    for model in contents.aliases:
        indexes |= _plan_weights(model, contents, files)
    for rank, each in enumerate(contents.ranks):
        planned = {id(part) for parts in files[rank].values() for part in parts.values()}
        rest = {part.part.label: part for part in each.parts if id(part) not in planned}
        if rest:
            files[rank][f"state-rank{rank}.safetensors"] = rest
    pieces = []
    for rank, each in enumerate(contents.ranks):
        stored: dict[str, StoredFile] = {}
        for name, parts in files[rank].items():
            described = {label: part.part for label, part in parts.items()}
            stored[name] = write_parts(folder / name, described, _reading(parts, advance))
        for name, text in indexes.items() if rank == 0 else ():
            with ChecksummedFile(folder / name) as file:
                file.write(text)
                stored[name] = file.finish()
        pieces.append(RankPiece(stored, each.values, each.state))
    return pieces


def _plan_weights(
    model: str, contents: Conversion, files: Sequence[dict[str, dict[str, LazyPart]]]
) -> dict[str, bytes]:
    """Put the weights of a model into `files` of each rank; return the index of the files, if it is needed."""
    start, ranks = f"{model}.", len(contents.ranks)
    planned: list[tuple[int, dict[str, LazyPart]]] = []
    sharded = False
    for rank, each in enumerate(contents.ranks):
        own = [part for part in each.parts if part.part.name.startswith(start)]
        whole = {part.part.name[len(start) :]: part for part in own if part.part.is_whole}
        shards = {part.part.label[len(start) :]: part for part in own if not part.part.is_whole}
        if whole:
            sizes = {name: part.part.data.nbytes for name, part in whole.items()}
            planned += [
                (rank, {name: whole[name] for name in names}) for names in shards_of(sizes, _FILE_NBYTES)
            ]
        if shards:
            files[rank][f"{model}-shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"] = shards
            sharded = True
    names = weight_files(model, len(planned)) if planned else []
    for file, (rank, parts) in zip(names, planned, strict=True):
        files[rank][file] = parts
    if len(planned) < 2 or sharded:
        return {}
    locations = {name: file for file, (_, parts) in zip(names, planned, strict=True) for name in parts}
    total = sum(part.part.data.nbytes for _, parts in planned for part in parts.values())
    return {f"{model}.safetensors.index.json": index_text(locations, total)}
