"""Shell completion of commands and options, in bash, zsh and fish, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.tools.cli.app import COMMANDS

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def complete(monkeypatch, command):
    """Return what a shell gets for a line whose last word is to be completed."""

    def run(shell, line):
        monkeypatch.setenv("_PACELINE_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - (not line.endswith(" "))))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        code, out, err = command()
        assert (code, err) == (0, "")
        return out

    return run


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_are_completed_and_the_hidden_one_is_not(complete, shell):
    found = complete(shell, "paceline ")
    assert [name for name in COMMANDS if name not in found] == []
    assert "dispatch" not in found


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "completion"),
    [
        ("paceline pl", "plan"),
        ("paceline hub s", "serve"),
        ("paceline plan memory --wor", "--world-size"),
        ("paceline train --nproc", "--nproc-per-node"),
        ("paceline dispatch --wor", "--world-size"),
    ],
)
def test_subcommands_and_options_are_completed(complete, shell, line, completion):
    assert completion in complete(shell, line)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_its_script(monkeypatch, command, shell):
    monkeypatch.setenv("_PACELINE_COMPLETE", f"source_{shell}")
    code, script, _ = command()
    assert code == 0
    assert "_PACELINE_COMPLETE=complete_" in script
    assert shell in script


def test_commands_are_completed_without_torch():
    code = (
        "import os, sys\n"
        "os.environ |= {'_PACELINE_COMPLETE': 'complete_bash', 'COMP_WORDS': 'paceline ', 'COMP_CWORD': '1'}\n"
        "from paceline.tools.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'rich.console'} & set(sys.modules), set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "simulate" in ended.stdout.split()
