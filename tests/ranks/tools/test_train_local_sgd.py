"""Real training on warm ranks with compressed gradients, and with parameters synchronised every H steps."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train import clean, curve, run, run_to, weights

import paceline
from paceline.tools.train import auto_strategy
from paceline.tools.train.train_settings import TrainSettings
from paceline.tools.train.training_job import build_job
from paceline.tools.train.training_loop import run_training, take_step
from paceline.tools.train.training_progress import TrainingProgress


@pytest.fixture
def settings(tmp_path):
    text = tmp_path / "text.py"
    text.write_bytes((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:60_000])
    return TrainSettings(
        out=str(tmp_path / "run"), data=str(text), context=16, micro_batch_size=4, steps=11, lr=3e-3, log_every=1,
        eval_every=4, eval_windows=20, checkpoint_every=0, sample_tokens=0, device="cpu",
    )  # fmt: skip


def same(results):
    """Return the result of all ranks, after checking that it is bitwise equal."""
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))
    return results[0]


def equal(one, two):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))


LOCAL_SGD = [
    {"every": 4, "compression": "int4"},
    {"every": 6, "outer": "diloco", "fragments": 3, "delay": 2, "outer_warmup_steps": 2},
    {"every": 3, "outer": "slowmo"},
]


def run_local_sgd_to(rank, size, settings, step):
    """Train `step` steps inside the context manager, write a checkpoint and stop, as if interrupted."""
    job = build_job(settings, paceline.init())
    job.first_val_loss = job.evaluate()
    with job.loop:
        for _ in range(step):
            take_step(job)
        shared = job.evaluate()
        job.save(wait=True)
        job.checkpoint.close()
        return shared


@pytest.mark.thorough
@pytest.mark.parametrize("options", LOCAL_SGD, ids=lambda options: options.get("outer", "average"))
def test_resumed_between_synchronisations_it_is_the_same_to_the_bit(pool, settings, options):
    settings = replace(settings, **options)
    whole, halved = clean(settings, "whole"), clean(settings, "halved")
    results = pool(2).run(run, whole, timeout=120)
    expected = same([params for _, params in results])
    shared = pool(2).run(run_local_sgd_to, halved, 7, timeout=120)
    assert shared[0] == shared[1]  # of the parameters that all ranks share
    resumed = pool(2).run(run, replace(halved, existing="resume"), timeout=120)
    assert equal(same([params for _, params in resumed]), expected)
    assert resumed[0][0] == results[0][0] < curve(whole)[0]["val_loss"] - 0.5
    for key in ("sent_nbytes", "would_be_nbytes"):
        assert curve(halved)[-1][key] == curve(whole)[-1][key]


@pytest.mark.thorough
def test_another_number_of_ranks_continues_from_the_shared_parameters(pool, settings):
    settings = clean(replace(settings, every=4, micro_batch_size=6), "a")
    (shared, _) = pool(2).run(run_local_sgd_to, settings, 6)
    found = pool(3).run(evaluated, replace(settings, micro_batch_size=4, existing="resume"))
    assert found == [pytest.approx(shared, abs=1e-6)] * 3
    results = pool(3).run(run, replace(settings, micro_batch_size=4, existing="resume"))
    same([params for _, params in results])


def evaluated(rank, size, settings):
    job = build_job(settings, paceline.init())
    job.checkpoint.close()
    return job.evaluate()


def run_in_two_contexts(rank, size, settings, cut):
    """Train, leave the context manager after step `cut`, save, and enter it again in a new job."""
    job = build_job(settings, paceline.init())
    job.first_val_loss = job.evaluate()
    with job.loop:
        for _ in range(cut):
            take_step(job)
    job.save(wait=True)
    job.checkpoint.close()
    job = build_job(replace(settings, existing="resume"), paceline.init())
    with TrainingProgress(settings.steps, shown=False) as progress:
        run_training(job, progress)
    return weights(job), job.loop.steps


@pytest.mark.thorough
@pytest.mark.parametrize("options", LOCAL_SGD[:2], ids=lambda options: options.get("outer", "average"))
def test_a_run_resumes_after_its_context_was_left(pool, settings, options):
    """Its last checkpoint is written outside the context manager; a larger --steps resumes it."""
    results = pool(2).run(run_in_two_contexts, clean(replace(settings, **options), "a"), 7, timeout=120)
    same([params for params, _ in results])
    assert all(steps == 11 for _, steps in results)


@pytest.mark.thorough
def test_leaving_the_context_right_after_a_synchronisation_changes_nothing(pool, settings):
    """After a synchronisation all ranks are equal: nothing is sent, and no residual is added."""
    settings = replace(settings, every=4, compression="int4")
    expected = same([params for _, params in pool(2).run(run, clean(settings, "whole"), timeout=120)])
    left = pool(2).run(run_in_two_contexts, clean(settings, "left"), 8, timeout=120)
    assert equal(same([params for params, _ in left]), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("compression", ["int8", "powersgd"])
def test_compressed_gradients_learn_and_resume_to_the_bit(pool, settings, compression):
    settings = replace(settings, compression=compression)
    whole, halved = clean(settings, "whole"), clean(settings, "halved")
    results = pool(2).run(run, whole, timeout=120)
    last = curve(whole)[-1]
    assert last["val_loss"] < curve(whole)[0]["val_loss"] - 0.5
    assert last["sent_nbytes"] < 0.35 * last["would_be_nbytes"]
    pool(2).run(run_to, halved, 5, timeout=120)
    resumed = pool(2).run(run, replace(halved, existing="resume"), timeout=120)
    assert equal(resumed[0][1], results[0][1])


def slow(rank, size, settings, seconds):
    """Train with --strategy auto where every exchange seems to take `seconds`."""
    real = auto_strategy._exchange_seconds
    auto_strategy._exchange_seconds = lambda comm, nbytes, device, tag: (
        real(comm, nbytes, device, tag),
        seconds,
    )[1]
    try:
        job = build_job(settings, paceline.init())
    finally:
        auto_strategy._exchange_seconds = real
    with TrainingProgress(settings.steps, shown=False) as progress:
        run_training(job, progress)
    job.checkpoint.close()
    return weights(job), job.settings, job.choice.sentences


@pytest.mark.thorough
def test_auto_chooses_a_plain_strategy_on_a_fast_network(pool, settings):
    # See [Note: one norm for all plans].
    settings = replace(settings, micro_batch_size=32, context=64, steps=3, clip=0.0)
    named = pool(2).run(run, clean(replace(settings, strategy="bucketed"), "named"), timeout=120)
    measured = pool(2).run(slow, clean(replace(settings, strategy="auto"), "auto"), 1e-9, timeout=120)
    chosen = measured[0][1]
    assert measured[1][1] == chosen
    assert (chosen.strategy, chosen.every) == ("bucketed", None)
    assert equal(measured[0][0], named[0][1]), "measuring and tuning must change nothing"


@pytest.mark.thorough
def test_auto_chooses_local_sgd_on_a_slow_network_and_keeps_it(pool, settings):
    settings = clean(replace(settings, strategy="auto"), "a")
    results = pool(2).run(slow, settings, 30.0, timeout=120)
    same([params for params, *_ in results])
    chosen, message = results[0][1:]
    assert (chosen.every, chosen.compression, chosen.strategy) > (1, "int4", "")
    assert "--strategy auto measured" in message[0]
    assert f"--every {chosen.every}" in " ".join(message)
    more = replace(settings, existing="resume", steps=13)
    again = pool(2).run(slow, more, 1e-9, timeout=120)
    assert again[0][1] == replace(chosen, existing="resume", steps=13)
    assert "as the run began" in again[0][2][0]
