"""``paceline checkpoint``: what checkpoints are there, whether they are intact, and their weights for use elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline._core.files import write_json
from paceline._core.format import format_bytes
from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.checkpoint.format.manifest import Manifest
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.tools.result_files import check_writable

__all__ = ["checkpoint"]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint; `problem` says what is wrong with it, None: its files were not read."""

    path: Path
    manifest: Manifest | None
    problem: str | None

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        told: dict[str, Any] = {"path": str(self.path), "problem": self.problem}
        if self.manifest is not None:
            told |= {"step": self.manifest.step, "ranks": self.manifest.ranks, "nbytes": self.manifest.nbytes}
            told |= {"written": dict(self.manifest.written)}
        return told


def checkpoint(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or that of its checkpoints.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare all checksums.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the weights of the newest intact one to this .safetensors file."),
    ] = None,
    model: Annotated[str, typer.Option(help="Which model's, where there are several.")] = "model",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was found as JSON.")] = None,
) -> None:
    """Show the checkpoints of a run, newest first; --verify reads them whole. Exit code 1: one is damaged."""
    place = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    complete = CheckpointFolder(place).complete()
    if not complete:
        raise UsageError(
            f"no checkpoint in {str(place)!r}", remedy="name the folder that was given to paceline.Checkpoint"
        )
    if json_file is not None:
        check_writable(json_file, "--json")
    if export is not None:
        check_writable(export, "--export")
    rows = [_look(path, verify) for path in complete]
    console = Console()
    console.print(_table(rows))
    for row in rows:
        if row.problem:
            console.print(f"{row.path.name}: {row.problem}", style="red", highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, [row.plain() for row in rows], indent=2)
    if export is not None:
        from paceline.checkpoint.weights_export import export_weights

        written = export_weights(place, export, model=model)
        console.print(f"weights: {written} ({format_bytes(written.stat().st_size)})", soft_wrap=True)
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _look(path: Path, verify: bool) -> CheckpointRow:
    try:
        manifest = Manifest.read(path)
    except DamagedCheckpoint as error:
        return CheckpointRow(path, None, str(error))
    if not verify:
        return CheckpointRow(path, manifest, None)
    from paceline.checkpoint.resume import find_problem

    return CheckpointRow(path, manifest, find_problem(path))


def _table(rows: list[CheckpointRow]) -> Table:
    table = Table("checkpoint", "step", "ranks", "size", "written", "state", box=None, header_style="bold")
    for row in rows:
        state = "not read" if row.problem is None else "DAMAGED" if row.problem else "intact"
        if row.manifest is None:
            table.add_row(row.path.name, "", "", "", "", "DAMAGED", style="red")
        else:
            told = row.manifest
            numbers = str(told.step), str(told.ranks), format_bytes(told.nbytes)
            table.add_row(row.path.name, *numbers, told.written.get("at", ""), state)
    return table
