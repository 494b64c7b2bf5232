"""A snapshot of a hub: tensors and facts in one safetensors file, which anybody can read, with one checksum of all.

The checksum is of what the file means, not of its bytes: the text of the facts, and of each tensor its name, dtype,
shape and elements. It is taken before the file is written and compared with what was read, so nothing on the way is
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
from paceline.async_dp.wal.plain_values import to_json
from paceline.errors import DamagedCheckpoint, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HubSnapshot", "read_snapshot", "write_snapshot"]

_FORMAT = 1


@dataclass(frozen=True)
class HubSnapshot:
    """What a snapshot says beside its tensors.

    Attributes:
        revision: of the state.
        next: number of the first record that is not in it.
        facts: what the hub wanted to be remembered.
        ledger_nbytes: of the ledger up to that record.
    """

    revision: int
    next: int
    facts: Mapping[str, Any]
    ledger_nbytes: int = 0


def write_snapshot(path: Path, snapshot: HubSnapshot, tensors: Mapping[str, Tensor]) -> None:
    """Put a snapshot at `path`, whole and on the disk when this returns.

    Raises:
        UsageError: the facts are not plain, or a tensor has a dtype that safetensors has not.
        OSError: it can't be written; what was there stays.
    """
    import torch

    from paceline.checkpoint.format.safetensors_writer import dtype_name, write_file

    facts = to_json(snapshot.facts, "facts of a snapshot")
    for label, tensor in tensors.items():
        if tensor.dtype is torch.complex128 or tensor.is_quantized or tensor.layout is not torch.strided:
            raise UsageError(
                f"tensor {label!r} is {dtype_name(tensor)}, {tensor.layout}, which a snapshot can't hold",
                remedy="give plain tensors, of torch.view_as_real() where they are complex",
            )
    whole = {label: tensor.detach().cpu().contiguous() for label, tensor in tensors.items()}
    about = {name: value for name, value in vars(snapshot).items() if name != "facts"} | {"format": _FORMAT}
    metadata = {"format": "pt", "paceline": json.dumps(about), "facts": facts}
    metadata["xxh3"] = _sum_of(metadata, whole)
    write_atomic(path, lambda beside: write_file(beside, whole, metadata))


def read_snapshot(path: Path) -> tuple[HubSnapshot, dict[str, Tensor]]:
    """Return what is in a snapshot, once its checksum fits.

    Raises:
        DamagedCheckpoint: it is not what was written, or can't be read.
        UsageError: a newer version of Paceline wrote it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {label: file.get_tensor(label).clone() for label in file.keys()}  # noqa: SIM118 — no dict
        told = metadata.pop("xxh3")
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{path.name} can't be read: {error!r:.200}") from error
    came = _sum_of(metadata, tensors)
    if came != told:
        raise DamagedCheckpoint(f"{path.name} has checksum {came}, written was {told:.40}")
    about = json.loads(metadata["paceline"])
    if about["format"] > _FORMAT:
        raise UsageError(
            f"{str(path)!r} has format {about['format']}, this version of Paceline knows those up to {_FORMAT}",
            remedy="resume with the version that wrote it, or a newer one",
        )
    facts = json.loads(metadata["facts"])
    return HubSnapshot(about["revision"], about["next"], facts, about["ledger_nbytes"]), tensors


def _sum_of(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of all that a snapshot means; the tensors are on the CPU and contiguous."""
    import torch

    from paceline.checkpoint.format.safetensors_writer import dtype_name

    summed = xxh3_64(json.dumps([metadata, len(tensors)], sort_keys=True).encode())
    for label in sorted(tensors):
        tensor = tensors[label]
        summed.update(json.dumps([label, dtype_name(tensor), list(tensor.shape)]).encode())
        if tensor.numel():
            elements: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            summed.update(elements)
    return summed.hexdigest()
