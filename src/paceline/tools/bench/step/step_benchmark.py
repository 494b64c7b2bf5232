"""`paceline bench step`: the time of a training step, by strategy and bucket size, with torch in the same table.

Method. All strategies live in the same processes and process group and run interleaved, so that a disturbance of the
machine affects all of them; times are medians, ratios are taken within a round ([Note: turns] in
`paceline.tools.bench.turn_statistics`). First each runs five steps from the same seed on the same data, after which
its parameters must agree with those of torch DDP. Calls and bytes are counted afterwards, in steps that are not timed.
Peak memory is measured in fresh processes, one set of ranks per strategy. `paceline.tools.bench.step.step_rows`
describes how each column is obtained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from paceline._core.format import format_bytes
from paceline._core.json_codec import decode, encode
from paceline.errors import UsageError, unknown
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.rank_jobs import StartRanks, run_rank_job
from paceline.tools.bench.step.step_rows import StepRow, make_step_rows
from paceline.tools.bench.step.step_strategies import (
    DDP_PACELINE,
    DDP_STRATEGIES,
    PACELINE_STRATEGIES,
    StrategyVariant,
    strategy_variants,
)
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.result_files import result_head

__all__ = ["STEP_BACKENDS", "StepSettings", "measure_steps", "run_step_job", "step_result"]

STEP_BACKENDS = ("paceline", "gloo", "nccl", "xccl")
"""Backends that steps can run on."""

_BYTES_PER_PARAMETER = 24  # float32: parameter, gradient, two of AdamW, a bucket or a copy, and a margin


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a measurement of training steps.

    Attributes:
        ranks: processes, 2 or more.
        sizes: names of reference models.
        batch_size: windows of a rank's batch.
        context: tokens of a window.
        steps: steps of a turn.
        rounds: turns of each strategy.
        bucket_mib: bucket sizes to try, in MiB.
        threads: threads of a rank.
        strategies: names of strategies; `no-sync`, `ddp` and peers are always added.
        backend: of Paceline's strategies, a name in `STEP_BACKENDS`; None: chosen by the device.
        memory: measure peak memory too, each strategy in processes of its own.
        seed: of initial weights and batches.

    Raises:
        UsageError: a value is out of range or unknown.
    """

    ranks: int = 2
    sizes: tuple[str, ...] = ("tiny", "mini")
    batch_size: int = 2
    context: int = 64
    steps: int = 10
    rounds: int = 15
    bucket_mib: tuple[float, ...] = (0.25, 1.0, 5.0, 25.0, float("inf"))
    threads: int = 1
    strategies: tuple[str, ...] = (*PACELINE_STRATEGIES, *DDP_STRATEGIES, DDP_PACELINE)
    backend: str | None = None
    memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(
                f"--nproc-per-node {self.ranks}: one rank has no peer to synchronise with",
                remedy="give 2 or more",
            )
        for name in ("batch_size", "context", "steps", "rounds", "threads"):
            if getattr(self, name) < 1:
                option = "micro-batch-size" if name == "batch_size" else name
                raise UsageError(f"--{option} {getattr(self, name)}", remedy="give 1 or more")
        if self.backend is not None and self.backend not in STEP_BACKENDS:
            raise unknown("backend", self.backend, STEP_BACKENDS)
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", remedy="give 0 or more")
        if not self.sizes:
            raise UsageError("no model size given", remedy="for example --model tiny,mini")
        for name in self.sizes:
            if self.context > gpt_size(name).context:
                raise UsageError(
                    f"--context {self.context}: model size {name!r} sees at most {gpt_size(name).context} tokens",
                    remedy=f"give at most {gpt_size(name).context}, or another --model",
                )
            self.variants(name)

    def variants(self, size: str) -> dict[StrategyVariant, StrategyVariant | None]:
        """Return the variants to benchmark with a model, each with its peer or None."""
        return strategy_variants(self.strategies, self.bucket_mib, 4 * gpt_size(size).parameters())

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON, which has no infinity."""
        sizes = ["inf" if size == float("inf") else size for size in self.bucket_mib]
        return encode(self) | {"bucket_mib": sizes}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StepSettings:
        """Return the settings that `to_json` wrote."""
        sizes = [float(size) for size in record["bucket_mib"]]
        return decode(record | {"bucket_mib": sizes}, cls, "settings")


def measure_steps(settings: StepSettings, start: StartRanks) -> list[StepRow]:
    """Measure and return the rows of all models.

    Args:
        settings: of the measurement.
        start: starts the ranks, such as `paceline.launch.process.local_ranks.run_ranks`.

    Raises:
        UsageError: the strategies do not fit into memory together.
        RankFailed: a rank ended with an error.
    """
    for name in settings.sizes:
        _check_memory(settings, name)
    rows = []
    for name in settings.sizes:
        peer_of = settings.variants(name)
        found = run_step_job(settings, start, "time", name, list(peer_of))
        peaks = _peaks(settings, start, name, list(peer_of))
        rows += make_step_rows(name, settings.ranks, peer_of, found, peaks)
    return rows


def step_result(settings: StepSettings, rows: Sequence[StepRow], command: str) -> dict[str, Any]:
    """Return a measurement for JSON; `command` reproduces it."""
    head = result_head("bench-step", (), command=command)
    return head | {"settings": settings.to_json(), "rows": [row.to_json() for row in rows]}


def _check_memory(settings: StepSettings, name: str) -> None:
    variants = len(settings.variants(name))
    needed = settings.ranks * variants * gpt_size(name).parameters() * _BYTES_PER_PARAMETER
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"{variants} strategies with models of size {name!r} on {settings.ranks} ranks need about "
            f"{format_bytes(needed)}; {format_bytes(available)} are available",
            remedy="give fewer --strategy or --bucket-mib, or a smaller --model",
        )


def _peaks(
    settings: StepSettings, start: StartRanks, name: str, variants: list[StrategyVariant]
) -> list[float | None]:
    if not settings.memory:
        return [None] * len(variants)
    peaks = []
    with ProgressBar(f"{name}, {settings.ranks} ranks, memory", len(variants)) as advance:
        for variant in variants:
            peaks.append(run_step_job(settings, start, "memory", name, [variant])["peak_nbytes"])
            advance()
    return peaks


def run_step_job(
    settings: StepSettings, start: StartRanks, kind: str, name: str, variants: Sequence[StrategyVariant]
) -> Mapping[str, Any]:
    """Run a job of `paceline.tools.bench.step.step_worker` and return its result.

    Args:
        settings: as for `measure_steps`.
        start: as for `measure_steps`.
        kind: ``"time"`` all variants, interleaved, or measure the peak ``"memory"`` of the first one.
        name: the model's name.
        variants: the benchmarked variants.
    """
    job = {
        "kind": kind,
        "size": name,
        "settings": settings.to_json(),
        "variants": [variant.to_json() for variant in variants],
    }
    env = {"OMP_NUM_THREADS": str(settings.threads), "KINETO_LOG_LEVEL": "99"}
    if kind == "memory":
        env["MALLOC_ARENA_MAX"] = "1"  # else what a thread leaves unused in its own heap blurs the peak
    return run_rank_job(
        start,
        "paceline.tools.bench.step.step_worker",
        job,
        settings.ranks,
        env=env,
        folder_variables=["XDG_CACHE_HOME"],  # "auto" finds nothing of earlier runs, and leaves nothing
    )
