"""Finds the manual's command lines, and splits them as a shell would."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from manual import blocks, prose_with_code

_SHELLS = {"sh", "console", "bash", ""}
_STARTS = re.compile(
    r"(?:\$ )?(?:\w+=\S+ |\w+=\"[^\"]*\" )*(paceline|python|torchrun|mpiexec|make|pip|srun|sbatch)\b"
)
_ENDS = {"&", "&&", ";", "|", ">"}
_SPAN = re.compile(r"`(paceline [a-z][^`]*)`")


@dataclass(frozen=True)
class Line:
    """One command line: where it stands, and its words without those of the shell."""

    place: str
    words: tuple[str, ...]


def command_lines(page: Path) -> list[Line]:
    """Return the command lines of a page's blocks."""
    found = []
    for block in blocks(page):
        if block.language not in _SHELLS:
            continue
        joined = re.sub(r" *\\\n\s*", " ", block.text)
        for line in joined.splitlines():
            started = _STARTS.match(line)
            if started:
                found.append(Line(block.place, tuple(_words(line.removeprefix("$ ")))))
    return found


def spans(page: Path) -> list[Line]:
    """Return the `paceline …` commands in running text."""
    return [
        Line(f"{page.name}: `{text}`", tuple(text.split())) for text in _SPAN.findall(prose_with_code(page))
    ]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    for at, word in enumerate(words):
        if word in _ENDS:
            return words[:at]
    return words
