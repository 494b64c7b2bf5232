"""``paceline doctor``: checks this machine for training, and shows what to fix."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline._core.files import write_json
from paceline.errors import PacelineError, UsageError
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import shared
from paceline.tools.diagnostics.machine_findings import MachineFinding, diagnose_machine
from paceline.tools.result_files import check_writable
from paceline.world.machine_facts import LoopbackTiming, read_machine_facts

__all__ = ["doctor"]

SCHEMA = 1
_LOOPBACK_SECONDS = 120.0
_STYLE = {"ok": "green", "note": "dim", "warn": "yellow", "broken": "bold red"}


def doctor(
    json_file: JsonOption = None,
    nproc_per_node: Annotated[
        int, shared("nproc-per-node", ", for a trial all-reduce on this one; 0: skip it")
    ] = 2,
) -> None:
    """Check this machine for training, try an all-reduce, and show what to fix.

    Exits with 1 if something is broken that training needs.
    """
    if nproc_per_node < 0 or nproc_per_node == 1:
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: an all-reduce needs two or more", remedy="give 0 to skip it"
        )
    if json_file is not None:
        check_writable(json_file, "--json")
    facts = read_machine_facts()
    loopback = try_loopback(nproc_per_node) if nproc_per_node and facts.torch else None
    found = diagnose_machine(facts, loopback)
    if json_file is not None:
        record = {
            "kind": "doctor",
            "schema": SCHEMA,
            "machine": asdict(facts),
            "loopback": asdict(loopback) if isinstance(loopback, LoopbackTiming) else loopback,
            "findings": [asdict(finding) for finding in found],
        }
        write_json(json_file, record, indent=2)
    _print_findings(found)
    if any(finding.status == "broken" for finding in found):
        raise typer.Exit(1)


def try_loopback(ranks: int) -> LoopbackTiming | str:
    """Return the times of an all-reduce between `ranks` new processes, or the error message."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        result = Path(folder) / "loopback.json"
        try:
            run_ranks(
                ["-m", "paceline.tools.diagnostics.loopback_all_reduce", str(result)],
                ranks,
                timeout=_LOOPBACK_SECONDS,
            )
        except PacelineError as error:
            return str(error)
        return LoopbackTiming(**json.loads(result.read_text()))


def _print_findings(found: list[MachineFinding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        value = Text(finding.value)
        if finding.remedy:
            value.append(f"\n→ {finding.remedy}", style="default" if finding.status == "note" else "bold")
        table.add_row(finding.subject, Text(finding.status, style=_STYLE[finding.status]), value)
    console = Console(highlight=False)
    console.print(table)
    broken, warnings = (sum(each.status == status for each in found) for status in ("broken", "warn"))
    if broken or warnings:
        console.print(f"\n{broken} broken, {warnings} to look at.")
    else:
        console.print("\nReady to train.")
