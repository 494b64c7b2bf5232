"""Keys of hub and workers: owners, permissions, no overwriting, and errors for invalid files."""

from __future__ import annotations

import errno
import multiprocessing
import os

import pytest
import zmq

from paceline.errors import UsageError
from paceline.transport.zmq import curve_keys
from paceline.transport.zmq.curve_keys import HubKeys, WorkerKeys, make_keys, read_public_key


def mode(path):
    return path.stat().st_mode & 0o777


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_hub_and_worker_have_keys_that_belong_together(tmp_path):
    given = make_keys(tmp_path / "keys", "alice")
    hub, worker = HubKeys.read(tmp_path / "keys"), WorkerKeys.read(given)
    assert (given.name, worker.name, worker.hub) == ("alice.key", "alice", hub.public)
    assert read_public_key(hub.workers / "alice.pub") == ("alice", worker.public)
    for each in (hub, worker):
        assert zmq.curve_public(each.secret.encode()).decode() == each.public
    assert HubKeys.read(tmp_path / "keys" / "hub.key") == hub


def test_secrets_are_their_owner_s_alone(tmp_path):
    given = make_keys(tmp_path / "keys")
    folder = tmp_path / "keys"
    assert [mode(path) for path in (folder, folder / "workers")] == [0o700, 0o700]
    assert {mode(path) for path in (given, folder / "hub.key")} == {0o600}
    assert sorted(path.name for path in content(folder)) == ["hub.key", "worker.key", "worker.pub"]
    for secret in (HubKeys.read(folder), WorkerKeys.read(given)):
        assert secret.secret not in repr(secret)


def test_a_worker_is_added_and_existing_files_remain(tmp_path):
    make_keys(tmp_path / "keys", "alice")
    before = content(tmp_path / "keys")
    added = WorkerKeys.read(make_keys(tmp_path / "keys", "bob"))
    after = content(tmp_path / "keys")
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 2
    assert added.hub == HubKeys.read(tmp_path / "keys").public


@pytest.mark.parametrize("there", ["alice.key", "workers/alice.pub"])
def test_keys_are_never_overwritten(tmp_path, there):
    folder = tmp_path / "keys"
    make_keys(folder, "bob")
    (folder / there).write_text("mine")
    before = content(folder)
    with pytest.raises(UsageError, match=f"{there} already exists"):
        make_keys(folder, "alice")
    assert content(folder) == before


def test_a_file_that_appears_at_the_last_moment_is_not_overwritten_either(tmp_path, monkeypatch):
    folder = tmp_path / "keys"
    make_keys(folder, "bob")

    def also_made():
        (folder / "alice.key").write_text("another's")
        return "x", "y"

    monkeypatch.setattr(curve_keys, "_new_pair", also_made)
    with pytest.raises(UsageError, match=r"alice\.key already exists"):
        make_keys(folder, "alice")
    assert (folder / "alice.key").read_text() == "another's"


@pytest.mark.parametrize("at", [0, 1])
def test_after_a_failed_write_no_file_of_the_worker_remains(tmp_path, monkeypatch, at):
    folder = tmp_path / "keys"
    make_keys(folder, "bob")
    before, link, done = content(folder), os.link, []

    def refused(source, target):
        done.append(target)
        if len(done) == at + 1:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # as by a file system without hard links
        link(source, target)

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(UsageError, match="can't be written: Operation not permitted"):
        make_keys(folder, "alice")
    assert content(folder) == before
    assert make_keys(folder, "alice").name == "alice.key"


def add(folder, name):
    make_keys(folder, name)


def test_workers_that_are_added_at_once_are_given_the_same_hub(tmp_path):
    folder, names = tmp_path / "keys", [f"w{number}" for number in range(6)]
    fork = multiprocessing.get_context("fork")
    adding = [fork.Process(target=add, args=(folder, name)) for name in names]
    for each in adding:
        each.start()
    for each in adding:
        each.join()
    assert [each.exitcode for each in adding] == [0] * len(names)
    assert {WorkerKeys.read(folder / f"{name}.key").hub for name in names} == {HubKeys.read(folder).public}


@pytest.mark.parametrize("name", ["", "hub", ".hidden", "a/b", "../up", "a b", "x" * 65, "ä", "a\n"])
def test_a_name_that_could_be_another_file_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="not a valid name for a worker's keys"):
        make_keys(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_others_can_enter_is_refused_for_keys(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match=f"chmod 700 {tmp_path}"):
        make_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_reported_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be made"):
        make_keys(tmp_path / "file" / "keys")


def test_swapped_key_files_are_recognised(tmp_path):
    given = make_keys(tmp_path / "keys", "alice")
    with pytest.raises(UsageError, match=r"alice\.key is a worker's key, not a hub's key"):
        HubKeys.read(given)
    with pytest.raises(UsageError, match=r"hub\.key is a hub's key, not a worker's key\n.*stays with it"):
        WorkerKeys.read(tmp_path / "keys" / "hub.key")
    with pytest.raises(UsageError, match="a public key of a worker, not a worker's key"):
        WorkerKeys.read(tmp_path / "keys" / "workers" / "alice.pub")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_can_read_is_refused_with_a_remedy(tmp_path, bits):
    given = make_keys(tmp_path / "keys")
    for path, read in ((given, WorkerKeys.read), (tmp_path / "keys" / "hub.key", HubKeys.read)):
        path.chmod(bits)
        with pytest.raises(UsageError, match=f"chmod 600 {path}"):
            read(path)


def test_a_record_of_a_worker_may_be_read_by_others(tmp_path):
    make_keys(tmp_path / "keys", "alice")
    record = tmp_path / "keys" / "workers" / "alice.pub"
    record.chmod(0o644)
    assert read_public_key(record)[0] == "alice"


def private(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\xff\xfe\x00", b"kind = house\n", b"kind=worker\n", b"x" * 10**6, bytes(5000)]
)
def test_an_invalid_key_file_is_reported(tmp_path, data):
    path = private(tmp_path / "file", data)
    for read in (HubKeys.read, WorkerKeys.read):
        with pytest.raises(UsageError, match=r"is not a key file|can't be read as a \w+ key"):
            read(path)


def test_a_missing_file_or_a_folder_is_reported(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="can't be read as a worker key"):
            WorkerKeys.read(path)
    with pytest.raises(UsageError, match=r"hub\.key can't be read as a hub key: No such file"):
        HubKeys.read(tmp_path)


@pytest.mark.parametrize("name", ["public", "secret", "hub", "name"])
@pytest.mark.parametrize("how", ["gone", "short", "too big", "letter"])
def test_a_damaged_key_is_named(tmp_path, name, how):
    given = make_keys(tmp_path / "keys")
    lines = given.read_text().splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith(f"{name} = ")]
    value = lines[at].partition(" = ")[2]
    lines[at] = {
        "gone": "",
        "short": f"{name} = {value[:-1] if name != 'name' else ''}",
        "too big": f"{name} = {'#' * (40 if name != 'name' else 65)}",
        "letter": f"{name} = {value[:-1]}~",
    }[how]
    private(given, "\n".join(lines).encode())
    with pytest.raises(UsageError, match=f"is damaged: no valid {name}"):
        WorkerKeys.read(given)


def test_keys_that_do_not_belong_together_are_found(tmp_path):
    texts = [make_keys(tmp_path / "keys", name).read_text() for name in ("alice", "bob")]
    secrets = [next(line for line in text.splitlines() if line.startswith("secret")) for text in texts]
    mixed = private(tmp_path / "mixed", texts[0].replace(*secrets).encode())
    with pytest.raises(UsageError, match="its keys don't match"):
        WorkerKeys.read(mixed)
