"""Manifests and their pieces: what they say, and that changed ones are refused, with memory in proportion to them."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import tracemalloc

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from paceline.checkpoint.format.manifest import CHECKSUM, FORMAT, MANIFEST, Manifest, RankPiece, piece_name
from paceline.checkpoint.format.manifest_index import make_manifest
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import DamagedCheckpoint, UsageError
from written_checkpoints import write_checkpoint


def shard(rank, *, first=0, rows=2, dtype=torch.float32):
    """Return what a rank writes that has `rows` rows of a tensor of four, a value and a text of its own."""
    parts = StateParts(rank, values={f"value{rank}": {"$float": "nan"}}, texts={f"note{rank}.json": b"{}"})
    box = Box((first, 0), (rows, 3))
    parts.add(TensorPart("w", (4, 3), box, torch.ones(rows, 3, dtype=dtype)), file=f"part{rank}.safetensors")
    parts.add(TensorPart.whole(f"whole{rank}", torch.arange(2 + rank, dtype=torch.int64)))
    return parts


@pytest.fixture(scope="module", params=["safetensors", "dcp"])
def files(request, tmp_path_factory):
    """A checkpoint of two ranks."""
    folder = LocalFolder(tmp_path_factory.mktemp("run"))
    ranks = [shard(0), shard(1, first=2)]
    return write_checkpoint(
        folder, 7, ranks, container=request.param, states=[{"a": {"$tensor": "flag"}}, {}], values={"lr": b"0.1"},
        facts={"windows": 32}, aliases={"model": {"tied": "w"}}, optimizers={"adam": [{"lr": 0.1, "params": ["w"]}]},
    )  # fmt: skip


@pytest.fixture
def text(files):
    """A manifest, for reading without its checksum, which would refuse nearly all of the following."""
    return files.read(MANIFEST)


@pytest.fixture
def piece_text(files):
    """The piece of the second rank, for reading without its checksum."""
    return files.read(piece_name(1))


def read(text):
    return measured(lambda: Manifest.from_json(text), text)


def read_piece(text):
    return measured(lambda: RankPiece.from_json(text, "rank-00001.json"), text)


def measured(make, text):
    """Read a manifest or piece: it is valid or refused, and takes memory in proportion to its size."""
    tracemalloc.start()
    try:
        found = make()
    except (DamagedCheckpoint, UsageError) as error:
        found = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(text) + 200_000
    return found


# ------------------------------------------------------------------ contents


def test_round_trip(files, text, piece_text):
    found = Manifest.read(files.read)
    assert (found.step, found.ranks, found.facts) == (7, 2, {"windows": 32})
    assert found.tensors["w"].shape == (4, 3)
    assert found.layouts[found.tensors["w"].layout] == [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))]
    assert found.values == {"value0": 0, "value1": 1}
    assert found.aliases == {"model": {"tied": "w"}}
    assert Manifest.from_json(found.to_json()) == found
    piece = found.read_piece(files.read, 1)
    assert piece.values == {"value1": {"$float": "nan"}}
    assert {chunk.tensor: chunk.shape for file in piece.files.values() for chunk in file.chunks.values()} == {
        "w": (4, 3),
        "whole1": (3,),
    }
    assert RankPiece.from_json(piece.to_json(), "a") == piece
    assert found.nbytes == sum(found.read_piece(files.read, rank).nbytes for rank in range(2))


def test_the_checksum_is_what_xxhsum_prints(files, text):
    assert files.read(CHECKSUM) == f"{xxh3_128_hexdigest(text)}  manifest.json\n".encode()


def test_every_file_of_a_checkpoint_has_a_checksum(files):
    manifest = Manifest.read(files.read)
    described = {MANIFEST, CHECKSUM, *manifest.extra_files, *(piece.name for piece in manifest.pieces)}
    for rank in range(2):
        described |= manifest.read_piece(files.read, rank).files.keys()
    assert {path.name for path in files.path.iterdir()} == described


@pytest.mark.parametrize("name", [MANIFEST, CHECKSUM, piece_name(0), piece_name(1)])
def test_a_changed_byte_is_found(files, name):
    original = files.read(name)
    for at in (0, len(original) // 2, len(original) - 1):
        changed = bytearray(original)
        changed[at] ^= 4

        def read(other, changed=changed):
            return bytes(changed) if other == name else files.read(other)

        with pytest.raises(
            DamagedCheckpoint, match=f"{MANIFEST if name == CHECKSUM else name} does not match"
        ):
            [Manifest.read(read).read_piece(read, rank) for rank in range(2)]


def test_nan_is_refused_when_a_manifest_is_written(files):
    manifest = dataclasses.replace(Manifest.read(files.read), facts={"loss": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest.to_json()


# ------------------------------------------------------------------ put together from pieces


def pieces_of(*ranks, folder):
    """Return the pieces of ranks as `make_manifest` takes them."""
    files = write_checkpoint(LocalFolder(folder), 1, ranks)
    texts = [files.read(piece_name(rank)) for rank in range(len(ranks))]
    return [RankPiece.from_json(text, "piece") for text in texts], texts


HEAD = {"step": 1, "facts": {}, "container": "safetensors", "aliases": {}, "optimizers": {}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"offsets": (1, 0)}, "elements of 'w' were written twice"),  # and as many are missing
        ({"offsets": (0, 0)}, "6 of the 12 elements of 'w' were written"),  # as if by a replica
        ({"offsets": (0, 0), "checksums": "0" * 16}, "rank 0 and rank 1 have written 'w' with other values"),
        ({"tensor": "v"}, "6 of the 12 elements of 'w' were written"),
        ({"tensor": "whole0"}, r"ranks have written 'whole0' as .*int64.* and as .*float32"),
        ({"shape": (5, 3)}, r"ranks have written 'w' as .*\(4, 3\).* and as .*\(5, 3\)"),
    ],
)
def test_pieces_that_do_not_fit_together(tmp_path, changed, words):
    pieces, texts = pieces_of(shard(0), shard(1, first=2), folder=tmp_path)
    make_manifest(pieces, texts, HEAD)
    (label, chunk), *_ = pieces[1].files["part1.safetensors"].chunks.items()
    file = dataclasses.replace(
        pieces[1].files["part1.safetensors"], chunks={label: dataclasses.replace(chunk, **changed)}
    )
    pieces[1] = dataclasses.replace(pieces[1], files={**pieces[1].files, "part1.safetensors": file})
    with pytest.raises(ValueError, match=words):
        make_manifest(pieces, texts, HEAD)


def test_two_ranks_with_other_values_under_a_name_do_not_fit_together(tmp_path):
    pieces, texts = pieces_of(shard(0), shard(1, first=2), folder=tmp_path)
    pieces[1] = dataclasses.replace(pieces[1], values={"value0": 3})
    with pytest.raises(ValueError, match="rank 0 and rank 1 have written other values of 'value0'"):
        make_manifest(pieces, texts, HEAD)


@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_what_a_replica_writes_counts_once(tmp_path, container):
    """A DTensor on a part of a mesh has replicas on the other parts."""
    ranks = [shard(0), shard(1, first=2), shard(2), shard(3, first=2)]
    for rank, parts in enumerate(ranks):
        parts.add(TensorPart.whole("step", torch.tensor(7.0)))
        parts.values = {"lists": [1, {"$float": "nan"}], f"own{rank}": rank}
    manifest = Manifest.read(write_checkpoint(LocalFolder(tmp_path), 1, ranks, container=container).read)
    assert manifest.layouts[manifest.tensors["w"].layout] == [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))]
    assert manifest.layouts[manifest.tensors["step"].layout] == [(0, (), ())]
    assert manifest.values == {"lists": 0, "own0": 0, "own1": 1, "own2": 2, "own3": 3}
    if container == "dcp":
        metadata = pickle.loads((tmp_path / "step-00000001" / ".metadata").read_bytes())
        assert [tuple(chunk.offsets) for chunk in metadata.state_dict_metadata["w"].chunks] == [
            (0, 0),
            (2, 0),
        ]
        (index,) = (index for index in metadata.storage_data if index.fqn == "step")
        assert metadata.storage_data[index].relative_path == "__0_0.distcp"


@settings(max_examples=60)
@given(st.data())
def test_boxes_that_overlap_are_found(data):
    """However many there are, and whichever two overlap."""
    from paceline.checkpoint.format import manifest_index as module

    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20))
    boxes = [((row, 2 * column), (1, 2)) for row in range(rows) for column in range(columns)]
    boxes = data.draw(st.permutations(boxes)) + [
        ((0, 0), (0, 9)),
        ((1, 1), (3, 0)),
    ]  # empty ones count for nothing
    assert not module._overlap(boxes)
    (row, column), _ = boxes[data.draw(st.integers(0, rows * columns - 1))]
    at = data.draw(st.integers(0, len(boxes)))
    extra = ((row, column + data.draw(st.integers(0, 1))), (data.draw(st.integers(1, 3)), 1))
    assert module._overlap([*boxes[:at], extra, *boxes[at:]])


def test_tensors_that_are_cut_alike_share_a_layout(tmp_path):
    ranks = [StateParts(0), StateParts(1)]
    for name in ("a", "b", "c"):
        for rank, parts in enumerate(ranks):
            parts.add(TensorPart(name, (4,), Box((2 * rank,), (2,)), torch.ones(2)))
    manifest = Manifest.read(write_checkpoint(LocalFolder(tmp_path), 1, ranks).read)
    assert len(manifest.layouts) == 1


# ------------------------------------------------------------------ changed at random


def changed(text, rng):
    data = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            data[at:at] = rng.choice(
                [b"9" * 30, b"-", b"[" * 50, b'"', b"null", b"{}", b"1e999", b"NaN", b"\x00"]
            )
        else:
            start = rng.randrange(len(data))
            data[at : at + 20] = data[start : start + 20]
    return bytes(data)


@pytest.mark.thorough
def test_10_000_manifests_with_random_changes(text):
    rng = random.Random(7)
    assert sum(isinstance(read(changed(text, rng)), Exception) for _ in range(10_000)) > 5000


@pytest.mark.thorough
def test_10_000_pieces_with_random_changes(piece_text):
    rng = random.Random(8)
    assert sum(isinstance(read_piece(changed(piece_text, rng)), Exception) for _ in range(10_000)) > 5000


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 2**80), st.floats(allow_nan=False), st.text(max_size=6)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)


def one_changed_value(text, data):
    """Return the text with a value of it, at any depth, replaced or removed."""
    plain = json.loads(text)
    place, key = plain, data.draw(st.sampled_from(sorted(plain)))
    while data.draw(st.booleans()) and isinstance(place[key], dict | list) and place[key]:
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if data.draw(st.integers(0, 9)):
        place[key] = data.draw(JSON)
    else:
        del place[key]
    return json.dumps(plain).encode()


@settings(max_examples=300)
@given(st.data())
def test_manifests_with_one_changed_value(files, data):
    read(one_changed_value(files.read(MANIFEST), data))


@settings(max_examples=300)
@given(st.data())
def test_pieces_with_one_changed_value(files, data):
    read_piece(one_changed_value(files.read(piece_name(1)), data))


NO_MANIFESTS = [
    b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000,
    b'{"format": "1"}', b'{"format": true}', b'{"format": -1}', b'{"format": 2}', b'{"format": NaN}',
    b'{"files": {}}', b'{"files": [], "values": {}, "state": 1}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_MANIFESTS, ids=lambda text: repr(text[:24]))
def test_files_that_are_no_manifest(text):
    assert isinstance(read(text), Exception)
    assert isinstance(read_piece(text), Exception)


# ------------------------------------------------------------------ contradictions


def described(text):
    """Return a manifest or piece as plain values, and a function that returns its text."""
    return json.loads(text), lambda plain: json.dumps(plain).encode()


MANIFESTS = [
    (lambda found: found["pieces"].reverse(), "piece 'rank-00001.json' in place of 'rank-00000.json'"),
    (lambda found: found["pieces"].pop(), "tensors of rank 1, of 1 ranks"),
    (lambda found: found.update(pieces=[]), "pieces"),
    (lambda found: found["tensors"]["w"].update(layout=9), "tensor 'w' has no layout"),
    (lambda found: found["tensors"]["w"].update(layout=-1), "layout"),
    (lambda found: found["layouts"][0][0].__setitem__(0, 2), "tensors of rank 2, of 2 ranks"),
    (lambda found: found["layouts"][0][0].__setitem__(1, [-1, 0]), "layouts"),
    (lambda found: found["values"].update(value1=7), "tensors of rank 7, of 2 ranks"),
    (lambda found: found.update(prefix="/etc/"), "prefix '/etc/'"),
    (lambda found: found.update(prefix="a/../../b/"), "prefix"),
    (lambda found: found.update(extra_files={"../x": "00"}), "file name '../x'"),
    (lambda found: found.update(step=-1), "step"),
    (lambda found: found.update(step=True), "step"),
    (lambda found: found.update(step=1.5), "step"),
    (lambda found: found["tensors"]["w"].update(shape=[3e30, 3]), "shape"),
    (lambda found: found.pop("container"), "container"),
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_contradictory_manifests(text, number):
    change, words = MANIFESTS[number]
    plain, encode = described(text)
    change(plain)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is invalid") as caught:
        Manifest.from_json(encode(plain))
    assert words in str(caught.value)


def first(piece):
    """Return the description of the first file with tensors, and that of its first tensor."""
    file = next(each for each in piece["files"].values() if each["chunks"])
    return file, next(iter(file["chunks"].values()))


def last(piece):
    file = [each for each in piece["files"].values() if each["chunks"]][-1]
    return file, list(file["chunks"].values())[-1]


EMPTY = {"nbytes": 0, "rest": "", "chunks": {}}

PIECES = [
    (lambda piece: piece["files"].update({"../a": EMPTY}), "file name '../a'"),
    (lambda piece: piece["files"].update({"/a": EMPTY}), "file name '/a'"),
    (lambda piece: piece["files"].update({"a/../../b": EMPTY}), "file name 'a/../../b'"),
    (lambda piece: first(piece)[0].update(nbytes=30), "30 bytes, where the tensors end at"),
    (lambda piece: first(piece)[0].update(nbytes=-1), "nbytes"),
    (lambda piece: last(piece)[1].update(start=10**30), "bytes, where the tensors end at"),
    (lambda piece: last(piece)[1].update(start=2**63), "bytes, where the tensors end at"),
    (lambda piece: first(piece)[1].update(dtype="object"), "dtype 'object'"),
    (lambda piece: first(piece)[1].update(sizes=[10**30, 3]), "digits of checksums for"),
    (lambda piece: first(piece)[1].update(sizes=[-2, 3]), "sizes"),
    (lambda piece: first(piece)[1].update(sizes=[True, 3]), "sizes"),
    (lambda piece: first(piece)[1].update(offsets=[3, 0]), "a box outside of 'w'"),
    (lambda piece: first(piece)[1].update(offsets=[0]), "a box of other dimensions than 'w'"),
    (lambda piece: first(piece)[1].update(shape=[4]), "a box of other dimensions than 'w'"),
    (lambda piece: first(piece)[1].update(checksums="0" * 15), "15 digits of checksums for 1 blocks"),
    (lambda piece: first(piece)[1].update(checksums="0" * 32), "32 digits of checksums for 1 blocks"),
    (
        lambda piece: first(piece)[0]["chunks"].update(again=first(piece)[1]),
        "before the end of the one before",
    ),
    (lambda piece: piece.pop("state"), "state"),
]


@pytest.mark.parametrize("number", range(len(PIECES)))
def test_contradictory_pieces(piece_text, number):
    change, words = PIECES[number]
    plain, encode = described(piece_text)
    change(plain)
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001\.json is invalid") as caught:
        RankPiece.from_json(encode(plain), "rank-00001.json")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("number", "words"), [(FORMAT + 1, "update Paceline"), (1, "the Paceline that began it")]
)
def test_other_formats_are_refused(text, number, words):
    plain, encode = described(text)
    with pytest.raises(UsageError, match=rf"(?s)of format {number}; .* reads format {FORMAT}.*{words}"):
        Manifest.from_json(encode({**plain, "format": number}))
    with pytest.raises(UsageError, match=words):  # whatever else it holds
        Manifest.from_json(json.dumps({"format": number}).encode())


def test_fields_of_later_versions_are_ignored(text, piece_text):
    plain, encode = described(text)
    assert Manifest.from_json(encode({**plain, "later": [1]})) == Manifest.from_json(text)
    piece = msgspec.json.decode(piece_text)
    assert read_piece(encode({**piece, "later": [1]})) == read_piece(piece_text)
