"""SVG text of a drawn chart, for tests of what charts say."""

from __future__ import annotations

import tempfile
from pathlib import Path


def svg_of(chart) -> str:
    """Return a chart as SVG, whose texts are text."""
    with tempfile.TemporaryDirectory() as folder:
        return chart.save(Path(folder, "chart.svg")).read_text()
