"""Finds objects whose states differ between ranks, though only rank 0's is saved.

Every rank saves a digest of these states. Rank 0's writing thread compares them when it has the parts of all ranks, so
training waits for nothing. Tensors on a device, and those above 64 KiB, count with dtype and shape only: an average of
a model's weights is not read for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64

from paceline.world.plain_values import pack

__all__ = ["state_digest", "warn_of_differences"]

log = logging.getLogger("paceline.checkpoint")

_TENSOR_NBYTES = 1 << 16
_warned: set[tuple[str, str]] = set()
"""Folders of checkpoints, and the objects there that a warning has named."""


def state_digest(name: str, state: Any) -> str:
    """Return a digest of a state, equal on ranks with equal states.

    Raises:
        UsageError: the state contains values that can't be saved.
    """
    packed, tensors = pack(state, name)
    digest = xxh3_64(json.dumps(_with_sorted_sets(packed), sort_keys=True).encode())
    for label in sorted(tensors):
        tensor = tensors[label]
        digest.update(f"{label} {tensor.dtype} {list(tensor.shape)}".encode())
        if (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and _nbytes(tensor) <= _TENSOR_NBYTES
        ):
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def warn_of_differences(folder: str, states: Sequence[Mapping[str, Any]]) -> None:
    """Log a warning for each object whose digests differ, once per folder of checkpoints.

    Args:
        folder: of the checkpoints.
        states: the ranks' parts, with digests by object.
    """
    digests = [state.get("digests", {}) for state in states]
    first = digests[0]
    for name, digest in first.items():
        ranks = [rank for rank, each in enumerate(digests) if each.get(name, digest) != digest]
        if ranks and (folder, name) not in _warned:
            _warned.add((folder, name))
            log.warning(
                "the state of %r on rank %s differs from rank 0's: rank 0's is saved, and loaded on all ranks; to save "
                "every rank's, give the object a rank_state_dict(), which load_state_dict() gets as second argument",
                name,
                ", ".join(map(str, ranks)),
            )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_sorted_sets(packed: Any) -> Any:
    """Return packed values with the items of sets in one order: that of strings differs between processes."""
    if isinstance(packed, list):
        return [_with_sorted_sets(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    plain = {key: _with_sorted_sets(item) for key, item in packed.items()}
    return {"$set": sorted(plain["$set"], key=json.dumps)} if isinstance(plain.get("$set"), list) else plain
