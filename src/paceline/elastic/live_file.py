"""What a rank that recovers live and its launcher share."""

from __future__ import annotations
import json, os
from pathlib import Path

MEMBER_VARIABLE = "PACELINE_MEMBER"
LIVE_VARIABLE = "PACELINE_LIVE_FILE"
LEFT_EXIT_CODE = 75


class LiveFile:
    def __init__(self, path):
        self._path = path

    @classmethod
    def from_environment(cls):
        name = os.environ.get(LIVE_VARIABLE)
        return cls(Path(name) if name else None)

    def write(self, epoch, members, step):
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"epoch": epoch, "members": members, "step": step}))
        os.replace(new, self._path)

    def remove(self):
        if self._path is not None:
            self._path.unlink(missing_ok=True)
