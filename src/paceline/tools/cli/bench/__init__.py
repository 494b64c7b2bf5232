"""``paceline bench`` and its commands: measurements that end in a table, JSON, CSV and charts."""

import typer

from paceline.tools.cli.bench.bench_collectives_command import collectives, compare
from paceline.tools.cli.bench.bench_fit_command import fit
from paceline.tools.cli.bench.bench_machine_command import machine
from paceline.tools.cli.bench.bench_parts_command import parts
from paceline.tools.cli.bench.bench_step_command import step

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def bench() -> None:
    """Measure, with torch in the same table."""


for _command in (collectives, compare, machine, fit, parts, step):
    app.command()(_command)
