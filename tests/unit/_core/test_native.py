"""The compiled part: whether it is there, and why not."""

from __future__ import annotations

import importlib

import pytest

from paceline._core.native import load_native, why_not_native


def test_it_is_built_where_tests_run():
    assert why_not_native() == ""
    assert load_native() is not None


def test_a_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert load_native() is None
    assert why_not_native() == "PACELINE_NATIVE=0"


def test_without_it_the_reason_and_the_remedy_are_given(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert load_native() is None
    assert why_not_native().startswith(
        "No module named 'paceline._core._native'; install Paceline where pip finds"
    )


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("wait", ()),
        ("start", (0, b"short", -1, 0, print)),
        ("all_reduce_eager", (0, b"0" * 16, 0, 10**6, 0, 1, print)),
        ("reduce_staged", (0, 0, 64, 9, 1)),
        ("add_eager", (0, 0, 64, 9, 1)),
    ],
)
def test_wrong_arguments_raise_and_touch_nothing(method, arguments):
    native = load_native()
    assert native is not None
    ranks = native.Ranks(
        0, 0, 1, 1, 0.0, 0.0, (0, 64, 128, 4096, 4096, 256, 260, 64, 8192, 1 << 20, 1 << 16, 1 << 18)
    )
    with pytest.raises((TypeError, ValueError)):
        getattr(ranks, method)(*arguments)
