"""Compute what was drawn elsewhere beside what is to be expected, and fill the tables of docs/dispatch.md.

python benchmarks/dispatch/figures.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from bench_harness.markdown import fill, table
from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import draw_block_counts
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import RankPortions
from paceline.tools.plan.dispatch_text import format_ranges, percent, summarise_counts
from paceline.tools.plan.imbalance_statistics import expected_excess, largest_excess, unlikely_excess

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "dispatch.md"
SAMPLES, SEVEN, BATCH, DRAWS = 50_000, RankShares.equal(7), 64, 10_000
SEEN = {
    2: (7054, 6904, 7180, 7274, 7280, 7222, 7086),
    10: (6870, 7060, 7190, 7200, 7010, 7570, 7100),
    100: (9100, 7100, 7900, 6300, 7800, 6900, 4900),
    1000: (6000, 9000, 10_000, 6000, 6000, 4000, 9000),
}
"""Draws at random that somebody has seen: block size, samples of seven workers."""


def entries(folder: str) -> list[dict[str, Any]]:
    """Return what `paceline dispatch` wrote there."""
    return json.loads((HERE / folder / "dispatch.json").read_text(encoding="utf-8"))["entries"]


def beside_draws(block: int) -> dict[str, Any]:
    """Return what was seen with this block size beside 10,000 draws of ours."""
    blocks, mean = SAMPLES // block, SAMPLES / 7
    keys = (derive_key(number, block, 5) for number in range(DRAWS))
    drawn = np.array([draw_block_counts(blocks, SEVEN, key) for key in keys]) * block
    seen = np.array(SEEN[block])
    left = lost(drawn)
    return {
        "block": block,
        "seen": list(SEEN[block]),
        "chi_squared": float(chi_squared(seen, mean, block)),
        "draws_as_far": float((chi_squared(drawn, mean, block) >= chi_squared(seen, mean, block)).mean()),
        "largest": largest_excess(SEEN[block], SEVEN),
        "expected_largest": expected_excess(SEVEN, blocks),
        "unlikely_largest": unlikely_excess(SEVEN, blocks),
        "drawn_largest": float(drawn.max(axis=1).mean() / mean - 1),
        "drawn_deviation": float(drawn[:, 0].std() / SAMPLES),
        "deviation": deviation(1 / 7, block),
        "lost_mean": float(left.mean()),
        "lost_worst": float(left.max()),
        "lost_seen": float(lost(seen[None])[0]),
    }


def chi_squared(counts: NDArray[np.int64], mean: float, block: int) -> NDArray[np.float64]:
    """Return how far the samples of the ranks are from equal, blocks counted: 6 on average at random."""
    return ((counts - mean) ** 2 / (mean * block)).sum(axis=-1)


def deviation(share: float, block: int) -> float:
    """Return the standard deviation of the part of the data that a rank with this share gets at random."""
    return math.sqrt(share * (1 - share) * block / SAMPLES)


def lost(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the part of the data that is never used if all ranks make as many batches as the one with least."""
    steps = -(-counts.min(axis=-1) // BATCH)
    return 1 - np.minimum(counts, steps[:, None] * BATCH).sum(axis=-1) / SAMPLES


# ------------------------------------------------------------------ tables


def in_turns() -> str:
    """Return what dealing in turns gives each rank."""
    rows = []
    for entry in entries("in-turns"):
        truncated = entry["policies"]["truncate"]
        rows.append(
            [
                str(entry["block"]),
                summarise_counts(entry["counts"]),
                summarise_counts(entry["batches_floor"]),
                summarise_counts(entry["batches_ceil"]),
                f"in step {min(entry['batches_ceil']) + 1}" if entry["deadlock"] else "no",
                f"{truncated['dropped']} ({percent(truncated['dropped'] / SAMPLES)})",
            ]
        )
    titles = [
        "block",
        "samples",
        "full batches of 64 (floor)",
        "all (ceiling)",
        "deadlock",
        "min(batches) drops",
    ]
    return table(titles, rows, words=6)


def batches() -> str:
    """Return the batches of the draw in blocks of 2."""
    rows = []
    for size in (64, 4096):
        portions = RankPortions(SEEN[2], size)
        for name, numbers, policy in (
            ("full batches (floor)", portions.full_batches, "drop"),
            ("all batches (ceiling)", portions.batches, "truncate"),
            ("rounded", [round(count / size) for count in SEEN[2]], None),
        ):
            dropped = "" if policy is None else RankPortions(SEEN[2], size, policy).dropped
            told = f"{dropped} ({percent(dropped / SAMPLES)})" if policy else "no loader makes them"
            rows.append([str(size), name, " ".join(map(str, numbers)), told])
    return table(["batch", "", "batches of the seven workers", "min(batches) drops"], rows, words=4)


def far(rows: list[dict[str, Any]]) -> str:
    """Return how far what was seen is from what is to be expected."""
    titles = ["block", "seen", "χ²", "draws as far", "largest above its share", "expected", "1 in 1000 above"]
    cells = [
        [
            str(row["block"]),
            " ".join(map(str, row["seen"])),
            f"{row['chi_squared']:.1f}",
            f"{row['draws_as_far']:.1%}",
            *(percent(row[name]) for name in ("largest", "expected_largest", "unlikely_largest")),
        ]
        for row in rows
    ]
    return table(titles, cells, words=2)


def grows(rows: list[dict[str, Any]]) -> str:
    """Return how the spread grows with the block."""
    exact = {entry["block"]: entry["imbalance"] for entry in entries("in-turns")}
    titles = ["block", "√(w(1−w)k/N)", "of 10,000 draws", "largest expected", "of 10,000 draws", "÷ √block"]
    titles += ["in turns", "never more than"]
    cells = [
        [
            str(row["block"]),
            percent(row["deviation"]),
            percent(row["drawn_deviation"]),
            percent(row["expected_largest"]),
            percent(row["drawn_largest"]),
            percent(row["expected_largest"] / math.sqrt(row["block"])),
            percent(exact[row["block"]]["in_turns"]),
            percent(exact[row["block"]]["bound_in_turns"]),
        ]
        for row in rows
    ]
    return table(titles, cells)


def drops(rows: list[dict[str, Any]]) -> str:
    """Return what an epoch of min(batches) steps leaves out."""
    exact = {entry["block"]: entry["policies"]["truncate"] for entry in entries("in-turns")}
    titles = ["block", "in turns", "at random, mean", "worst of 10,000 draws", "of the draw above"]
    cells = [
        [
            str(row["block"]),
            percent(exact[row["block"]]["dropped"] / SAMPLES),
            *(percent(row[name]) for name in ("lost_mean", "lost_worst", "lost_seen")),
        ]
        for row in rows
    ]
    return table(titles, cells)


def safe() -> str:
    """Return which sizes are safe."""
    found = entries("in-turns")
    rows = [
        [
            "blocks, batch 64",
            format_ranges(found[0]["safe_blocks"], most=16),
            f"{found[0]['safe_blocks_tried']}",
        ]
    ]
    rows += [
        [
            f"batch sizes, block {entry['block']}",
            format_ranges(entry["safe_batch_sizes"], most=12),
            f"{entry['safe_batch_sizes_tried']}",
        ]
        for entry in found
    ]
    return table(["", "safe", "of all up to"], rows, words=2)


def policies() -> str:
    """Return what each policy makes of the shares .25 .25 .10 .40."""
    rows = []
    (entry,) = entries("shares")
    for name, each in entry["policies"].items():
        if each["steps"] is None:
            rows.append([name, "", "", "", "", "", "refused"])
            continue
        end = "hangs" if each["deadlock"] else "yes" if each["exact"] else "no"
        amounts = [
            f"{each[key]} ({percent(each[key] / SAMPLES)})" if each[key] else "0"
            for key in ("dropped", "repeated")
        ]
        rows.append([name, str(each["steps"]), *amounts, str(each["empty"]), percent(each["moved"]), end])
    titles = [
        "policy",
        "steps",
        "never used",
        "used again",
        "empty batches",
        "weight moved",
        "each sample once",
    ]
    return table(titles, rows)


def main() -> None:
    """Write seen.json and fill all tables."""
    rows = [beside_draws(block) for block in SEEN]
    (HERE / "seen.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    output = (HERE / "output.txt").read_text(encoding="utf-8")
    told = "\n".join(f"    {line}".rstrip() for line in output.strip().splitlines())
    text = DOCS.read_text(encoding="utf-8")
    for name, block in {
        "output": told,
        "in-turns": in_turns(),
        "batches": batches(),
        "far": far(rows),
        "grows": grows(rows),
        "drops": drops(rows),
        "safe": safe(),
        "policies": policies(),
    }.items():
        text = fill(text, name, block)
    DOCS.write_text(text, encoding="utf-8")
    print(DOCS)


if __name__ == "__main__":
    typer.run(main)
