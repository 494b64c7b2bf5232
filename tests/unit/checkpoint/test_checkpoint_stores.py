"""What every place for checkpoints does alike: local folders, memory, SFTP, S3."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from checkpoint_places import save, small_files
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST
from paceline.checkpoint.storage.checkpoint_store import CheckpointStore
from paceline.errors import CheckpointError

pytestmark = pytest.mark.sweep


def steps(store: CheckpointStore) -> list[int]:
    return [int(name.removeprefix("step-")) for name in store.names()]


def content(store: CheckpointStore, attempt, name: str) -> bytes:
    files = store.files(store.names()[0])
    file = files.open(attempt.prefix + name)
    data = bytearray(file.nbytes)
    file.read_into(0, memoryview(data))
    file.close()
    return bytes(data)


def test_a_complete_checkpoint_is_listed_and_read_by_other_processes(place):
    store = place.owned()
    assert store.names() == []
    attempt = save(store, 200, {"a.safetensors": b"of rank 0", "b.safetensors": bytes(100_000)})
    other = place.store()
    assert other.names() == ["step-00000200"]
    assert content(other, attempt, "a.safetensors") == b"of rank 0"
    assert content(other, attempt, "b.safetensors") == bytes(100_000)
    files = other.files("step-00000200")
    assert (files.name, files.location) == ("step-00000200", f"{other.location}/step-00000200")
    assert files.read(MANIFEST) == small_files(f"step 200 {attempt.prefix}")[0][1]
    with pytest.raises(FileNotFoundError):
        files.read("nothing")
    with pytest.raises(FileNotFoundError):
        files.open("nothing.safetensors")


def test_checkpoints_are_listed_newest_first(place):
    store = place.owned()
    for step in (9, 100, 11):
        save(store, step)
    assert steps(store) == [100, 11, 9]


def test_a_checkpoint_is_complete_with_its_last_file_only(place):
    store = place.owned()
    attempt = store.begin(7, "mark")
    (attempt.folder / "model.safetensors").write_bytes(b"123")
    attempt.publish(["model.safetensors"])
    assert store.names() == []
    with pytest.raises(OSError, match=r"model.safetensors is|shorter or longer"):
        attempt.complete(small_files("7"), {"model.safetensors": 4})
    assert store.names() == []
    attempt.complete(small_files("7"), {"model.safetensors": 3})
    assert steps(store) == [7]


def test_ranks_report_to_rank_0(place):
    place.owned()
    first, second = place.store().begin(3, "mark"), place.store().begin(3, "mark")
    assert first.reported("piece-1") is None
    second.report("piece-1", b"done")
    found = None
    while found is None:  # a listing may be half a second old
        found = first.reported("piece-1")
    assert found == b"done"
    assert first.prefix == second.prefix


def test_what_is_reported_can_be_read_in_the_checkpoint(place):
    store = place.owned()
    attempt = store.begin(3, "mark")
    attempt.report("piece-0", b"text")
    attempt.complete(small_files("3"), {})
    assert store.files("step-00000003").read(f"{attempt.prefix}piece-0") == b"text"


def test_a_file_of_an_earlier_checkpoint_is_linked_where_that_is_possible(place):
    store = place.owned()
    earlier = save(store, 1, {"model.safetensors": b"frozen"}, mark="mark")
    attempt = store.begin(2, "mark")
    name = f"{attempt.prefix}model.safetensors"
    linked = attempt.link(name, "step-00000001")
    assert linked == (not place.url.startswith(("file:", "sftp:")))
    assert not attempt.link(f"{attempt.prefix}nothing.safetensors", "step-00000001")
    if linked:
        attempt.complete(small_files("2"), {"model.safetensors": 6})
        store.remove(["step-00000001"])
        assert content(store, earlier, "model.safetensors") == b"frozen"


def test_an_abandoned_checkpoint_is_gone(place):
    store = place.owned()
    save(store, 1)
    attempt = store.begin(2, "mark")
    (attempt.folder / "model.safetensors").write_bytes(b"123")
    attempt.publish(["model.safetensors"])
    attempt.report("piece-0", b"text")
    attempt.abandon()
    assert steps(store) == [1]
    again = save(store, 2, {"other.safetensors": b"4"}, mark="mark")
    assert steps(store) == [2, 1]
    with pytest.raises(FileNotFoundError):
        store.files("step-00000002").read(f"{again.prefix}piece-0")


def test_incomplete_checkpoints_of_runs_that_died_are_removed(place):
    dead = place.store()
    dead.prepare()
    lock = dead.lock()
    attempt = dead.begin(5, "dead" * 3)
    (attempt.folder / "model.safetensors").write_bytes(b"123")
    attempt.publish(["model.safetensors"])
    attempt.report("piece-0", b"text")
    save(dead, 4, mark="dead" * 3)
    lock.close()
    store = place.owned()
    store.remove_incomplete()
    assert steps(store) == [4]
    assert store.begin(5, "dead" * 3).reported("piece-0") is None


def test_a_damaged_checkpoint_is_set_aside_and_kept_until_newer_ones_are_enough(place):
    store = place.owned()
    for step in (5, 7):
        save(store, step)
    damaged = store.files("step-00000007").read(MANIFEST)
    store.set_aside("step-00000007")
    assert steps(store) == [5]
    store.remove_incomplete()
    aside = store.files("step-00000007.damaged")
    assert aside.read(MANIFEST) == damaged
    save(store, 7)
    assert steps(store) == [7, 5]
    store.remove(["step-00000005"])
    assert aside.read(MANIFEST) == damaged
    save(store, 8)
    store.remove(["step-00000007"])
    assert steps(store) == [8]
    with pytest.raises(FileNotFoundError):
        aside.read(MANIFEST)


def test_a_step_that_is_written_again_replaces_a_skipped_one(place):
    store = place.owned()
    save(store, 7, {"model.safetensors": b"old"}, mark="old")
    again = save(store, 7, {"model.safetensors": b"newer"}, mark="new")
    assert steps(store) == [7]
    assert content(store, again, "model.safetensors") == b"newer"
    assert store.files("step-00000007").read(CHECKSUM) == small_files(f"step 7 {again.prefix}")[1][1]


def test_removed_checkpoints_are_gone_whole(place):
    store = place.owned()
    attempts = [save(store, step) for step in (1, 2, 3)]
    store.remove(["step-00000001", "step-00000002"])
    assert steps(store) == [3]
    for step, attempt in enumerate(attempts[:2], 1):
        with pytest.raises(FileNotFoundError):
            store.files(f"step-0000000{step}").open(f"{attempt.prefix}model.safetensors")


def test_a_file_is_read_in_pieces_by_several_threads(place):
    store = place.owned()
    data = bytes(range(256)) * 40_000  # more than two blocks of the cache
    attempt = save(store, 1, {"model.safetensors": data})
    for reader in (store, place.store(reads_cache=False)):
        file = reader.files("step-00000001").open(f"{attempt.prefix}model.safetensors")
        found = bytearray(len(data))

        def read(first: int, file=file, found=found) -> None:
            for start in range(first, len(data), 4 * 777_777):
                file.read_into(start, memoryview(found)[start : start + 777_777])

        threads = [threading.Thread(target=read, args=(n * 777_777,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bytes(found) == data
        with pytest.raises(EOFError):
            file.read_into(len(data) - 1, memoryview(bytearray(2)))
        file.close()
        file.close()


def test_ranks_see_a_probe_until_it_is_removed(place):
    store, other = place.owned(), place.store()
    assert not other.sees_probe("mark")
    store.put_probe("mark")
    assert other.sees_probe("mark")
    store.remove_probe("mark")
    assert not other.sees_probe("mark")


def test_one_run_at_a_time(place):
    store = place.store()
    store.prepare()
    lock = store.lock()
    with pytest.raises(CheckpointError, match=r"in use by this run: process \d+ on .*, since 2\d"):
        place.store().lock()
    lock.close()
    lock.close()
    place.store().lock().close()


def test_the_programs_random_numbers_are_not_used_up(place):
    """Its generators are part of what it saves."""
    before = random.getstate(), torch.get_rng_state().tolist()
    store = place.owned()
    save(store, 1)
    store.files("step-00000001").read(MANIFEST)
    store.remove(["step-00000001"])
    assert before == (random.getstate(), torch.get_rng_state().tolist())
