"""The compiled part of the shared-memory backend (`native.c`), which pip builds where it finds a C compiler.

Without it, or with ``PACELINE_NATIVE=0``, Python does the same: same bits, same errors, longer calls. Processes with
and without it work together.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

__all__ = ["load_native", "why_not_native"]


def load_native() -> ModuleType | None:
    """Return the compiled module; None: it was not built, or ``PACELINE_NATIVE=0``."""
    if os.environ.get("PACELINE_NATIVE", "1") == "0":
        return None
    try:
        return importlib.import_module("paceline._core._native")
    except ImportError:
        return None


def why_not_native() -> str:
    """Return why `load_native` returns None; empty if it returns the module."""
    if os.environ.get("PACELINE_NATIVE", "1") == "0":
        return "PACELINE_NATIVE=0"
    try:
        importlib.import_module("paceline._core._native")
    except ImportError as error:
        return f"{error}; install Paceline where pip finds a C compiler (cc) and Python's headers"
    return ""
