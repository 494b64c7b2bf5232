"""Shows the XXL model's figures, each with its derivation; ``paceline plan memory --model xxl`` calls it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import typer

from paceline.plan.derived import Derived

__all__ = ["show", "show_derived"]

_WIDTH, _INDENT = 112, "    "


def show() -> None:
    """Print every figure of the XXL model: what it is, its formula with numbers, why, and what people get wrong."""
    from paceline.plan.xxl import derive

    typer.echo("XXL: 126 blocks of two linear layers, 16384 → 53248 → 16384; M is the memory of a device.\n")
    show_derived(derive())


def show_derived(figures: Sequence[Derived]) -> None:
    """Print figures with their derivations, one after another."""
    for figure in figures:
        typer.echo(f"{figure.what}: {figure.shown}")
        lines = [
            figure.formula,
            figure.why and f"since {figure.why}",
            figure.wrong and f"wrong: {figure.wrong}",
        ]
        for line in filter(None, lines):
            typer.echo(textwrap.fill(line, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))
