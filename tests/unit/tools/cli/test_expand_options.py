"""`expand_options`: a command has one option per field of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer import Argument, Option
from typer.testing import CliRunner

from paceline.tools.cli.shared_options import expand_options


@dataclass(frozen=True, kw_only=True)
class SendOptions:
    path: Annotated[str, Argument(help="File to send.")]
    rate: Annotated[float, Option(help="Rate in MB/s.")] = 2.0
    hosts: Annotated[list[str] | None, Option("--host", help="A host; may be repeated.")] = None
    attempts: int = 3


@dataclass(frozen=True, kw_only=True)
class FastSendOptions(SendOptions):
    rate: Annotated[float, Option(help="Rate in GB/s.")] = 8.0


def command_with(kind):
    received = []

    def send(options, verbose: Annotated[bool, Option("--verbose", help="Print more.")] = False):
        """Send a file."""
        received.append((options, verbose))

    send.__annotations__["options"] = kind
    app = typer.Typer()
    app.command()(expand_options(send))
    return lambda *words: (CliRunner().invoke(app, [*words]), received)


def test_values_fill_the_dataclass_and_the_other_parameters():
    result, received = command_with(SendOptions)(
        "a.txt", "--rate", "5", "--host", "x", "--host", "y", "--verbose"
    )
    assert result.exit_code == 0, result.output
    assert received == [(SendOptions(path="a.txt", rate=5.0, hosts=["x", "y"]), True)]


@pytest.mark.parametrize("kind", [SendOptions, FastSendOptions])
def test_defaults_are_those_of_the_fields(kind):
    result, received = command_with(kind)("a.txt")
    assert result.exit_code == 0, result.output
    assert received == [(kind(path="a.txt"), False)]


def test_a_field_without_default_is_required():
    result, received = command_with(SendOptions)("--rate", "5")
    assert result.exit_code == 2
    assert received == []


def test_a_field_that_declares_no_option_has_none():
    result, _ = command_with(SendOptions)("a.txt", "--attempts", "5")
    assert result.exit_code == 2


def test_help_shows_the_command_and_the_fields():
    result, _ = command_with(FastSendOptions)("--help")
    for text in ("Send a file.", "File to send.", "Rate in GB/s.", "Print more."):
        assert text in result.output
