"""``paceline checkpoint``: lists the checkpoints of a run, verifies them, and exports their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_bytes
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.storage.local_folder import LocalFiles, LocalFolder
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.result_files import check_writable

__all__ = ["app"]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint.

    Attributes:
        path: its folder.
        manifest: None: damaged.
        problem: what is damaged; empty: intact; None: its files were not read.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        record: dict[str, Any] = {"path": str(self.path), "problem": self.problem}
        if self.manifest is not None:
            step, ranks, nbytes = self.manifest.step, self.manifest.ranks, self.manifest.nbytes
            record |= {"step": step, "ranks": ranks, "nbytes": nbytes, "written": dict(self.manifest.written)}
        return record


app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

FolderArgument = Annotated[Path, Argument(metavar="FOLDER", help="Folder of a run, or of its checkpoints.")]


@app.command("ls")
def ls(folder: FolderArgument, json_file: JsonOption = None) -> None:
    """List the checkpoints of a run, newest first. Exits with 1 if a manifest is damaged."""
    _show(folder, json_file, verify=False)


@app.command("verify")
def verify(folder: FolderArgument, json_file: JsonOption = None) -> None:
    """Read every file of a run's checkpoints and compare all checksums. Exits with 1 if one is damaged."""
    _show(folder, json_file, verify=True)


@app.command("export")
def export(
    folder: FolderArgument,
    file: Annotated[Path, Argument(metavar="FILE", help="The .safetensors file to write.")],
    model_name: Annotated[str, own("NAME", "Name of the model to export, if there are several.")] = "model",
) -> None:
    """Write the weights of the newest intact checkpoint to a .safetensors file."""
    from paceline.checkpoint.interop.weights_export import export_weights

    checkpoints, _ = _find(folder)
    check_writable(file, "FILE")
    written = export_weights(checkpoints, file, model=model_name)
    typer.echo(f"weights: {written} ({format_bytes(written.stat().st_size)})")


def _find(folder: Path) -> tuple[Path, list[Path]]:
    """Return the folder of checkpoints, and the checkpoints in it, newest first.

    Raises:
        UsageError: there is none.
    """
    checkpoints = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    complete = [checkpoints / name for name in LocalFolder(checkpoints).names()]
    if not complete:
        raise UsageError(
            f"no checkpoint in {str(checkpoints)!r}", remedy="name the folder passed to paceline.Checkpoint"
        )
    return checkpoints, complete


def _show(folder: Path, json_file: Path | None, *, verify: bool) -> None:
    """Print the checkpoints and what is damaged, write them as JSON, and exit with 1 after damage."""
    _, complete = _find(folder)
    if json_file is not None:
        check_writable(json_file, "--json")
    rows = [_read_row(path, verify) for path in complete]
    _print_table(rows)
    for row in rows:
        if row.problem:
            problem = f"{row.path.name}: {row.problem}"
            Console().print(problem, style="red", highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, [row.to_json() for row in rows], indent=2)
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _read_row(path: Path, verify: bool) -> CheckpointRow:
    try:
        manifest = Manifest.read(LocalFiles(path).read)
    except DamagedCheckpoint as error:
        return CheckpointRow(path, None, str(error))
    if not verify:
        return CheckpointRow(path, manifest, None)
    from paceline.checkpoint.newest_checkpoint import find_problem

    return CheckpointRow(path, manifest, find_problem(LocalFiles(path)))


def _print_table(rows: list[CheckpointRow]) -> None:
    table = make_table(("checkpoint", "step", "ranks", "size", "written", "state"), [])
    for row in rows:
        state = "not read" if row.problem is None else "DAMAGED" if row.problem else "intact"
        manifest = row.manifest
        if manifest is None:
            table.add_row(row.path.name, "", "", "", "", "DAMAGED", style="red")
        else:
            numbers = str(manifest.step), str(manifest.ranks), format_bytes(manifest.nbytes)
            table.add_row(row.path.name, *numbers, manifest.written.get("at", ""), state)
    print_wide(table)
