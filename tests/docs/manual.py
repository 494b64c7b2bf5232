"""Pages of the manual, and the code blocks in them.

A block is fenced, or indented by four spaces. `<!-- not run: why -->` on the line before it says why a test leaves it
alone; without a reason it is no mark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {
        path
        for pattern in (
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "docs/**/*.md",
            "benchmarks/**/README.md",
            "tests/**/README.md",
        )
        for path in ROOT.glob(pattern)
    }
)
_FENCE = re.compile(r"^( *)(```+|~~~+) *([\w-]*)(?: +title=\"([^\"]+)\")?[^\n]*$")
_MARK = re.compile(r"<!-- not run: \S.* -->")


@dataclass(frozen=True)
class Block:
    """A piece of code on a page; `line` is where it begins, `language` is empty where it is indented.

    A complete file has its name as `title`, which the site shows: ```python title="train.py".
    """

    page: Path
    line: int
    language: str
    text: str
    run: bool
    title: str = ""

    @property
    def place(self) -> str:
        """Return page and line, for a message."""
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    """Return the page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return all code of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found, at = [], 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        indented = lines[at].startswith("    ") and (
            at == 0 or not lines[at - 1].strip() or _MARK.match(lines[at - 1])
        )
        if not fence and not indented:
            at += 1
            continue
        run = at == 0 or not _MARK.fullmatch(lines[at - 1].strip())
        if fence:
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[2]), len(lines))
            text, language, title, after = lines[at + 1 : end], fence[3], fence[4] or "", end + 1
        else:
            end = next((i for i in range(at, len(lines)) if lines[i][:4].strip()), len(lines))
            text, language, title, after = [line[4:] for line in lines[at:end]], "", "", end
        found.append(Block(page, at + 1, language, "\n".join(text).rstrip() + "\n", run, title))
        at = after
    return found


def prose_with_code(page: Path) -> str:
    """Return a page's text without blocks; lines of blocks are empty, so that line numbers stay."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        fences = 2 if lines[block.line - 1].lstrip().startswith(("```", "~~~")) else 0
        end = block.line - 1 + block.text.count("\n") + fences
        lines[block.line - 1 : end] = [""] * len(lines[block.line - 1 : end])
    return "\n".join(lines)


def prose(page: Path) -> str:
    """Return a page's text without any code."""
    return re.sub(r"`[^`\n]*`", "", prose_with_code(page))
