"""Exports weights to safetensors files: one file, or a folder as Hugging Face's libraries load it.

A file loads with torch and safetensors alone, under the names of the bare module's ``state_dict()``:

    net.load_state_dict(safetensors.torch.load_file("model.safetensors"))

A folder loads with ``from_pretrained``. Tensors are read and written one at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline._core.files import write_atomic, write_bytes
from paceline._core.units import parse_bytes
from paceline.checkpoint.format.tensor_files import write_safetensors
from paceline.checkpoint.interop.safetensors_reader import INDEX_SUFFIX
from paceline.checkpoint.interop.staged_folder import staged_folder
from paceline.checkpoint.interop.weights_source import WeightsSource, use_weights
from paceline.checkpoint.parts.model_weights import index_text, weight_files
from paceline.checkpoint.storage.stores import local_path
from paceline.errors import UsageError

__all__ = [
    "check_without_weights",
    "described",
    "export_weights",
    "read_weights",
    "shards_of",
    "write_folder",
]

_OTHER_FILES = {
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".npz",
    ".h5",
    ".onnx",
    ".json",
    ".safetensor",
}
"""Suffixes of files, which are no names of folders."""
_BESIDE = (
    "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*", "*.tiktoken",
)  # fmt: skip
"""Files of a Hugging Face folder that belong to a model besides its weights."""


def export_weights(
    source: str | Path,
    path: str | Path,
    *,
    model: str = "model",
    dtype: torch.dtype | None = None,
    max_shard: int | str = "5GB",
    config: Any = None,
) -> Path:
    """Write the weights in a checkpoint to a safetensors file or a Hugging Face folder, and return its path.

    A folder has ``model.safetensors``, or files of at most `max_shard` with an index, and loads with
    ``transformers.AutoModel.from_pretrained`` if the model is one of transformers. Tied weights are in it once.

    Args:
        source: a checkpoint of Paceline's or of torch.distributed.checkpoint, or a run's folder, whose newest intact
            checkpoint is used, by path or URL; also safetensors files.
        path: a file with the suffix ``.safetensors``, which is replaced once the new one is complete; or a folder
            without weights, which may exist.
        model: which model, if the checkpoint holds several.
        dtype: cast floating-point weights to it, such as ``torch.bfloat16``; None: leave them as they are.
        max_shard: largest file of a folder, such as ``"5GB"``; a larger weight has a file of its own.
        config: for a folder, what describes the model: an object with ``save_pretrained``, such as the model's
            ``config`` or a tokenizer, a list of these, or a folder whose configuration and tokenizer files are copied.

    Raises:
        UsageError: there is no such checkpoint or model, or the file or folder can't be written.
        DamagedCheckpoint: the checkpoint is not intact.

    Example:
        >>> export_weights("runs/train/checkpoint", "model.safetensors")  # doctest: +SKIP
        >>> export_weights("runs/train", "exported", dtype=torch.bfloat16, config=model.module.config)  # doctest: +SKIP
    """
    target = local_path(path)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"dtype={dtype!r}", remedy="pass a floating-point dtype, such as torch.bfloat16")
    if target.suffix == ".safetensors":
        if config is not None:
            raise UsageError("config= with a single file", remedy="name a folder to export to")
        use_weights(source, model, lambda weights: _write_file(weights, target, dtype))
        return target
    if target.suffix in _OTHER_FILES:
        raise UsageError(
            f"{str(path)!r} is not the name of a safetensors file",
            remedy="use the suffix .safetensors, or name a folder",
        )
    largest = parse_bytes(max_shard)
    if largest <= 0:
        raise UsageError(f"max_shard={max_shard!r}", remedy="pass a size such as '5GB'")
    beside = described(config)
    check_without_weights(target)
    use_weights(source, model, lambda weights: write_folder(weights, target, dtype, largest, beside))
    return target


def read_weights(source: str | Path, *, model: str = "model") -> dict[str, Tensor]:
    """Return weights under all their names, from any source that `import_weights` accepts except a dict.

    Args:
        source: the file or folder.
        model: which model, if a checkpoint holds several.

    Raises:
        UsageError: there is no such source or model, or it can't be read.
        DamagedCheckpoint: the checkpoint is not intact.
    """
    return use_weights(source, model, _read_all)


def _read_all(weights: WeightsSource) -> dict[str, Tensor]:
    found = {name: weights.tensor(name) for name in weights.names}
    return found | {alias: found[first] for alias, first in weights.aliases.items()}


# ------------------------------------------------------------------ one file


def _write_file(weights: WeightsSource, path: Path, dtype: torch.dtype | None) -> None:
    """Write weights under all their names to one file."""
    kinds = {name: _kind(weights, name, dtype) for name in [*weights.names, *weights.aliases]}
    read = partial(_cast, weights, dtype)
    try:
        write_atomic(path, lambda temporary: write_safetensors(temporary, kinds, {}, read), private=True)
    except OSError as error:
        raise UsageError(
            f"can't write {str(path)!r}: {error.strerror or error}",
            remedy="name a file that you may write to",
        ) from error


def _kind(weights: WeightsSource, name: str, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor without memory that has the dtype and shape of a weight to write."""
    info = weights.info(name)
    cast = dtype is not None and info.dtype.is_floating_point
    return torch.empty(info.shape, dtype=dtype if cast else info.dtype, device="meta")


def _cast(weights: WeightsSource, dtype: torch.dtype | None, name: str) -> Tensor:
    tensor = weights.tensor(name)
    return (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()


# ------------------------------------------------------------------ a folder


def check_without_weights(folder: Path) -> None:
    """Raise unless a folder can take weights.

    Raises:
        UsageError: it is no folder, or has weights.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is a file", remedy="name a folder, or a file with .safetensors")
    found = [
        file.name for kind in ("*.safetensors*", "*.bin", "*.bin.index.json") for file in folder.glob(kind)
    ]
    if found:
        raise UsageError(f"{str(folder)!r} has weights: {sorted(found)[0]}", remedy="name another folder")


def write_folder(
    weights: WeightsSource,
    folder: Path,
    dtype: torch.dtype | None,
    largest: int,
    beside: Iterable[Callable[[Path], object]] = (),
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Write weights to a Hugging Face folder, which has all of its files or counts for nothing.

    Args:
        weights: to write, once each.
        folder: new, or without weights.
        dtype: to cast floating-point weights to; None: they stay as they are.
        largest: bytes of a file, unless it has a single weight.
        beside: writes further files to the folder that each is passed.
        advance: called after each weight.

    Raises:
        UsageError: it can't be written.
        DamagedCheckpoint: the checkpoint is not intact.
    """
    kinds = {name: _kind(weights, name, dtype) for name in weights.names}
    shards = shards_of({name: kind.nbytes for name, kind in kinds.items()}, largest)
    files = weight_files("model", len(shards))

    def read(name: str) -> Tensor:
        tensor = _cast(weights, dtype, name)
        advance()
        return tensor

    index = f"model{INDEX_SUFFIX}"
    with staged_folder(folder, last=files[0] if len(files) == 1 else index) as staging:
        for write in beside:
            write(staging)
        for file, names in zip(files, shards, strict=True):
            write_safetensors(staging / file, {name: kinds[name] for name in names}, {}, read)
        if len(files) > 1:
            locations = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            total = sum(kind.nbytes for kind in kinds.values())
            write_bytes(staging / index, index_text(locations, total), private=True)


def shards_of(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Return the names in each file: in their order, as many as fit.

    Example:
        >>> shards_of({"a": 3, "b": 2, "c": 9, "d": 1}, 5)
        [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    held = 0
    for name, nbytes in sizes.items():
        if shards[-1] and held + nbytes > largest:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    return shards


def described(config: Any) -> list[Callable[[Path], object]]:
    """Return what writes the files that describe a model."""
    if config is None:
        return []
    if isinstance(config, str | Path):
        return [partial(_copy_beside, _folder_with_config(Path(config)))]
    found = list(config) if isinstance(config, list | tuple) else [config]
    for each in found:
        if isinstance(each, torch.nn.Module) or not callable(getattr(each, "save_pretrained", None)):
            raise UsageError(
                f"config is a {type(each).__qualname__}, which does not describe a model",
                remedy="pass model.config, a tokenizer, a list of these, or a folder with config.json",
            )
    return [each.save_pretrained for each in found]


def _folder_with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{str(folder)!r} has no config.json", remedy="name the folder of the model that was trained"
        )
    return folder


def _copy_beside(source: Path, target: Path) -> None:
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
