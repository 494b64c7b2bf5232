"""How a program of measurements begins and ends: options from the command line, errors in one message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from paceline.errors import PacelineError

__all__ = ["run_program"]


def run_program(main: Callable[..., Any]) -> None:
    """Run `main` with the options of this process's command line, and exit with an error's message if it raises one.

    Args:
        main: its parameters are the options, as typer reads them.

    Raises:
        SystemExit: it has ended, well or with an error of Paceline's.
    """
    try:
        typer.run(main)
    except PacelineError as error:
        sys.exit(str(error))
