"""The files of the recipes run as their pages print them, on ranks as a launcher starts them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from unittest import mock

import pytest
from manual import ROOT, blocks, name

from hub_process import hub_thread
from paceline._core.job_key import JobKey
from paceline.transport.zmq.curve_keys import HubKeys
from paceline.world.mpi_world import find_mpiexec
from rank_pool import RankError
from world_entry import free_port, torchrun_variables

RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))


def files_of(page):
    """Return the complete files of a page, by name."""
    return {block.title: block.text for block in blocks(page) if block.title}


@pytest.fixture
def files(tmp_path):
    """`files("four-gpus")` writes the files of a recipe into an empty folder, and returns that."""

    def write(recipe):
        for title, text in files_of(ROOT / "docs" / "recipes" / f"{recipe}.md").items():
            (tmp_path / title).write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def run(pool):
    """`run(folder, 2, "train.py", "--steps", "3")` runs a file there on two ranks; returns rank 0's output."""

    def started(folder, size, *argv, **variables):
        env = [each | variables for each in torchrun_variables(size)]
        return pool(size).run(run_file, str(folder), *argv, world=False, env=env)[0]

    return started


def run_file(rank, size, folder, *argv):
    """Run a file as a program of its own; return what it printed.

    Its group outlives its models, since torch's class may hang where it is the last to release a group.
    """
    import torch.distributed as dist

    import paceline

    groups, destroy = [], dist.destroy_process_group

    def leave():
        groups.append(dist.group.WORLD)
        destroy()

    output, argv = io.StringIO(), [os.path.join(folder, argv[0]), *argv[1:]]
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(output),
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(dist, "destroy_process_group", leave),
        ):
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        paceline.shutdown()
        for thread in threading.enumerate():
            if thread.name == "paceline-checkpoint":
                thread.join(60)  # as a program does at its end
    return output.getvalue()


def losses_in(output):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize("page", RECIPES, ids=name)
def test_a_recipe_has_a_complete_file_in_the_style_of_the_project(page):
    assert files_of(page)
    for title, text in files_of(page).items():
        for command in (["check"], ["format", "--check"]):
            words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", f"examples/{title}", "-"]
            ended = subprocess.run(words, cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)
            assert ended.returncode == 0, f"{page.name}, {title}: {ended.stdout}{ended.stderr}"


def test_four_ranks_train_and_are_recorded(files, run):
    folder = files("four-gpus")
    output = run(folder, 4, "train.py")
    assert output.count("4 ranks on cpu") == 2
    losses = losses_in(output)
    assert losses[-1] < losses[0] < 5.5  # of 256 bytes at random: 5.55
    assert (folder / "runs" / "four-gpus" / "steps.jsonl").is_file()


@pytest.mark.parametrize("method", ["bucketed", "int8", "local"])
def test_two_ranks_train_in_three_ways(files, run, method):
    output = run(files("two-pcs"), 2, "train.py", method)
    assert re.fullmatch(rf"{method}: 1 hosts, \d+ ms per step, loss \d\.\d+\n", output)
    assert losses_in(output)[0] < 4.5


def test_a_torchrun_script_prints_the_same_with_torchs_class(files, run):
    folder = files("torchrun-script")
    text = (folder / "train.py").read_text()
    ours, theirs = "from paceline import Dist", "from torch.nn.parallel import Dist"
    assert text.count(ours) == 1
    (folder / "before.py").write_text(text.replace(ours, theirs))
    expected = run(folder, 2, "before.py")
    assert losses_in(expected)[-1] < 0.3 * losses_in(expected)[0]
    assert run(folder, 2, "train.py") == expected
    assert run(folder, 2, "with_paceline.py", str(folder / "before.py")) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_complete_loop_trains_logs_and_continues(files, run, dtype):
    folder = files("complete-loop")
    script = folder / "train.py"
    script.write_text(script.read_text().replace("torch.bfloat16\n", f"torch.{dtype}\n"))
    output = run(folder, 2, "train.py")
    assert [line.split(":")[0] for line in output.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    assert float(re.findall(r"accuracy (\d\.\d+)", output)[-1]) > 0.9  # by chance: 0.1
    lines = [
        json.loads(line) for line in (folder / "runs" / "complete" / "steps.jsonl").read_text().splitlines()
    ]
    assert {"loss", "gradient_norm"} <= lines[-1].keys()
    script.write_text(script.read_text().replace("DTYPE = 3,", "DTYPE = 4,"))
    assert run(folder, 3, "train.py").startswith("epoch 3: ")


def test_uneven_ranks_learn_what_one_process_learns(files, run):
    folder = files("uneven-data")
    alone, three = (losses_in(run(folder, size, "train.py")) for size in (1, 3))
    assert len(alone) == 2
    assert alone[1] < alone[0] < 5.0
    assert three == pytest.approx(alone, abs=2e-4)


def test_a_failed_run_continues_on_fewer_ranks_to_the_same_loss(files, run):
    folder = files("other-hardware")
    alone = run(folder, 1, "train.py")
    (folder / "runs").rename(folder / "undisturbed")
    with pytest.raises(RankError, match="injected"):
        run(folder, 4, "train.py", PACELINE_FAULTS="fail_at(rank=1, step=70)")
    first, last = run(folder, 2, "train.py").splitlines()
    assert first == "step 60, by 4 ranks; now 2 on cpu"
    assert losses_in(last) == pytest.approx(losses_in(alone), abs=2e-5)
    assert last.startswith("step 150: ")


@pytest.mark.parametrize(
    ("recipe", "accumulation"),
    [
        ("hugging-face", "gradient_accumulation_steps={}"),
        pytest.param("lightning", "accumulate_grad_batches={}", marks=pytest.mark.thorough),
    ],
)
def test_the_loops_of_others_learn_the_same_on_any_number_of_ranks(files, run, recipe, accumulation):
    folder = files(recipe)
    text = (
        (folder / "train.py")
        .read_text()
        .replace("n_embd=64", "n_embd=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0")
    )
    (folder / "train.py").write_text(text)  # dropout depends on the rank
    two = run(folder, 2, "train.py")
    if recipe == "hugging-face":
        assert run(folder, 2, "train.py", "--resume").splitlines()[-1] == two.splitlines()[-1]
    (folder / "alone.py").write_text(text.replace(accumulation.format(2), accumulation.format(4)))
    losses = [
        [float(loss) for loss in re.findall(r"\d\.\d{3}", each.splitlines()[-1])]
        for each in (two, run(folder, 1, "alone.py"))
    ]
    assert losses[0][-1] < 3.0
    assert losses[0][0] == pytest.approx(losses[1][0], abs=2e-3)  # after which rounding grows
    assert losses[0] == pytest.approx(losses[1], abs=4e-2)


def test_a_program_for_oneccl_learns_what_it_learns_over_gloo(files, run):
    folder = files("oneccl")
    text = (folder / "train.py").read_text()
    (folder / "gloo.py").write_text(text.replace('"paceline"', '"gloo"'))
    ours = run(folder, 2, "train.py")
    assert losses_in(ours)[-1] < 0.2 * losses_in(ours)[0]
    assert run(folder, 2, "gloo.py") == ours


@pytest.mark.thorough
@pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
def test_a_program_for_oneccl_runs_under_mpiexec(files):
    folder = files("oneccl")
    command = [find_mpiexec(), "-n", "2", sys.executable, "train.py"]
    env = os.environ | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert len(losses_in(ended.stdout)) == 4


def test_ranks_of_a_host_are_one_worker_of_a_hub(files, run):
    folder, key = files("gpu-hosts"), JobKey.generate()
    with hub_thread(keys=HubKeys.of_job(key)) as hub:
        output = run(folder, 2, "train.py", hub.address, "1", **key.environment())
        assert [each.name for each in hub.hub.members] == ["host 1"]
        assert hub.hub.updates > 0
    assert output.startswith("2 ranks, 1920 samples, ")
    assert output.endswith("holds the global parameters: True\n")
    assert losses_in(output)[0] < 4.5
    assert (folder / "runs" / "worker1" / "hub0" / "worker.json").is_file()


def test_ranks_of_linux_report_shared_memory(files, run):
    output = run(files("wsl-macos"), 2, "check.py")
    assert output == "rank 0 of 2: paceline on cpu, shared memory; right: True\n"


@pytest.mark.thorough
def test_without_the_calls_that_macos_lacks_ranks_train_over_gloo(files):
    folder = files("wsl-macos")
    command = [sys.executable, str(ROOT / "tests" / "docs" / "as_macos.py"), "check.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    expected = [f"rank {rank} of 2: paceline on cpu, sockets or NCCL; right: True" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == expected
    assert "no shared memory, using gloo instead" in ended.stderr
