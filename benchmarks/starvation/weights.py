"""How much each rank's data count in an epoch, by policy: ``python benchmarks/starvation/weights.py``.

Pure arithmetic over `paceline.data.sampling.uneven_policies`. A step's gradient is a weighted sum over ranks:
torch's DDP weighs them all the same, Paceline by their samples. The mean over the steps of an epoch is what a rank's
data count in it, compared with the rank's share of the data. If ranks hold different data, the difference is a bias
that more epochs don't remove; if all data are shuffled over all ranks before each epoch, it is none, whatever the
policy. The gradient is that of a linear regression, at zero, whose true coefficients differ between ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline._core.files import write_json
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.data.sampling.uneven_policies import RankPortions, UnevenPolicy

HERE = Path(__file__).parent
SAMPLES, SHARES, BATCH_SIZE = 100_000, (0.25, 0.25, 0.10, 0.40), 64
INPUTS, OWN = 16, 0.5  # how much of the coefficients is the rank's own

WAYS: dict[str, tuple[UnevenPolicy, str]] = {
    "torch DDP, truncated": ("truncate", "ranks"),
    "torch DDP, padded": ("pad", "ranks"),
    "torch Join, ÷ all ranks (default)": ("join", "ranks"),
    "torch Join, ÷ ranks with data": ("join", "active"),
    "Paceline, truncate": ("truncate", "samples"),
    "Paceline, join": ("join", "samples"),
    "Paceline, rebalance": ("rebalance", "samples"),
}


def weights(portions: RankPortions, divide_by: str) -> np.ndarray:
    """Return what each rank's data count in an epoch, ``[ranks]``.

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


def rows() -> list[dict[str, Any]]:
    """Return a row for each way."""
    counts = dispatch_blocks(SAMPLES, len(SHARES), shares=SHARES).counts
    true, of_rank = np.array(counts) / SAMPLES, gradients(counts)
    found = []
    for name, (policy, divide_by) in WAYS.items():
        portions = RankPortions(counts, BATCH_SIZE, policy)
        counted = weights(portions, divide_by)
        off = np.linalg.norm((counted - true) @ of_rank) / np.linalg.norm(true @ of_rank)
        row = {"way": name, "steps": portions.steps, "used": portions.used / SAMPLES}
        found.append(row | {"repeated": portions.repeated / SAMPLES, "weights": list(counted), "bias": off})
    return found


def main() -> None:
    """Write the rows beside this file."""
    head = {"kind": "epoch-weights", "schema": 1, "command": "python benchmarks/starvation/weights.py"}
    settings = {"samples": SAMPLES, "shares": SHARES, "batch_size": BATCH_SIZE}
    write_json(HERE / "weights.json", {**head, **settings, "rows": rows()})


if __name__ == "__main__":
    main()
