"""What tuning found for this model in this world on these hosts: rank 0's file, the same answer on all ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from paceline.sync.tuned import Tuned, load, save
from paceline.world.agree import gather_texts
from paceline.world.cache import cache_folder

if TYPE_CHECKING:
    from paceline.sync.bucket import Slot
    from paceline.sync.wire import Wire

__all__ = ["Memory"]


class Memory:
    """Reads and writes the result of a search.

    Args:
        slots: the parameters. wire: the ranks.
    """

    def __init__(self, slots: Sequence[Slot], wire: Wire) -> None:
        self._slots, self._wire = slots, wire
        self._key: dict[str, Any] = {}

    def read(self) -> Tuned | None:
        """Return what rank 0 has kept, None if nothing; all ranks call this, before `write`."""
        hosts = gather_texts(f"{socket.gethostname()}, {os.cpu_count()} cores", self._wire.group)
        shapes = [(slot.name, list(slot.param.shape), str(slot.view.dtype)) for slot in self._slots]
        self._key = {
            "model": xxhash.xxh3_64_hexdigest(json.dumps(shapes).encode()),
            "parameters": sum(slot.numel for slot in self._slots),
            "device": self._slots[0].param.device.type if self._slots else "cpu",
            "backend": self._wire.backend,
            "torch": torch.__version__,
            "hosts": hosts,
        }
        text = ""
        if self._wire.rank == 0 and (found := load(_folder(), self._key)) is not None:
            text = json.dumps(found.to_json(self._key))
        told = gather_texts(text, self._wire.group)[0]
        return Tuned.from_json(json.loads(told)) if told else None

    def write(self, tuned: Tuned) -> Path | None:
        """Keep `tuned`, on rank 0, and return the file; None: on another rank, or where that is not possible."""
        return save(_folder(), self._key, tuned) if self._wire.rank == 0 else None


def _folder() -> Path:
    return cache_folder() / "tuned"
