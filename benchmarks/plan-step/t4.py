"""The closed form on somebody's measurement: two T4 GPUs, a GPT of 423 M parameters, buckets of 1 to 1000 MiB.

    python benchmarks/plan-step/t4.py

Fills the table of docs/step-time.md. What was measured: CALLS (all-reduce calls by bucket size, over ten steps, and
milliseconds of each) and STEPS (milliseconds of a training step). The rest is computed here.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from bench_harness.markdown import fill, table
from paceline._core.units import MIB
from paceline.cost_model.bucket_assignment import plan_buckets
from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.piecewise_fit import fit_line

DOCS = Path(__file__).parents[2] / "docs" / "step-time.md"
D_MODEL, D_FF, LAYERS, VOCABULARY = 1024, 4096, 24, 10_000
CALLS = {1: (1700, 2.745), 10: (980, 4.425), 100: (150, 28.52), 1000: (20, 214.9)}
MEASURED_STEPS = 10
STEPS = {0: 1075.7, 1: 1093.4, 10: 1120.0, 100: 1213.4, 1000: 1360.4, math.inf: 1365.2}
BACKWARD = (0.4, 0.5, 0.6)  # it was not measured by itself: within these bounds


def gradient_nbytes() -> list[int]:
    """Return the bytes of the gradients, the first that is ready first: three matrices in each feed-forward layer."""
    square, wide = D_MODEL * D_MODEL, D_MODEL * D_FF
    block = [D_MODEL, *[square] * 4, D_MODEL, *[wide] * 3]
    numel = [VOCABULARY * D_MODEL, *block * LAYERS, D_MODEL, VOCABULARY * D_MODEL]
    return [4 * each for each in reversed(numel)]


def fitted(sizes: list[int]) -> EqualBuckets:
    """Return o and w of the line through the seconds of a step's calls: n·o + s/w."""
    calls = np.array([number / MEASURED_STEPS for number, _ in CALLS.values()])
    seconds = np.array([number * each / MEASURED_STEPS / 1e3 for number, each in CALLS.values()])
    line = fit_line(calls, np.full(len(calls), float(sum(sizes))), seconds)
    return EqualBuckets(sum(sizes), 1 / line.beta, line.alpha, BACKWARD[1])


def main() -> None:
    """Fill the table, and print what was fitted."""
    sizes = gradient_nbytes()
    job, rows = fitted(sizes), []
    for mebibytes, step in STEPS.items():
        grouped = plan_buckets(range(len(sizes)), sizes, [0] * len(sizes), mebibytes * MIB)
        count, (counted, each) = len(grouped), CALLS.get(mebibytes, (0, 0.0))
        name = {0: "one parameter each", math.inf: "one for all, after backward"}.get(
            mebibytes, f"{mebibytes} MiB"
        )
        cells = [
            str(count),
            f"{counted / MEASURED_STEPS:g}" if counted else "",
            f"{sum(sizes) / count / 1e6:.3g}",
        ]
        price = 1e3 * (job.call_seconds + job.wire_seconds / count)
        cells += [
            f"{each:.4g}" if counted else "",
            f"{price:.3g}",
            f"{1e3 * job.overhead(count):.3g}",
            f"{step:.1f}",
        ]
        rows.append([name, *cells])
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
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(fill(text, "t4", table(titles, rows)), encoding="utf-8")
    print(f"o = {1e3 * job.call_seconds:.3f} ms, w = {job.bytes_per_second / 1e9:.3f} GB/s")
    print(f"s/w = {1e3 * job.wire_seconds:.0f} ms, balanced {job.best_balanced().nbytes / 1e6:.1f} MB")
    for backward in BACKWARD:
        best = EqualBuckets(job.nbytes, job.bytes_per_second, job.call_seconds, backward).best()
        print(
            f"backward {backward} s: n = {best.count:g}, {best.nbytes / 1e6:.1f} MB, {1e3 * best.overhead:.1f} ms"
        )


if __name__ == "__main__":
    main()
