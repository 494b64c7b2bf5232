"""A file system in memory that runs a test's script before each call: it may raise, count, or do what others do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["ScriptedFileSystem", "script"]


class ScriptedFileSystem(MemoryFileSystem):
    """Protocol ``scripted``; shares its files with ``memory``.

    Attributes:
        before: is passed the operation ("write", "create", "upload", "read", "info", "list", "remove") and the path.
    """

    protocol = "scripted"
    before: ClassVar[Callable[[str, str], object]] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("scripted://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        type(self).before("create" if mode == "create" else "write", path)
        super().pipe_file(path, value, mode=mode)

    def open(self, path, mode="rb", *args, **kwargs):
        if "data" not in kwargs and "w" in mode:
            type(self).before("upload", path)
        return super().open(path, mode, *args, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        type(self).before("read", path)
        return super().cat_file(path, start=start, end=end)

    def info(self, path, **kwargs):
        type(self).before("info", path)
        return super().info(path)

    def ls(self, path, detail=True, **kwargs):
        type(self).before("list", path)
        return super().ls(path, detail=detail)

    def rm_file(self, path):
        type(self).before("remove", path)
        super().rm_file(path)


@contextmanager
def script(before: Callable[[str, str], object]) -> Iterator[None]:
    """Run `before` before each call."""
    earlier, ScriptedFileSystem.before = ScriptedFileSystem.before, staticmethod(before)
    try:
        yield
    finally:
        ScriptedFileSystem.before = staticmethod(earlier)


fsspec.register_implementation("scripted", ScriptedFileSystem, clobber=True)
