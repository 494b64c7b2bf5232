"""Options that name the files which several commands, and benchmarks, write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["CsvOption", "JsonOption", "JsonResultOption", "JsonRowsOption"]

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")]
JsonRowsOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write machine, settings and rows there.")
]
JsonResultOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")
]
CsvOption = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table there.")]
