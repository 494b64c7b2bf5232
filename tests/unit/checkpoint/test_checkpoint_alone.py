"""`Checkpoint` in a world of one: errors for values that can't be saved, warnings of lost checkpoints."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.interop.weights_export import export_weights
from paceline.checkpoint.storage.local_folder import LocalFolder, _LocalAttempt
from paceline.errors import CheckpointError, UsageError


def saved(folder, step=1, **options):
    """Save at `step` in a separate run that loads nothing."""
    checkpoint = paceline.Checkpoint(folder, nn.Linear(2, 1), **options)
    checkpoint.step = step
    checkpoint.save(wait=True)
    checkpoint.close()


@pytest.mark.parametrize("facts", [{"loss": math.nan}, {"at": Path("a")}, {"of": {1, 2}}])
def test_facts_that_are_no_json_are_refused(tmp_path, facts):
    with pytest.raises(UsageError, match="facts of a checkpoint can't be encoded as JSON"):
        paceline.Checkpoint(tmp_path / "run", nn.Linear(2, 1), facts=facts)
    assert not (tmp_path / "run").exists()


def test_facts_that_become_invalid_fail_a_save_without_a_hang(tmp_path):
    checkpoint = paceline.Checkpoint(tmp_path, nn.Linear(2, 1))
    checkpoint.facts["loss"] = math.nan
    with pytest.raises(
        CheckpointError, match=r"step 0 can't be written to .*: rank 0: ValueError: Out of range"
    ):
        checkpoint.save(wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    checkpoint.facts["loss"] = 1.0
    checkpoint.save(wait=True)
    checkpoint.close()
    assert (tmp_path / "step-00000000").is_dir()


def test_a_program_that_changes_its_directory_saves_into_the_same_folder(tmp_path, monkeypatch):
    """Also what is being written then, and what is removed later."""
    publish, moved = _LocalAttempt.publish, Event()

    def publish_late(attempt, names):
        moved.wait(10)
        publish(attempt, names)

    monkeypatch.setattr(_LocalAttempt, "publish", publish_late)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoint = paceline.Checkpoint("run", nn.Linear(2, 1), keep=1)
    checkpoint.save()
    monkeypatch.chdir("other")
    moved.set()
    checkpoint.step = 1
    checkpoint.save()
    checkpoint.close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock", "step-00000001"]
    assert list((tmp_path / "other").iterdir()) == []


def test_close_waits_until_an_earlier_save_has_removed_old_checkpoints(tmp_path, monkeypatch):
    remove, late = LocalFolder.remove, Event()

    def remove_late(folder, names):
        if not (folder.path / "step-00000003").exists():  # the removal after step 2 is late
            late.wait(10)
            time.sleep(0.2)
        remove(folder, names)

    checkpoint = paceline.Checkpoint(tmp_path, nn.Linear(2, 1), keep=1)
    for step in (1, 2, 3):
        monkeypatch.setattr(LocalFolder, "remove", remove_late if step == 2 else remove)
        checkpoint.step = step
        checkpoint.save(wait=True)
    late.set()
    monkeypatch.setattr(shutil, "rmtree", delayed(shutil.rmtree))
    checkpoint.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-00000003"]


def delayed(function):
    def run(*args, **options):
        time.sleep(0.2)
        return function(*args, **options)

    return run


def test_checkpoints_that_would_be_removed_as_older_are_warned_of(tmp_path, caplog):
    """Checkpoints that the run did not load count as newer."""
    with caplog.at_level(logging.WARNING, "paceline.checkpoint"):
        saved(tmp_path, 10)
        saved(tmp_path, 20)
        assert caplog.messages == []
        saved(tmp_path, 15)
        assert [message.partition(" already exists")[0] for message in caplog.messages] == [
            str(tmp_path / "step-00000020")
        ]
        assert "call load() before training" in caplog.text
        caplog.clear()
        checkpoint = paceline.Checkpoint(tmp_path, nn.Linear(2, 1))
        assert checkpoint.load().step == 20
        checkpoint.step = 21
        checkpoint.save(wait=True)
        checkpoint.close()
        assert caplog.messages == []


def test_a_loader_passed_after_load_is_warned_of(tmp_path, caplog):
    net = nn.Linear(2, 1)
    loader = paceline.Loader(torch.ones(4, 2), 2)
    checkpoint = paceline.Checkpoint(tmp_path / "a", net)
    checkpoint.load()
    with caplog.at_level(logging.WARNING, "paceline.checkpoint"):
        assert len(list(checkpoint.resume(loader))) == 2
    checkpoint.close()
    assert (
        "the loader was not part of the checkpoint when load() was called, so it is not saved" in caplog.text
    )
    caplog.clear()
    checkpoint = paceline.Checkpoint(tmp_path / "b", net, loader)
    checkpoint.load()
    with caplog.at_level(logging.WARNING, "paceline.checkpoint"):
        assert len(list(checkpoint.resume(loader))) == 2
    checkpoint.close()
    assert caplog.messages == []


def test_a_closed_checkpoint_writes_nothing(tmp_path):
    checkpoint = paceline.Checkpoint(tmp_path, nn.Linear(2, 1))
    checkpoint.close()
    with pytest.raises(CheckpointError, match="after close"):
        checkpoint.save()
    assert list(tmp_path.glob("step-*")) == []


def test_weights_on_disk_are_their_users_alone(tmp_path):
    before = os.umask(0)
    try:
        saved(tmp_path / "run")
        export_weights(tmp_path / "run", tmp_path / "run/exported.safetensors")
    finally:
        os.umask(before)
    found = list((tmp_path / "run").rglob("*"))
    assert {path.name for path in found} > {"step-00000001", "exported.safetensors"}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "run", *found] if path.is_dir()} == {0o700}


def test_a_group_that_shares_the_folder_can_read_checkpoints(tmp_path):
    tmp_path.chmod(0o2750)
    saved(tmp_path / "run")
    found = list((tmp_path / "run").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o640}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {0o750}


# ------------------------------------------------------------------ which stay


def steps_in(folder):
    return [int(name[5:]) for name in LocalFolder(folder).names()]


@pytest.mark.parametrize("format", ["paceline", "dcp"])
@pytest.mark.parametrize("late", [False, True], ids=["with its save", "after it"])
def test_the_best_stay_across_runs(tmp_path, late, format):
    """A metric that is known only after a save, as `resume` saves at the end of an epoch, counts all the same."""
    metrics = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: 4.0, 6: 5.0, 7: None, 8: 6.0}
    for run in ([1, 2, 3, 4], [5, 6, 7, 8]):
        with paceline.Checkpoint(tmp_path, nn.Linear(2, 1), keep=1, keep_best=2, format=format) as checkpoint:
            checkpoint.load()
            for step in run:
                checkpoint.step = step
                checkpoint.save(metric=None if late else metrics[step], wait=step % 2 == 0)
                checkpoint.save(metric=metrics[step])
    assert steps_in(tmp_path) == [8, 3, 2]


def test_the_metric_of_another_checkpoint_of_the_same_step_is_forgotten(tmp_path):
    with paceline.Checkpoint(tmp_path, nn.Linear(2, 1), keep=1, keep_best=1) as checkpoint:
        for step, metric in [(1, 2.0), (2, 1.0), (3, 3.0)]:
            checkpoint.step = step
            checkpoint.save(metric=metric, wait=True)
        assert steps_in(tmp_path) == [3, 2]
        shutil.rmtree(tmp_path / "step-00000002")
        for step, metric in [(2, None), (4, 3.5), (5, None)]:
            checkpoint.step = step
            checkpoint.save(metric=metric, wait=True)
    assert steps_in(tmp_path) == [5, 3]


def test_multiples_stay(tmp_path):
    with paceline.Checkpoint(tmp_path, nn.Linear(2, 1), keep=2, keep_every=4) as checkpoint:
        for step in (1, 3, 5, 6, 9, 10, 11, 13, 14):
            checkpoint.step = step
            checkpoint.save()
    assert steps_in(tmp_path) == [14, 13, 9, 5]
