"""What a rank writes while it goes on: a line for each thing that happened, there even if it is ended by a signal.

    {"what": "began", "at": 12.1, "step": 0}              a step
    {"what": "made",  "at": 12.2, "step": 0, "samples": 64, "error": 1e-16}
    {"what": "dry",   "at": 12.3}                         no batches left, while others have some
    {"what": "finished", "at": 12.4, "parameters": […]}   the end, as planned
    {"what": "raised", "at": 12.4, "kind": "RuntimeError", "text": "…"}

`at` is the machine's monotonic clock in seconds, the same for all processes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

__all__ = ["Note", "Notes", "read_notes"]

Note = dict[str, Any]


class Notes:
    """The notes of one rank.

    Args:
        path: where they are written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)  # what is written has left this process

    def write(self, what: str, **more: object) -> None:
        """Add a line."""
        self._file.write((json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())


def read_notes(path: Path) -> list[Note]:
    """Return all whole lines of a file of notes; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
