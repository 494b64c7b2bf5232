"""``paceline launch slurm --submit`` and ``--watch``: a batch script into Slurm's queue, and what becomes of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.writable import check_writable
from paceline.durable import write_text
from paceline.launch.slurm_queue import need_slurm, submit_script, watch_job

if TYPE_CHECKING:
    from paceline.launch.work import Work

__all__ = ["submit_and_watch"]


def submit_and_watch(work: Work, text: str, out: Path | None, *, watch: bool) -> int:
    """Submit the script `text`, and return 0; or follow the job, and return its exit code.

    Ctrl-C ends the following, not the job.

    Args:
        work: what it runs.
        text: the batch script.
        out: where it is kept besides; None: nowhere.
        watch: whether to follow the job.
    """
    need_slurm()
    if out is not None:
        check_writable(out, "--out")
        write_text(out, text)
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as folder:  # sbatch takes a copy
        script = out or Path(folder, work.name)
        if out is None:
            write_text(script, text)
        job = submit_script(script)
    log = Path(work.folder, f"{work.name}-{job}.log")
    typer.echo(f"job {job}; it writes to {log}", err=watch)
    if not watch:
        return 0
    try:
        state = watch_job(
            job, log, lambda line: typer.echo(line, err=True), lambda new: typer.echo(new, nl=False)
        )
    except KeyboardInterrupt:
        typer.echo(f"job {job} goes on; end it with: scancel {job}", err=True)
        return 130
    return state.exit_code
