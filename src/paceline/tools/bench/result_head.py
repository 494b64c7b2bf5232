"""What a committed result says about where it was measured: plain values for JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from paceline.world.machine_facts import read_machine_facts

__all__ = ["head", "machine_record", "versions"]


def head(kind: str, packages: Iterable[str] = ("paceline", "torch"), schema: int = 1) -> dict[str, Any]:
    """Return what a program's result begins with: what it is, the command that makes it, the machine, versions.

    Args:
        kind: of the measurement. packages: whose versions bear on it. schema: of what follows.
    """
    return {
        "kind": kind,
        "schema": schema,
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine_record(),
        "versions": versions(packages),
    }


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
