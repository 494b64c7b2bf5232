"""States as JSON: round trips, and unsupported values named by path."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.world.plain_values import pack, unpack

KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.just("$tensor"), st.tuples(st.integers(), st.booleans())
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(state):
    packed, tensors = pack(state)
    return unpack(json.loads(json.dumps(packed, allow_nan=False)), tensors.__getitem__)


def same(a, b):
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(STATES)
def test_plain_states_round_trip(state):
    assert same(state, there_and_back(state))


@pytest.mark.parametrize(
    "state",
    [
        {"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None},
        {"milestones": Counter({30: 1, 80: 2}), "last_epoch": 4},
        {"seen": {1, 2, 3}, "of": frozenset()},
        {0: {"step": 5}, 1: {"step": 6}},
        {"$dict": 1},
        {"": {"": []}},
    ],
)
def test_states_of_schedulers_round_trip(state):
    assert there_and_back(state) == state
    assert type(there_and_back(state).get("milestones", Counter())) is Counter


def test_tensors_and_arrays_round_trip():
    state = OrderedDict(
        a=torch.arange(6).view(2, 3),
        b=[torch.tensor(2.5), np.arange(3.0)],
        c={"x": np.float32(1.5), "y": np.int64(7)},
    )
    found = there_and_back(state)
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"][0], state["b"][0])
    assert np.array_equal(found["b"][1], state["b"][1])
    assert found["c"] == {"x": 1.5, "y": 7}
    assert pack(state, "optimizer")[1].keys() == {"optimizer.a", "optimizer.b[0]", "optimizer.b[1]"}


def test_tensors_with_the_same_path_have_different_labels():
    packed, tensors = pack({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    assert len(tensors) == 2
    found = unpack(packed, tensors.__getitem__)
    assert (found["a.b"].item(), found["a"]["b"].item()) == (0.0, 1.0)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, torch.float32, np.array([object()]), np.array(["text"]), np.array([1.0], ">f4")],
)
def test_an_unsupported_value_is_refused_by_its_path(value):
    with pytest.raises(UsageError, match=r"scheduler\.lambdas\[1\] is a"):
        pack({"lambdas": [None, value]}, "scheduler")


@pytest.mark.parametrize(
    "packed",
    [
        {"$tensor": 3}, {"$float": "1e400"}, {"$float": 2}, {"$tuple": {}}, {"$dict": [[1]]}, {"$dict": "ab"},
        {"$code": "1"}, {"$bytes": "zz"}, {"$tuple": [], "$set": []}, {"$counter": [1]},
    ],
)  # fmt: skip
def test_an_invalid_packed_state_is_refused(packed):
    with pytest.raises((ValueError, TypeError)):
        unpack({"a": [packed]}, {}.__getitem__)
