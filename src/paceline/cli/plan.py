"""``paceline plan``: answers from measured numbers, before anything runs."""

from __future__ import annotations

import typer

from paceline.cli.plan_memory import memory
from paceline.cli.plan_network import network

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def plan() -> None:
    """Plan a training from measured numbers, before anything runs."""


app.command()(memory)
app.command()(network)
