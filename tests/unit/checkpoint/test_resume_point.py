"""The checkpoint that a run resumes from: damaged ones are always found, and skipped on all ranks."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, Manifest
from paceline.checkpoint.newest_checkpoint import find_problem, find_resume_point
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError
from written_checkpoints import state_of, write_checkpoint

TENSORS = {"weight": torch.arange(12.0).view(3, 4), "half": torch.arange(5, dtype=torch.bfloat16)}


def alone(text):
    return [text]


def write(folder, step, container="safetensors"):
    """Write a checkpoint of two ranks."""
    ranks = [
        state_of({f"{name}{rank}": tensor for name, tensor in TENSORS.items()}, rank) for rank in range(2)
    ]
    ranks[0].texts["model.safetensors.index.json"] = b"{}"
    return write_checkpoint(
        LocalFolder(folder), step, ranks, container=container, states=[{"step": step}, {}]
    )


def everything(reader):
    """Read all of a checkpoint, as the only rank."""
    for rank in range(reader.manifest.ranks):
        reader.verify(rank)
    return reader


def find(folder, prepare=everything):
    return find_resume_point(LocalFolder(folder), 0, alone, prepare)


def damage(path, how, rng):
    if how == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[rng.randrange(len(data)) :]
    else:
        at = rng.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


@pytest.mark.thorough
@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_300_damages_are_detected_and_the_newest_intact_checkpoint_is_used(tmp_path, container):
    """Files cut short at random, bits flipped at random, files removed: in the newest checkpoint, or in both newest."""
    rng = random.Random(5)
    pristine = tmp_path / "pristine"
    for step in (10, 20, 30):
        write(pristine, step, container)
    for number in range(300):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine, folder)
        damaged = [30] if number % 3 else [20, 30]
        for step in damaged:
            files = LocalFolder(folder).files(f"step-{step:08d}")
            chosen = rng.choice(sorted(files.path.iterdir()))
            damage(chosen, ("cut", "flip", "remove")[number // 3 % 3], rng)
            named = MANIFEST if chosen.name == CHECKSUM and chosen.exists() else chosen.name
            assert named in find_problem(files), chosen
        found = find(folder)
        assert found is not None
        assert found.plan.piece(0).state == {"step": 10 if len(damaged) == 2 else 20}
        assert [each.path[-2:] for each in found.skipped] == [str(step) for step in reversed(damaged)]


@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_damage_in_any_file_is_found(tmp_path, container):
    rng = random.Random(6)
    files = write(tmp_path / "run", 1, container)
    for path in sorted(files.path.iterdir()):
        whole = path.read_bytes()
        for how in ("cut", "flip", "remove"):
            damage(path, how, rng)
            assert find_problem(files), (path.name, how)
            path.write_bytes(whole)
    assert find_problem(files) == ""


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    files = write(tmp_path, 1)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    assert find_problem(files) == "state-rank0.safetensors can't be read: Input/output error"
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert find_problem(files) == "state-rank0.safetensors ended while it was read"


@pytest.mark.parametrize("name", ["state-rank1.safetensors", MANIFEST, "rank-00001.json"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, name):
    files = write(tmp_path, 1)
    (files.path / name).unlink()
    (files.path / name).mkdir()
    assert name in find_problem(files)
    with pytest.raises(CheckpointError, match=name):
        find(tmp_path)


def test_if_no_checkpoint_is_intact_all_are_named(tmp_path):
    assert find(tmp_path) is None
    for step in (1, 2):
        (write(tmp_path, step).path / "state-rank1.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"none of the 2 .* step-00000002: state-rank1.safetensors is missing; step-0"
    ):
        find(tmp_path)


@pytest.mark.parametrize("number", [1, 3])
def test_other_formats_are_not_skipped(tmp_path, number):
    write(tmp_path, 1)
    path = write(tmp_path, 2).path
    text = (path / MANIFEST).read_bytes().replace(b'"format":2', b'"format":%d' % number)
    (path / MANIFEST).write_bytes(text)
    (path / CHECKSUM).write_bytes(Manifest.checksum_line(text))
    for _ in range(2):
        with pytest.raises(UsageError, match=f"a checkpoint of format {number}; .* reads format 2"):
            find(tmp_path)
    assert "of format" in find_problem(LocalFolder(tmp_path).files("step-00000002"))


def test_a_checkpoint_of_another_model_is_not_skipped(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)

    def prepare(reader):
        raise UsageError(f"step {reader.manifest.step} is of another model")

    with pytest.raises(UsageError, match="step 2 is of another model"):
        find(tmp_path, prepare)


# ------------------------------------------------------------------ several ranks


def at_once(folder, ranks, prepares):
    """Find the resume point on several ranks, each in a thread; return what each found or raised."""
    barrier, texts = Barrier(ranks, timeout=20), [""] * ranks

    def find_on(rank):
        def gather(text):
            texts[rank] = text
            barrier.wait()
            gathered = list(texts)
            barrier.wait()
            return gathered

        try:
            return find_resume_point(LocalFolder(folder), rank, gather, prepares[rank])
        except (CheckpointError, UsageError) as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(find_on, range(ranks)))


def part_of(rank):
    """Return what a rank prepares: it reads the part of the same rank only."""

    def prepare(reader):
        reader.verify(rank)
        return reader

    return prepare


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_finds_is_skipped_on_all(tmp_path, rank):
    """Every rank reads a part: the one that reads the damaged one reports it to the others."""
    for step in (1, 2):
        path = write(tmp_path, step).path
    damage(path / f"state-rank{rank}.safetensors", "flip", random.Random(0))
    found = at_once(tmp_path, 2, [part_of(0), part_of(1)])
    assert [each.files.name for each in found] == ["step-00000001"] * 2
    for each in found:
        assert [skipped.path for skipped in each.skipped] == [str(path)]
        assert all(skipped.why.startswith(f"state-rank{rank}.safetensors: wrong") for skipped in each.skipped)


def test_what_one_rank_refuses_is_refused_on_all(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)

    def refuse(reader):
        raise UsageError("another model", remedy="build it anew")

    mine, theirs = at_once(tmp_path, 2, [part_of(0), refuse])
    assert isinstance(mine, UsageError)
    assert "rank 1 can't use" in str(mine)
    assert "another model" in str(mine)
    assert str(theirs) == "another model\n  → build it anew"


def test_ranks_that_all_find_damage_raise_the_same(tmp_path):
    path = write(tmp_path, 1).path
    (path / MANIFEST).unlink()
    found = at_once(tmp_path, 2, [part_of(0), part_of(1)])
    assert len({str(each) for each in found}) == 1
    assert isinstance(found[0], CheckpointError)


def test_only_rank_0_lists_the_checkpoints(tmp_path):
    """A disk may show another rank a folder that is about to be renamed."""
    for step in (1, 2):
        write(tmp_path, step)
    texts, from_rank_0 = [], iter([json.dumps([["step-00000001"], ""]), ""])
    found = find_resume_point(
        LocalFolder(tmp_path), 1, lambda text: texts.append(text) or [next(from_rank_0), text], everything
    )
    assert texts == ["", ""]
    assert found.files.name == "step-00000001"


def test_a_place_that_rank_0_can_not_list_raises_on_all(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def fail(*_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(LocalFolder, "names", fail)
    found = at_once(tmp_path, 2, [part_of(0), part_of(1)])
    assert all("can't be listed: Permission denied" in str(each) for each in found)


def test_a_piece_that_contradicts_the_manifest_is_damage(tmp_path):
    """Both have the checksums that they should have."""
    files = write(tmp_path, 1)
    piece = json.loads(files.read("rank-00001.json"))
    chunks = piece["files"]["state-rank1.safetensors"]["chunks"]
    chunks["weight1"]["sizes"] = [3, 3]
    text = json.dumps(piece).encode()
    manifest = json.loads(files.read(MANIFEST))
    manifest["pieces"][1]["checksum"] = xxh3_128_hexdigest(text)
    (files.path / "rank-00001.json").write_bytes(text)
    (files.path / MANIFEST).write_text(json.dumps(manifest))
    (files.path / CHECKSUM).write_bytes(Manifest.checksum_line(json.dumps(manifest).encode()))
    with pytest.raises(DamagedCheckpoint, match=r"'weight1' at \[0, 0\] is not in the piece of rank 1"):
        CheckpointReader(files).tensor("weight1")
