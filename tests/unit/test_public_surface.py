"""The public surface: the names of `paceline` exist, and listing them imports no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
MODULES = sorted(
    ".".join(["paceline", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.name != "__main__.py"
)

PROGRAMS = {"paceline._core.processes.pdeathsig", "paceline.testing.netlab.namespace_main"}
"""Run by their path, never imported."""

WITHOUT_TORCH = [
    "errors", "_core", "testing", "world", "cost_model", "transport", "launch", "tools.report", "tools.cli",
    "tools.simulate.cluster", "collectives.algorithms", "collectives.simulated_cost",
    "collectives.closed_form_cost", "collectives.schedule_text", "collectives.prove", "collectives.schedule",
    "collectives.topology", "profiling.trace_file", "profiling.step_recorder", "profiling.metrics_writer",
    "data.map_loader_state", "data.batch_assignment", "data.sampling",
    "checkpoint.storage.local_folder", "checkpoint.format.manifest", "health.attribution", "health.failure_text",
    "elastic.view", "elastic.next_view", "elastic.member", "elastic.member_events", "elastic.store_records",
    "async_dp.wal", "tools.plan.uneven_batch_outcomes", "tools.plan.dispatch_forecast",
    "tools.plan.imbalance_statistics",
]  # fmt: skip
"""Modules, and folders with all that is in them, that answer before torch is loaded."""

NEEDS_TORCH = {
    "paceline.world.accelerator",
    "paceline.world.control_collectives",
    "paceline.world.group_devices",
    "paceline.world.mesh_groups",
    "paceline.world.plain_values",
    "paceline.world.value_collectives",
    "paceline.world.store.authenticated_store",
    "paceline.tools.cli.simulate.simulate_async_run",
}
"""Of those folders: imported by a function, once everything that can be refused has been."""

WITHOUT_NUMPY = [
    "errors",
    "_core.units",
    "_core.files",
    "_core.step_state",
    "testing",
    "world",
    "launch.process.local_ranks",
    "tools.cli.app",
    "tools.cli.doctor_command",
]


def modules_in(places):
    for place in places:
        name = f"paceline.{place}"
        yield from (module for module in MODULES if module == name or module.startswith(f"{name}."))


def loaded_by(places):
    names = [name for name in modules_in(places) if name not in NEEDS_TORCH and name not in PROGRAMS]
    assert len(names) >= len(places)
    ended = run(f"import sys, {', '.join(names)}; print(*sorted(sys.modules))")
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def tree_of(module):
    path = ROOT.joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def test_all_is_sorted_and_lists_only_names_with_a_module():
    assert paceline.__all__ == sorted(paceline.__all__)
    assert set(paceline.__all__) == set(paceline._HOME) | {"__version__"}
    assert dir(paceline) == paceline.__all__


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_name_exists_and_is_public_in_its_module(name):
    value = getattr(paceline, name)
    if name in paceline._HOME:
        home = import_module(paceline._HOME[name])
        assert value is getattr(home, name)
        assert name in home.__all__
        assert value.__doc__


def test_type_checkers_see_the_same_names():
    guarded = next(node for node in tree_of("paceline").body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in guarded.body for alias in node.names}
    assert seen == paceline._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        paceline.Trainer  # noqa: B018


def test_importing_paceline_imports_no_torch():
    ended = run("import sys, paceline; dir(paceline); paceline.PacelineError; print(*sorted(sys.modules))")
    assert ended.returncode == 0, ended.stderr
    assert {"torch", "numpy", "rich", "typer"}.isdisjoint(ended.stdout.split())


def test_modules_that_promise_to_do_without_torch_keep_it():
    assert "torch" not in loaded_by(WITHOUT_TORCH)


def test_modules_that_the_command_line_loads_first_need_no_numpy():
    assert {"torch", "numpy"}.isdisjoint(loaded_by(WITHOUT_NUMPY))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_docstring_and_all(module):
    tree = tree_of(module)
    assert ast.get_docstring(tree)
    public = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    declared = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    if public:
        assert declared, "it has public names but no __all__"
    for names in declared:
        assert len(names) == len(set(names))


LISTED = {
    path: found
    for path in sorted(Path(paceline.__file__).parent.rglob("__init__.py"))
    if (found := re.findall(r"^([a-z_]+\.py)  ", path.read_text(encoding="utf-8"), re.MULTILINE))
}
"""Packages whose docstring lists their files."""


@pytest.mark.parametrize("path", LISTED, ids=lambda path: path.parent.name)
def test_a_list_of_files_names_every_file_and_no_other(path):
    assert sorted(LISTED[path]) == sorted(each.name for each in path.parent.glob("*.py") if each != path)


def test_windows_is_refused_with_the_way_out():
    program = "import sys; sys.platform = 'win32'; import paceline"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ImportError" in ended.stderr
    assert "WSL 2" in ended.stderr
