"""The exception tree: base classes, texts, and pickling between processes."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from paceline import errors
from paceline.errors import PacelineError, UsageError, unknown

CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PacelineError)
]


def tree_of_docstring():
    """Return {class name: parent's name} as drawn in the module's docstring."""
    parents, path = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^( {4}[│├└─ ]*)(\w+)(?: |$)", line)
        if match is None or match[2] not in errors.__all__:
            continue
        depth = (len(match[1]) - 4) // 4
        path[depth:] = [match[2]]
        parents[match[2]] = path[depth - 1] if depth else None
    return parents


def test_the_drawn_tree_is_the_real_one():
    real = {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if base in CLASSES), None)
        for cls in CLASSES
    }
    assert tree_of_docstring() == real


def test_all_is_sorted_and_complete():
    assert errors.__all__ == sorted(errors.__all__)
    assert set(errors.__all__) == {cls.__name__ for cls in CLASSES} | {"require", "unknown"}


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_documents_when_it_is_raised(cls):
    assert cls.__doc__
    assert cls.__doc__.partition("\n")[0].endswith(".")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UsageError", ValueError),
        ("MismatchError", ValueError),
        ("WorldError", RuntimeError),
        ("MissingRanks", TimeoutError),
        ("SyncError", RuntimeError),
        ("UnsyncedGradients", RuntimeError),
        ("BackwardFailed", RuntimeError),
        ("RankFailed", RuntimeError),
    ],
)
def test_errors_are_subclasses_of_pythons_exceptions(name, builtin):
    with pytest.raises(builtin):
        raise getattr(errors, name)("it happened")


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ({}, "it happened"),
        ({"rank": 0}, "[rank 0] it happened"),
        ({"step": 7}, "[step 7] it happened"),
        ({"rank": 3, "step": 0}, "[rank 3, step 0] it happened"),
        ({"remedy": "do this"}, "it happened\n  → do this"),
        ({"rank": 1, "step": 2, "remedy": "do this"}, "[rank 1, step 2] it happened\n  → do this"),
    ],
)
def test_rank_step_and_remedy_are_in_the_text(details, text):
    assert str(PacelineError("it happened", **details)) == text


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("travel", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_travel_between_processes_unchanged(cls, travel):
    error = cls("it happened", rank=2, step=5, remedy="do this")
    other = travel(error)
    assert type(other) is cls
    assert str(other) == str(error) == "[rank 2, step 5] it happened\n  → do this"
    assert (other.rank, other.step, other.remedy) == (2, 5, "do this")


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("bukketed", "bucketed"),
        ("Naive", "naive"),
        ("flatt", "flat"),
        ("zzz", None),
        (None, None),
        (25, None),
    ],
)
def test_an_unknown_name_suggests_the_near_one(given, suggested):
    error = unknown("strategy", given, ["naive", "flat", "bucketed"])
    assert isinstance(error, UsageError)
    assert f"unknown strategy {given!r}; valid: naive, flat, bucketed" in str(error)
    assert error.remedy == (f"did you mean {suggested!r}?" if suggested else "")


def test_valid_names_may_come_from_an_iterator():
    assert "valid: a, b" in str(unknown("thing", "c", iter(["a", "b"])))
