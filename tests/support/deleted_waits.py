"""Finds the calls of a package that order streams, and deletes one of them in a running process.

    waits = find_waits()                       # of src/paceline/parallel, by the syntax tree
    with without(waits[3]):                    # its function runs without that call
        ...

A call is deleted by compiling the changed syntax tree of its file and exchanging the code of its function.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import paceline

__all__ = ["ORDERING", "Wait", "find_waits", "without"]

ORDERING = frozenset(
    ["wait", "wait_for", "wait_all", "wait_event", "wait_stream", "record_stream", "keep", "synchronize"]
)
"""Names of functions and methods that order streams, or keep memory for them."""

_PACKAGE = "paceline.parallel"
_ROOT = Path(paceline.__file__).parent / "parallel"
_SECONDS = ("wait_for", "wait_all")  # return how long they took
_STAND_IN = "__instead_of_the_wait__"


@dataclass(frozen=True)
class Wait:
    """A call in src/paceline/parallel.

    Attributes:
        file: path below that folder.
        function: qualified name of the outermost function around it.
        text: the call, as code.
        number: of the equal calls in that function, this is the n-th, from 1.
    """

    file: str
    function: str
    text: str
    number: int

    @property
    def name(self) -> str:
        """Return what identifies it, whatever the line."""
        return f"{self.file}: {self.function}: {self.text}" + (f" ({self.number})" if self.number > 1 else "")


class _Calls(ast.NodeVisitor):
    """Collects the calls, each with the qualified name of its outermost function."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.Call]] = []
        self._classes: list[str] = []
        self._function = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._function
        self._function = outer or ".".join([*self._classes, node.name])
        self.generic_visit(node)
        self._function = outer

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        named = isinstance(function, ast.Name) and function.id == "synchronize"
        if named or (isinstance(function, ast.Attribute) and function.attr in ORDERING):
            self.found.append((self._function, node))
        self.generic_visit(node)


def _tree(file: str) -> ast.Module:
    return ast.parse((_ROOT / file).read_text())


def _calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    collected = _Calls()
    collected.visit(tree)
    return collected.found


def find_waits() -> list[Wait]:
    """Return all such calls, by file and line."""
    waits = []
    for path in sorted(_ROOT.rglob("*.py")):
        file, seen = str(path.relative_to(_ROOT)), {}
        for function, call in _calls(_tree(file)):
            key = function, ast.unparse(call)
            seen[key] = seen.get(key, 0) + 1
            waits.append(Wait(file, *key, seen[key]))
    return waits


def _instead(receiver: Any, name: str) -> Any:
    """Return what the deleted call would, without any wait."""
    if isinstance(receiver, torch.futures.Future):
        return receiver.value()
    return 0.0 if name in _SECONDS else None


@contextlib.contextmanager
def without(wait: Wait) -> Iterator[None]:
    """Run the function of `wait` without that call; what the call is made on is still evaluated.

    Raises:
        LookupError: there is no such call.
    """
    tree = _tree(wait.file)
    equal = [
        call for function, call in _calls(tree) if (function, ast.unparse(call)) == (wait.function, wait.text)
    ]
    if len(equal) < wait.number:
        raise LookupError(f"there is no {wait.name}")
    call = equal[wait.number - 1]
    method = isinstance(call.func, ast.Attribute)
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else ast.Constant(None)
    name = call.func.attr if method else call.func.id  # type: ignore[attr-defined]
    call.func = ast.copy_location(ast.Name(_STAND_IN, ast.Load()), call)
    call.args, call.keywords = [receiver, ast.Constant(name)], []
    code = compile(ast.fix_missing_locations(tree), str(_ROOT / wait.file), "exec", dont_inherit=True)
    module = importlib.import_module(f"{_PACKAGE}.{wait.file.removesuffix('.py').replace('/', '.')}")
    function = _function(module, wait.function)
    before = function.__code__
    function.__globals__[_STAND_IN] = _instead
    function.__code__ = _code_of(code, before)
    try:
        yield
    finally:
        function.__code__ = before


def _function(module: types.ModuleType, qualified: str) -> types.FunctionType:
    found: Any = module
    for name in qualified.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, types.FunctionType), f"{qualified} is a function"
    return found


def _code_of(code: types.CodeType, before: types.CodeType) -> types.CodeType:
    """Return the code of the same function as `before` in a compiled module."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    for each in inner:
        if (each.co_qualname, each.co_firstlineno) == (before.co_qualname, before.co_firstlineno):
            return each
        if before.co_qualname.startswith(f"{each.co_qualname}."):
            return _code_of(each, before)
    raise LookupError(f"{before.co_qualname} is not in {code.co_filename}")
