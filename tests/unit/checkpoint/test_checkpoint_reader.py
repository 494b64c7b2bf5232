"""Reading boxes of stored tensors, against brute force: tensors of all dtypes, cut and read in any way."""

from __future__ import annotations

import itertools
import os
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.format import checkpoint_reader as module
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.newest_checkpoint import find_problem
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart
from paceline.checkpoint.parts.state_reader import Read
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import DamagedCheckpoint
from written_checkpoints import (
    DTYPES,
    small_blocks,
    state_of,
    tensor_bytes,
    without_flushes,
    write_checkpoint,
)

RANKS = 3


@st.composite
def tensors(draw):
    """A tensor of random bytes, NaN among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    seed = draw(st.integers(0, 2**32))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).bool()
    numbers = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return numbers.view(dtype).view(shape)


@st.composite
def partitions(draw, box):
    """Disjoint boxes that cover a box, in any order."""
    axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
    if not axes or draw(st.integers(0, 2)) == 0:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.sizes[axis] - 1))
    low = replaced(box, axis, box.offsets[axis], at)
    high = replaced(box, axis, box.offsets[axis] + at, box.sizes[axis] - at)
    return draw(st.permutations(draw(partitions(low)) + draw(partitions(high))))


def replaced(box, axis, offset, size):
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis], sizes[axis] = offset, size
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def boxes(draw, shape):
    """A box in a tensor, which may have no elements."""
    offsets = [draw(st.integers(0, max(0, size - 1))) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


def target(kind, sizes, dtype):
    """Return a tensor to fill: contiguous, or with other strides."""
    if kind == "gaps" and sizes:
        return torch.zeros(*sizes[:-1], sizes[-1] + 2, dtype=dtype)[..., 1 : sizes[-1] + 1]
    if kind == "reversed":
        return torch.zeros(tuple(reversed(sizes)), dtype=dtype).permute(tuple(reversed(range(len(sizes)))))
    return torch.zeros(sizes, dtype=dtype)


@st.composite
def stored(draw):
    """Tensors by name, and what each rank writes of them."""
    ranks = [StateParts(rank) for rank in range(RANKS)]
    found = {}
    for name in ("a", "b.c")[: draw(st.integers(1, 2))]:
        tensor = found[name] = draw(tensors())
        whole = Box.whole(tuple(tensor.shape))
        for box in draw(partitions(whole)):
            data = tensor[box.index_in(whole)].contiguous()
            parts = ranks[draw(st.integers(0, RANKS - 1))]
            parts.add(TensorPart(name, tuple(tensor.shape), box, data))
    return found, ranks


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from(["safetensors", "dcp"]),
    st.sampled_from([(16, 16), (48, 32), (4 << 20, 1 << 20)]),
)
def test_any_box_is_read_from_any_boxes(data, container, blocks):
    found, ranks = data.draw(stored())
    with small_blocks(*blocks), without_flushes(), tempfile.TemporaryDirectory() as folder:
        files = write_checkpoint(LocalFolder(folder), 1, ranks, container=container)
        reader = CheckpointReader(files)
        wanted, reads = [], []
        for _ in range(data.draw(st.integers(1, 4))):
            name = data.draw(st.sampled_from(sorted(found)))
            tensor = found[name]
            box = data.draw(boxes(tuple(tensor.shape)))
            kind = data.draw(st.sampled_from(["contiguous", "gaps", "reversed", "real", "real box", "none"]))
            expected = tensor[box.index_in(Box.whole(tuple(tensor.shape)))]
            if tensor.is_complex() and kind.startswith(
                "real"
            ):  # as pairs, named with and without their dimension
                part = data.draw(st.sampled_from([0, 1])) if kind == "real box" else None
                into = torch.zeros(*box.sizes, 2 if part is None else 1, dtype=tensor.real.dtype)
                expected = torch.view_as_real(expected.contiguous())
                if part is not None:
                    expected = expected[..., part : part + 1]
                    box = Box((*box.offsets, part), (*box.sizes, 1))
            else:
                into = None if kind == "none" else target(kind, box.sizes, tensor.dtype)
            reads.append(Read(name, box, into))
            wanted.append(expected)
        reader.read(reads)
        for read, expected in zip(reads, wanted, strict=True):
            assert read.into is None or tensor_bytes(read.into) == tensor_bytes(expected)
        for name, tensor in found.items():
            info = reader.info(name)
            assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
            assert tensor_bytes(reader.tensor(name)) == tensor_bytes(tensor)
        assert find_problem(files) == ""
        reader.close()


def test_memory_around_a_target_is_untouched(tmp_path):
    tensor = torch.arange(60.0).view(5, 12)
    files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": tensor})])
    memory = torch.full((7, 16), -1.0)
    CheckpointReader(files).read([Read("a", Box((1, 2), (3, 8)), memory[2:5, 4:12])])
    assert torch.equal(memory[2:5, 4:12], tensor[1:4, 2:10])
    memory[2:5, 4:12] = -1
    assert memory.eq(-1).all()


def test_only_the_blocks_that_are_needed_are_read(tmp_path, monkeypatch):
    read = []
    with small_blocks(64, 32):
        files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": torch.arange(1024.0)})])
        reader = CheckpointReader(files)
        read_block = CheckpointReader._read_block
        monkeypatch.setattr(
            CheckpointReader,
            "_read_block",
            lambda self, job, file: read.append(job.block) or read_block(self, job, file),
        )
        found = reader.tensor("a", Box((40,), (20,)))
    assert found.tolist() == list(range(40, 60))
    assert sorted(read) == [2, 3]  # of 16 elements each


def test_what_is_contiguous_is_read_into_place(tmp_path, monkeypatch):
    """Without memory between, except for the blocks at the ends of what is read."""
    with small_blocks(64, 32):
        files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": torch.arange(1024.0)})])
        reader = CheckpointReader(files)
        monkeypatch.setattr(CheckpointReader, "_memory", lambda *_: pytest.fail("copied"))
        assert torch.equal(reader.tensor("a"), torch.arange(1024.0))
        assert torch.equal(reader.tensor("a", Box((32,), (64,))), torch.arange(32.0, 96))


@pytest.mark.parametrize("blocks", [16, 4 << 20])
def test_damage_is_found_where_it_is_read(tmp_path, blocks):
    with small_blocks(blocks, blocks):
        files = write_checkpoint(
            LocalFolder(tmp_path), 1, [state_of({"a": torch.arange(64.0)}, file="model.safetensors")]
        )
        path = files.path / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        reader = CheckpointReader(files)
        words = "model.safetensors: wrong checksum of tensor 'a'"
        for box in (Box((63,), (1,)), Box.whole((64,))):
            with pytest.raises(DamagedCheckpoint, match=words):
                reader.tensor("a", box)
            with pytest.raises(DamagedCheckpoint, match=words):
                reader.read([Read("a", box, None)])
        if blocks == 16:
            assert reader.tensor("a", Box((0,), (60,))).tolist() == list(range(60))
        assert find_problem(files) == words


def test_a_rank_reads_the_pieces_that_it_needs_only(tmp_path):
    ranks = [state_of({f"t{rank}": torch.ones(2) * rank}, rank) for rank in range(4)]
    files = write_checkpoint(LocalFolder(tmp_path), 1, ranks)
    reader, read = CheckpointReader(files), []
    original = files.read
    files.read = lambda name: read.append(name) or original(name)
    assert reader.tensor("t2").tolist() == [2, 2]
    assert read == ["rank-00002.json"]
    assert sorted(reader._open) == ["state-rank2.safetensors"]


def test_several_threads_read_and_the_first_error_is_raised(tmp_path, monkeypatch):
    tensor = torch.arange(5000.0)
    with small_blocks(16, 16):
        files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": tensor})])
        reader = CheckpointReader(files)
        assert torch.equal(reader.tensor("a"), tensor)
        read_block = CheckpointReader._read_block

        def fail(self, job, file):
            if job.block >= 700:
                raise DamagedCheckpoint(f"block {job.block}")
            read_block(self, job, file)

        monkeypatch.setattr(CheckpointReader, "_read_block", fail)
        with pytest.raises(DamagedCheckpoint, match=r"^block 7\d\d$"):
            reader.tensor("a")
    assert module._THREADS > 1


def test_small_neighbours_are_read_together_and_each_is_verified(tmp_path, monkeypatch):
    tensors = {f"t{at:02}": torch.full((at + 1,), float(at)) for at in range(40)}
    files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of(tensors, file="model.safetensors")])
    reader, reads = CheckpointReader(files), []
    read_bytes = CheckpointReader._read_bytes
    monkeypatch.setattr(
        CheckpointReader, "_read_bytes", lambda self, *where: reads.append(where) or read_bytes(self, *where)
    )
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    reader.read([Read(name, Box.whole(each.shape), found[name]) for name, each in tensors.items()])
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    assert len(reads) == 1

    chunk = reader.piece(0).files["model.safetensors"].chunks["t17"]
    path = files.path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[chunk.start + 3] ^= 1
    path.write_bytes(content)
    reader = CheckpointReader(files)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors: wrong checksum of tensor 't17'"):
        reader.read([Read(name, Box.whole(each.shape), found[name]) for name, each in tensors.items()])
    reader.tensor("t16")
    reader.tensor("t18")


def test_names_that_do_not_exist(tmp_path):
    reader = CheckpointReader(write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": torch.ones(2)})]))
    for read in (
        reader.info,
        reader.tensor,
        reader.value,
        lambda name: reader.read([Read(name, Box((), ()), None)]),
    ):
        with pytest.raises(KeyError):
            read("b")
    assert list(reader.names()) == ["a"]
    assert list(reader.value_names()) == []


def test_a_closed_reader_leaves_no_file_open(tmp_path):
    files = write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": torch.ones(2)})])
    reader = CheckpointReader(files)
    reader.tensor("a")
    handles = [file._handle for file in reader._open.values()]
    reader.close()
    reader.close()
    for handle in handles:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
    assert reader.tensor("a").tolist() == [1, 1]  # it opens what it needs


# ------------------------------------------------------------------ every pair of ways to cut


def grid(counts, shape):
    """Return the boxes of a tensor that is cut into chunks along each axis, as DTensor does."""
    rows = []
    for count, size in zip(counts, shape, strict=True):
        step = -(-size // count)
        rows.append([(at, min(step, size - at)) for at in range(0, size, step)])
    return [
        Box(tuple(at for at, _ in cell), tuple(size for _, size in cell)) for cell in itertools.product(*rows)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("cut", [(1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 4), (2, 2, 1), (2, 2, 3)])
def test_shards_are_read_as_other_shards(tmp_path, dtype, cut):
    shape = (7, 5, 6)
    tensor = torch.randn(shape, dtype=dtype)
    whole = Box.whole(shape)
    ranks = []
    for rank, box in enumerate(grid(cut, shape)):
        ranks.append(StateParts(rank))
        ranks[-1].add(TensorPart("a", shape, box, tensor[box.index_in(whole)].contiguous()))
    with small_blocks(32, 16):
        reader = CheckpointReader(write_checkpoint(LocalFolder(tmp_path), 1, ranks))
        for other in itertools.product((1, 2, 3), (1, 2), (1, 4)):
            for box in grid(other, shape):
                assert torch.equal(reader.tensor("a", box), tensor[box.index_in(whole)])


def test_a_dimension_of_size_1_may_have_any_stride(tmp_path):
    tensor = torch.tensor([[1.0], [2.0]])
    reader = CheckpointReader(write_checkpoint(LocalFolder(tmp_path), 1, [state_of({"a": tensor})]))
    into = torch.zeros(5).as_strided((1, 1), (3, 4), 2)
    assert into.is_contiguous()
    reader.read([Read("a", Box((1, 0), (1, 1)), into)])
    assert into.tolist() == [[2]]
