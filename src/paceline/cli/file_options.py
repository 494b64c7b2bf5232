"""Options that name the files which several commands write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["CsvOption", "JsonOption", "JsonRowsOption"]

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")]
JsonRowsOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write machine, settings and rows there.")
]
CsvOption = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table there.")]
