"""Named tensors in one safetensors file that has reached the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.durable import flush
from paceline.errors import UsageError

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to `path` and wait until they are on the disk.

    Raises:
        OSError: they can't be written.
    """
    # A copy each: safetensors refuses tensors that share memory, as views into a bucket do.
    copies = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(copies, path)
    except SafetensorError as error:
        raise OSError(0, str(error)) from error
    flush(path)


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor in `path`.

    Raises:
        UsageError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping: it can't be iterated over)
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{str(path)!r} can't be read: {error}", remedy="the checkpoint is damaged: start anew"
        ) from error
