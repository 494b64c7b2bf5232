"""``paceline``: runs a command, and turns errors into one message and an exit code.

Commands are listed here by name, location and one line of help; their modules are imported on use, so that
``paceline --help`` is fast. Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from paceline._core import __version__
from paceline.errors import PacelineError, UsageError

__all__ = ["app", "main", "print_error"]

_PACKAGE = "paceline.tools.cli"
COMMANDS = {  # name: (module, a function or a typer.Typer in it, help, panel of the help)
    "train": (".train_command", "train", "Train the reference GPT data-parallel on text.", "Train"),
    "run": (".run_command", "run", "Run a script on hosts, restarted after failures.", "Train"),
    "launch": (".launch_command", "app", "Run a script by torchrun, Slurm, Ray, MPI or Kubernetes.", "Train"),
    "hub": (".hub_command", "app", "Serve asynchronous training to workers.", "Train"),
    "checkpoint": (
        ".checkpoint_command",
        "app",
        "Show, verify and export the checkpoints of a run.",
        "Train",
    ),
    "bench": (".bench", "app", "Measure training steps and collectives, against torch.", "Measure"),
    "doctor": (
        ".doctor_command",
        "doctor",
        "Check this machine for training, and show what to fix.",
        "Measure",
    ),
    "plan": (".plan", "app", "Plan a training from measurements, before anything runs.", "Plan"),
    "simulate": (".simulate", "app", "Predict how a job would run on many nodes, or elsewhere.", "Plan"),
    "data": (".data_command", "data", "Show which rank gets which data, which starve, what is safe.", "Plan"),
    "report": (".report_command", "report", "Write an HTML report of a run, or compare two.", "Explain"),
    "collective": (
        ".collective_command",
        "collective",
        "Prove, price, explain, draw and run a collective algorithm.",
        "Explain",
    ),
    "lab": (".lab_command", "lab", "Emulate hosts around a slow switch, on this machine.", "Network"),
    "exchange": (
        ".exchange_command",
        "exchange",
        "Exchange checked messages over MPI during computation.",
        "Network",
    ),
}
ALIASES = {"dispatch": "data"}  # earlier names, which the help does not list

# Commands that run a program: all arguments after its name belong to it, options too.
PROGRAM_LAST = {"lab", "run"}


class LazyGroup(TyperGroup):
    """Command group whose members are imported when they are invoked."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=line, rich_help_panel=panel)
            for name, (module, _, line, panel) in COMMANDS.items()
            if find_spec(module, _PACKAGE) is not None
        }
        self.commands |= {name: TyperCommand(name, hidden=True) for name in ALIASES}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that `args` name, imported."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _load(name), rest


app = typer.Typer(
    name="paceline",
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _load(name: str) -> Any:
    module, attribute, line, _ = COMMANDS[ALIASES.get(name, name)]
    target = getattr(import_module(module, _PACKAGE), attribute)
    if isinstance(target, typer.Typer):
        group = typer.main.get_group(target)
        group.name, group.help = name, group.help or line
        return group
    single = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    single.command(name, context_settings={"allow_interspersed_args": name not in PROGRAM_LAST})(target)
    return typer.main.get_command(single)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact, explained data-parallel training with PyTorch."""


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        typer.main.get_command(app)(prog_name="paceline")
    except PacelineError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def print_error(error: PacelineError) -> None:
    """Print an error to stderr, without a traceback: the user can fix it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("Error: ", "bold red"), (str(error), "red")))
