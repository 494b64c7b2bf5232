"""The command line: help, version, suggestions, errors and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer

import paceline
from paceline.errors import MissingRanks, PacelineError, RankFailed, UsageError
from paceline.tools.cli import app as module

HEAVY = ("torch", "numpy", "matplotlib", "jinja2", "psutil", "safetensors")


def run(*arguments):
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def main_of(monkeypatch, function, *arguments):
    """Run main() with `function` as the command `try`, and return the exit code."""
    monkeypatch.setattr(module, "COMMANDS", {"try": (__name__, "attempt", "Try.", "Train")})
    monkeypatch.setattr(sys.modules[__name__], "attempt", function, raising=False)
    monkeypatch.setattr(sys, "argv", ["paceline", "try", *arguments])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code


def raising(error):
    def attempt() -> None:
        raise error

    return attempt


def test_help_names_the_commands_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from paceline.tools.cli.app import main\n"
        "sys.argv = ['paceline', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "HEAVY []" in ended.stdout, ended.stdout + ended.stderr
    assert "doctor" in ended.stdout
    assert "what to fix" in ended.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(module.COMMANDS))
def test_each_command_explains_itself_without_torch(name):
    code = (
        "import sys\n"
        "from paceline.tools.cli.app import main\n"
        f"sys.argv = ['paceline', {name!r}, '-h']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert f"paceline {name}" in ended.stdout


def test_the_version_is_the_package_s():
    ended = run("--version")
    assert (ended.returncode, ended.stdout) == (0, f"paceline {paceline.__version__}\n")


def test_without_a_command_the_help_is_shown():
    ended = run()
    assert ended.returncode == 2
    assert "Usage: paceline" in ended.stdout + ended.stderr


def test_an_unknown_command_suggests_the_near_one():
    ended = run("docter")
    assert ended.returncode == 2
    assert "No such command 'docter'" in ended.stderr
    assert "doctor" in ended.stderr.partition("No such command")[2]
    assert "Traceback" not in ended.stderr


def test_an_old_option_suggests_the_near_one():
    ended = run("lab", "--latensy", "1ms", "true")
    assert ended.returncode == 2
    assert "--latency" in ended.stderr


def test_the_help_groups_the_commands(command):
    code, shown, _ = command("--help")
    panels = ["Train", "Measure", "Plan", "Explain", "Network"]
    titles = [line.split()[1] for line in shown.splitlines() if line.startswith("╭─")]
    assert (code, titles) == (0, ["Options", *panels])
    assert list(dict.fromkeys(panel for *_, panel in module.COMMANDS.values())) == panels


def test_an_earlier_name_of_a_command_still_works_and_is_not_listed(command):
    example = ("--samples", 100, "--world-size", 3)
    assert command("dispatch", *example) == command("data", *example)
    assert "dispatch" not in command("--help")[1]


def test_an_unknown_option_is_refused():
    ended = run("doctor", "--jsn", "x")
    assert ended.returncode == 2
    assert "--jsn" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_command_whose_module_is_absent_is_no_command(monkeypatch, capsys):
    monkeypatch.setattr(module, "COMMANDS", {"gone": ("paceline.tools.cli.gone", "gone", "Gone.", "Train")})
    monkeypatch.setattr(sys, "argv", ["paceline", "gone"])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    assert "No such command 'gone'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("bucket_mib=-1", remedy="give MiB > 0"), 2),
        (PacelineError("it broke", rank=1, remedy="mend it"), 1),
        (RankFailed("ended with exit code 3", rank=2), 1),
        (MissingRanks("1 of 2 ranks did not come"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_message_and_an_exit_code(monkeypatch, capsys, error, code):
    assert main_of(monkeypatch, raising(error)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    if isinstance(error, PacelineError):
        assert shown.err.strip() == f"Error: {error}"


def test_a_long_message_is_not_wrapped(monkeypatch, capsys):
    path = "/a/" + "very/" * 60 + "long/path [with brackets]"
    main_of(monkeypatch, raising(UsageError(f"{path} is not there")))
    assert f"Error: {path} is not there\n" == capsys.readouterr().err


def test_an_internal_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(module, "COMMANDS", {"try": (__name__, "attempt", "Try.", "Train")})
    monkeypatch.setattr(sys.modules[__name__], "attempt", raising(ZeroDivisionError("a bug")), raising=False)
    monkeypatch.setattr(sys, "argv", ["paceline", "try"])
    with pytest.raises(ZeroDivisionError):
        module.main()


def test_a_group_of_commands_is_loaded_as_one(monkeypatch, capsys):
    group = typer.Typer()

    @group.command("step")
    def step(times: int = 1) -> None:
        print("stepped", times)

    assert main_of(monkeypatch, group, "step", "--times", "3") == 0
    assert capsys.readouterr().out == "stepped 3\n"


def test_help_lines_are_short_sentences():
    for _, _, line, _ in module.COMMANDS.values():
        assert re.fullmatch(r"[A-Z][^.]{10,60}\.", line)
