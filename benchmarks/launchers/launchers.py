"""What launchers do with a run, as their tests found: ``python benchmarks/launchers/launchers.py table``."""

from __future__ import annotations

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table

bench = Benchmark(__file__, docs=["launchers.md"])


@bench.tables
def tables() -> dict[str, str]:
    """Return the table: a row per launcher."""
    result, outcomes = bench.read("launchers"), ("finishes", "killed and resumed")
    rows = [
        [
            name,
            result["versions"].get(name, ""),
            *(result["cells"].get(name, {}).get(key, "") for key in outcomes),
        ]
        for name in ("torchrun", "Slurm", "Ray", "MPI")
    ]
    return {"launchers": table(["", "version", *outcomes], rows, words=4)}


if __name__ == "__main__":
    bench.main()
