"""Every command line of the manual is valid: commands, options, values.

They are parsed by the real parser and not run; test_manual_runs.py runs a few.
"""

from __future__ import annotations

import re

import pytest
import typer
from manual import PAGES, ROOT, name
from shell import command_lines, spans
from typer.exceptions import TyperException

from paceline.tools.cli.app import COMMANDS, app

LINES = {page: command_lines(page) for page in PAGES}
SPANS = {page: spans(page) for page in PAGES}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def parse(words):
    """Parse a command line as `paceline` would; return the innermost command's context and the rest."""
    command, args = typer.main.get_command(app), list(words[1:])
    context = command.make_context("paceline", args)
    while (rest := remaining(context)) and hasattr(context.command, "resolve_command"):
        word, inner, args = context.command.resolve_command(context, rest)
        context = inner.make_context(word, args, parent=context)
    return context


def remaining(context):
    """Return the words that a group leaves to its subcommand."""
    return [*context._protected_args, *context.args]


def programs(words):
    """Each `paceline …` in a command line: after torchrun, mpiexec or a lab there is another one."""
    for at, word in enumerate(words):
        if word == "paceline" and not words[max(at - 1, 0)].startswith("--"):
            yield words[at:]


def check(words):
    if "paceline" in words:
        for program in programs(words):
            if program[1:]:
                parse(program)
    elif words[0] == "make":
        assert set(filter(lambda word: "=" not in word, words[1:])) <= TARGETS, "no such target"
    for word in words[1:]:
        if re.fullmatch(r"(examples|benchmarks|docs|src|tests)/[\w./-]+\.\w+", word):
            written = words[words.index(word) - 1] in ("--json", "--out", "--draw", "--csv", "--profile")
            assert written or (ROOT / word).exists(), f"no file {word}"


@pytest.mark.parametrize("page", [page for page in PAGES if LINES[page]], ids=name)
def test_command_lines_are_right(page):
    wrong = []
    for line in LINES[page]:
        try:
            check(line.words)
        except (TyperException, AssertionError) as error:
            message = error.format_message() if hasattr(error, "format_message") else error
            wrong.append(f"{line.place}: {' '.join(line.words)}\n    {message}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if SPANS[page]], ids=name)
def test_commands_named_in_a_sentence_are_there(page):
    wrong = []
    for line in SPANS[page]:
        command = typer.main.get_command(app)
        words = list(next(programs(line.words)))[1:]
        # Another one, inside of a lab.
        words = words[: words.index("paceline")] if "paceline" in words else words
        while hasattr(command, "resolve_command") and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            try:
                _, command, words = command.resolve_command(command.context_class(command), words)
            except TyperException as error:
                wrong.append(f"{line.place}: {error.format_message()}")
                break
        known = {option for param in command.params for option in param.opts + param.secondary_opts}
        unknown = [word for word in words if re.match(r"--[a-z]", word) and word.split("=")[0] not in known]
        if unknown and "--help" not in unknown:
            wrong.append(f"{line.place}: no option {' '.join(unknown)}")
    assert not wrong, "\n".join(wrong)


def test_every_command_has_its_place_in_the_list_of_commands():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [command for command in COMMANDS if f"`paceline {command}" not in text] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "paceline trane",
        "paceline plan memory --modl tiny",
        "paceline train --steps many",
        "paceline lab paceline trane",
    ],
)
def test_a_wrong_line_is_found(wrong):
    with pytest.raises(TyperException):
        check(wrong.split())


def test_the_manual_has_command_lines():
    assert sum(map(len, LINES.values())) > 100
