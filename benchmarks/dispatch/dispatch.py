"""Tables of README.md: blocks of data dealt in turns and at random, and draws that somebody has seen.

python benchmarks/dispatch/dispatch.py run       (seen.json: the draws seen, beside 10,000 of ours)
python benchmarks/dispatch/dispatch.py table
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.progress import progress
from paceline._core.files import write_json
from paceline._core.keyed_random import derive_key
from paceline.data.sampling.block_dispatch import draw_block_counts
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import RankPortions
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.plan.dispatch_text import format_ranges, percent, summarise_counts
from paceline.tools.plan.imbalance_statistics import expected_excess, largest_excess, unlikely_excess

SAMPLES, SEVEN, BATCH, DRAWS = 50_000, RankShares.equal(7), 64, 10_000
SEEN = {
    2: (7054, 6904, 7180, 7274, 7280, 7222, 7086),
    10: (6870, 7060, 7190, 7200, 7010, 7570, 7100),
    100: (9100, 7100, 7900, 6300, 7800, 6900, 4900),
    1000: (6000, 9000, 10_000, 6000, 6000, 4000, 9000),
}
"""Draws at random that somebody has seen: block size, samples of seven workers."""

bench = Benchmark(__file__)


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Compute what was seen beside what is to be expected."""
    path = bench.output(json_file, "seen")
    write_json(path, [beside_draws(block) for block in progress("block sizes", SEEN)])
    print(path)


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
        "chi_squared": float(chi_squared(seen, block)),
        "draws_as_far": float((chi_squared(drawn, block) >= chi_squared(seen, block)).mean()),
        "largest": largest_excess(SEEN[block], SEVEN),
        "expected_largest": expected_excess(SEVEN, blocks),
        "unlikely_largest": unlikely_excess(SEVEN, blocks),
        "drawn_largest": float(drawn.max(axis=1).mean() / mean - 1),
        "drawn_deviation": float(drawn[:, 0].std() / SAMPLES),
        "deviation": math.sqrt(1 / 7 * (1 - 1 / 7) * block / SAMPLES),
        "lost_mean": float(left.mean()),
        "lost_worst": float(left.max()),
        "lost_seen": float(lost(seen[None])[0]),
    }


def chi_squared(counts: NDArray[np.int64], block: int) -> NDArray[np.float64]:
    """Return how far the samples of the ranks are from equal, blocks counted: 6 on average at random."""
    mean = SAMPLES / 7
    return ((counts - mean) ** 2 / (mean * block)).sum(axis=-1)


def lost(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the part of the data that is never used if all ranks make as many batches as the one with least."""
    steps = -(-counts.min(axis=-1) // BATCH)
    return 1 - np.minimum(counts, steps[:, None] * BATCH).sum(axis=-1) / SAMPLES


# ------------------------------------------------------------------ tables


def entries(folder: str) -> list[dict[str, Any]]:
    """Return what `paceline data` wrote there."""
    return bench.read(f"{folder}/dispatch")["entries"]


def shares(row: dict[str, Any], *names: str) -> list[str]:
    """Return some fields of a row in per cent."""
    return [percent(row[name]) for name in names]


def samples(count: int) -> str:
    """Return a number of samples and its part of the data."""
    return f"{count} ({percent(count / SAMPLES)})"


def in_turns() -> str:
    """Return the samples and batches of each rank if blocks are dealt in turns."""
    rows = []
    for entry in entries("in-turns"):
        counts = (summarise_counts(entry[key]) for key in ("counts", "batches_floor", "batches_ceil"))
        deadlock = f"in step {min(entry['batches_ceil']) + 1}" if entry["deadlock"] else "no"
        rows.append(
            [str(entry["block"]), *counts, deadlock, samples(entry["policies"]["truncate"]["dropped"])]
        )
    titles = ["block", "samples", "full batches of 64 (floor)", "all (ceiling)", "deadlock"]
    return table([*titles, "min(batches) drops"], rows, words=6)


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
            dropped = (
                samples(RankPortions(SEEN[2], size, policy).dropped) if policy else "no loader makes them"
            )
            rows.append([str(size), name, " ".join(map(str, numbers)), dropped])
    return table(["batch", "", "batches of the seven workers", "min(batches) drops"], rows, words=4)


def far(rows: list[dict[str, Any]]) -> str:
    """Return how far what was seen is from what is to be expected."""
    cells = []
    for row in rows:
        chi_squared, as_far = f"{row['chi_squared']:.1f}", f"{row['draws_as_far']:.1%}"
        largest = shares(row, "largest", "expected_largest", "unlikely_largest")
        cells.append([str(row["block"]), " ".join(map(str, row["seen"])), chi_squared, as_far, *largest])
    titles = ["block", "seen", "χ²", "draws as far", "largest above its share", "expected", "1 in 1000 above"]
    return table(titles, cells, words=2)


def grows(rows: list[dict[str, Any]]) -> str:
    """Return how the spread grows with the block."""
    exact = {entry["block"]: entry["imbalance"] for entry in entries("in-turns")}
    cells = []
    for row in rows:
        drawn = shares(row, "deviation", "drawn_deviation", "expected_largest", "drawn_largest")
        scaled = percent(row["expected_largest"] / math.sqrt(row["block"]))
        in_turns = shares(exact[row["block"]], "in_turns", "bound_in_turns")
        cells.append([str(row["block"]), *drawn, scaled, *in_turns])
    titles = ["block", "√(w(1−w)k/N)", "of 10,000 draws", "largest expected", "of 10,000 draws", "÷ √block"]
    return table([*titles, "in turns", "never more than"], cells)


def drops(rows: list[dict[str, Any]]) -> str:
    """Return what an epoch of min(batches) steps leaves out."""
    exact = {entry["block"]: entry["policies"]["truncate"]["dropped"] for entry in entries("in-turns")}
    cells = []
    for row in rows:
        at_random = shares(row, "lost_mean", "lost_worst", "lost_seen")
        cells.append([str(row["block"]), percent(exact[row["block"]] / SAMPLES), *at_random])
    titles = ["block", "in turns", "at random, mean", "worst of 10,000 draws", "of the draw above"]
    return table(titles, cells)


def safe() -> str:
    """Return which sizes are safe."""
    found = entries("in-turns")
    rows = [
        ["blocks, batch 64", format_ranges(found[0]["safe_blocks"], most=16), found[0]["safe_blocks_tried"]]
    ]
    for entry in found:
        sizes = format_ranges(entry["safe_batch_sizes"], most=12)
        rows.append([f"batch sizes, block {entry['block']}", sizes, entry["safe_batch_sizes_tried"]])
    return table(["", "safe", "of all up to"], [list(map(str, row)) for row in rows], words=2)


def policies() -> str:
    """Return what each policy makes of the shares .25 .25 .10 .40."""
    rows = []
    (entry,) = entries("shares")
    for name, each in entry["policies"].items():
        if each["steps"] is None:
            rows.append([name, "", "", "", "", "", "refused"])
            continue
        end = "hangs" if each["deadlock"] else "yes" if each["exact"] else "no"
        amounts = [samples(each[key]) if each[key] else "0" for key in ("dropped", "repeated")]
        rows.append([name, str(each["steps"]), *amounts, str(each["empty"]), percent(each["moved"]), end])
    titles = ["policy", "steps", "never used", "used again", "empty batches", "weight moved"]
    return table([*titles, "each sample once"], rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md."""
    rows, output = bench.read("seen"), (bench.folder / "output.txt").read_text(encoding="utf-8").strip()
    return {
        "output": "\n".join(f"    {line}".rstrip() for line in output.splitlines()),
        "in-turns": in_turns(),
        "batches": batches(),
        "far": far(rows),
        "grows": grows(rows),
        "drops": drops(rows),
        "safe": safe(),
        "policies": policies(),
    }


if __name__ == "__main__":
    bench.main()
