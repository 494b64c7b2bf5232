"""The reference lists the whole public surface, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
import re
from importlib import import_module

import pytest
from manual import ROOT
from prelude import names

import paceline
from hugging_face import separate_process

REFERENCE = {
    path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md"))
}
LISTED = re.findall(r"^<!-- reference: ([\w.]+) -->$", "\n".join(REFERENCE.values()), re.M)
PUBLIC = [name for name in paceline.__all__ if name != "__version__"]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(paceline.__path__, "paceline.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference_with_an_example(name):
    value = getattr(paceline, name)
    home = f"{inspect.getmodule(inspect.unwrap(value)).__name__}.{name}"
    assert home in LISTED or home.rpartition(".")[0] in LISTED
    assert "Example:" in inspect.getdoc(value)
    assert ">>>" in inspect.getdoc(value)


@pytest.mark.parametrize("name", LISTED)
def test_names_in_the_reference_exist(name):
    module, _, last = name.rpartition(".")
    value = import_module(name) if name in MODULES else getattr(import_module(module), last)
    assert inspect.getdoc(value)


def test_every_error_is_public():
    from paceline import errors

    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert {name for name in defined if not name.startswith("_")} <= set(errors.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_are_true(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = import_module(module)
    found = [test for test in doctest.DocTestFinder(exclude_empty=True).find(loaded) if test.examples]
    known = names() if found else {}
    if found:
        monkeypatch.setattr(paceline.AsyncDataParallel.finish, "__defaults__", (0.0,))  # no hub will answer
    for test in found:
        output = []
        test.globs = {**known, **vars(loaded)}
        with separate_process():
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
        assert not result.failed, "".join(output)
