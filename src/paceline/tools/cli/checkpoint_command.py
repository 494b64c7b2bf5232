"""``paceline checkpoint``: lists and verifies checkpoints, exports their weights, and converts them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_bytes
from paceline.checkpoint.format.manifest import METADATA, Manifest
from paceline.errors import DamagedCheckpoint
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own
from paceline.tools.console_table import make_table, print_wide
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles
    from paceline.checkpoint.storage.stores import ReadableStore

__all__ = ["app"]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint.

    Attributes:
        name: of its folder.
        location: path or URL of its folder.
        facts: step, ranks that wrote it, nbytes, what is known of when it was written, and its format: ``"paceline"``,
            ``"dcp"``, or ``"plain dcp"`` if torch.distributed.checkpoint wrote it alone. Empty: damaged.
        problem: what is damaged; empty: intact; None: its files were not read.
    """

    name: str
    location: str
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {"path": self.location, "problem": self.problem, **self.facts}


app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

FolderArgument = Annotated[
    str,
    Argument(
        metavar="FOLDER",
        help="Folder of a run, or of its checkpoints, or a checkpoint: a path, or a URL such as s3://bucket/run.",
    ),
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
    file: Annotated[str, Argument(metavar="FILE", help="The .safetensors file to write.")],
    model_name: ModelName = "model",
) -> None:
    """Write the weights of the newest intact checkpoint to a .safetensors file."""
    from paceline.checkpoint.interop.weights_export import export_weights
    from paceline.checkpoint.storage.stores import checkpoints_at, local_path

    check_writable(local_path(file), "FILE")
    checkpoints_at(folder)
    written = export_weights(folder, file, model=model_name)
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
    target: Annotated[str, Argument(metavar="TARGET", help="The folder to write, which must not exist.")],
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
    nbytes = sum(file.stat().st_size for file in Path(target).iterdir())
    typer.echo(f"{to}: {target} ({format_bytes(nbytes)})")
    for note in notes:
        typer.echo(f"note: {note}")


def _progress(total: int) -> AbstractContextManager[Callable[[], object]]:
    from paceline.tools.bench.progress_bar import ProgressBar

    return ProgressBar("tensors", total)


def _show(folder: str, json_file: Path | None, *, verify: bool) -> None:
    """Print the checkpoints and what is damaged, write them as JSON, and exit with 1 after damage."""
    from paceline.checkpoint.storage.stores import checkpoints_at

    if json_file is not None:
        check_writable(json_file, "--json")
    store, names = checkpoints_at(folder)  # not what this host has in a cache
    rows = [_read_row(store.files(name), verify) for name in names]
    if any(row.problem for row in rows):
        rows = _without_removed(rows, store)
    _print_table(rows)
    for row in rows:
        if row.problem:
            problem = f"{row.name}: {row.problem}"
            Console().print(problem, style="red", highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, [row.to_json() for row in rows], indent=2)
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _without_removed(rows: list[CheckpointRow], store: ReadableStore) -> list[CheckpointRow]:
    """Return rows without those of checkpoints that a run has removed meanwhile, which are not damaged."""
    try:
        there = store.names()
    except OSError:
        return rows
    removed = [row for row in rows if row.problem and row.name not in there]
    for row in removed:
        typer.echo(f"note: {row.name} was removed while it was read", err=True)
    return [row for row in rows if row not in removed]


def _read_row(files: CheckpointFiles, verify: bool) -> CheckpointRow:
    try:
        facts = _facts(files)
    except DamagedCheckpoint as error:
        return CheckpointRow(files.name, files.location, problem=str(error))
    if not verify:
        return CheckpointRow(files.name, files.location, facts)
    from paceline.checkpoint.newest_checkpoint import find_problem

    return CheckpointRow(files.name, files.location, facts, find_problem(files))


def _facts(files: CheckpointFiles) -> dict[str, Any]:
    """Return the facts of a checkpoint; DamagedCheckpoint: it has none that can be read."""
    if _has(files, METADATA):
        from paceline.checkpoint.interop.dcp_reader import DcpReader, is_plain_dcp

        if is_plain_dcp(files):
            return _facts_of_dcp(DcpReader(files))
    manifest = Manifest.read(files.read)
    return {
        "step": manifest.step,
        "ranks": manifest.ranks,
        "nbytes": manifest.nbytes,
        "written": dict(manifest.written),
        "format": "dcp" if manifest.container == "dcp" else "paceline",
    }


def _has(files: CheckpointFiles, name: str) -> bool:
    try:
        files.open(name).close()
    except OSError:
        return False
    return True


def _facts_of_dcp(reader: Any) -> dict[str, Any]:
    from paceline.checkpoint.interop.dcp_match import step_of_dcp

    written, folder = {}, getattr(reader.files, "path", None)
    if folder is not None:  # a path, not a URL
        at = datetime.fromtimestamp((folder / METADATA).stat().st_mtime).astimezone()
        written["at"] = at.isoformat(timespec="seconds")
    facts = {
        "step": step_of_dcp(reader),
        "ranks": reader.index.writers,
        "nbytes": sum(item.nbytes for _, item in reader.index.items()),
        "written": written,
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
            table.add_row(row.name, "", "", "", "", "DAMAGED", style="red")
            continue
        if facts["format"] == "plain dcp":
            state = f"DCP, {state}"
        step = "?" if facts["step"] is None else str(facts["step"])
        numbers = step, str(facts["ranks"]), format_bytes(facts["nbytes"])
        table.add_row(row.name, *numbers, facts["written"].get("at", ""), state)
    print_wide(table)
