"""Rates of a machine without a network: memory bandwidth and matrix multiplication.

Each rate is the median of several repetitions, kept with the slowest and the fastest of them. Bytes are counted as in
STREAM (J. McCalpin, 1995), read plus written: 2·n for a copy, 3·n for a += b. An n × n matrix product has 2·n³
operations; several n are tried and the best median is the machine's rate, as no single shape is best everywhere (the
maximum achievable matmul FLOPS of stas00/ml-engineering). The CPU is measured with all usable cores and with one; the
number of threads is restored afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from statistics import median

import psutil
import torch

from paceline._core.cpu_cores import usable_cores
from paceline._core.format import format_bytes
from paceline._core.units import MIB
from paceline.cost_model.profile_entries import Rate, Source
from paceline.errors import UsageError, unknown
from paceline.world.accelerator import find_accelerator
from paceline.world.device_selection import DEVICE_TYPES

__all__ = ["MachineSettings", "RateJob", "RepeatedTiming", "measure_machine_rate", "rate_jobs", "repeat"]

_LEAST_SECONDS = 0.005  # of a repetition
_PASSES = {"copy": 2, "add": 3}


@dataclass(frozen=True)
class MachineSettings:
    """Settings of a measurement of one machine.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or ``"xpu"``; ``"auto"``: the CPU, and the GPU if there is one.
        nbytes: of each tensor for the memory bandwidth; more than the caches hold.
        sizes: n of the n × n matrices, in ascending order.
        dtypes: of the matrices.
        repetitions: at most, of each rate.
        seconds: about the longest time for a rate; three repetitions are always made.

    Raises:
        UsageError: a value is out of range, or the device or type is unknown or unusable.
    """

    device: str = "auto"
    nbytes: int = 256 * MIB
    sizes: tuple[int, ...] = (512, 1024, 2048, 4096)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    _: KW_ONLY
    repetitions: int = 15
    seconds: float = 3.0

    def __post_init__(self) -> None:
        if self.device not in ("auto", *DEVICE_TYPES):
            raise unknown("device", self.device, ("auto", *DEVICE_TYPES))
        if self.device not in ("auto", "cpu") and not torch.get_device_module(self.device).is_available():
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


@dataclass(frozen=True)
class RepeatedTiming:
    """Seconds of one piece of work: median, fastest and slowest of the repetitions."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class RateJob:
    """One rate to measure; see `paceline.cost_model.profile_entries.Rate` for `kind`. `threads` is 0 on a GPU."""

    kind: str
    device: str
    dtype: str
    threads: int


def rate_jobs(settings: MachineSettings) -> list[RateJob]:
    """Return the rates to measure, in order.

    Raises:
        UsageError: the tensors do not fit into memory.
    """
    found = find_accelerator()
    every = ("cpu", found) if found in DEVICE_TYPES else ("cpu",)
    jobs = []
    for device in every if settings.device == "auto" else (settings.device,):
        _check_memory(settings, device)
        cores = max(1, int(usable_cores()))
        for threads in (0,) if device != "cpu" else sorted({cores, 1}, reverse=True):
            jobs += [RateJob(kind, device, "float32", threads) for kind in _PASSES]
            jobs += [RateJob("matmul", device, dtype, threads) for dtype in settings.dtypes]
    return jobs


def measure_machine_rate(job: RateJob, settings: MachineSettings, source: Source) -> Rate:
    """Measure one rate; `source` records how the measurement was started."""
    with _threads(job.threads):
        value, low, high, shape = (_matmul if job.kind == "matmul" else _bandwidth)(job, settings)
    device = "cpu" if job.device == "cpu" else torch.get_device_module(job.device).get_device_name()
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
    wait: Callable[[], object] = lambda: None,
) -> RepeatedTiming:
    """Return the time of `work`, after two warm-up runs.

    Work of less than a few milliseconds runs several times per repetition, so that the clock and the wait for the
    device are negligible.

    Args:
        work: the timed function.
        repetitions: the most, 1 or more.
        seconds: about the longest time; three repetitions are made if `repetitions` allows.
        wait: waits for the device.
    """
    work()
    once = _timed(work, 1, wait)
    calls = max(1, min(100_000, round(_LEAST_SECONDS / max(once, 1e-9))))
    fitting = int(seconds / max(once * calls, 1e-9))
    count = max(min(3, repetitions), min(repetitions, fitting))
    times = [_timed(work, calls, wait) / calls for _ in range(count)]
    return RepeatedTiming(median(times), min(times), max(times))


def _timed(work: Callable[[], object], calls: int, wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return time.perf_counter() - start


def _repeat_on_device(
    job: RateJob, settings: MachineSettings, work: Callable[[], object], share: float = 1.0
) -> RepeatedTiming:
    options = {} if job.device == "cpu" else {"wait": torch.get_device_module(job.device).synchronize}
    return repeat(work, repetitions=settings.repetitions, seconds=settings.seconds * share, **options)


def _bandwidth(job: RateJob, settings: MachineSettings) -> tuple[float, float, float, str]:
    """Return median, least and most bytes per second, and the size of a tensor."""
    count = settings.nbytes // 4
    own, other = torch.ones(count, device=job.device), torch.zeros(count, device=job.device)
    work = (lambda: own.copy_(other)) if job.kind == "copy" else (lambda: own.add_(other))
    timing = _repeat_on_device(job, settings, work)
    moved = _PASSES[job.kind] * 4 * count
    return moved / timing.median, moved / timing.slowest, moved / timing.fastest, format_bytes(4 * count)


def _matmul(job: RateJob, settings: MachineSettings) -> tuple[float, float, float, str]:
    """Return median, least and most FLOP/s of the best n, and n; stops before an n that would take too long."""
    best = (0.0, 0.0, 0.0, "")
    for size in settings.sizes:
        own, other = (
            torch.rand(size, size, device=job.device).to(getattr(torch, job.dtype)) for _ in range(2)
        )
        out = torch.empty_like(own)
        timing = _repeat_on_device(
            job,
            settings,
            lambda own=own, other=other, out=out: torch.mm(own, other, out=out),
            share=1 / len(settings.sizes),
        )
        flops = 2 * size**3
        best = max(best, (flops / timing.median, flops / timing.slowest, flops / timing.fastest, str(size)))
        if timing.median * 8 * 3 > settings.seconds:
            break
    return best


def _check_memory(settings: MachineSettings, device: str) -> None:
    needed = max(2 * settings.nbytes, 3 * 4 * max(settings.sizes) ** 2)
    on_cpu = device == "cpu"
    free = psutil.virtual_memory().available if on_cpu else torch.get_device_module(device).mem_get_info()[0]
    if needed > free:
        raise UsageError(
            f"two tensors of {format_bytes(settings.nbytes)} and three matrices of {max(settings.sizes)} need "
            f"{format_bytes(needed)}; {format_bytes(free)} are free on the {device}",
            remedy=f"give at most --bytes {int(free / 4 / MIB)}MiB and smaller --matrix-sizes",
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's number of threads in the block; 0 leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
