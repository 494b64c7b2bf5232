"""`paceline launch`: output, files and refused input."""

from __future__ import annotations

import os
import shlex
import sys

import psutil
import pytest
import yaml

from paceline.errors import RankFailed, UsageError
from paceline.launch.process.foreground_commands import run_commands
from paceline.launch.targets import slurm
from paceline.launch.targets.cluster_job import DRAW_JOB_KEY, ClusterJob
from paceline.launch.targets.ray_job import ray_driver
from paceline.tools.cli.launch_submit import run_with_restarts


def test_the_command_is_printed(command):
    code, out, err = command("launch", "torchrun", "--host", "a", "--host", "b", "train.py", "--host", "c d")
    assert (code, err) == (0, "")
    *_, line = out.splitlines()
    words = shlex.split(line)
    assert words[:2] == ["cd", os.getcwd()]
    assert "--nnodes=2" in words
    assert words[-3:] == ["train.py", "--host", "c d"]


def test_the_options_of_slurm_are_in_its_script(command):
    words = (
        "--nnodes 2 --nproc-per-node 3 --gpus 1 --memory-per-node 2GiB --time 8h --partition gpu --warn 60"
    )
    code, out, _ = command(
        "launch",
        "slurm",
        *words.split(),
        "--option",
        "--qos=low",
        "--workdir",
        "/runs",
        "train.py",
        "--gpus",
        "7",
    )
    assert code == 0
    for option in ("nodes=2", "gpus-per-node=3", "mem=2048M", "time=08:00:00", "qos=low", "signal=B:USR1@60"):
        assert f"#SBATCH --{option}\n" in out
    assert "paceline run --nproc-per-node 3 " in out
    assert out.count(" train.py --gpus 7 &\n") == 1


def test_the_out_file_is_executable(command, tmp_path):
    file = tmp_path / "a b.sh"
    code, out, err = command("launch", "mpi", "--nproc-per-node", 4, "--file", file, "train.py")
    assert (code, out, err) == (0, "", "")
    first, key, command_line = file.read_text().splitlines()
    assert (first, key) == ("#!/bin/sh", DRAW_JOB_KEY)
    assert command_line.startswith("exec mpiexec -n 4 -ppn 4 ")
    assert os.access(file, os.X_OK)


def test_hosts_of_mpi_are_written_to_a_file(command, tmp_path):
    hosts = ("--host", "pc1", "--host", "pc2", "--nproc-per-node", 4, "--hostfile", tmp_path / "hosts")
    code, out, _ = command("launch", "mpi", "--mpi", "openmpi", *hosts, "train.py")
    assert code == 0
    assert f"--hostfile {tmp_path / 'hosts'}" in out
    assert (tmp_path / "hosts").read_text() == "pc1 slots=4\npc2 slots=4\n"


def test_a_manifest_is_yaml(command):
    line = ("launch", "kubernetes", "--image", "lab/train:1", "--nnodes", 2)
    code, out, _ = command(*line, "-m", "my.module", "x: y")
    assert code == 0
    [container] = yaml.safe_load(out)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ]
    assert container["command"][-3:] == ["-m", "my.module", "x: y"]
    assert "kubectl create secret generic train-key --from-file=key=/dev/stdin\n" in out.splitlines(True)[0]
    assert "workingDir" not in container


def test_a_driver_of_ray_is_shown(command):
    code, out, _ = command("launch", "ray", "--nnodes", 2, "--workdir", "/runs", "--python", "py", "train.py")
    assert code == 0
    assert out == ray_driver(ClusterJob(("train.py",), hosts=2, folder="/runs", python="py"))


def test_a_launcher_may_continue_with_fewer_hosts(command):
    hosts = ("--host", "a", "--host", "b")
    code, out, _ = command("launch", "torchrun", *hosts, "--nnodes", "1:2", "train.py")
    assert code == 0
    assert "--nnodes=1:2 " in out
    code, out, _ = command("launch", "ray", "--nnodes", "2:4", "--workdir", "/runs", "train.py")
    assert code == 0
    assert '"min_hosts": 2' in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torchrun", "--host", "a", "--nnodes", "2", "train.py"], "--nnodes 2, but --host names 1"),
        (["slurm", "--nnodes", "1:2", "train.py"], "--nnodes 1:2: Slurm starts a fixed number"),
        (["torchrun", "--nproc-per-node", "0", "train.py"], "ranks_per_host=0"),
        (["torchrun", "--host", "a", "--host", "a", "train.py"], "2 hosts, but these names: a, a"),
        (["slurm", "--hostz", "2", "train.py"], "'--hostz' is not a script"),
        (["slurm", "--env", "A", "train.py"], "--env 'A' is not NAME=VALUE"),
        (["slurm", "--env", "A=1", "--env", "A=2", "train.py"], "sets A a second time"),
        (["slurm", "--workdir", "runs", "train.py"], "folder 'runs' is not the same everywhere"),
        (["slurm", "--time", "soon", "train.py"], "'soon' is no time"),
        (["torchrun", "--submit", "--shell", "", "train.py"], "--shell names no program"),
        (["torchrun", "--submit", "--shell", "ssh '", "train.py"], "No closing quotation"),
        (["mpi", "--mpi", "mpitch", "train.py"], "did you mean 'mpich'?"),
        (["mpi", "--hostfile", "hosts", "train.py"], "no hosts to write there"),
        (["ray", "--file", "/no/such/folder/x.py", "train.py"], "no such folder"),
        (["kubernetes", "--image", "", "train.py"], "a pod needs an image"),
        (["kubernetes", "--image", "x", "--claim", "runs", "train.py"], "no folder to mount it at"),
    ],
)
def test_invalid_options_are_refused(command, words, message):
    code, out, err = command("launch", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_launcher_is_reported(command, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = command("launch", "slurm", "--submit", "train.py")
    assert code == 2
    assert "no sbatch and no scontrol on this machine" in err
    assert "--file FILE" in err
    code, _, err = command("launch", "torchrun", "--host", "a", "--submit", "train.py")
    assert code == 2
    assert "no program 'ssh' on this machine" in err
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    code, _, err = command("launch", "mpi", "--submit", "train.py")
    assert code == 2
    assert "there is no mpiexec on this machine" in err
    monkeypatch.setattr("paceline.launch.targets.ray_job.find_spec", lambda name: None)
    code, _, err = command("launch", "ray", "--submit", "train.py")
    assert code == 2
    assert "pip install 'paceline[ray]'" in err


@pytest.mark.parametrize("end", ["COMPLETED", "NODE_FAIL"])
def test_a_job_whose_node_is_lost_may_be_requeued(monkeypatch, tmp_path, end):
    script = tmp_path / "scontrol"  # each call takes one state off the list, but the last
    script.write_text(
        f'#!/bin/sh\ncd {tmp_path}\necho "JobId=3 JobState=$(head -n 1 states) ExitCode=0:0"\n'
        "[ $(wc -l < states) = 1 ] || sed -i 1d states\n"
    )
    script.chmod(0o755)
    (tmp_path / "states").write_text(
        "PENDING\nRUNNING\nRUNNING\nNODE_FAIL\nNODE_FAIL\nPENDING\n" + end + "\n"
    )
    (tmp_path / "log").write_bytes(b"step 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "_RETURN_SECONDS", 0.05)
    messages, shown = [], []
    state = slurm.watch_job(3, tmp_path / "log", messages.append, shown.append)
    assert (state.state, state.exit_code) == (end, 0 if end == "COMPLETED" else 1)
    assert [line.split()[2].rstrip(",") for line in messages] == [
        "PENDING",
        "RUNNING",
        "NODE_FAIL",
        "PENDING",
        end,
    ]
    assert shown == [b"step 1\n"]


def test_a_job_unknown_to_slurm_is_reported(monkeypatch, tmp_path):
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        RankFailed, match=r"(?s)Slurm reports nothing about job 3: .*Invalid job id.*sacct -j 3"
    ):
        slurm.watch_job(3, tmp_path / "log", print, print)


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_controller_is_queried_again(monkeypatch, tmp_path, answers):
    calls = tmp_path / "calls"
    script = tmp_path / "scontrol"
    answer = f'[ $(wc -l < {calls}) -lt 2 ] || exec echo "JobId=3 JobState=COMPLETED ExitCode=0:0"'
    script.write_text(f"#!/bin/sh\necho x >> {calls}\n{answer if answers else ''}\nexec sleep 100\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in (("_ANSWER_SECONDS", 0.3), ("_POLL_SECONDS", 0.01), ("_TRIES", 3)):
        monkeypatch.setattr(slurm, name, value)
    if answers:
        assert slurm.watch_job(3, tmp_path / "log", print, print).state == "COMPLETED"
        return
    with pytest.raises(
        RankFailed, match=r"Slurm reports nothing about job 3: no answer within 0.3 s, 3 times"
    ):
        slurm.watch_job(3, tmp_path / "log", print, print)


def test_output_lines_carry_host_names_and_the_first_error_decides(capsys):
    codes = {"pc1": ["sh", "-c", "echo one; sleep 100"], "pc2": ["sh", "-c", "echo two >&2; exit 5"]}
    assert run_commands(codes, follow=0.2) == 5
    assert sorted(capsys.readouterr().out.splitlines()) == ["pc1 | one", "pc2 | two"]
    assert not [one for one in psutil.Process().children(recursive=True) if one.name() == "sleep"]
    assert run_commands({"": ["sh", "-c", "kill -9 $$"]}) == 137
    assert run_commands({"a": ["true"], "b": ["true"]}) == 0
    with pytest.raises(UsageError, match="no program 'no-such'"):
        run_commands({"": ["no-such"]})


def test_an_mpi_world_is_restarted_a_limited_number_of_times(tmp_path, capsys):
    count = tmp_path / "count"
    fails = ["sh", "-c", f"echo x >> {count}; [ $(wc -l < {count}) = 3 ] || exit 9"]
    assert run_with_restarts(fails, 1) == 9
    assert count.read_text() == "x\n" * 2
    assert run_with_restarts(fails, 1) == 0
    assert "restart 1: mpiexec ended with exit code 9" in capsys.readouterr().err
    assert run_with_restarts(["sh", "-c", f"echo x >> {count}; exit 2"], 5) == 2
    assert count.read_text() == "x\n" * 4
