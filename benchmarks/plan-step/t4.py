"""The closed form on others' measurement: two T4 GPUs, a GPT of 423 M parameters, buckets of 1 to 1000 MiB.

    python benchmarks/plan-step/t4.py table

Fills the table of docs/step-time.md, and prints what was fitted. CALLS and STEPS were measured, the rest is computed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline._core.units import MIB
from paceline.cost_model.bucket_assignment import plan_buckets
from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.piecewise_fit import fit_line

D_MODEL, D_FF, LAYERS, VOCABULARY = 1024, 4096, 24, 10_000
CALLS = {1: (1700, 2.745), 10: (980, 4.425), 100: (150, 28.52), 1000: (20, 214.9)}
"""By bucket size in MiB: all-reduce calls over ten steps, and milliseconds of each."""
MEASURED_STEPS = 10
STEPS = {0: 1075.7, 1: 1093.4, 10: 1120.0, 100: 1213.4, 1000: 1360.4, math.inf: 1365.2}
"""By bucket size in MiB: milliseconds of a training step."""
BACKWARD = (0.4, 0.5, 0.6)  # seconds; it was not measured separately: within these bounds

bench = Benchmark(__file__, docs=["step-time.md"])


def gradient_nbytes() -> list[int]:
    """Return the bytes of the gradients, the first that is ready first: three matrices in each feed-forward layer."""
    square, wide = D_MODEL * D_MODEL, D_MODEL * D_FF
    block = [D_MODEL, *[square] * 4, D_MODEL, *[wide] * 3]
    numel = [VOCABULARY * D_MODEL, *block * LAYERS, D_MODEL, VOCABULARY * D_MODEL]
    return [4 * each for each in reversed(numel)]


def fitted(nbytes: int) -> EqualBuckets:
    """Return o and w of the line through the seconds of a step's calls: n·o + s/w."""
    calls = np.array([number / MEASURED_STEPS for number, _ in CALLS.values()])
    seconds = np.array([number * each / MEASURED_STEPS / 1e3 for number, each in CALLS.values()])
    line = fit_line(calls, np.full(len(calls), float(nbytes)), seconds)
    return EqualBuckets(nbytes, 1 / line.beta, line.alpha, BACKWARD[1])


@bench.tables
def tables() -> dict[str, str]:
    """Print what was fitted, and return the table of bucket sizes."""
    sizes = gradient_nbytes()
    job, rows = fitted(sum(sizes)), []
    for mebibytes, step in STEPS.items():
        count = len(plan_buckets(range(len(sizes)), sizes, [0] * len(sizes), mebibytes * MIB))
        names = {0: "one parameter each", math.inf: "one for all, after backward"}
        counted, each = CALLS.get(mebibytes, (0, 0.0))
        rows.append(
            [
                names.get(mebibytes, f"{mebibytes} MiB"),
                str(count),
                f"{counted / MEASURED_STEPS:g}" if counted else "",
                f"{sum(sizes) / count / 1e6:.3g}",
                f"{each:.4g}" if counted else "",
                f"{1e3 * (job.call_seconds + job.wire_seconds / count):.3g}",
                f"{1e3 * job.overhead(count):.3g}",
                f"{step:.1f}",
            ]
        )
    print(f"o = {1e3 * job.call_seconds:.3f} ms, w = {job.bytes_per_second / 1e9:.3f} GB/s")
    print(f"s/w = {1e3 * job.wire_seconds:.0f} ms, balanced {job.best_balanced().nbytes / 1e6:.1f} MB")
    for backward in BACKWARD:
        best = replace(job, backward_seconds=backward).best()
        size = f"n = {best.count:g}, {best.nbytes / 1e6:.1f} MB, {1e3 * best.overhead:.1f} ms"
        print(f"backward {backward} s: {size}")
    titles = [
        "bucket",
        "buckets",
        "calls counted",
        "MB each",
        "ms a call",
        "fitted",
        "overhead, ms",
        "step, ms",
    ]
    return {"t4": table(titles, rows)}


if __name__ == "__main__":
    bench.main()
