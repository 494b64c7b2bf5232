"""Ranks that run out of batches: what happens to them, and how much each rank's data count in an epoch, by policy.

    python benchmarks/starvation/starvation.py run       (weights.json)
    python benchmarks/starvation/starvation.py table     (also of the results of ``paceline data --starve``)

Pure arithmetic over `paceline.data.sampling.uneven_policies`. A step's gradient is a weighted sum over ranks: torch's
DDP weighs them all the same, Paceline by their samples. The mean over the steps of an epoch, compared with the rank's
share of the data, shows a bias if ranks hold different data: more epochs don't remove it. If all data are shuffled over
all ranks before each epoch, there is none, whatever the policy. The gradient is that of a linear regression, at zero,
whose true coefficients differ between ranks.
"""

from __future__ import annotations

import numpy as np

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.data.sampling.uneven_policies import RankPortions, UnevenPolicy
from paceline.tools.bench.starvation.starvation_table import STARVATION_COLUMNS, row_cells, table_title
from paceline.tools.cli.shared_options import JsonOption

SAMPLES, SHARES, BATCH_SIZE = 100_000, (0.25, 0.25, 0.10, 0.40), 64
INPUTS, OWN = 16, 0.5  # how much of the coefficients is the rank's own

VARIANTS: dict[str, tuple[UnevenPolicy, str]] = {
    "torch DDP, truncated": ("truncate", "ranks"),
    "torch DDP, padded": ("pad", "ranks"),
    "torch Join, ÷ all ranks (default)": ("join", "ranks"),
    "torch Join, ÷ ranks with data": ("join", "active"),
    "Paceline, truncate": ("truncate", "samples"),
    "Paceline, join": ("join", "samples"),
    "Paceline, rebalance": ("rebalance", "samples"),
}

bench = Benchmark(__file__, docs=["data.md"])


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Compute the weights of ranks, and the bias."""
    path = bench.output(json_file, "weights")
    counts = dispatch_blocks(SAMPLES, len(SHARES), shares=SHARES).counts
    true, of_rank = np.array(counts) / SAMPLES, gradients(counts)
    rows = []
    for name, (policy, divide_by) in VARIANTS.items():
        portions = RankPortions(counts, BATCH_SIZE, policy)
        counted = weights(portions, divide_by)
        bias = np.linalg.norm((counted - true) @ of_rank) / np.linalg.norm(true @ of_rank)
        row = {"way": name, "steps": portions.steps, "used": portions.used / SAMPLES}
        rows.append(row | {"repeated": portions.repeated / SAMPLES, "weights": list(counted), "bias": bias})
    settings = {"samples": SAMPLES, "shares": SHARES, "batch_size": BATCH_SIZE}
    bench.write_computed(path, "epoch-weights", **settings, rows=rows)


def weights(portions: RankPortions, divide_by: str) -> np.ndarray:
    """Return how much each rank's data count in an epoch, ``[ranks]``.

    Args:
        portions: sizes of all batches.
        divide_by: in each step, the number of ``"ranks"``, of ``"active"`` ones, or of all ``"samples"``.
    """
    ranks = range(len(portions.counts))
    sizes = np.array([[portions.size(rank, step) for rank in ranks] for step in range(portions.steps)], float)
    active = (sizes > 0).astype(float)
    step = {
        "ranks": active / len(portions.counts),
        "active": active / active.sum(1, keepdims=True),
        "samples": sizes / sizes.sum(1, keepdims=True),
    }
    return step[divide_by].mean(0)


def gradients(counts: tuple[int, ...]) -> np.ndarray:
    """Return the mean gradient over each rank's samples, ``[ranks, 16]``, at coefficients of zero."""
    chance = np.random.default_rng(0)
    common = chance.normal(size=INPUTS)
    found = []
    for count in counts:
        x = chance.normal(size=(count, INPUTS))
        y = x @ (common + OWN * chance.normal(size=INPUTS)) + chance.normal(size=count)
        found.append(-2 * x.T @ y / count)
    return np.array(found)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md and docs/data.md."""
    blocks = {}
    for name in ("2-ranks", "4-ranks", "2-ranks-paceline"):
        result = bench.read(name)
        rows = table(STARVATION_COLUMNS, [row_cells(each) for each in result["scenes"]], words=4)
        blocks[name] = f"{table_title(result['settings'])}\n\n{rows}"
    cells = [
        [
            row["way"],
            str(row["steps"]),
            f"{row['used']:.1%}",
            f"{row['repeated']:.1%}" if row["repeated"] else "",
            " ".join(f"{100 * weight:.1f}" for weight in row["weights"]),
            f"{row['bias']:.1%}" if row["bias"] >= 5e-4 else f"{row['bias']:.0e}",
        ]
        for row in bench.read("weights")["rows"]
    ]
    titles = ["way", "steps", "samples used", "used again", "what each rank counts, %", "bias"]
    return blocks | {"weights": table(titles, cells)}


if __name__ == "__main__":
    bench.main()
