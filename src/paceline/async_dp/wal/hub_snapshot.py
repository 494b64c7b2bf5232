"""A snapshot of a hub: tensors and facts in one safetensors file, which any reader understands, with one checksum.

The checksum is of the contents, not of the file's bytes: the text of the facts, and name, dtype, shape and elements of
each tensor. It is computed before the file is written and compared with what was read, so nothing in between is
trusted, the reader included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64

from paceline._core.files import write_atomic
from paceline.async_dp.wal.journal_records import to_json
from paceline.errors import DamagedCheckpoint, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HubSnapshot", "read_snapshot", "write_snapshot"]

_FORMAT = 1


@dataclass(frozen=True)
class HubSnapshot:
    """The part of a snapshot without the tensors."""

    revision: int
    next: int  # number of the first record that is not in it
    facts: Mapping[str, Any]
    ledger_nbytes: int = 0  # size of the ledger up to that record


def write_snapshot(path: Path, snapshot: HubSnapshot, tensors: Mapping[str, Tensor]) -> None:
    """Write a snapshot, as a whole; it is on disk when this returns.

    Raises:
        UsageError: the facts are not plain, or safetensors has no such dtype.
        OSError: it can't be written; the previous file is untouched.
    """
    import torch

    from paceline.checkpoint.format.tensor_files import write_safetensors
    from paceline.checkpoint.parts.state_parts import dtype_name

    facts = to_json(snapshot.facts, "facts of a snapshot")
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128 or tensor.is_quantized or tensor.layout is not torch.strided:
            raise UsageError(
                f"tensor {name!r} is {dtype_name(tensor)}, {tensor.layout}, which a snapshot can't hold",
                remedy="give plain tensors, or torch.view_as_real() of complex ones",
            )
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {name: value for name, value in vars(snapshot).items() if name != "facts"} | {"format": _FORMAT}
    metadata = {"format": "pt", "paceline": json.dumps(about), "facts": facts}
    metadata["xxh3"] = _checksum(metadata, whole)
    write_atomic(path, lambda temporary: write_safetensors(temporary, whole, metadata), private=True)


def read_snapshot(path: Path) -> tuple[HubSnapshot, dict[str, Tensor]]:
    """Return the contents of a snapshot, after comparing its checksum.

    Raises:
        DamagedCheckpoint: it can't be read, or its checksum is wrong.
        UsageError: it was written by a newer version of Paceline.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 — no dict
        written = metadata.pop("xxh3")
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{path.name} can't be read: {error!r:.200}") from error
    computed = _checksum(metadata, tensors)
    if computed != written:
        raise DamagedCheckpoint(f"{path.name} has checksum {computed}, written was {written:.40}")
    about = json.loads(metadata["paceline"])
    if about["format"] > _FORMAT:
        raise UsageError(
            f"{str(path)!r} has format {about['format']}, this version of Paceline reads formats up to {_FORMAT}",
            remedy="resume with the version that wrote it, or a newer one",
        )
    facts = json.loads(metadata["facts"])
    return HubSnapshot(about["revision"], about["next"], facts, about["ledger_nbytes"]), tensors


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of a snapshot; the tensors are contiguous and on the CPU."""
    import torch

    from paceline.checkpoint.parts.state_parts import dtype_name

    state = xxh3_64(json.dumps([metadata, len(tensors)], sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(json.dumps([name, dtype_name(tensor), list(tensor.shape)]).encode())
        if tensor.numel():
            elements: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            state.update(elements)
    return state.hexdigest()
