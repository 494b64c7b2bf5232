"""``paceline checkpoint``: lists and verifies checkpoints, exports their weights, and converts them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_bytes
from paceline.checkpoint.format.manifest import MANIFEST, Manifest
from paceline.checkpoint.storage.local_folder import LocalFiles, LocalFolder
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.result_files import check_writable

__all__ = ["app"]

_METADATA = ".metadata"  # of torch.distributed.checkpoint; its module imports torch


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint.

    Attributes:
        path: its folder.
        facts: step, ranks that wrote it, nbytes, what is known of when it was written, and its format: ``"paceline"``,
            ``"dcp"``, or ``"plain dcp"`` if torch.distributed.checkpoint wrote it alone. Empty: damaged.
        problem: what is damaged; empty: intact; None: its files were not read.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {"path": str(self.path), "problem": self.problem, **self.facts}


app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

FolderArgument = Annotated[
    Path, Argument(metavar="FOLDER", help="Folder of a run, or of its checkpoints, or a checkpoint.")
]
ModelName = Annotated[str, own("NAME", "Name of the model to export, if there are several.")]


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
    model_name: ModelName = "model",
) -> None:
    """Write the weights of the newest intact checkpoint to a .safetensors file."""
    from paceline.checkpoint.interop.weights_export import export_weights

    checkpoints, _ = _find(folder)
    check_writable(file, "FILE")
    written = export_weights(checkpoints, file, model=model_name)
    typer.echo(f"weights: {written} ({format_bytes(written.stat().st_size)})")


@app.command("convert")
def convert(
    source: Annotated[
        str,
        Argument(
            metavar="SOURCE",
            help="A checkpoint of Paceline's or of torch.distributed.checkpoint, a folder of them (the newest intact "
            "one), or the URL of one; a .safetensors file, or a Hugging Face folder.",
        ),
    ],
    target: Annotated[Path, Argument(metavar="TARGET", help="The folder to write, which must not exist.")],
    to: Annotated[str, own("FORMAT", "Format to write: paceline, dcp or hf.", "--to")],
    model_name: ModelName = "model",
    config: Annotated[
        Path | None,
        own("FOLDER", "With --to hf: copy config.json and the tokenizer from this folder."),
    ] = None,
) -> None:
    """Convert a checkpoint to another format, verified while it is read; no ranks and little memory are needed."""
    from paceline.checkpoint.interop.convert import convert_checkpoint

    notes = convert_checkpoint(source, target, to, _progress, model=model_name, config=config)
    nbytes = sum(file.stat().st_size for file in target.iterdir())
    typer.echo(f"{to}: {target} ({format_bytes(nbytes)})")
    for note in notes:
        typer.echo(f"note: {note}")


def _progress(total: int) -> AbstractContextManager[Callable[[], object]]:
    from paceline.tools.bench.progress_bar import ProgressBar

    return ProgressBar("tensors", total)


def _find(folder: Path) -> tuple[Path, list[Path]]:
    """Return the folder of checkpoints, or a checkpoint, and the checkpoints there, newest first.

    Raises:
        UsageError: there is none.
    """
    if (folder / MANIFEST).exists() or (folder / _METADATA).exists():
        return folder, [folder]
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
        facts = _facts(path)
    except DamagedCheckpoint as error:
        return CheckpointRow(path, problem=str(error))
    if not verify:
        return CheckpointRow(path, facts)
    from paceline.checkpoint.newest_checkpoint import find_problem

    return CheckpointRow(path, facts, find_problem(LocalFiles(path)))


def _facts(path: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint; DamagedCheckpoint: it has none that can be read."""
    files = LocalFiles(path)
    if (path / _METADATA).exists():
        from paceline.checkpoint.interop.dcp_reader import DcpReader, is_plain_dcp

        if is_plain_dcp(files):
            return _facts_of_dcp(DcpReader(files), path)
    manifest = Manifest.read(files.read)
    return {
        "step": manifest.step,
        "ranks": manifest.ranks,
        "nbytes": manifest.nbytes,
        "written": dict(manifest.written),
        "format": "dcp" if manifest.container == "dcp" else "paceline",
    }


def _facts_of_dcp(reader: Any, path: Path) -> dict[str, Any]:
    from paceline.checkpoint.interop.dcp_match import step_of_dcp

    at = datetime.fromtimestamp((path / _METADATA).stat().st_mtime).astimezone()
    facts = {
        "step": step_of_dcp(reader),
        "ranks": reader.index.writers,
        "nbytes": sum(item.nbytes for _, item in reader.index.items()),
        "written": {"at": at.isoformat(timespec="seconds")},
        "format": "plain dcp",
    }
    reader.close()
    return facts


def _print_table(rows: list[CheckpointRow]) -> None:
    table = make_table(("checkpoint", "step", "ranks", "size", "written", "state"), [])
    for row in rows:
        facts = row.facts
        state = "not read" if row.problem is None else "DAMAGED" if row.problem else "intact"
        if not facts:
            table.add_row(row.path.name, "", "", "", "", "DAMAGED", style="red")
            continue
        if facts["format"] == "plain dcp":
            state = f"DCP, {state}"
        step = "?" if facts["step"] is None else str(facts["step"])
        numbers = step, str(facts["ranks"]), format_bytes(facts["nbytes"])
        table.add_row(row.path.name, *numbers, facts["written"].get("at", ""), state)
    print_wide(table)
