"""Build hook: compiles the C files of `src/paceline/_core` where there is a C compiler.

Without one the wheel has Python alone, which does the same more slowly (`paceline._core.native`).
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

CORE = "src/paceline/_core"
SOURCES = [f"{CORE}/native.c", f"{CORE}/native_calls.c"]
FLAGS = ["-O3", "-ffp-contract=off"]  # the second: every sum is rounded as Python's libraries round it


class CompiledPart(BuildHookInterface):
    """Adds the compiled module to the wheel, or beside its source for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as one for this platform."""
        if not sys.platform.startswith("linux"):
            return
        try:
            module = self.compile()
        except BaseException as error:  # noqa: BLE001 — setuptools raises SystemExit and errors of many kinds
            print(f"paceline: no compiled part, Python does its work ({error})", file=sys.stderr)
            return
        build_data["force_include"][str(module)] = f"paceline/_core/{module.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def compile(self) -> Path:
        """Return the compiled module, beside its source."""
        extension = Extension(
            "paceline._core._native",
            SOURCES,
            extra_compile_args=FLAGS,
            py_limited_api=True,
            depends=[*SOURCES, f"{CORE}/native_calls.h"],
        )
        command = build_ext(Distribution({"name": "paceline", "ext_modules": [extension]}))
        with tempfile.TemporaryDirectory() as temporary:
            command.build_lib, command.build_temp = f"{self.root}/src", temporary
            command.ensure_finalized()
            command.run()
        return Path(self.root, command.get_outputs()[0])
