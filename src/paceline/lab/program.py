"""Programs that hosts shall run: where they are looked for, and that they are there."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["check_program", "is_python", "search_path"]


def search_path() -> str:
    """Return the PATH of programs on hosts: this Python and its scripts come first."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def is_python(program: Sequence[str]) -> bool:
    """Return whether Python runs `program`: a script, by its name, or ``-m`` and a module."""
    return program[0] == "-m" or _is_script(program[0])


def check_program(program: Sequence[str], folder: str | Path = ".", path: str | None = None) -> None:
    """Refuse a program that is not there, before it is started on several hosts.

    Args:
        program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
        folder: where it will run.
        path: the PATH of the hosts; None: as :func:`search_path` has it.

    Raises:
        UsageError: no such file or command.
    """
    if not program:
        raise UsageError("there is no program to run", remedy='pass its arguments, such as ["train.py"]')
    name = program[0]
    if _is_script(name):
        if not Path(folder, name).is_file():
            raise UsageError(
                f"no such script: {name}", remedy="check its path, which starts at the folder to run in"
            )
    elif name != "-m":
        known = shutil.which(Path(folder, name) if os.sep in name else name, path=path or search_path())
        if known is None:
            raise UsageError(f"no such program: {name}", remedy="give a Python script (.py) or a command")


def _is_script(name: str) -> bool:
    return name.endswith(".py")
