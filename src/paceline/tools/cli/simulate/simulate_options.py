"""Parsing of option values shared by ``paceline simulate`` and ``paceline simulate async``."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from paceline._core.units import parse_share
from paceline.errors import UsageError

__all__ = ["parse_named", "parse_positive", "parse_share_below_1", "recorded_options", "write_results"]

_FILE_OPTIONS = ("json_file", "out")


def recorded_options(context: typer.Context) -> dict[str, Any]:
    """Return all options as given, for result files; without the names of those files."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in context.params.items()
        if name not in _FILE_OPTIONS
    }


def parse_named(option: str, text: str, parse: Callable[[str], float]) -> float:
    """Parse a quantity; errors name the option.

    Raises:
        UsageError: the text is not valid.
    """
    try:
        return float(parse(text))
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error


def parse_positive(option: str, text: str, parse: Callable[[str], float], example: str) -> float:
    """Parse a finite quantity above 0; errors name the option.

    Raises:
        UsageError: the text is not valid.
    """
    value = parse_named(option, text, parse)
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text}", remedy=f"pass more than 0, such as {example}")
    return value


def parse_share_below_1(option: str, text: str, example: str) -> float:
    """Parse a share from 0 to below 1; errors name the option.

    Raises:
        UsageError: the text is not valid.
    """
    value = parse_named(option, text, parse_share)
    if not 0 <= value < 1:
        raise UsageError(f"{option} {text}", remedy=f"pass a share below 100%, such as {example}")
    return value


def write_results(
    writer_of: Mapping[Path, Callable[..., object]], request: object, rows: Sequence[object]
) -> None:
    """Write all result files and print their paths.

    Args:
        writer_of: function that writes a path from request, rows and command line, by path.
        request: the request.
        rows: the rows.
    """
    command = shlex.join(["paceline", *sys.argv[1:]])
    for path, write in writer_of.items():
        write(path, request, rows, command)
        typer.echo(path)
