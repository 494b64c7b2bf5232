"""Tables of measured and predicted collectives: ``python benchmarks/collectives/collectives.py table``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline._core.format import format_size
from paceline.cost_model.collective_prediction import PredictionError
from paceline.cost_model.cost_forms import MESSAGES_FORM, CostForm
from paceline.cost_model.fit_measurements import MeasuredPoint, held_out_ranks, held_out_sizes
from paceline.tools.bench.collectives.collectives_rows import CollectiveRow, read_collectives

MB = 1_000_000

bench = Benchmark(__file__, docs=["collectives.md"])


def times() -> str:
    """Return milliseconds and busbw of every backend by ranks and size."""
    rows = rows_of("loopback")
    names = backends(rows)
    cells = []
    for ranks, nbytes, of_backend in cases(rows):
        found = [of_backend.get(name) for name in names]
        shown = [milliseconds(row.times.median_s) if row else "" for row in found]
        shown += [f"{row.busbw / 1e9:.2f}" if row else "" for row in found]
        cells.append([str(ranks), format_size(nbytes), *shown])
    titles = [*(f"{name}, ms" for name in names), *(f"{name}, GB/s" for name in names)]
    return table(["ranks", "S", *titles], cells)


def claims() -> str:
    """Return how each backend's times grow with size and ranks, and its bandwidth beside that of 100 MB."""
    rows = rows_of("loopback")
    cells = []
    for backend in backends(rows):
        seconds = {(row.ranks, row.nbytes): row.times.median_s for row in rows if row.backend == backend}
        for ranks in sorted({row.ranks for row in rows}):
            sizes = (1, 10, 100, 1024)
            at = [seconds.get((ranks, size * MB)) for size in sizes]
            rates = [size / one if one else None for size, one in zip(sizes, at, strict=True)]
            steps = [ratio(more, less) for less, more in pairwise(at)]
            grown = ratio(at[2], seconds.get((2, 100 * MB)))
            flat = [ratio(rates[each], rates[2]) for each in (0, 1, 3)]
            cells.append([backend, str(ranks), *steps, grown, *flat])
    titles = ["1 → 10 MB", "10 → 100 MB", "100 → 1024 MB", "time ÷ 2 ranks'", "1 MB", "10 MB", "1024 MB"]
    return table(["backend", "ranks", *titles], cells)


def model() -> str:
    """Return how well times are predicted: by the algorithm's own terms, and by αP + βn."""
    cells = []
    for network, files in (("loopback", ["sweep"]), ("star, 1 Gbit/s", ["lab-2", "lab-3", "lab-4"])):
        rows = [row for file in files for row in rows_of(file)]
        for backend in backends(rows):
            points = [
                MeasuredPoint(row.nbytes, row.ranks, row.times.median_s)
                for row in rows
                if row.backend == backend and row.correct
            ]
            name = backend.removeprefix("schedule:")
            forms = None if name == backend else (CostForm(name), CostForm(name, shared=True))
            sizes, ranks = errors(points, forms=forms)
            (four, _) = errors([point for point in points if point.ranks == 4], forms=forms)
            plain = errors(points, forms=[MESSAGES_FORM], max_segments=1, per_ranks=False)
            cells.append([network, backend, sizes, four, ranks, *plain])
    titles = ["sizes", "sizes, 4 ranks", "ranks", "αP + βn: sizes", "αP + βn: ranks"]
    return table(["network", "backend", *titles], cells, words=2)


def errors(points: Sequence[MeasuredPoint], **options: Any) -> tuple[str, str]:
    """Return median errors of held-out sizes, and of held-out numbers of ranks from 1 MB on."""
    sizes = PredictionError.of(held_out_sizes(points, "all-reduce", **options))
    ranks = PredictionError.of(held_out_ranks(points, "all-reduce", **options), least_nbytes=MB)
    return tuple("" if error is None else f"{error.median:.1%}" for error in (sizes, ranks))


def schedules() -> str:
    """Return our schedules over gloo's send and receive beside gloo's own all-reduce."""
    cells = []
    files = (("loopback", "schedules"), ("star, 1 Gbit/s", "lab-4"), ("star, 1 Gbit/s", "lab-2"))
    for network, file in files:
        for ranks, nbytes, of_backend in cases([row for row in rows_of(file) if row.nbytes >= 10 * MB]):
            gloo, ring = (of_backend[name].times.median_s for name in ("gloo", "schedule:ring"))
            shown = [milliseconds(gloo), milliseconds(ring), f"{ring / gloo:.2f}"]
            cells.append([network, str(ranks), format_size(nbytes), *shown])
    return table(["network", "ranks", "S", "gloo, ms", "our ring, ms", "ratio"], cells)


def rows_of(name: str) -> Sequence[CollectiveRow]:
    """Return the rows of a result, of a file or of a folder."""
    found = bench.folder / name / "collectives.json"
    return read_collectives(found if found.exists() else bench.folder / f"{name}.json").rows


def backends(rows: Sequence[CollectiveRow]) -> list[str]:
    """Return the backends, in order."""
    return list(dict.fromkeys(row.backend for row in rows))


def cases(rows: Sequence[CollectiveRow]) -> Iterator[tuple[int, int, dict[str, CollectiveRow]]]:
    """Return the rows of each number of ranks and size, by backend."""
    for case in sorted({(row.ranks, row.nbytes) for row in rows}):
        yield *case, {row.backend: row for row in rows if (row.ranks, row.nbytes) == case}


def milliseconds(seconds: float) -> str:
    """Return three digits, or all before the point."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def ratio(more: float | None, less: float | None) -> str:
    """Return more ÷ less, if both were measured."""
    return "" if more is None or less is None else f"{more / less:.2f}"


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md and docs/collectives.md."""
    return {"times": times(), "claims": claims(), "model": model(), "schedules": schedules()}


if __name__ == "__main__":
    bench.main()
