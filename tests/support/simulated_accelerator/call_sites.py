"""Which line of a program a call to the device comes from."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

__all__ = ["call_site", "is_called_by_python", "paceline_site"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACELINE = os.sep + os.path.join("src", "paceline") + os.sep
_LIBRARY, _CALLER, _OURS = range(3)
_kinds: dict[CodeType, int] = {}


def _kind(code: CodeType) -> int:
    path = code.co_filename
    passes_on = (
        path == contextlib_path or code.co_name == "__torch_function__"
    )  # a mode, on behalf of its caller
    if path.startswith((_HERE, _TORCH, "<")) or passes_on:
        kind = _LIBRARY
    else:
        kind = _OURS if _PACELINE in path else _CALLER
    _kinds[code] = kind
    return kind


contextlib_path = os.path.join(os.path.dirname(os.__file__), "contextlib.py")


def call_site() -> str:
    """Return "file:line" of the innermost frame outside of torch and of the simulator."""
    frame = _caller()
    return _outside_python() if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_called_by_python() -> bool:
    """Return whether Python code outside of torch and of the simulator is in the call's stack."""
    return _caller() is not None


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        if (_kind(code) if kind is None else kind) != _LIBRARY:
            return frame
        frame = frame.f_back
    return None


def paceline_site() -> str:
    """Return "file:line" of the innermost frame in src/paceline, or else what `call_site` returns."""
    frame, caller = sys._getframe(1), None
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        kind = _kind(code) if kind is None else kind
        if kind == _OURS:
            return f"{code.co_filename}:{frame.f_lineno}"
        if kind == _CALLER and caller is None:
            caller = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return caller or _outside_python()


def _outside_python() -> str:
    """Return what runs in a thread of the autograd engine, where no frame of the program is."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return f"backward pass: {node.name()}" if node is not None else "no Python frame"
