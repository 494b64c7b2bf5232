"""Result files: the head that all of them begin with, and paths checked before anything is measured."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UsageError
from paceline.world.machine_facts import read_machine_facts

__all__ = [
    "check_writable",
    "checked_files",
    "machine_record",
    "paceline_command",
    "require_matplotlib",
    "result_head",
    "versions",
]

W = TypeVar("W", bound=Callable[..., Any])


_REMEDY = "name a file in a folder that you may write to"


def check_writable(path: Path, option: str = "", *, make_folder: bool = False) -> None:
    """Refuse a file that can't be written.

    Args:
        path: the file.
        option: the one that named it, for the message.
        make_folder: make its folder rather than refuse one that is absent.

    Raises:
        UsageError: `path` is no ordinary file or may not be written, or its folder is absent or can't be made.
    """
    folder, told = path.absolute().parent, f"{option} {path}".lstrip()
    try:
        if make_folder:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise UsageError(f"can't write {told}: no such folder", remedy=f"make {folder} first")
        if path.is_dir():
            raise UsageError(f"can't write {told}: it is a folder", remedy=_REMEDY)
        if path.exists() and not path.is_file():  # a device or a pipe would be replaced, not written to
            raise UsageError(f"can't write {told}: it is no ordinary file", remedy=_REMEDY)
        # It is written beside its place and put there once it is whole, so its folder counts too.
        if not all(os.access(each, os.W_OK) for each in (folder, path) if each.exists()):
            raise UsageError(f"can't write {told}: no permission", remedy=_REMEDY)
    except OSError as error:
        raise UsageError(f"can't write {told}: {error.strerror}", remedy=_REMEDY) from error


def checked_files(
    json_file: Path | None, write_json: W, out: Path | None, writer_of_name: Mapping[str, W]
) -> dict[Path, W]:
    """Return what writes which files, once it is clear that they can be written.

    Args:
        json_file: the file of ``--json``; None: not asked for. write_json: writes it.
        out: the folder of ``--out``, made where it is absent; None: not asked for.
        writer_of_name: what writes the files in it, charts among them.

    Raises:
        UsageError: a file can't be written, or charts can't be drawn.
    """
    writer_of: dict[Path, W] = {}
    if json_file is not None:
        check_writable(json_file, "--json")
        writer_of[json_file] = write_json
    if out is not None:
        require_matplotlib()
        in_folder = {out / name: writer for name, writer in writer_of_name.items()}
        for path in in_folder:
            check_writable(path, "--out", make_folder=True)
        writer_of |= in_folder
    return writer_of


def require_matplotlib() -> Any:
    """Return matplotlib, which charts are drawn with.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "charts need matplotlib, which is not installed", remedy="pip install 'paceline[report]'"
        ) from error
    return matplotlib


def result_head(
    kind: str,
    packages: Iterable[str] = ("paceline", "torch"),
    schema: int = 1,
    *,
    command: str | None = None,
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the head of a result: kind, schema, the command that reproduces it, machine, versions.

    Args:
        kind: of the measurement.
        packages: whose versions bear on the result; if empty, the head has no versions.
        schema: version of the format.
        command: the command line; by default that of this process, as a program run by ``python``.
        machine: where it was measured; by default this machine.
    """
    head = {
        "kind": kind,
        "schema": schema,
        "command": shlex.join(["python", *sys.argv]) if command is None else command,
        "machine": machine_record() if machine is None else dict(machine),
    }
    found = versions(packages)
    return head | {"versions": found} if found else head


def paceline_command() -> str:
    """Return the ``paceline`` command line that started this process, for results."""
    return shlex.join(["paceline", *sys.argv[1:]])


def machine_record() -> dict[str, Any]:
    """Return the facts of this machine that bear on times; nothing that names the machine."""
    here = read_machine_facts()
    return {
        "cpu": here.cpu,
        "usable_cores": here.usable_cores,
        "memory_nbytes": here.memory_nbytes,
        "system": here.system,
        "python": here.python,
        "torch": here.torch.version if here.torch else "",
        "gpus": [asdict(gpu) for gpu in here.torch.gpus] if here.torch else [],
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package, empty where it is absent."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found
