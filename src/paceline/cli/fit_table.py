"""What ``paceline bench fit`` prints: for each operation the algorithm, its segments, and how well they predict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from paceline.plan.accuracy import Accuracy, Checked
from paceline.plan.fit import Fit
from paceline.plan.segments import Segment
from paceline.units import format_seconds, format_size

__all__ = ["FOOTER", "LARGE_NBYTES", "fit_table"]

LARGE_NBYTES = 1_000_000

FOOTER = (
    "α: per message. 1/β: per link of the algorithm, not bus bandwidth. ±: standard errors; none where a parameter\n"
    "is at its bound 0, or a line has no more points than parameters. n½: where half of the largest bandwidth is\n"
    "reached. Errors are medians of |predicted / measured − 1| (at most …). Sizes: every second one predicted from\n"
    "the others. Ranks: each number predicted from the others, over all sizes and over those of 1 MB and more.\n"
    "N ranks alone: their own α and β; the common ones, above them, are for other numbers of ranks.\n"
    "αP + βn: one line that knows the number of messages only. (assumed): one number of ranks can't tell."
)


def fit_table(rows: Sequence[tuple[str, Fit, Sequence[Checked], Accuracy | None]]) -> Table:
    """Return the table.

    Args:
        rows: backend, its fit, the predictions of numbers of ranks that were held out, and the error of αP + βn on
            sizes that were held out.
    """
    table = Table(box=None, pad_edge=False)
    for name in ("backend", "operation", "algorithm", "sizes"):
        table.add_column(name, no_wrap=True)
    for name in ("α", "1/β", "n½", "error, sizes", "ranks", "ranks, ≥ 1 MB", "αP + βn, sizes"):
        table.add_column(name, justify="right", no_wrap=True)
    for backend, fit, held_out, plain in rows:
        told = [
            format_size(fit.half_size(fit.ranks[-1])) if fit.segments[-1].line.beta else "",
            _share(fit.sizes_error),
            _share(fit.ranks_error),
            _share(Accuracy.of(held_out, least_nbytes=LARGE_NBYTES)),
            _share(plain),
        ]
        algorithm = f"{fit.form}{'' if fit.told else ' (assumed)'}"
        for at, segment in enumerate(fit.segments):
            names = [backend, fit.op, algorithm] if at == 0 else [""] * 3
            table.add_row(*names, *_cells(segment), *(told if at == 0 else [""] * 5))
        for ranks, segments in fit.own.items():
            for at, segment in enumerate(segments):
                alone = f"  {ranks} ranks alone" if at == 0 else ""
                table.add_row("", "", alone, *_cells(segment), *[""] * 5)
    return table


def _cells(segment: Segment) -> list[str]:
    """Return range of sizes, α and 1/β with their standard errors."""
    line = segment.line
    alpha = format_seconds(line.alpha) if line.alpha else "0"
    if line.alpha_error is not None:
        alpha += f" ± {format_seconds(line.alpha_error)}"
    rate = "" if not line.beta else f"{1e-9 / line.beta:.3g}"
    if line.beta and line.beta_error is not None:
        rate += f" ± {1e-9 * line.beta_error / line.beta**2:.2g}"
    return [
        f"{format_size(segment.low)} … {format_size(segment.high)}",
        alpha,
        f"{rate} GB/s" if rate else "∞",
    ]


def _share(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return ""
    return f"{100 * accuracy.median:.1f} % ({100 * accuracy.maximum:.0f} %)"
