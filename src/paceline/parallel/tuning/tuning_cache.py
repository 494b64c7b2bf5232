"""Keeps the tuner's results from run to run: one small file per model, world and hosts, on rank 0."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from paceline._core.files import write_json
from paceline._core.json_codec import encode
from paceline.errors import UsageError
from paceline.parallel.buckets.grad_slot import GradSlot
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.world.control_collectives import gather_texts

__all__ = ["TuningCache", "TuningResult", "cache_file", "cache_folder", "load_result", "save_result"]

KIND, SCHEMA = "paceline-tuned", 1


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The result of a search.

    Attributes:
        plan: the chosen plan.
        step_seconds: seconds per step with it.
        default_seconds: seconds per step with `Sync()`, in the same rounds.
        ratio: of the two, the median over rounds.
        date: ISO 8601.
        rows: every candidate: its plan's label, the seconds of its turns (None: not run in that round), its score.
    """

    plan: Sync
    step_seconds: float
    default_seconds: float
    ratio: float
    date: str
    rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def sentence(self) -> str:
        """The choice, its gain over the default, and the measurements."""
        tried = "; ".join(f"{row['plan']}: {_turns(row['seconds'])}" for row in self.rows)
        default = self.rows[0]["plan"]
        if self.plan == Sync():
            choice = f"{default}, the default, stays: no other plan is faster by more than noise"
        else:
            rounds = len(self.rows[0]["seconds"])
            choice = (
                f"{self.plan.label}, {1 / self.ratio:.2f}× faster than the default ({default}) in the median of "
                f"{rounds} rounds; a step takes {self.step_seconds:.3g} s"
            )
        return f"{choice}. Seconds per step, by rounds: {tried}."

    def to_json(self, key: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of this result for a model, world and hosts."""
        size = self.plan.bucket_mib
        plan = {
            "bucket_mib": "inf" if size == math.inf else size,
            "overlap": self.plan.overlap,
            "shard": self.plan.shard,
        }
        return {"kind": KIND, "schema": SCHEMA, "for": dict(key)} | encode(self) | {"plan": plan}

    @classmethod
    def from_json(cls, record: Any) -> TuningResult | None:
        """Return the result of a record; None: it is of another kind or version, or damaged."""
        try:
            if (record["kind"], record["schema"]) != (KIND, SCHEMA):
                return None
            plan = record["plan"]
            return cls(
                plan=Sync(float(plan["bucket_mib"]), bool(plan["overlap"]), plan["shard"]),
                step_seconds=float(record["step_seconds"]),
                default_seconds=float(record["default_seconds"]),
                ratio=float(record["ratio"]),
                date=str(record["date"]),
                rows=tuple(record["rows"]),
            )
        except (KeyError, TypeError, ValueError, UsageError):
            return None


def _turns(seconds: Sequence[float | None]) -> str:
    return " ".join("–" if each is None else f"{each:.3g}" for each in seconds)


def cache_folder() -> Path:
    """Return the user's cache, ``$XDG_CACHE_HOME/paceline`` or ``~/.cache/paceline``, which may not exist.

    See the XDG Base Directory Specification, 0.8.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "paceline"


def cache_file(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file of the result for `key`: a model, a world and hosts."""
    return folder / f"{xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())}.json"


def load_result(folder: Path, key: Mapping[str, Any]) -> TuningResult | None:
    """Return the result for `key`; None: there is none, or it can't be read."""
    try:
        record = json.loads(cache_file(folder, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("for") != dict(key):
        return None
    return TuningResult.from_json(record)


def save_result(folder: Path, key: Mapping[str, Any], result: TuningResult) -> Path | None:
    """Keep the result for `key` and return its file; None: the folder can't be written to."""
    file = cache_file(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return None
        write_json(file, result.to_json(key))
    except OSError:
        return None
    return file


class TuningCache:
    """Reads and writes the tuning result of one model on its ranks.

    Args:
        slots: the parameters.
        comm: the ranks.
    """

    def __init__(self, slots: Sequence[GradSlot], comm: Comm) -> None:
        self._slots, self._comm = slots, comm
        self._folder = cache_folder() / "tuned"
        self._key: dict[str, Any] = {}

    def read(self) -> TuningResult | None:
        """Return the result that rank 0 has kept, None without; all ranks call this, before `write`."""
        hosts = gather_texts(f"{socket.gethostname()}, {os.cpu_count()} cores", self._comm.group)
        shapes = [(slot.name, list(slot.param.shape), str(slot.view.dtype)) for slot in self._slots]
        self._key = {
            "model": xxhash.xxh3_64_hexdigest(json.dumps(shapes).encode()),
            "parameters": sum(slot.numel for slot in self._slots),
            "device": self._slots[0].param.device.type if self._slots else "cpu",
            "backend": self._comm.backend,
            "torch": str(torch.__version__),
            "hosts": hosts,
        }
        text = ""
        if self._comm.rank == 0 and (found := load_result(self._folder, self._key)) is not None:
            text = json.dumps(found.to_json(self._key))
        kept = gather_texts(text, self._comm.group)[0]
        return TuningResult.from_json(json.loads(kept)) if kept else None

    def write(self, result: TuningResult) -> Path | None:
        """On rank 0, keep `result` and return its file; None: on another rank, or if it can't be written."""
        return save_result(self._folder, self._key, result) if self._comm.rank == 0 else None
