"""What ran, by which command and on what, as ``run.json`` tells it; no address, so that it can be shown."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import datetime
from pathlib import Path

import torch

from paceline._core.format import format_bytes
from paceline._core.version import __version__
from paceline.world.machine_facts import read_machine_facts

__all__ = ["command_line", "machine_facts", "started_now", "versions"]


def command_line() -> str:
    """Return the command that this process was started with, as one would type it."""
    name = Path(sys.argv[0]).name if sys.argv[0] else "python"
    return shlex.join([name, *sys.argv[1:]])


def started_now() -> str:
    """Return the present time, with its zone (ISO 8601)."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def machine_facts() -> dict[str, object]:
    """Return what a reader of the report needs to know of this machine."""
    here = read_machine_facts()
    return {
        "system": here.system,
        "cpu": here.cpu,
        "usable cores": here.usable_cores,
        "memory": format_bytes(here.memory_nbytes),
        "GPUs": torch.cuda.device_count(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Paceline, torch and Python."""
    return {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()}
