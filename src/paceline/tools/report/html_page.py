"""What all pages are made of: tiles, figures, listings, and one HTML file. The only file that needs jinja2.

A page holds everything it shows, loads nothing, follows the reader's choice of light or dark and can be read on a
phone: each chart is in it twice, drawn wide and narrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.tools.report.charts.chart_style import COLOUR_OF_PHASE, Chart
from paceline.tools.report.run.bucket_timeline import BucketView
from paceline.tools.report.run.bytes_sent import SentBytes

__all__ = ["PageFigure", "PageTable", "ReportPage", "Tile", "responsive_figure", "write_page"]


@dataclass(frozen=True)
class Tile:
    """A number with its name above and a note below."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class PageFigure:
    """A chart as the page shows it: two drawings, what it tells in words, and perhaps a table (head first).

    The last column of a table may hold `wrap_last`, which are wrapped.
    """

    title: str
    caption: str
    wide_svg: str
    narrow_svg: str
    table: Sequence[Sequence[str]] = ()
    wrap_last: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table of words (head first) with a title, and what it tells."""

    title: str
    table: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class ReportPage:
    """All that a page shows, from top to bottom.

    Attributes:
        title, subtitle, command: on top. notes: for the reader, each one sentence. sentences: the gist.
        actions: what to do, how, and what that would bring; each three texts.
        tiles, figures, buckets, sent, listings: see there. sample: text that the model generated.
        groups: facts by title.
    """

    title: str
    subtitle: str
    sentences: Sequence[str]
    command: str = ""
    notes: Sequence[str] = ()
    actions: Sequence[tuple[str, str, str]] = ()
    tiles: Sequence[Tile] = ()
    figures: Sequence[PageFigure] = ()
    buckets: BucketView | None = None
    sent: SentBytes | None = None
    listings: Sequence[PageTable] = ()
    sample: str = ""
    groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def html(self) -> str:
        """Return the page.

        Raises:
            UsageError: the ``report`` extra is not installed.
        """
        return _template().render(page=self, colour_of_phase=COLOUR_OF_PHASE)


def responsive_figure(
    title: str,
    caption: str,
    name: str,
    draw: Callable[[bool], Chart],
    table: Sequence[Sequence[str]] = (),
    wrap_last: bool = False,
) -> PageFigure:
    """Return a figure drawn for a desk and for a phone; `name` keeps its ids apart from other figures'."""
    wide_svg, narrow_svg = draw(True).inline_svg(f"{name}-desk"), draw(False).inline_svg(f"{name}-phone")
    return PageFigure(title, caption, wide_svg, narrow_svg, table, wrap_last)


def write_page(folder: Path, page: str) -> Path:
    """Write ``report.html`` into a folder and return its path; the file is whole or not there at all.

    Raises:
        UsageError: the folder can't be written.
    """
    path, growing = folder / "report.html", folder / f".report-{os.getpid()}.tmp"
    try:
        growing.write_text(page, encoding="utf-8")
        os.replace(growing, path)
    except OSError as error:
        growing.unlink(missing_ok=True)
        raise UsageError(
            f"can't write {path}: {error.strerror}", remedy="make the folder writable"
        ) from error
    return path


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise UsageError(
            "the report needs jinja2, which is not installed", remedy="pip install 'paceline[report]'"
        ) from error
    source = files("paceline.tools.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    room = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return room.from_string(source)
