"""``paceline simulate`` and ``paceline simulate async``."""

import typer

from paceline.tools.cli.simulate.simulate_async_command import async_
from paceline.tools.cli.simulate.simulate_cluster_command import cluster

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
app.callback(invoke_without_command=True)(cluster)
app.command("async")(async_)
