"""What a machine does without a network: memory bandwidth and matrix rate.

Each rate is the median of several repetitions, with the slowest and the fastest of them. Bytes are counted as STREAM
does (J. McCalpin, 1995): what the program reads and writes, 2·n for a copy and 3·n for a += b. A matrix product of
n × n has 2·n³ operations; several n are tried and the one with the best median stands for the machine, as no single
shape is best everywhere (the maximum achievable matmul FLOPS of stas00/ml-engineering). On the CPU all usable
cores work, and one alone; the number of threads is set back afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import psutil
import torch

from paceline._core.cpu_cores import usable_cores
from paceline._core.format import format_bytes
from paceline._core.units import MIB
from paceline.cost_model.profile_entries import Rate, Source
from paceline.errors import UsageError, unknown

__all__ = ["Job", "MachineSettings", "Timing", "jobs", "measure", "repeat"]

_LEAST_SECONDS = 0.005
_PASSES = {"copy": 2, "add": 3}


@dataclass(frozen=True)
class MachineSettings:
    """Settings of a measurement of one machine.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``; ``"auto"``: both where there is a GPU.
        nbytes: of each tensor for the memory bandwidth; more than the caches hold.
        sizes: n of the n × n matrices, in ascending order.
        dtypes: of the matrices.
        repetitions: at most so many of each.
        seconds: a rate takes about so long at most; three repetitions are always made.

    Raises:
        UsageError: a value is out of range, or there is no such device or type.
    """

    device: str = "auto"
    nbytes: int = 256 * MIB
    sizes: tuple[int, ...] = (512, 1024, 2048, 4096)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    repetitions: int = 15
    seconds: float = 3.0

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise unknown("device", self.device, ("auto", "cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("torch can use no GPU here", remedy="--device cpu, or see paceline doctor")
        for dtype in self.dtypes:
            if dtype not in ("float32", "bfloat16", "float16", "float64"):
                raise unknown("dtype", dtype, ("float32", "bfloat16", "float16", "float64"))
        least = min(self.repetitions, *self.sizes) if self.sizes and self.dtypes else 0
        if least < 1 or self.nbytes < MIB or not self.seconds > 0:
            raise UsageError(
                f"{self.repetitions} repetitions, matrices of {list(self.sizes)} in {list(self.dtypes)}, "
                f"tensors of {format_bytes(self.nbytes)}, {self.seconds} s",
                remedy="give a repetition, a size and a type or more, 1 MiB or more, and some time",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Timing:
    """Seconds of one piece of work: median of the repetitions, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Job:
    """One rate to measure; see `paceline.cost_model.profile_entries.Rate` for `kind`. `threads` is 0 on a GPU."""

    kind: str
    device: str
    dtype: str
    threads: int


def jobs(settings: MachineSettings) -> list[Job]:
    """Return the rates that are measured, in order.

    Raises:
        UsageError: the tensors don't fit into memory.
    """
    every = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    made = []
    for device in every if settings.device == "auto" else (settings.device,):
        _check_memory(settings, device)
        cores = max(1, int(usable_cores()))
        for threads in (0,) if device == "cuda" else sorted({cores, 1}, reverse=True):
            made += [Job(kind, device, "float32", threads) for kind in _PASSES]
            made += [Job("matmul", device, dtype, threads) for dtype in settings.dtypes]
    return made


def measure(job: Job, settings: MachineSettings, source: Source) -> Rate:
    """Measure one rate; `source` says what asked for it."""
    wait = torch.cuda.synchronize if job.device == "cuda" else _nothing
    with _threads(job.threads):
        value, low, high, shape = (_product if job.kind == "matmul" else _bandwidth)(job, settings, wait)
    device = torch.cuda.get_device_name() if job.device == "cuda" else "cpu"
    return Rate(
        kind=job.kind,
        device=device,
        dtype=job.dtype,
        threads=job.threads,
        value=value,
        low=low,
        high=high,
        shape=shape,
        source=source,
    )


def repeat(
    work: Callable[[], object],
    *,
    repetitions: int = 15,
    seconds: float = 3.0,
    calls: int | None = None,
    wait: Callable[[], object] | None = None,
) -> Timing:
    """Return how long `work` takes, after it has run twice.

    Work of less than a few milliseconds runs several times within a repetition, so that the clock and the wait
    for the device don't count.

    Args:
        work: what is timed.
        repetitions: at most so many, 1 or more.
        seconds: about so long at most; three repetitions are made if `repetitions` allows.
        calls: run `work` so often in each repetition, and make exactly `repetitions`, however long it takes: for a
            collective, which all ranks must call equally often. Left out, the first run decides.
        wait: waits for the device.
    """
    wait = wait or _nothing
    work()
    once = _timed(work, 1, wait)
    each = calls or max(1, min(100_000, round(_LEAST_SECONDS / max(once, 1e-9))))
    fitting = repetitions if calls else int(seconds / max(once * each, 1e-9))
    count = max(min(3, repetitions), min(repetitions, fitting))
    times = [_timed(work, each, wait) / each for _ in range(count)]
    return Timing(median(times), min(times), max(times))


def _timed(work: Callable[[], object], calls: int, wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return time.perf_counter() - start


def _bandwidth(
    job: Job, settings: MachineSettings, wait: Callable[[], object]
) -> tuple[float, float, float, str]:
    """Return median, least and most bytes per second, and the size of a tensor."""
    count = settings.nbytes // 4
    own, other = torch.ones(count, device=job.device), torch.zeros(count, device=job.device)
    work = (lambda: own.copy_(other)) if job.kind == "copy" else (lambda: own.add_(other))
    timing = repeat(work, repetitions=settings.repetitions, seconds=settings.seconds, wait=wait)
    moved = _PASSES[job.kind] * 4 * count
    return moved / timing.median, moved / timing.slowest, moved / timing.fastest, format_bytes(4 * count)


def _product(
    job: Job, settings: MachineSettings, wait: Callable[[], object]
) -> tuple[float, float, float, str]:
    """Return median, least and most FLOP/s of the best shape, and its n; ends where the next would take too long."""
    best = (0.0, 0.0, 0.0, "")
    for size in settings.sizes:
        own, other = (
            torch.rand(size, size, device=job.device).to(getattr(torch, job.dtype)) for _ in range(2)
        )
        into = torch.empty_like(own)
        timing = repeat(
            lambda own=own, other=other, into=into: torch.mm(own, other, out=into),
            repetitions=settings.repetitions,
            seconds=settings.seconds / len(settings.sizes),
            wait=wait,
        )
        flops = 2 * size**3
        found = (flops / timing.median, flops / timing.slowest, flops / timing.fastest, str(size))
        best = max(best, found)
        if timing.median * 8 * 3 > settings.seconds:
            break
    return best


def _check_memory(settings: MachineSettings, device: str) -> None:
    needed = max(2 * settings.nbytes, 3 * 4 * max(settings.sizes) ** 2)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"two tensors of {format_bytes(settings.nbytes)} and three matrices of {max(settings.sizes)} need "
            f"{format_bytes(needed)}; {format_bytes(free)} are free on the {device}",
            remedy=f"give at most --bytes {int(free / 4 / MIB)}MiB and smaller --sizes",
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch work with so many threads in the block; 0: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nothing() -> None:
    return None
