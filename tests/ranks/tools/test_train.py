"""Real training on warm ranks: the loss falls, ranks do not change the curve, resume changes nothing."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.errors import MismatchError, PacelineError
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import TrainSettings
from paceline.tools.train.training_job import build_job
from paceline.tools.train.training_loop import run_training, take_step
from paceline.tools.train.training_progress import TrainingProgress
from rank_pool import RankError


@pytest.fixture
def settings(tmp_path):
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    text = tmp_path / "text.py"
    text.write_bytes(source.read_bytes()[:60_000])
    return TrainSettings(
        out=str(tmp_path / "run"), data=str(text), context=16, micro_batch_size=4, steps=8, lr=3e-3, log_every=1,
        eval_every=4, eval_windows=20, checkpoint_every=0, sample_tokens=0, device="cpu",
    )  # fmt: skip


def weights(job):
    params = [param.detach() for param in job.model.module.parameters()]
    return [param.full_tensor() if hasattr(param, "full_tensor") else param.clone() for param in params]


def run(rank, size, settings):
    """Train to the end; return the final held-out loss and the weights."""
    job = build_job(settings, paceline.init())
    with TrainingProgress(settings.steps, shown=False) as progress:
        val_loss = run_training(job, progress)
    job.checkpoint.close()  # its thread may still remove older checkpoints
    return val_loss, weights(job)


def run_to(rank, size, settings, step):
    """Train `step` steps, write a checkpoint and stop, as if interrupted."""
    job = build_job(settings, paceline.init())
    job.first_val_loss = job.evaluate()
    for _ in range(step):
        take_step(job)
    job.save(wait=True)
    job.checkpoint.close()  # as the end of the process does


def curve(settings):
    lines = (Path(settings.out) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def clean(settings, name):
    folder = Path(settings.out) / name
    folder.mkdir(parents=True)
    return replace(settings, out=str(folder))


def test_loss_falls_on_held_out_text(pool, settings):
    settings = clean(replace(settings, steps=40, eval_every=20), "a")
    (val_loss, one), (_, two) = pool(2).run(run, settings, timeout=120)
    lines = curve(settings)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["step"] for line in lines if "val_loss" in line] == [1, 20, 40]
    assert lines[0]["val_loss"] == pytest.approx(5.55, abs=0.2)  # ln 256 is guessing
    assert lines[-1]["val_loss"] == val_loss < lines[0]["val_loss"] - 1.5
    assert all(line["samples"] == 8 and 0 <= line["exposed_share"] <= 1 for line in lines)
    for mine, theirs in zip(one, two, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("sync", ["naive", "flat", "overlap", "bucketed", "sharded", "full-shard"])
def test_same_global_batch_same_curve(pool, settings, sync):
    one = clean(replace(settings, micro_batch_size=12), f"one-{sync}")
    two = clean(replace(settings, micro_batch_size=2, accumulate=3, strategy=sync), f"two-{sync}")
    pool(1).run(run, one, timeout=120)
    pool(2).run(run, two, timeout=120)
    for alone, dealt in zip(curve(one), curve(two), strict=True):
        assert dealt["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert dealt["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)
        assert dealt.get("val_loss") == pytest.approx(alone.get("val_loss"), abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_held_out_loss_does_not_depend_on_ranks(pool, settings, ranks):
    settings = replace(settings, steps=1, lr=1e-9)
    alone, dealt = clean(settings, "one"), clean(replace(settings, micro_batch_size=3), "more")
    pool(1).run(run, alone)
    pool(ranks).run(run, dealt)
    assert curve(dealt)[0]["val_loss"] == pytest.approx(curve(alone)[0]["val_loss"], abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_resume_gives_the_same_parameters(pool, settings, sync):
    settings = replace(settings, strategy=sync)
    whole, halved = clean(settings, f"whole-{sync}"), clean(settings, f"halved-{sync}")
    expected_loss, expected = pool(2).run(run, whole, timeout=120)[0]
    pool(2).run(run_to, halved, 5, timeout=120)
    val_loss, found = pool(2).run(run, replace(halved, existing="resume"), timeout=120)[0]
    assert val_loss == expected_loss
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "sharded"), (3, "sharded")),
        ((3, "sharded"), (1, "sharded")),
        ((1, "bucketed"), (3, "full-shard")),
        ((3, "full-shard"), (2, "sharded")),
    ],
)
def test_resume_on_other_ranks_with_another_strategy(pool, settings, before, after):
    def dealt(name, ranks, sync):
        return replace(settings, micro_batch_size=6 // ranks, strategy=sync), name

    whole = clean(*dealt("whole", 1, "bucketed"))
    halved = clean(*dealt("halved", *before))
    _, expected = pool(1).run(run, whole, timeout=120)[0]
    pool(before[0]).run(run_to, halved, 5, timeout=120)
    rest = replace(halved, micro_batch_size=6 // after[0], strategy=after[1], existing="resume")
    _, found = pool(after[0]).run(run, rest, timeout=120)[0]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.thorough
def test_ranks_restarted_after_the_last_step_return_the_last_loss(pool, settings):
    settings = clean(settings, "a")
    val_loss, last = pool(2).run(run, settings)[0]
    again, weights = pool(2).run(run, replace(settings, existing="resume"))[0]
    assert again == pytest.approx(val_loss, rel=1e-6)
    assert all(map(torch.equal, weights, last))


def test_checkpoints_are_the_latest_two_and_no_pickle(pool, settings):
    settings = clean(replace(settings, checkpoint_every=3), "a")
    pool(2).run(run, settings)
    folder = Path(settings.out, "checkpoint")
    files = [
        "manifest.json",
        "manifest.json.xxh128",
        "model.safetensors",
        "rank-00000.json",
        "rank-00001.json",
        "state-rank0.safetensors",
        "state-rank1.safetensors",
    ]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["lock", *(f"step-{step:08d}/{name}" for step in (6, 8) for name in files)]


def save_with_a_full_disk(rank, size, settings):
    import os

    job = build_job(settings, paceline.init())
    take_step(job)
    job.save(wait=True)
    take_step(job)
    real = os.rename

    def fail(*args):
        raise OSError(28, "No space left on device")

    os.rename = fail
    try:
        job.save(wait=True)
    except PacelineError as error:
        return str(error)
    finally:
        os.rename = real
        job.checkpoint.close()
    return "saved"


def test_checkpoint_that_fails_leaves_the_one_before(pool, settings):
    settings = clean(settings, "a")
    message, _ = pool(2).run(save_with_a_full_disk, settings)
    assert "the checkpoint of step 2 can't be written" in message
    assert "rank 0: No space left on device" in message
    assert "resume from that" in message
    val_loss, _ = pool(2).run(run, replace(settings, existing="resume"))[0]
    assert val_loss < 5.5
    names = sorted(path.name for path in RunFolder(settings.out).checkpoint.iterdir())
    assert names == ["lock", "step-00000001", "step-00000008"]


def test_divergence_is_reported(pool, settings):
    with pytest.raises(RankError) as caught:
        pool(2).run(run, clean(replace(settings, lr=1e30, clip=0.0), "a"))
    assert isinstance(caught.value.__cause__, PacelineError)
    assert "training diverged" in str(caught.value.__cause__)
    assert "--lr" in str(caught.value.__cause__)


def test_a_run_that_diverges_between_logged_steps_keeps_its_last_good_checkpoint(pool, settings):
    settings = clean(replace(settings, lr=1e25, clip=0.0, checkpoint_every=1, log_every=100, steps=8), "a")
    with pytest.raises(RankError) as caught:
        pool(2).run(run, settings)
    assert "training diverged" in str(caught.value.__cause__)
    for path in RunFolder(settings.out).checkpoint.glob("step-*/model.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.isfinite(tensor).all(), name


def run_with_own_seed(rank, size, settings):
    return run(rank, size, replace(settings, seed=rank))


def run_with_own_data(rank, size, settings):
    import os

    os.chdir(Path(settings.data).parent / str(rank))
    try:
        return run(rank, size, replace(settings, data="text.py"))
    finally:
        os.chdir("/")


@pytest.mark.parametrize(
    ("case", "what"), [(run_with_own_seed, "seed=1"), (run_with_own_data, "data of number ")]
)
def test_ranks_with_different_settings_are_refused(pool, settings, case, what):
    text = Path(settings.data)
    for rank in (0, 1):
        (text.parent / str(rank)).mkdir()
        (text.parent / str(rank) / text.name).write_bytes(text.read_bytes() + b"x" * rank)
    with pytest.raises(RankError) as caught:
        pool(2).run(case, settings)
    assert isinstance(caught.value.__cause__, MismatchError)
    assert f"rank 1 has {what}" in str(caught.value.__cause__)


def command(rank, size, arguments):
    """Run the command as a launcher would on each rank; return its exit code and stderr."""
    import contextlib
    import io
    import sys

    from paceline.tools.cli.app import main

    sys.argv[:] = ["paceline", "train", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as written:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    return code, written.getvalue()


def test_started_by_a_launcher_all_ranks_refuse_a_folder_that_holds_a_run(pool, settings, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "steps.jsonl").write_text("{}\n")
    meet = {"PACELINE_INIT_METHOD": f"file://{tmp_path}/meet", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = [meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    arguments = ["--data", settings.data, "--out", str(out), "--context", "16", "--micro-batch-size", "2"]
    results = pool(2).run(command, arguments, world=False, env=env)
    assert [code for code, _ in results] == [2, 2]
    assert "holds a run already" in results[0][1]
    assert "rank 0 can't use" in results[1][1]
    assert [path.name for path in out.iterdir()] == ["steps.jsonl"]
