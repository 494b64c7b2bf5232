"""`paceline bench step`: what one training step takes, by strategy and bucket size, with torch in the same table.

Method. All contestants live in the same processes and process group and take turns (A B C … in rounds, see
`paceline.tools.bench.turn_order`), so that whatever else the machine does meets all of them; numbers are medians,
ratios are taken within a round (`paceline.tools.bench.turn_order`). Before that, each runs five steps from the same
seed on the same data, and its parameters must agree with torch DDP's. Calls and bytes are counted afterwards, in
steps that are not timed. Peak memory needs processes without other contestants: one fresh set of ranks for each.
`paceline.tools.bench.step.step_rows` says for each column how it is obtained.

What `paceline bench step` is asked to do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from paceline._core.format import format_bytes
from paceline.errors import UsageError, unknown
from paceline.tools.bench.progress_bar import TurnBar
from paceline.tools.bench.step.step_rows import Row, make_rows
from paceline.tools.bench.step.step_strategies import DDP, DDP_PACELINE, OURS, Entry, entries
from paceline.tools.models.gpt_sizes import size_of
from paceline.tools.result_files import machine_record

__all__ = ["BACKENDS", "StartRanks", "StepSettings", "measure_steps", "result", "run_job"]

_BYTES_PER_PARAMETER = 24  # float32: parameter, gradient, two of AdamW, a bucket or a copy, and some room


class StartRanks(Protocol):
    """Runs ``python *argv`` as `ranks` processes of one world and returns when all have ended well."""

    def __call__(self, argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None: ...


def measure_steps(settings: StepSettings, start: StartRanks) -> list[Row]:
    """Measure and return the rows of all models.

    Args:
        settings: what to measure.
        start: starts the ranks, such as `paceline.launch.process.local_ranks.run_ranks`.

    Raises:
        UsageError: the contestants would not fit into memory side by side.
        RankFailed: a rank ended with an error.
    """
    plans = {name: _contestants(settings, name) for name in settings.sizes}
    for name, peer_of in plans.items():
        _check_memory(settings, name, len(peer_of))
    rows = []
    for name, peer_of in plans.items():
        found = run_job(settings, start, "time", name, list(peer_of))
        peaks = _peaks(settings, start, name, list(peer_of))
        rows += make_rows(name, settings.ranks, peer_of, found, peaks)
    return rows


def result(settings: StepSettings, rows: Sequence[Row], command: str) -> dict[str, Any]:
    """Return a measurement for JSON: the command that made it, this machine, the settings and the rows."""
    return {
        "kind": "bench-step",
        "schema": 1,
        "command": command,
        "machine": machine_record(),
        "settings": settings.to_json(),
        "rows": [row.to_json() for row in rows],
    }


def _contestants(settings: StepSettings, name: str) -> dict[Entry, Entry | None]:
    return entries(settings.strategies, settings.bucket_mib, 4 * size_of(name).parameters())


def _check_memory(settings: StepSettings, name: str, contestants: int) -> None:
    """Refuse before anything is started what the machine has no memory for."""
    needed = settings.ranks * contestants * size_of(name).parameters() * _BYTES_PER_PARAMETER
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"{contestants} contestants of size {name!r} on {settings.ranks} ranks need about "
            f"{format_bytes(needed)}; {format_bytes(available)} are available",
            remedy="give fewer --strategies or --bucket-mib, or a smaller --size",
        )


def _peaks(settings: StepSettings, start: StartRanks, name: str, everyone: list[Entry]) -> list[float | None]:
    """Return each contestant's peak memory in bytes."""
    if not settings.memory:
        return [None] * len(everyone)
    peaks = []
    with TurnBar(f"{name}, {settings.ranks} ranks, memory", len(everyone)) as tick:
        for entry in everyone:
            peaks.append(run_job(settings, start, "memory", name, [entry])["peak_nbytes"])
            tick()
    return peaks


def run_job(
    settings: StepSettings, start: StartRanks, kind: str, name: str, everyone: Sequence[Entry]
) -> dict[str, Any]:
    """Start the ranks for one job of `paceline.tools.bench.step.step_worker` and return what rank 0 wrote.

    Args:
        settings: as for `measure_steps`.
        start: as for `measure_steps`.
        kind: ``"time"`` everyone in turn, or measure the peak ``"memory"`` of the first one.
        name: the model's name.
        everyone: who takes part.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "found.json"
        description = {
            "kind": kind,
            "size": name,
            "settings": settings.to_json(),
            "entries": [entry.to_json() for entry in everyone],
            "out": str(out),
        }
        job.write_text(json.dumps(description), encoding="utf-8")
        env = {"OMP_NUM_THREADS": str(settings.threads), "KINETO_LOG_LEVEL": "99"}
        env["XDG_CACHE_HOME"] = folder  # "auto" finds nothing of earlier runs, and leaves nothing
        if kind == "memory":
            env["MALLOC_ARENA_MAX"] = "1"  # else what a thread leaves unused in its own heap blurs the peak
        start(["-m", "paceline.tools.bench.step.step_worker", str(job)], settings.ranks, env=env)
        return json.loads(out.read_text(encoding="utf-8"))


BACKENDS = ("paceline", "gloo", "nccl")
"""What steps can run on."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a measurement of training steps.

    Attributes:
        ranks: processes, 2 or more.
        sizes: names of reference models.
        batch_size: windows of a rank's batch.
        context: tokens of a window.
        steps: steps that a contestant runs in its turn.
        rounds: how often each contestant has its turn.
        bucket_mib: bucket sizes to try, in MiB.
        threads: threads of a rank.
        strategies: who takes part; `no-sync`, `ddp` and peers always do.
        backend: what our strategies run on, a name in `BACKENDS`; None: what fits the device.
        memory: measure peak memory too, each contestant in processes of its own.
        seed: decides initial weights and batches.

    Raises:
        UsageError: a value is out of range or unknown.
    """

    ranks: int = 2
    sizes: Sequence[str] = ("tiny", "mini")
    batch_size: int = 2
    context: int = 64
    steps: int = 10
    rounds: int = 15
    bucket_mib: Sequence[float] = (0.25, 1.0, 5.0, 25.0, float("inf"))
    threads: int = 1
    strategies: Sequence[str] = (*OURS, *DDP, DDP_PACELINE)
    backend: str | None = None
    memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(
                f"--ranks {self.ranks}: one rank has nobody to synchronise with", remedy="give 2 or more"
            )
        for name in ("batch_size", "context", "steps", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}", remedy="give 1 or more")
        if self.backend is not None and self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", remedy="give 0 or more")
        if not self.sizes:
            raise UsageError("no model size given", remedy="for example --size tiny,mini")
        for name in self.sizes:
            size = size_of(name)
            if self.context > size.context:
                raise UsageError(
                    f"--context {self.context}: model size {name!r} sees at most {size.context} tokens",
                    remedy=f"give at most {size.context}, or another --size",
                )
            entries(self.strategies, self.bucket_mib, 4 * size.parameters())

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON, which has no infinity."""
        record = asdict(self)
        return record | {"bucket_mib": ["inf" if size == float("inf") else size for size in self.bucket_mib]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StepSettings:
        """Return the settings that `to_json` wrote."""
        return cls(**{**record, "bucket_mib": tuple(float(size) for size in record["bucket_mib"])})
