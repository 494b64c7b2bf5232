"""Writes the results of a full run into README.md."""

from __future__ import annotations

import os
import re
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import suite

__all__ = ["write"]

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- result: written by --full -->\n", "<!-- end of result -->"
CASE = re.compile(r"test_torch\[(\d)-(test_\w+)\]$")


def write(stats: dict[str, list[Any]]) -> None:
    """Write the result between its marks, if all of the suite was run and nothing of it failed.

    Args:
        stats: pytest's reports by outcome.
    """
    reports = {
        (outcome, *found.groups()): report
        for outcome in ("passed", "skipped", "failed", "error")
        for report in stats.get(outcome, [])
        if (found := CASE.search(report.nodeid))
    }
    passed = [(size, name) for outcome, size, name in reports if outcome == "passed"]
    skipped = {
        (size, name): report.longrepr[2].removeprefix("Skipped: ")
        for (outcome, size, name), report in reports.items()
        if outcome == "skipped"
    }
    whole = len(passed) + len(skipped) == len(reports) == len(suite.SIZES) * len(suite.names())
    if whole and suite.BACKEND == "paceline":
        before, after = README.read_text().split(BEGIN)[0], README.read_text().split(END)[1]
        README.write_text(before + BEGIN + _table(passed, skipped) + END + after)


def _table(passed: list[tuple[str, str]], skipped: dict[tuple[str, str], str]) -> str:
    names = {name for _, name in passed}
    sizes = Counter(size for size, _ in passed)
    reasons = Counter({name: reason for (_, name), reason in skipped.items() if name not in names}.values())
    lines = [
        f"{date.today():%d %B %Y}, torch {version('torch')}, {os.cpu_count()} cores: "
        f"**{len(names)} tests passed** ("
        + ", ".join(f"{count} on {size} ranks" for size, count in sorted(sizes.items()))
        + f"), none failed, {reasons.total()} are not run:",
        "",
        "| tests | reason |",
        "|---|---|",
        *(f"| {count} | {reason} |" for reason, count in reasons.most_common()),
    ]
    return "\n".join(lines) + "\n"
