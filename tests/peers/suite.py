"""torch's own tests of `torch.distributed`, as they come in its wheel, run on the backend "paceline".

The suite (``distributed_test.py``) checks in two ways what a backend can do: by sets of names, which hold torch's
own backends, and by guards before single tests, as ``BACKEND != "gloo"``. While its module is made here,
"paceline" is put into the sets, and guards that don't hold for it are lifted: those that require torch's name
of a CPU backend, and those that require GPUs, as the tests then run on the CPU (cpu.py). Which guards these
are, and which tests are not run for what reason, is data: suite.toml.

The suite would start new processes for every test; here warm ranks run them (tests/support/rank_pool.py), each test
in a world of its own. ``BACKEND=gloo`` in the environment runs it all on gloo, for comparison.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import time
import tomllib
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

__all__ = [
    "BACKEND",
    "DATA",
    "SIZES",
    "ddp_names",
    "guards",
    "loaded_names",
    "names",
    "run",
    "run_plain",
    "skipped",
]

MODULE = "torch.testing._internal.distributed.distributed_test"
DATA = tomllib.loads(Path(__file__).with_name("suite.toml").read_text())
BACKEND = os.environ.get("BACKEND", "paceline")
SIZES = (2, 3, 4)  # of the worlds; the last one is that of an ordinary run
BARRIER_SECONDS = 60.0  # how long the suite's own barrier, through files, waits: by itself 10 s
POLL_SECONDS = 0.005  # how often it looks: by itself every 0.1 s

Decorator = Callable[[Any], Any]


def skipped() -> dict[str, str]:
    """Return, for every test that is not run, why."""
    return {name: group["why"] for group in DATA["skipped"].values() for name in group["tests"]}


# Making the suite's module.


@functools.cache
def load(size: int) -> ModuleType:
    """Return the suite for worlds of `size` ranks on our backend."""
    module = _make(size, BACKEND, _our_guard)
    slow_sync = module.Barrier.sync
    clock = SimpleNamespace(time=time.time, sleep=lambda _: time.sleep(POLL_SECONDS))

    def sync(wait_for: int | None = None, timeout: float = BARRIER_SECONDS) -> None:
        with mock.patch.object(module, "time", clock):
            slow_sync(wait_for, timeout)

    module.Barrier.sync = sync
    return module


def guards(size: int, backend: str) -> dict[str, list[str]]:
    """Return, for every test that torch does not run on `backend` without GPUs, its reasons for that."""
    found: dict[str, list[str]] = {}

    def note(function: Any, reason: str) -> bool:
        found.setdefault(function.__name__, []).append(reason)
        return False

    module = _make(size, backend, note)
    for name in _tests_of(module):
        if getattr(_method(module, name), "__unittest_skip__", False):
            note(_method(module, name), _method(module, name).__unittest_skip_why__)
    return found


def _make(size: int, backend: str, guard: Callable[[Any, str], bool]) -> ModuleType:
    """Import the module again; `guard` decides by test and reason whether the test is skipped."""
    from torch.testing._internal import common_distributed as common

    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    environment = {"BACKEND": backend, "WORLD_SIZE": str(size), "INIT_METHOD": "file://"}
    features = {name: {*known, "paceline"} for name, known in common.DistTestCases.backend_feature.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch.dict(common.DistTestCases.backend_feature, features))
        for name, decorator in _decorators(size, guard).items():
            stack.enter_context(mock.patch.object(common, name, decorator))
            if hasattr(common.common_utils, name):
                stack.enter_context(mock.patch.object(common.common_utils, name, decorator))
        spec.loader.exec_module(module)
    return module


def _decorators(size: int, guard: Callable[[Any, str], bool]) -> dict[str, Any]:
    """Return the suite's own decorators that skip tests, as asking `guard`."""

    def skip(reason: str, condition: bool = True) -> Decorator:
        def decorate(function: Any) -> Any:
            return unittest.skip(reason)(function) if condition and guard(function, reason) else function

        return decorate

    return {
        "skip_but_pass_in_sandcastle": skip,
        "skip_but_pass_in_sandcastle_if": lambda condition, reason: skip(reason, condition),
        "skip_if_no_gpu": skip("GPUs"),
        "skip_if_lt_x_gpu": lambda count, **_: skip("GPUs"),
        "skip_if_small_worldsize": skip("needs a world of 3", size < 3),  # makes a group of ranks 1 and 2
        "skip_if_odd_worldsize": skip("needs an even world", size % 2 == 1),
        "init_multigpu_helper": lambda world_size, backend: {rank: [rank] for rank in range(world_size)},
    }


def _our_guard(function: Any, reason: str) -> bool:
    lifted, reason = DATA["lifted"], reason.replace(f"backend {BACKEND} ", "backend paceline ")
    return reason not in lifted["guards"] and reason != lifted["tests"].get(function.__name__)


def _tests_of(module: ModuleType) -> list[str]:
    return sorted(name for name in vars(module.DistributedTest._DistTestBase) if name.startswith("test_"))


def loaded_names() -> list[str]:
    """Return the names of all tests of process groups, by importing the suite."""
    return _tests_of(load(4))


def names() -> list[str]:
    """Return the same by reading: the suite changes torch's settings when it is imported."""
    return sorted(name for name in _sources() if name.startswith("test_"))


def ddp_names() -> list[str]:
    """Return the tests that wrap a model in DistributedDataParallel, themselves or through a helper."""
    sources = _sources()
    found = {name for name, source in sources.items() if "DistributedDataParallel" in source}
    while more := {
        name
        for name, source in sources.items()
        if name not in found and any(f"self.{helper}(" in source for helper in found)
    }:
        found |= more
    return sorted(name for name in found if name.startswith("test_"))


@functools.cache
def _sources() -> dict[str, str]:
    """Return the source of every method of the suite's class."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    text = Path(torch.submodule_search_locations[0], *MODULE.split(".")[1:]).with_suffix(".py").read_text()
    kinds = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    base = next(kind for kind in kinds if kind.name == "_DistTestBase")
    lines = text.splitlines()
    return {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in base.body
        if isinstance(node, ast.FunctionDef)
    }


def _method(module: ModuleType, name: str) -> Any:
    return getattr(module.DistributedTest._DistTestBase, name)


# Running a test, on a rank.


def run(rank: int, size: int, name: str, folder: str, ours: bool = False) -> str:
    """Run one test on this rank and return why the suite skipped it, nothing if it ran.

    Args:
        rank, size: place in the world that the test gets.
        name: of the test.
        folder: an empty one that all ranks of this test share.
        ours: with `paceline.DistributedDataParallel` in the place of torch's.
    """
    import torch.distributed as dist
    from cpu import on_cpu
    from torch.testing._internal import common_utils

    module = sys.modules[MODULE] = load(size)  # where its classes are looked up when they are unpickled
    if getattr(_method(module, name), "__unittest_skip__", False):
        return _method(module, name).__unittest_skip_why__
    _prepare(module, size, folder)
    case = type("Case", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})(name)
    case.rank, case.file_name = rank, f"{folder}/world"
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{folder}/world",
        world_size=size,
        rank=rank,
        timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)),
    )
    case._barrier()
    common_utils.set_rng_seed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cpu())
        if name in DATA["lifted"]["as_gloo"]:
            stack.enter_context(_known_as_gloo(module))
        if ours:
            stack.enter_context(_with_our_class(module))
        getattr(case, name)()
    case._barrier()
    dist.destroy_process_group()
    return ""


def _prepare(module: ModuleType, size: int, folder: str) -> None:
    """Set the variables and folders that the suite's own start sets; begin as a fresh process does."""
    import torch.distributed as dist

    os.environ.update(
        BACKEND=BACKEND,
        WORLD_SIZE=str(size),
        TEMP_DIR=folder,
        TMPDIR=folder,
        INIT_METHOD=f"file://{folder}/again",
        MASTER_ADDR="127.0.0.1",
    )
    tempfile.tempdir = None
    for name in ("barrier", "test_dir"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    module.INIT_METHOD = os.environ["INIT_METHOD"]
    module.Barrier.barrier_id = 0
    dist.set_debug_level_from_env()  # a test before may have left another one


@contextlib.contextmanager
def _known_as_gloo(module: ModuleType) -> Iterator[None]:
    """Have the suite, and torch's monitored_barrier, take our backend for torch's one for the CPU."""
    with (
        mock.patch.object(module, "BACKEND", "gloo"),
        mock.patch("torch.distributed.distributed_c10d.get_backend", return_value="gloo"),
    ):
        yield


@contextlib.contextmanager
def _with_our_class(module: ModuleType) -> Iterator[None]:
    """Put `paceline.DistributedDataParallel` in the place of torch's class."""
    import paceline.ddp

    paceline.ddp.install()
    try:
        with mock.patch.object(module, "DistributedDataParallel", paceline.ddp.DistributedDataParallel):
            yield
    finally:
        paceline.ddp.uninstall()


def run_plain(rank: int, size: int) -> tuple[int, list[str]]:
    """Run the tests of the suite that need no world; return their number and the failures."""
    module = sys.modules[MODULE] = load(size)
    cases = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, unittest.TestCase)
        and kind.__module__ == MODULE
        and kind is not module.TestDistBackend
    ]
    load_tests = unittest.defaultTestLoader.loadTestsFromTestCase
    result = unittest.TestSuite(map(load_tests, cases)).run(unittest.TestResult())
    return result.testsRun, [text for _, text in (*result.failures, *result.errors)]
