"""Exports the weights in a checkpoint to one safetensors file, and imports weights from such files.

An exported file loads with torch and safetensors alone, under the names of the bare module's ``state_dict()``:

    net.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline._core.files import write_atomic
from paceline.checkpoint.checkpoint_contents import saved_weights
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.format.manifest import MANIFEST
from paceline.checkpoint.format.tensor_files import write_safetensors
from paceline.checkpoint.parts.model_weights import check_weights, load_weights
from paceline.checkpoint.parts.state_parts import dtype_name
from paceline.checkpoint.storage.local_folder import LocalFiles, LocalFolder
from paceline.errors import DamagedCheckpoint, UsageError

__all__ = ["export_weights", "import_weights", "read_weights"]


def export_weights(source: str | Path, path: str | Path, *, model: str = "model") -> Path:
    """Write the weights in a checkpoint to one safetensors file, and return its path.

    Args:
        source: a checkpoint, or a run's folder, whose newest intact checkpoint is used.
        path: the file; an existing one is replaced once the new one is complete.
        model: which model, if the checkpoint holds several.

    Raises:
        UsageError: there is no such checkpoint or model, or the file can't be written.
        DamagedCheckpoint: the checkpoint is not intact.

    Example:
        >>> export_weights("runs/train/checkpoint", "model.safetensors")  # doctest: +SKIP
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise UsageError(
            f"{str(path)!r} is not the name of a safetensors file", remedy="use the suffix .safetensors"
        )
    weights = read_weights(source, model=model)
    try:
        write_atomic(target, lambda temporary: write_safetensors(temporary, weights, {}), private=True)
    except OSError as error:
        raise UsageError(
            f"can't write {str(path)!r}: {error.strerror or error}",
            remedy="name a file that you may write to",
        ) from error
    return target


def import_weights(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> None:
    """Fill a model with weights; all ranks call this, before training.

    Args:
        model: any module, wrapped or not; floating-point weights are cast to its dtypes.
        source: a state_dict of the bare module, a safetensors file, a folder of such files (as Hugging Face's), a
            checkpoint, or a run's folder.

    Raises:
        UsageError: the weights belong to another model, or can't be read; nothing was changed.
        DamagedCheckpoint: the checkpoint is not intact.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> import_weights(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    """
    weights = dict(source) if isinstance(source, Mapping) else read_weights(source)
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{name!r} of the state_dict is a {type(tensor).__name__}, not a tensor",
                remedy="pass a state_dict of the bare module",
            )
    wanted = {name: tensor.dtype for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    wanted = {name.removeprefix("module."): dtype for name, dtype in wanted.items()} | wanted
    for name, tensor in weights.items():
        dtype = wanted.get(name, tensor.dtype)
        if tensor.is_floating_point() and dtype.is_floating_point:
            weights[name] = tensor.to(dtype)
    described = "the state_dict" if isinstance(source, Mapping) else repr(str(source))
    kinds = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
    check_weights(model, kinds, described)
    load_weights(model, weights.__getitem__)


def read_weights(source: str | Path, *, model: str = "model") -> dict[str, Tensor]:
    """Return weights under all their names, from any source that `import_weights` accepts except a dict.

    Args:
        source: the file or folder.
        model: which model, if a checkpoint holds several.

    Raises:
        UsageError: there is no such source or model, or it can't be read.
        DamagedCheckpoint: the checkpoint is not intact.
    """
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise UsageError(f"{str(path)!r} does not exist", remedy="name a checkpoint, or a safetensors file")
    if (path / MANIFEST).exists():
        return _read_checkpoint(path, model)
    for folder in (path, path / "checkpoint"):
        if names := LocalFolder(folder).names():
            return _read_newest([folder / name for name in names], model)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{str(path)!r} holds neither checkpoints nor safetensors files",
            remedy="name the folder of a run's checkpoints, or of safetensors files",
        )
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}


def _read_newest(complete: list[Path], model: str) -> dict[str, Tensor]:
    problems = []
    for path in complete:
        try:
            return _read_checkpoint(path, model)
        except DamagedCheckpoint as error:
            problems.append(f"{path.name}: {error}")
    raise DamagedCheckpoint(
        f"no checkpoint in {str(complete[0].parent)!r} is intact: {'; '.join(problems)}",
        remedy="restore a copy of one",
    )


def _read_checkpoint(path: Path, model: str) -> dict[str, Tensor]:
    reader = CheckpointReader(LocalFiles(path))
    if model not in reader.manifest.aliases:
        raise UsageError(
            f"{str(path)!r} holds no model {model!r}",
            remedy=f"it holds: {', '.join(reader.manifest.aliases) or 'none'}",
        )
    aliases = reader.manifest.aliases[model]
    found = {
        name: reader.tensor(f"{model}.{name}") for name in saved_weights(reader, model) if name not in aliases
    }
    reader.close()
    return found | {alias: found[first] for alias, first in aliases.items()}


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is no mapping
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise UsageError(
            f"{str(path)!r} can't be read as safetensors: {error}",
            remedy="convert a file of torch.save to safetensors first, if it is trusted",
        ) from error
