"""What tuning found, kept from run to run: one small file per model, world and host.

What tuning found for this model in this world on these hosts: rank 0's file, the same answer on all ranks.

Where Paceline keeps what it found out from run to run.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.parallel.strategy import Sync
from paceline.world.object_collectives import gather_texts

if TYPE_CHECKING:
    from paceline.parallel.engine.bucket import GradSlot
    from paceline.parallel.engine.comm import Comm

__all__ = ["TuningCache", "TuningResult", "cache_folder", "file_of", "load", "save"]

KIND, SCHEMA = "paceline-tuned", 1


@dataclass(frozen=True)
class TuningResult:
    """The result of a search.

    Attributes:
        plan: what was chosen.
        step_seconds: what a step took with it. default_seconds: with `Sync()`, in the same rounds.
        ratio: of the two, the median over rounds.
        date: when, ISO 8601.
        rows: every candidate: its plan in words, seconds of its turns (None: it did not run in that round).
    """

    plan: Sync
    step_seconds: float
    default_seconds: float
    ratio: float
    date: str
    rows: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def sentence(self) -> str:
        """What was chosen, what that gains over the default, and how it was found."""
        tried = "; ".join(f"{row['plan']}: {_turns(row['seconds'])}" for row in self.rows)
        default = self.rows[0]["plan"]
        if self.plan == Sync():
            said = f"{default}, the default, stays: no other plan is faster by more than noise"
        else:
            rounds = len(self.rows[0]["seconds"])
            said = (
                f"{self.plan.words}, {1 / self.ratio:.2f} times as fast as the default ({default}) in the median of "
                f"{rounds} rounds; a step takes {self.step_seconds:.3g} s"
            )
        return f"{said}. Seconds of a step, by rounds: {tried}."

    def to_json(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """Return it for JSON, with what it was found for."""
        plan = {
            "bucket_mib": "inf" if self.plan.bucket_mib == math.inf else self.plan.bucket_mib,
            "overlap": self.plan.overlap,
            "shard": self.plan.shard,
        }
        numbers = {name: getattr(self, name) for name in ("step_seconds", "default_seconds", "ratio", "date")}
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "for": dict(key),
            "plan": plan,
            **numbers,
            "rows": list(self.rows),
        }

    @classmethod
    def from_json(cls, record: Any) -> TuningResult | None:
        """Return what `to_json` wrote; None: it is something else, or of another version."""
        try:
            if (record["kind"], record["schema"]) != (KIND, SCHEMA):
                return None
            told = record["plan"]
            plan = Sync(float(told["bucket_mib"]), bool(told["overlap"]), told["shard"])
            step, default, ratio = (
                float(record[name]) for name in ("step_seconds", "default_seconds", "ratio")
            )
            return cls(plan, step, default, ratio, str(record["date"]), tuple(record["rows"]))
        except (KeyError, TypeError, ValueError, UsageError):
            return None


def _turns(seconds: Sequence[float | None]) -> str:
    return " ".join("–" if each is None else f"{each:.3g}" for each in seconds)


def file_of(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file of what was found for `key`: a model, a world and a host."""
    told = json.dumps(key, sort_keys=True)
    return folder / f"{xxhash.xxh3_64_hexdigest(told.encode())}.json"


def load(folder: Path, key: Mapping[str, Any]) -> TuningResult | None:
    """Return what was found for `key`; None: nothing, or nothing that can be read."""
    try:
        record = json.loads(file_of(folder, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        TuningResult.from_json(record)
        if isinstance(record, dict) and record.get("for") == dict(key)
        else None
    )


def save(folder: Path, key: Mapping[str, Any], tuned: TuningResult) -> Path | None:
    """Keep what was found for `key` and return the file; None: the folder can't be written to."""
    file = file_of(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return None
        write_json(file, tuned.to_json(key))
    except OSError:
        return None
    return file


class TuningCache:
    """Reads and writes the result of a search.

    Args:
        slots: the parameters. comm: the ranks.
    """

    def __init__(self, slots: Sequence[GradSlot], comm: Comm) -> None:
        self._slots, self._comm = slots, comm
        self._key: dict[str, Any] = {}

    def read(self) -> TuningResult | None:
        """Return what rank 0 has kept, None if nothing; all ranks call this, before `write`."""
        hosts = gather_texts(f"{socket.gethostname()}, {os.cpu_count()} cores", self._comm.group)
        shapes = [(slot.name, list(slot.param.shape), str(slot.view.dtype)) for slot in self._slots]
        self._key = {
            "model": xxhash.xxh3_64_hexdigest(json.dumps(shapes).encode()),
            "parameters": sum(slot.numel for slot in self._slots),
            "device": self._slots[0].param.device.type if self._slots else "cpu",
            "backend": self._comm.backend,
            "torch": torch.__version__,
            "hosts": hosts,
        }
        text = ""
        if self._comm.rank == 0 and (found := load(_folder(), self._key)) is not None:
            text = json.dumps(found.to_json(self._key))
        told = gather_texts(text, self._comm.group)[0]
        return TuningResult.from_json(json.loads(told)) if told else None

    def write(self, tuned: TuningResult) -> Path | None:
        """Keep `tuned`, on rank 0, and return the file; None: on another rank, or where that is not possible."""
        return save(_folder(), self._key, tuned) if self._comm.rank == 0 else None


def _folder() -> Path:
    return cache_folder() / "tuned"


def cache_folder() -> Path:
    """Return the user's folder for what can be found out again: ``$XDG_CACHE_HOME/paceline``, or ``~/.cache/paceline``.

    It need not exist. See the XDG Base Directory Specification, 0.8.
    """
    asked = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(asked) if Path(asked).is_absolute() else Path("~/.cache").expanduser()
    return base / "paceline"
