"""The compiled part: whether it is there, and why not."""

from __future__ import annotations

import importlib
from datetime import timedelta

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.autograd import _profiler_enabled
from torch.nn import Parameter

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


NAMED = {"grad": Parameter(torch.ones(3)), "float32": torch.ones(3), "int64": torch.arange(3)}
OTHERS = {
    "strided": torch.ones(3, 2).t(),
    "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": torch.ones(3).to_sparse(),
    "another device": torch.ones(3, device="meta"),
}


def read(tensors, **options):
    """Read the arguments of an all-reduce that the caller waits for."""
    native, opts = load_native(), c10d.AllreduceOptions()
    assert native is not None
    opts.asyncOp = False
    for name, value in options.items():
        setattr(opts, name, value)
    reader = native.SumReader(
        *(
            c10d.AllreduceOptions,
            torch.Tensor,
            Parameter,
            torch.strided,
            dist.ReduceOp.SUM,
            dist.ReduceOp.AVG,
        ),
        *(c10d.AllreduceOptions().timeout, _profiler_enabled),
    )
    return reader.read(tensors, opts)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
@pytest.mark.parametrize("tensor", NAMED.values(), ids=NAMED)
def test_sums_and_means_of_plain_tensors_are_read(op, tensor):
    key = (op == dist.ReduceOp.AVG, tensor.dtype, 3)
    assert read([tensor], reduceOp=op) == (key, tensor.data_ptr())


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_left_to_the_general_path(tensor):
    assert read([tensor]) is None


@pytest.mark.parametrize(
    "options",
    [{"reduceOp": dist.ReduceOp.MAX}, {"asyncOp": True}, {"timeout": timedelta(seconds=5)}],
    ids=["operation", "asynchronous", "time-out"],
)
def test_other_calls_are_left_to_the_general_path(options):
    assert read([torch.ones(3)], **options) is None


def test_a_missing_argument_is_named():
    native = load_native()
    assert native is not None
    with pytest.raises(TypeError, match="1 arguments instead of 2"):
        native.SumReader(*[None] * 8).read([])


def test_other_arguments_and_recorded_calls_are_left_to_the_general_path():
    tensor = torch.ones(3)
    for tensors in ([], [tensor, tensor], (tensor,), tensor):
        assert read(tensors) is None
    with torch.profiler.profile():
        assert read([tensor]) is None
    assert read([tensor]) is not None
