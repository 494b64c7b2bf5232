"""``paceline plan`` and its commands, each in a module of its own."""

import typer

from paceline.tools.cli.plan.plan_batch_command import batch
from paceline.tools.cli.plan.plan_checkpoint_command import checkpoint
from paceline.tools.cli.plan.plan_command import plan
from paceline.tools.cli.plan.plan_hardware_command import hardware, network
from paceline.tools.cli.plan.plan_memory_command import memory
from paceline.tools.cli.plan.plan_step_command import step

__all__ = ["app"]

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
app.callback(invoke_without_command=True)(plan)
for _command in (batch, checkpoint, hardware, memory, network, step):
    app.command()(_command)
