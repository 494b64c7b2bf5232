"""``paceline checkpoint`` with URLs: what the store holds counts, and whatever is wrong is refused first."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import paceline
from paceline.checkpoint import newest_checkpoint
from paceline.checkpoint.storage import remote_folder
from paceline.checkpoint.storage.host_cache import HostCache


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """Where commands would leave what they download."""
    folder = tmp_path / "host"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def server(s3, monkeypatch):
    """An S3 server that s3fs finds by itself."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options()["endpoint_url"])
    return s3


@pytest.fixture(params=["file", "s3"])
def place(request, make_place):
    """A place with two checkpoints of a run."""
    if request.param == "s3":
        request.getfixturevalue("server")
    place = make_place(request.param)
    checkpoint = paceline.Checkpoint(place.store(), torch.nn.Linear(3, 2))
    for checkpoint.step in (10, 20):
        checkpoint.save(wait=True)
    checkpoint.close()
    return place


def file_system(place):
    return fsspec.filesystem(place.url.partition(":")[0], skip_instance_cache=True, **place.options)


def weights_file(place):
    """The weights in the newest checkpoint."""
    [path] = file_system(place).glob(f"{place.url}/step-00000020/*/model.safetensors")
    return path


def test_every_command_takes_the_url_of_a_run_or_of_a_checkpoint(command, place, tmp_path, host):
    code, shown, _ = command("checkpoint", "ls", place.url)
    assert code == 0
    assert shown.index("step-00000020") < shown.index("step-00000010")
    assert shown.count("not read") == 2
    file = tmp_path / "found.json"
    code, shown, _ = command("checkpoint", "verify", place.url, "--json", file)
    assert code == 0
    assert shown.count("intact") == 2
    rows = json.loads(file.read_text())
    assert [(row["path"], row["step"], row["problem"]) for row in rows] == [
        (f"{place.url}/step-000000{step}", step, "") for step in (20, 10)
    ]
    parent, _, _ = place.url.rpartition("/")
    for url in (f"{place.url}/step-00000010", f"{place.url}/step-00000010/"):
        code, shown, _ = command("checkpoint", "verify", url)
        assert code == 0
        assert "step-00000010" in shown
        assert "step-00000020" not in shown
    out = tmp_path / "out.safetensors"
    code, shown, _ = command("checkpoint", "export", place.url, out)
    assert code == 0
    assert shown.startswith(f"weights: {out} (")
    code, shown, _ = command("checkpoint", "convert", place.url, tmp_path / "hf", "--to", "hf")
    assert code == 0
    first, second = load_file(out), load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in ("weight", "bias"))
    code, _, error = command("checkpoint", "ls", parent)
    assert code == 2
    assert f"{parent!r} holds no checkpoint" in error
    assert list(host.iterdir()) == []


def test_verify_reads_what_the_store_holds(command, place, monkeypatch):
    """Though this host has an intact copy of all of it."""
    monkeypatch.setenv("TMPDIR", str(place.cache))
    monkeypatch.setattr(HostCache, "open", lambda *_: pytest.fail("read from the cache"))
    path, store = weights_file(place), file_system(place)
    data = bytearray(store.cat_file(path))
    data[-1] ^= 1
    store.pipe_file(path, bytes(data))
    code, shown, _ = command("checkpoint", "verify", place.url)
    assert code == 1
    assert "step-00000020: model.safetensors: wrong checksum of tensor" in shown
    assert shown.count("intact") == 1
    store.rm_file(path)
    code, shown, _ = command("checkpoint", "verify", place.url)
    assert code == 1
    assert "model.safetensors is missing" in shown


def test_export_skips_what_is_damaged_in_the_store(command, place, tmp_path):
    file_system(place).rm_file(weights_file(place))
    code, _, _ = command("checkpoint", "export", place.url, tmp_path / "out.safetensors")
    assert code == 0
    code, _, error = command(
        "checkpoint", "export", f"{place.url}/step-00000020", tmp_path / "other.safetensors"
    )
    assert code == 1
    assert "model.safetensors is missing" in error
    assert not (tmp_path / "other.safetensors").exists()


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(command, place, monkeypatch):
    genuine = newest_checkpoint.find_problem

    def find_problem(files):
        if files.name == "step-00000010":
            place.store().remove([files.name])
        return genuine(files)

    monkeypatch.setattr(newest_checkpoint, "find_problem", find_problem)
    code, shown, error = command("checkpoint", "verify", place.url)
    assert code == 0
    assert "step-00000010" not in shown
    assert "note: step-00000010 was removed while it was read" in error


def test_a_checkpoint_of_torch_by_its_url(command, tmp_path):
    dcp.save({"model": torch.nn.Linear(3, 2).state_dict()}, checkpoint_id=tmp_path / "run" / "step-5")
    code, shown, _ = command("checkpoint", "verify", f"file://{tmp_path}/run/step-5")
    assert code == 0
    assert "DCP, intact" in shown
    code, _, _ = command(
        "checkpoint", "export", f"file://{tmp_path}/run/step-5", tmp_path / "out.safetensors"
    )
    assert code == 0
    assert load_file(tmp_path / "out.safetensors")["weight"].shape == (2, 3)


# ------------------------------------------------------------------ what is refused

COMMANDS = {
    "ls": ("--json", "x.json"),
    "verify": ("--json", "x.json"),
    "export": ("x.safetensors",),
    "convert": ("x", "--to", "hf"),
}


def refused(command, url, name, tmp_path, monkeypatch):
    """Return the error of a command that must have written nothing."""
    folder = tmp_path / "here"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    code, shown, error = command("checkpoint", name, url, *COMMANDS[name])
    assert (code, shown) == (2, "")
    assert list(folder.iterdir()) == []
    return error


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("url", "reason", "remedy"),
    [
        ("dropbox://folder/run", "needs a package that is not installed", "pip install dropboxdrivefs"),
        ("nothing://bucket/run", "'nothing' is no protocol that fsspec knows", "s3://, gs://"),
        ("s3://", "'s3://' is no URL of a folder", "for example s3://bucket/run"),
        ("s3:/bucket/run", "'s3:/bucket/run' is neither a path nor a URL", "'s3://bucket/run'"),
        ("nowhere/run", "'nowhere/run' does not exist", "name a checkpoint"),
    ],
)
def test_what_is_no_place_is_refused(command, name, url, reason, remedy, tmp_path, monkeypatch):
    error = refused(command, url, name, tmp_path, monkeypatch)
    assert reason in error
    assert remedy in error


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_bucket_or_folder_is_refused(command, server, name, tmp_path, monkeypatch):
    for url in ("s3://no-such-bucket-here/run", f"s3://{server.new_bucket()}/run"):
        error = refused(command, url, name, tmp_path, monkeypatch)
        assert f"{url!r} holds no checkpoint" in error
        assert "check the bucket, and the folder in it" in error


def test_a_store_that_cant_be_reached_or_permits_nothing_is_refused(command, server, tmp_path, monkeypatch):
    url = f"s3://{server.new_bucket()}/run"
    monkeypatch.setattr(remote_folder, "_PREPARE_SECONDS", 0.3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    error = refused(command, url, "ls", tmp_path, monkeypatch)
    assert f"can't read checkpoints in {url!r}" in error
    assert "whether this host reaches the place" in error
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    error = refused(command, url, "verify", tmp_path, monkeypatch)
    assert f"can't read checkpoints in {url!r}" in error
    assert "check the credentials" in error


@pytest.mark.parametrize(
    "words", [("export", "s3://bucket/x.safetensors"), ("convert", "s3://bucket/x", "--to", "dcp")]
)
def test_results_are_written_to_a_disk(command, words, tmp_path, monkeypatch):
    with paceline.Checkpoint(tmp_path / "run", torch.nn.Linear(1, 1)) as checkpoint:
        checkpoint.save(wait=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, error = command("checkpoint", words[0], tmp_path / "run", *words[1:])
    assert code == 2
    assert f"{words[1]!r} is a URL, and this is written to a disk" in error
    assert list(Path().iterdir()) == []


def test_train_writes_its_run_folder_to_a_disk(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "host")
    code, _, error = command("train", "--out", "s3://bucket/run")
    assert code == 2
    assert "out='s3://bucket/run' is a URL" in error
    assert list(Path().iterdir()) == []
