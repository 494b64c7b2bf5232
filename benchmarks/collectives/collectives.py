"""Write what was measured into the tables of README.md and docs/collectives.md.

    python benchmarks/collectives/table.py

Reads the results beside this file; no figure there is typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import typer

from bench_harness.markdown import fill, table
from paceline._core.format import format_size
from paceline.cost_model.collective_fit import PredictionError
from paceline.cost_model.cost_forms import MESSAGES_FORM, CostForm
from paceline.cost_model.fit_measurements import MeasuredPoint, held_out_ranks, held_out_sizes
from paceline.tools.bench.collectives.collectives_rows import (
    CollectiveRow,
    CollectivesResult,
    read_collectives,
)

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "collectives.md"
MB = 1_000_000
LEAST_NBYTES = MB  # numbers of ranks never measured are asked for from here on


def main() -> None:
    """Fill all tables."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    blocks = {"times": times, "claims": claims, "model": model, "schedules": schedules}
    for name, block in blocks.items():
        text = fill(text, name, block())
    readme.write_text(text, encoding="utf-8")
    DOCS.write_text(fill(DOCS.read_text(encoding="utf-8"), "model", model()), encoding="utf-8")
    print(readme, DOCS, sep="\n")


def times() -> str:
    """Return milliseconds and busbw of every backend by ranks and size."""
    rows = _result("loopback").rows
    cells = []
    for ranks in _ranks(rows):
        for nbytes in _sizes(rows):
            of_case = {row.backend: row for row in rows if (row.ranks, row.nbytes) == (ranks, nbytes)}
            if of_case:
                found = [of_case.get(name) for name in _backends(rows)]
                shown = [_milliseconds(row.times.median_s) if row else "" for row in found]
                shown += [f"{row.busbw / 1e9:.2f}" if row else "" for row in found]
                cells.append([str(ranks), format_size(nbytes), *shown])
    names = _backends(rows)
    return table(
        ["ranks", "S", *(f"{name}, ms" for name in names), *(f"{name}, GB/s" for name in names)], cells
    )


def claims() -> str:
    """Return for each backend what the claims about size, processes and bandwidth come to."""
    rows = _result("loopback").rows
    cells = []
    for backend in _backends(rows):
        seconds = {(row.ranks, row.nbytes): row.times.median_s for row in rows if row.backend == backend}
        for ranks in _ranks(rows):
            at = [seconds.get((ranks, size)) for size in (MB, 10 * MB, 100 * MB, 1024 * MB)]
            steps = [_ratio(more, less) for less, more in pairwise(at)]
            grown = _ratio(seconds.get((ranks, 100 * MB)), seconds.get((2, 100 * MB)))
            rates = [
                None if one is None else size / one for size, one in zip((1, 10, 100, 1024), at, strict=True)
            ]
            flat = [_ratio(rate, rates[2]) for rate in (rates[0], rates[1], rates[3])]
            cells.append([backend, str(ranks), *steps, grown, *flat])
    titles = ["1 → 10 MB", "10 → 100 MB", "100 → 1024 MB", "time ÷ 2 ranks'", "1 MB", "10 MB", "1024 MB"]
    return table(["backend", "ranks", *titles], cells, words=1)


def model() -> str:
    """Return how well times are predicted: by the algorithm's own terms, and by αP + βn."""
    cells = []
    for network, files in (("loopback", ["sweep"]), ("star, 1 Gbit/s", ["lab-2", "lab-3", "lab-4"])):
        rows = [row for name in files for row in _result(name).rows]
        for backend in _backends(rows):
            points = [
                MeasuredPoint(row.nbytes, row.ranks, row.times.median_s)
                for row in rows
                if row.backend == backend and row.correct
            ]
            name = backend.removeprefix("schedule:")
            forms = None if name == backend else (CostForm(name), CostForm(name, shared=True))
            cells.append([network, backend, *_errors(points, forms)])
    titles = ["sizes", "sizes, 4 ranks", "ranks", "αP + βn: sizes", "αP + βn: ranks"]
    return table(["network", "backend", *titles], cells, words=2)


def schedules() -> str:
    """Return our schedules over gloo's send and receive beside gloo's own all-reduce."""
    cells = []
    for network, name in (
        ("loopback", "schedules"),
        ("star, 1 Gbit/s", "lab-4"),
        ("star, 1 Gbit/s", "lab-2"),
    ):
        rows = [row for row in _result(name).rows if row.nbytes >= 10 * MB]
        for ranks in _ranks(rows):
            for nbytes in _sizes(rows):
                of_case = {row.backend: row for row in rows if (row.ranks, row.nbytes) == (ranks, nbytes)}
                gloo, ring = of_case["gloo"].times.median_s, of_case["schedule:ring"].times.median_s
                shown = [_milliseconds(gloo), _milliseconds(ring), f"{ring / gloo:.2f}"]
                cells.append([network, str(ranks), format_size(nbytes), *shown])
    return table(["network", "ranks", "S", "gloo, ms", "our ring, ms", "ratio"], cells)


def _errors(points: Sequence[MeasuredPoint], forms: Sequence[CostForm] | None) -> list[str]:
    """Return median errors of held-out sizes (all, and 4 ranks alone) and of held-out numbers of ranks."""
    four = [point for point in points if point.ranks == 4]
    usual = [
        PredictionError.of(held_out_sizes(points, "all-reduce", forms=forms)),
        PredictionError.of(held_out_sizes(four, "all-reduce", forms=forms)),
        PredictionError.of(held_out_ranks(points, "all-reduce", forms=forms), least_nbytes=LEAST_NBYTES),
    ]
    simple = {"forms": [MESSAGES_FORM], "max_segments": 1, "per_ranks": False}
    plain = [
        PredictionError.of(held_out_sizes(points, "all-reduce", **simple)),
        PredictionError.of(held_out_ranks(points, "all-reduce", **simple), least_nbytes=LEAST_NBYTES),
    ]
    return ["" if one is None else f"{one.median:.1%}" for one in (*usual, *plain)]


def _result(name: str) -> CollectivesResult:
    found = HERE / name / "collectives.json"
    return read_collectives(found if found.exists() else HERE / f"{name}.json")


def _backends(rows: Iterable[CollectiveRow]) -> list[str]:
    return list(dict.fromkeys(row.backend for row in rows))


def _ranks(rows: Iterable[CollectiveRow]) -> list[int]:
    return sorted({row.ranks for row in rows})


def _sizes(rows: Iterable[CollectiveRow]) -> list[int]:
    return sorted({row.nbytes for row in rows})


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _ratio(more: float | None, less: float | None) -> str:
    return "" if more is None or less is None else f"{more / less:.2f}"


if __name__ == "__main__":
    typer.run(main)
