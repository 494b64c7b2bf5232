"""Boxes of tensors against brute force, and the order in which parameters are flattened."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.parts.boxes import Box, boxes_of_range, storage_order
from paceline.checkpoint.parts.optimizer_parts import FlatOrder
from paceline.parallel.buckets.grad_slot import shaped_as, storage_numel

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    """A box in a tensor, with elements."""
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


def elements(box, shape):
    """Return the numbers of a box's elements in a tensor of `shape`, in their order."""
    return numbered(shape)[box.index_in(Box.whole(shape))].reshape(-1).tolist()


# ------------------------------------------------------------------ ranges of elements


@given(st.data())
def test_boxes_of_a_range_are_its_elements_in_their_order(data):
    shape = data.draw(SHAPES)
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = list(boxes_of_range(shape, start, stop))
    assert [at for box in found for at in elements(box, shape)] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    first = start
    for box in found:
        assert box.numel > 0
        assert box.flat_range_in(Box.whole(shape)) == (first, first + box.numel)
        first += box.numel


@pytest.mark.parametrize(("shape", "boxes"), [((7,), 1), ((5, 4), 3), ((4, 5, 6), 5), ((3, 4, 5, 6), 7)])
def test_the_most_boxes_of_a_range(shape, boxes):
    numel = math.prod(shape)
    counts = [
        len(list(boxes_of_range(shape, start, stop)))
        for start in range(numel)
        for stop in range(start + 1, numel + 1)
    ]
    assert max(counts) == boxes


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_tensors_without_elements_have_no_boxes(shape):
    assert list(boxes_of_range(shape, 0, 0)) == []
    assert Box.whole(shape).numel == 0
    assert Box.whole(shape).intersection(Box.whole(shape)) is None


def test_a_number_is_one_box():
    whole = Box.whole(())
    assert list(boxes_of_range((), 0, 1)) == [whole]
    assert whole.intersection(whole) == whole
    assert whole.flat_range_in(whole) == (0, 1)
    assert whole.numel == 1


# ------------------------------------------------------------------ two boxes


@given(st.data())
def test_an_intersection_has_the_elements_of_both(data):
    shape = data.draw(SHAPES)
    one, two = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = one.intersection(two)
    expected = sorted(set(elements(one, shape)) & set(elements(two, shape)))
    assert (elements(common, shape) if common is not None else []) == expected
    assert two.intersection(one) == common


@given(st.data())
def test_the_place_of_a_box_in_another_one(data):
    shape = data.draw(SHAPES)
    outer = data.draw(boxes(shape))
    inner = outer.intersection(data.draw(boxes(shape)))
    if inner is None:
        return
    values = numbered(shape)[outer.index_in(Box.whole(shape))]
    assert values[inner.index_in(outer)].reshape(-1).tolist() == elements(inner, shape)
    positions = numbered(outer.sizes)[inner.index_in(outer)].reshape(-1).tolist()
    contiguous = positions == list(range(positions[0], positions[0] + len(positions)))
    expected = (positions[0], positions[-1] + 1) if contiguous else None
    assert inner.flat_range_in(outer) == expected


@given(st.data())
def test_permuted_boxes_are_boxes_of_the_permuted_tensor(data):
    shape = data.draw(SHAPES)
    box, order = data.draw(boxes(shape)), data.draw(st.permutations(range(len(shape))))
    permuted = numbered(shape).permute(order)
    found = permuted[box.permuted(order).index_in(Box.whole(tuple(permuted.shape)))]
    assert sorted(found.reshape(-1).tolist()) == elements(box, shape)


# ------------------------------------------------------------------ the order of a parameter's elements


@st.composite
def parameters(draw):
    """A parameter of any layout: permuted, with gaps, with equal addresses, complex, on its own or a view."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.bfloat16]))
    order = draw(st.permutations(range(len(shape))))
    kind = draw(st.sampled_from(["dense", "gaps", "expanded", "odd strides"]))
    stored = [shape[at] for at in order]
    if kind == "gaps" and shape:
        memory = torch.zeros(*stored[:-1], stored[-1] + 1, dtype=dtype)[..., : stored[-1]]
    elif kind == "expanded" and shape:
        memory = torch.zeros(*stored[:-1], 1, dtype=dtype).expand(stored)
    elif kind == "odd strides":  # of dimensions of size 1, which have no meaning
        strides = [1 if size > 1 else draw(st.integers(0, 7)) for size in stored]
        step = 1
        for at in reversed(range(len(stored))):
            if stored[at] > 1:
                strides[at], step = step, step * stored[at]
        memory = torch.zeros(step, dtype=dtype).as_strided(stored, strides)
    else:
        memory = torch.zeros(stored, dtype=dtype)
    return memory.permute(sorted(range(len(order)), key=order.__getitem__))


@given(st.data())
def test_flattened_elements_are_those_of_shards(data):
    """What `FlatOrder` calls elements start … stop - 1 is what a shard of that range holds."""
    param = data.draw(parameters())
    flat = FlatOrder(param)
    assert flat.numel == storage_numel(param)
    assert math.prod(flat.shape) == flat.numel
    start = data.draw(st.integers(0, flat.numel))
    stop = data.draw(st.integers(start, flat.numel))
    real = param.real.dtype if param.is_complex() else param.dtype
    memory = torch.arange(flat.numel).to(torch.float64)
    whole = shaped_as(param, memory.to(real))
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    assert tuple(whole.shape) == flat.shape
    place, next_first = Box.whole(flat.shape), start
    for box, first in flat.boxes(start, stop):
        assert first == next_first
        shaped = flat.shaped(memory.to(real)[first : first + box.numel], box)
        assert shaped.shape == box.sizes
        assert torch.equal(shaped, whole[box.index_in(place)])
        next_first += box.numel
    assert next_first == stop


def test_the_order_of_known_layouts():
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert storage_order(image) == [0, 2, 3, 1]
    assert storage_order(torch.empty(4, 6).t()) == [1, 0]
    assert storage_order(torch.empty(())) == []
    order = FlatOrder(image)
    (box, first), *more = order.boxes(0, 3)  # the channels of the first pixel
    assert (box, first, more) == (Box((0, 0, 0, 0), (1, 3, 1, 1)), 0, [])


def test_complex_numbers_are_two_elements():
    order = FlatOrder(torch.empty(2, 3, dtype=torch.complex64))
    assert (order.numel, order.shape) == (12, (2, 3, 2))
    assert [box for box, _ in order.boxes(1, 3)] == [Box((0, 0, 1), (1, 1, 1)), Box((0, 1, 0), (1, 1, 1))]


def test_a_parameter_without_elements_or_dimensions():
    assert list(FlatOrder(torch.empty(0, 3)).boxes(0, 0)) == []
    assert list(FlatOrder(torch.empty(())).boxes(0, 1)) == [(Box((), ()), 0)]
