"""`paceline train`: its files, and one clear message for every invalid input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.trace_reader import read_timeline

TRAIN = ["-m", "paceline", "train"]
SMALL = ["--context", 16, "--micro-batch-size", 2, "--eval-every", 3, "--checkpoint-every", 3, "--threads", 1]


def run(*arguments, timeout=240, program=TRAIN):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def here(command, monkeypatch, capsys):
    """Return a function that runs the command in this process, which is faster than a new one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()

    def call(*arguments):
        capsys.readouterr()
        code, out, err = command("train", *arguments)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    yield call
    torch.set_num_threads(threads)


def losses(out):
    return {step.step: step.val_loss for step in read_run(out).steps if step.val_loss is not None}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_bytes((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:20_000])
    return path


def test_train_refuse_resume_overwrite(tmp_path, text, here):
    out = tmp_path / "run"
    ended = run("--data", text, "--out", out, "--steps", 6, *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks on cpu (paceline), 1 thread each; bucketed" in ended.stdout
    assert "step      6  held-out loss" in ended.stdout
    assert "a sample of generated text:\n\ndef " in ended.stdout
    assert f"report: {out}/report.html" in ended.stdout
    assert sorted(losses(out)) == [1, 3, 6]
    assert losses(out)[6] < losses(out)[1]
    record = read_run(out)
    assert record.facts["command"].startswith("paceline train --data")
    assert record.facts["parameters"] == gpt_size("tiny").parameters()
    assert record.facts["world"]["size"] == 2
    assert sorted(record.spans_of_rank) == [0, 1]
    steps = read_timeline(record.spans_of_rank[1]).steps
    assert [line.step for line in steps] == [0, 1, 2, 3, 4, 5]
    phases = {phase.name for phase in steps[1].phases}
    assert phases == {"forward", "outside", "backward", "exchange", "optimizer", "data"}
    assert "eval" in {task.name for line in steps for task in line.tasks}
    assert (out / "sample.txt").read_text().startswith("def ")
    assert "<html" in (out / "report.html").read_text()
    assert not record.notes
    weights = load_file(out / "checkpoint" / "step-00000006" / "model.safetensors")
    assert sum(tensor.size for tensor in weights.values()) == gpt_size("tiny").parameters()

    refused = here("--data", text, "--out", out, "--steps", 6, *SMALL)
    assert refused.returncode == 2
    assert "holds a run already" in refused.stderr

    finished = here("--data", text, "--out", out, "--steps", 6, "--resume", *SMALL)
    assert finished.returncode == 2
    assert "nothing left to do: the checkpoint is at step 6 of 6" in finished.stderr

    other = here("--data", text, "--out", out, "--steps", 9, "--resume", "--model", "mini", *SMALL)
    assert other.returncode == 2
    assert "of a model with name='tiny', but the settings give 'mini'" in other.stderr

    resumed = here("--data", text, "--out", out, "--steps", 9, "--resume", "--nproc-per-node", 1, *SMALL)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 6" in resumed.stdout
    assert sorted(losses(out)) == [1, 3, 6, 9]

    again = here("--data", text, "--out", out, "--steps", 3, "--overwrite", "--nproc-per-node", 1, *SMALL)
    assert again.returncode == 0, again.stderr
    assert "1 rank on cpu (none)" in again.stdout
    assert sorted(losses(out)) == [1, 3]
    assert sorted(read_run(out).spans_of_rank) == [0]
    facts = json.loads((out / "run.json").read_text())
    assert facts["machine"]["usable cores"] > 0
    assert facts["machine"]["memory"].endswith("iB")
    assert facts["machine"]["cpu"] in (out / "report.html").read_text()
    assert " left" not in again.stdout.partition("3/3")[2]
    assert {"command", "started", "settings", "world", "versions", "parameters", "result"} <= facts.keys()
    assert facts["result"]["last held-out loss"] == losses(out)[3]


@pytest.mark.thorough
def test_under_torchrun_it_takes_part(tmp_path, text, here, monkeypatch):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAIN]
    arguments = ["--data", text, "--out", tmp_path / "run", "--steps", 3, "--strategy", "full-shard", *SMALL]
    ended = run(*arguments, program=torchrun)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("held-out loss") == 3  # before, after step 3, at the end: only rank 0 prints
    assert sorted(losses(tmp_path / "run")) == [1, 3]
    seen = read_run(tmp_path / "run")
    assert sorted(seen.spans_of_rank) == [0, 1]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["steps"] == 3
    first = min(span.start for spans in seen.spans_of_rank.values() for span in spans)
    assert datetime.fromisoformat(str(seen.facts["started"])).timestamp() <= first

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    more = here(*arguments, "--overwrite", "--nproc-per-node", 3)
    assert more.returncode == 2
    assert "nproc_per_node=3, but torchrun started 2" in more.stderr


@pytest.mark.thorough
def test_parameters_every_few_steps(tmp_path, text, here):
    """Two ranks with pseudo-gradients in int4; resuming requires the same options."""
    out, small = tmp_path / "run", ["--data", text, *SMALL]
    ended = run(*small, "--out", out, "--steps", 6, "--every", 4, "--compression", "int4")
    assert ended.returncode == 0, ended.stderr
    assert "; averaged every 4 steps, int4; " in ended.stdout
    assert "less than float32 gradients every step" in ended.stdout
    facts = json.loads((out / "run.json").read_text())
    assert facts["synchronised"] == "averaged every 4 steps, int4"
    assert facts["sent"]["would_be_nbytes"] == 6 * 4 * gpt_size("tiny").parameters()
    assert 0 < facts["sent"]["sent_nbytes"] < facts["sent"]["would_be_nbytes"] / 8
    assert "Bytes sent" in (out / "report.html").read_text()
    small += ["--out", out, "--resume", "--nproc-per-node", 1, "--steps", 9]
    for other, message in (
        ([], "of a run with every=4, but the settings have no --every"),
        (
            ["--every", 4, "--outer", "diloco"],
            "of a run with outer='average', but the settings have 'diloco'",
        ),
        (["--every", 4, "--fragments", 2], "of a run with fragments=1, but the settings have 2"),
    ):
        refused = here(*small, *other)
        assert refused.returncode == 2
        assert message in refused.stderr
    resumed = here(*small, "--every", 4)
    assert resumed.returncode == 0, resumed.stderr
    assert sorted(losses(out)) == [1, 3, 6, 9]


@pytest.mark.thorough
def test_token_file(tmp_path, here):
    np.tile(np.arange(300, dtype="<u2"), 20).tofile(tmp_path / "words.bin")
    ended = here(
        "--data",
        tmp_path / "words.bin",
        "--out",
        tmp_path / "run",
        "--steps",
        2,
        "--nproc-per-node",
        1,
        *SMALL,
    )
    assert ended.returncode == 0, ended.stderr
    assert "vocabulary 300" in ended.stdout
    small = here("--data", tmp_path / "words.bin", "--out", tmp_path / "b", "--vocabulary", 256, *SMALL)
    assert small.returncode == 2
    assert "the data hold token 299, but vocabulary=256" in small.stderr


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategy bukketed", "did you mean 'bucketed'"),
        ("--model smal", "did you mean 'small'"),
        ("--bucket-mib 0", "one bucket per parameter is called 'naive'"),
        ("--bucket-mib -4", "must be above 0"),
        ("--strategy naive --bucket-mib 4", "which has no bucket size"),
        ("--nproc-per-node 0", "nproc_per_node=0"),
        ("--min-ranks 3", "min_ranks=3, of 2 ranks"),
        ("--nproc-per-node 1 --min-ranks 2", "min_ranks=2, of 1 rank"),
        ("--steps 0", "steps=0"),
        ("--micro-batch-size -3", "micro_batch_size=-3"),
        ("--lr -1", "lr=-1.0"),
        ("--clip nan", "clip=nan"),
        ("--threads 0", "threads=0"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--compression int5", "unknown compression 'int5'"),
        ("--compression int8 --strategy full-shard", "FSDP2 reduces gradients itself"),
        ("--compression powersgd --every 4", "follows a gradient from step to step"),
        ("--every 0", "every=0"),
        ("--every 4 --strategy sharded", "no rank has whole gradients"),
        ("--every 20 --fragments 8", "fragments=8, but the model has 7 layers"),
        ("--outer-lr 0.5", "outer_lr=0.5 without every"),
        ("--every 4 --outer-lr 0.5", "use --outer diloco"),
        ("--strategy auto --every 4", "which chooses that itself"),
        ("--resume --overwrite", "exclude each other"),
        ("--resume", "leave --resume out"),
        ("--resume later", "'later' is no option of paceline train"),
        ("auto", "give --resume auto"),
        ("--data {tmp}/nowhere", "no such file or folder"),
        ("--data {tmp}/empty.txt", "is an empty file"),
        ("--data {tmp}/empty.txt", "→ give a text file"),
        ("--data {tmp}/short.txt --context 16 --micro-batch-size 30", "less data than one batch"),
        (
            "--data {tmp}/short.txt --context 16 --nproc-per-node 60 --micro-batch-size 1",
            "more ranks than data: 60 ranks",
        ),
        ("--data {tmp}/odd.bin", "not whole 16-bit token numbers"),
        ("--out {tmp}/short.txt/run", "can't write the run folder"),
        ("--steps many", "not a valid integer|valid integer"),
        ("--stepz 4", "No such option"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path, here, monkeypatch, arguments, message):
    monkeypatch.setattr(
        "paceline.tools.train.start_training._run", lambda *_: pytest.fail("the training began")
    )
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("a short text. " * 50)
    (tmp_path / "odd.bin").write_bytes(b"123")
    given = arguments.format(tmp=tmp_path).split()
    ended = here(*(given if "--out" in given else [*given, "--out", tmp_path / "run"]))
    assert ended.returncode == 2
    assert any(part in ended.stderr for part in message.split("|")), ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert ended.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("recovery", ["restart", "live"])
def test_killed_ranks_do_not_change_the_result(tmp_path, text, here, monkeypatch, recovery):
    """Killed at step 5 on two ranks, it ends with the weights of one rank in an undisturbed run."""
    small = ["--data", text, "--steps", 7, "--strategy", "bucketed", *SMALL]
    monkeypatch.setenv("PACELINE_FAULTS", "fail_at(rank=1, step=4, how='kill', restart=0)")
    ended = run(*small, "--recovery", recovery, "--out", tmp_path / "run")
    monkeypatch.delenv("PACELINE_FAULTS")
    assert ended.returncode == 0, ended.stderr
    record = read_run(tmp_path / "run")
    if recovery == "restart":
        assert "restart 1: rank 1 on" in ended.stderr
        assert [(each.ranks_before, each.ranks_after) for each in record.restarts] == [(2, 2)]
        assert record.restarts[0].reason.endswith("was ended by SIGKILL")
        assert "<h2>Restarts</h2>" in (tmp_path / "run" / "report.html").read_text()
    else:
        assert re.search(r"rank 1 on .* was ended by SIGKILL .*the others train on", ended.stderr)
        assert not record.restarts
    assert (
        here(*small, "--micro-batch-size", 4, "--nproc-per-node", 1, "--out", tmp_path / "calm").returncode
        == 0
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "calm"), abs=1e-4)
    last = "checkpoint/step-00000007/model.safetensors"
    found, undisturbed = (load_file(tmp_path / name / last) for name in ("run", "calm"))
    for name, weights in undisturbed.items():
        np.testing.assert_allclose(found[name], weights, rtol=0, atol=2e-4)


@pytest.mark.thorough
def test_timeline_and_terminal_go_on_when_rank_0_dies(tmp_path, text):
    """Its process is killed once a step is logged; another one becomes rank 0, and a third joins."""
    out, small = tmp_path / "run", ["--data", text, "--steps", 150, "--strategy", "bucketed", *SMALL]
    words = [*small, "--eval-every", 0, "--checkpoint-every", 0, "--out", out]
    command = [sys.executable, *TRAIN, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (out / "steps.jsonl").exists():
            assert started.poll() is None
            time.sleep(0.05)
        children = psutil.Process(started.pid).children()
        [first] = [each for each in children if each.environ().get("RANK") == "0"]
        first.kill()
        output, errors = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode == 0, errors
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == len(set(lines)) > 25, output
    assert "step    150/150" in output
    assert f"report: {out}/report.html" in output
    record = read_run(out)
    assert not record.restarts
    timelines = {rank: read_timeline(spans) for rank, spans in record.spans_of_rank.items()}
    assert [line.step for line in timelines[0].steps][:150] == list(range(150))
    assert timelines[0].recoveries[0].ranks == 1
    for path in (out / "trace").iterdir():
        begins = [line for line in path.read_text().splitlines() if '"session"' in line]
        assert sum('"ranks"' not in line for line in begins) == ("." not in path.stem), "one process per file"
    assert "<h2>Live recoveries</h2>" in (out / "report.html").read_text()


@pytest.mark.thorough
def test_failure_of_a_rank_is_reported_without_a_traceback(tmp_path, text):
    ended = run("--data", text, "--out", tmp_path / "run", "--lr", "1e30", "--clip", 0, *SMALL)
    assert ended.returncode == 1
    assert "training diverged" in ended.stderr
    assert "restart 1" not in ended.stderr  # it would diverge again
    assert "Traceback" not in ended.stderr + ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_absent_gpu_is_refused_once_before_ranks_are_started(tmp_path, text, here):
    ended = here("--data", text, "--out", tmp_path / "run", "--device", "cuda", *SMALL)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: device 'cuda' requires CUDA, but ")
    assert ended.stderr.count("Error") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 0])
def test_an_interrupt_saves_and_explains_how_to_resume(tmp_path, text, here, every):
    out = tmp_path / "run"
    arguments = ["--data", text, "--out", out, "--nproc-per-node", 2, "--steps", 100_000, *SMALL]
    arguments[-3:] = [every, "--threads", 1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, *TRAIN, *map(str, arguments)]
    started = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wanted = "checkpoint/step-????????/manifest.json" if every else "steps.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob(wanted)) and started.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        started.send_signal(signal.SIGINT)
        output = started.communicate(timeout=60)[1]
    finally:
        started.kill()  # its ranks end with it
    assert started.returncode == 130
    assert "Interrupted" in output
    assert "with --resume" in output
    assert "Traceback" not in output
    again = here("--data", text, "--out", out, *SMALL)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    step = int(max((out / "checkpoint").glob("step-????????")).name.removeprefix("step-"))
    more = here("--data", text, "--out", out, "--resume", "--nproc-per-node", 1, "--steps", step + 1, *SMALL)
    assert more.returncode == 0, more.stderr


def started_until(out, arguments, wanted):
    """Start a training, and return it once a file is there."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    started = subprocess.Popen(
        [sys.executable, *TRAIN, "--out", str(out), *map(str, arguments)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (out / wanted).exists() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return started


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ["--recovery", "live"]),
        pytest.param(signal.SIGUSR1, ["--recovery", "live"], marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, ["--recovery", "restart"], marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, ["--every", 3], marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, ["--nproc-per-node", 1], marks=pytest.mark.thorough),
    ],
)
def test_a_warned_training_saves_and_is_resumed_by_the_same_command(tmp_path, text, number, options):
    """There is nothing to resume first; then it goes on from the step that was done; an ended run ends again."""
    out = tmp_path / "run"
    small = ["--data", text, *SMALL[:4], "--eval-every", 0, "--checkpoint-every", 0, "--threads", 1, *options]
    started = started_until(out, [*small, "--steps", 100_000, "--resume", "auto"], "steps.jsonl")
    try:
        started.send_signal(number)
        output = started.communicate(timeout=100)[1]
    finally:
        started.kill()
    assert started.returncode == 75, output
    assert "Traceback" not in output
    assert f"resume from the checkpoint in {out} with --resume" in output
    step = int(max((out / "checkpoint").glob("step-????????")).name.removeprefix("step-"))
    assert step > 0
    for _ in range(2):
        ended = run(*small, "--out", out, "--steps", step + 7, "--resume", "auto")
        assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {step + 7}" in ended.stdout
    logged = [each.step for each in read_run(out).steps]
    assert logged == sorted(set(logged))
    assert logged[-1] == step + 7


def test_resume_auto_begins_anew_only_where_nothing_is_lost(tmp_path, text, here):
    out, auto = (
        tmp_path / "run",
        ["--data", text, "--steps", 2, "--nproc-per-node", 1, *SMALL, "--resume", "auto"],
    )
    out.mkdir()
    (out / "steps.jsonl").write_text(
        '{"step": 1, "loss": 9.0}\n'
    )  # killed before its first checkpoint was whole
    (out / "checkpoint" / "step-00000003.tmp-5f0c").mkdir(parents=True)
    (out / "notes").touch()
    assert here(*auto, "--out", out).returncode == 0
    assert [each.step for each in read_run(out).steps] == [1, 2]
    assert (out / "notes").exists()
    saved = out / "checkpoint" / "step-00000002"
    (saved / "manifest.json").write_text("{}")
    damaged = here(*auto, "--out", out)
    assert (damaged.returncode, saved.exists()) == (2, True)
    assert "no intact checkpoint in" in damaged.stderr
    saved.rename(saved.with_suffix(".damaged"))
    aside = here(*auto, "--out", out)
    assert (aside.returncode, saved.with_suffix(".damaged").exists()) == (2, True)
    assert "but damaged ones, such as step-00000002.damaged" in aside.stderr


def test_bad_input_is_refused_before_torch_is_loaded():
    code = (
        "import sys; sys.argv[1:] = ['train', '--strategy', 'bukketed']\n"
        "from paceline.tools.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'paceline.tools.train.start_training' in sys.modules\n"
        "sys.exit(3 if 'torch' in sys.modules else 0)\n"
    )
    assert run(program=["-c", code]).returncode == 0
