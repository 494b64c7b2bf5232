"""Values that ranks exchange keep their containers' classes, and nothing that another rank sends is executed."""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from paceline.errors import UsageError
from paceline.world.plain_values import pack, unpack, unpack_objects
from paceline.world.value_collectives import _decode, _encode

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: torch.Tensor
    parts: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Small:
    x: int


class Encoding(UserDict):
    """Like the batches of a tokenizer: a dict with attributes."""

    def __init__(self, data):
        raise AssertionError("no code of the class runs")


class Output(OrderedDict):
    def __setitem__(self, key, value):
        raise AssertionError("no code of the class runs")


class Closing(dict):
    def __del__(self):
        pass


def encoding(**attributes):
    made = Encoding.__new__(Encoding)
    made.__dict__.update(attributes)
    return made


@pytest.mark.parametrize(
    "value",
    [
        None, True, 7, -0.5, "text", b"bytes", [1, [2]], (1, "x"), {"a": {"b": 1}}, {1: 2, "$x": 3}, {1, 2},
        Counter("aab"), Pair(1, [2.5]), Small(3), [Small(1), Pair(Small(2), None)],
        encoding(data={"ids": [1, 2]}, length=2),
    ],
)  # fmt: skip
def test_values_arrive_with_their_classes(value):
    found = _decode(_encode(value))
    assert found == value
    assert type(found) is type(value)


def test_an_ordered_dict_of_a_class_arrives_without_running_its_code():
    made = OrderedDict.__new__(Output)
    OrderedDict.__setitem__(made, "x", 1)
    found = _decode(_encode(made))
    assert (type(found), list(found.items())) == (Output, [("x", 1)])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64, torch.uint8],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 4)])
def test_tensors_arrive_with_dtype_and_shape(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    found = _decode(_encode(Record(tensor, [tensor.T if len(shape) == 2 else tensor])))
    assert type(found) is Record
    for mine, theirs in ((tensor, found.x), (tensor.T if len(shape) == 2 else tensor, found.parts[0])):
        assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape)
        assert torch.equal(theirs, mine)


@pytest.mark.parametrize("value", [object(), lambda: 0, {"x": [open]}, torch.eye(3).to_sparse()])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(UsageError, match=r"the value.* is a .*not a plain value"):
        _encode(value)


def message(packed, rows=()):
    head = json.dumps([packed, list(rows)]).encode()
    return torch.frombuffer(bytearray(struct.pack("<Q", len(head)) + head), dtype=torch.uint8)


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "subprocess:Popen", "builtins:dict", "builtins:eval", "tempfile:_TemporaryFileCloser",
        "nowhere:Thing", "json:loads", "", ":", "collections:Counter", f"{__name__}:Closing", f"{__name__}:pytest.mark",
    ],
)  # fmt: skip
def test_a_class_that_is_no_data_or_not_imported_is_refused(name):
    with pytest.raises(UsageError, match="is not a class of data that this process has imported"):
        _decode(message({"$object": [name, {}, {"name": "/tmp/x"}]}))


def test_what_is_on_disk_makes_no_objects():
    packed, _ = pack(Pair(1, 2), classes=True)
    assert unpack_objects(packed, {}.__getitem__) == Pair(1, 2)
    with pytest.raises(ValueError, match=r"\$object"):
        unpack(packed, {}.__getitem__)
    assert pack(Pair(1, 2))[0] == {"$tuple": [1, 2]}
