"""Commands and files of the launchers: content, quoting, refused input."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess

import pytest

from paceline._core.job_key import JobKey
from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import DRAW_JOB_KEY, ClusterJob, run_command
from paceline.launch.targets.mpiexec_command import host_file, mpiexec_command
from paceline.launch.targets.ray_job import job_from_json, ray_driver
from paceline.launch.targets.slurm import SlurmOptions, batch_script, parse_job_state
from paceline.launch.targets.torchrun_command import torchrun_command, torchrun_line, torchrun_script

WEIRD = ['a b"=0"', "it's", "$HOME `x` \\", "two\nlines", "*", "", "--steps", "é"]
NAMED = {"hosts": 2, "host_names": ("pc1", "pc2")}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"program": ()}, "no program to run"),
        ({"program": ("",)}, "no program to run"),
        ({"program": ("-m",)}, "no program to run"),
        ({"program": ("--ranks", "2", "train.py")}, "'--ranks' is not a script"),
        ({"program": ("train.py", "a\0b")}, "an argument has a zero byte"),
        ({"hosts": 0}, "hosts=0"),
        ({"ranks_per_host": 0}, "ranks_per_host=0"),
        ({"gpus_per_rank": -1}, "gpus_per_rank=-1"),
        ({"cpus_per_rank": 0}, "cpus_per_rank=0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"port": 70000}, "port=70000 is not a port"),
        ({"hosts": 2, "min_hosts": 3}, "min_hosts=3, of 2"),
        ({"min_hosts": 0}, "min_hosts=0, of 1"),
        ({"memory": 5}, "memory=5 bytes"),
        ({"seconds": 5.0}, "a time limit of 5 s"),
        ({"seconds": float("nan")}, "a time limit of nan s"),
        ({"name": "My Job"}, "'My Job' is not a valid job name"),
        ({"name": "-a"}, "'-a' is not a valid job name"),
        ({"hosts": 2, "host_names": ("pc1",)}, "2 hosts, but these names: pc1"),
        ({"hosts": 2, "host_names": ("pc1", "pc1")}, "2 hosts, but these names: pc1, pc1"),
        ({"host_names": ("-oProxyCommand=x",)}, "is not a host name"),
        ({"host_names": ("pc1,pc2",)}, "is not a host name"),
        ({"env": {"A B": "1"}}, "'A B' is not a variable name"),
        ({"env": {"A": "a\0b"}}, "A has a zero byte"),
        ({"folder": "runs/a"}, "folder 'runs/a' is not the same everywhere"),
        ({"folder": "/runs\n/a"}, "is not the same everywhere"),
    ],
)
def test_invalid_jobs_are_refused(what, message):
    with pytest.raises(UsageError, match=message) as caught:
        ClusterJob(**{"program": ("train.py",)} | what)
    assert "→" in str(caught.value)


def test_work_counts():
    work = ClusterJob(("train.py",), hosts=3, ranks_per_host=4, cpus_per_rank=2, gpus_per_rank=1)
    assert (work.ranks, work.cpus_per_host, work.gpus_per_host, work.fewest_hosts) == (12, 8, 4, 3)
    assert work.variables() == {"OMP_NUM_THREADS": "2"}
    assert ClusterJob(("train.py",), env={"OMP_NUM_THREADS": "7"}).variables() == {"OMP_NUM_THREADS": "7"}


def test_paceline_run_gets_the_hosts():
    work = ClusterJob(
        ("-m", "my.module", "-m"), hosts=3, min_hosts=2, ranks_per_host=2, name="gpt", python="py"
    )
    assert shlex.join(run_command(work, "pc1:400")) == (
        "py -m paceline run --nproc-per-node 2 --max-restarts 3 --nnodes 3 --rendezvous pc1:400 --name gpt "
        "--min-ranks 4 --module my.module -m"
    )


def test_torchruns_rendezvous_is_on_the_first_host():
    work = ClusterJob(("train.py", "--x"), **NAMED, min_hosts=1, ranks_per_host=2, max_restarts=1, port=400)
    assert shlex.join(torchrun_command(work)) == (
        "python3 -m torch.distributed.run --nnodes=1:2 --rdzv-backend=c10d --rdzv-id=train --rdzv-endpoint=pc1:400 "
        "--nproc-per-node=2 --max-restarts=1 train.py --x"
    )
    ipv6 = ClusterJob(("train.py",), hosts=2, host_names=("fe::1", "fe::2"))
    assert "--rdzv-endpoint=[fe::1]:29400" in torchrun_command(ipv6)
    with pytest.raises(UsageError, match="2 hosts, but no names"):
        torchrun_command(ClusterJob(("train.py",), hosts=2))


def test_the_torchrun_line_is_valid_shell():
    work = ClusterJob(("train.py", *WEIRD), **NAMED, env={"A": WEIRD[0]}, folder="/runs/it's 100%")
    words = shlex.split(torchrun_line(work))
    assert words[:4] == ["cd", "/runs/it's 100%", "&&", "exec"]
    assert words[-len(WEIRD) :] == WEIRD
    assert f"A={WEIRD[0]}" in words
    assert torchrun_script(work).startswith("#!/bin/sh\n# Start this on each of pc1, pc2.")
    assert "cd " not in torchrun_line(ClusterJob(("train.py",)))


def test_a_batch_script_requests_the_resources():
    work = ClusterJob(
        ("train.py",),
        name="gpt",
        hosts=2,
        ranks_per_host=4,
        cpus_per_rank=3,
        gpus_per_rank=1,
        memory=(64 << 30) + 1,
        seconds=90 * 60,
        folder='/runs/a "b" 100%',
    )
    lines = batch_script(work, SlurmOptions("gpu", "us", ("--constraint=ib",), warn=60)).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=gpt",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=12",
        "gpus-per-node=4",
        "mem=65537M",
        "time=01:30:00",
        "signal=B:USR1@60",
        'partition="gpu"',
        'account="us"',
        'output="/runs/a \\"b\\" 100%%/gpt-%j.log"',
        "open-mode=append",
        "requeue",
        "constraint=ib",
    ]
    assert "cd '/runs/a \"b\" 100%' || exit 2" in lines
    [srun] = [line for line in lines if line.startswith("srun")]
    assert '--rendezvous "$first:$port"' in srun
    assert DRAW_JOB_KEY in lines
    drawn = [
        subprocess.run(
            ["bash", "-uc", f"{DRAW_JOB_KEY}; printenv PACELINE_JOB_KEY"], capture_output=True, text=True
        )
        for _ in range(2)
    ]
    keys = {JobKey.from_environment({"PACELINE_JOB_KEY": one.stdout}) for one in drawn}
    assert len(keys - {None}) == 2


def test_a_batch_script_quotes_the_program():
    work = ClusterJob(("train.py", *WEIRD, "$first:$port", "-", "--rendezvous"), hosts=2, env={"A": WEIRD[3]})
    text = batch_script(work)
    assert f"export A={shlex.quote(WEIRD[3])}\n" in text
    srun = text[text.index("srun ") : text.index(" &\n")]
    assert shlex.split(srun)[-len(WEIRD) - 3 :] == [*WEIRD, "$first:$port", "-", "--rendezvous"]
    assert srun.endswith("'$first:$port' - --rendezvous")


def test_a_batch_script_without_limit_is_not_warned():
    text = batch_script(ClusterJob(("train.py",)))
    assert "USR1" not in text
    assert "--time" not in text
    assert "rendezvous" not in text
    assert "PACELINE_JOB_KEY" not in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlurmOptions(options=("constraint",)), "'constraint' is not an option of sbatch"),
        (lambda: SlurmOptions(options=("--a=b\nrm",)), "is not possible in a batch script"),
        (lambda: SlurmOptions(partition="a\nb"), "is not possible in a batch script"),
        (lambda: SlurmOptions(warn=0), "warn=0"),
        (
            lambda: batch_script(ClusterJob(("x.py",), seconds=60.0)),
            "a time limit of 60 s, and a warning 120 s before",
        ),
        (lambda: batch_script(ClusterJob(("x.py",), folder="/a\\b")), "has a backslash"),
    ],
)
def test_invalid_slurm_options_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "state", "code", "over"),
    [
        (
            "JobId=3 JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 NodeList=(null)",
            "PENDING",
            0,
            False,
        ),
        ("JobId=3 JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 NodeList=n[1-2]", "RUNNING", 0, False),
        ("JobId=3 JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:0 NodeList=n1", "COMPLETED", 0, True),
        ("JobId=3 JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=7:0", "FAILED", 7, True),
        ("JobId=3 JobState=FAILED Reason=RaisedSignal:9 Restarts=0 ExitCode=0:9", "FAILED", 137, True),
        ("JobId=3 JobState=CANCELLED Reason=None Restarts=0 ExitCode=0:15", "CANCELLED", 143, True),
        ("JobId=3 JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExitCode=0:0", "TIMEOUT", 1, True),
    ],
)
def test_the_state_of_a_job_is_read(text, state, code, over):
    job = parse_job_state(text)
    assert (job.job, job.state, job.exit_code, job.over) == (3, state, code, over)


def test_the_state_of_a_job_is_one_line():
    assert (
        str(parse_job_state("JobId=3 JobState=PENDING Reason=Resources Restarts=0"))
        == "job 3: PENDING (Resources)"
    )
    running = parse_job_state("JobId=3 JobState=RUNNING Reason=None Restarts=1 NodeList=n[1-2] ExitCode=0:0")
    assert str(running) == "job 3: RUNNING on n[1-2], requeued 1 time"
    assert str(parse_job_state("JobId=3 JobState=FAILED ExitCode=7:0")) == "job 3: FAILED, exit code 7"


def test_mpich_and_open_mpi_have_other_options():
    work = ClusterJob(
        ("train.py", *WEIRD), **NAMED, ranks_per_host=4, env={"A": "b c"}, folder="/runs", python="py"
    )
    mpich = "/x/mpiexec -n 8 -ppn 4 -hosts pc1,pc2 -wdir /runs -genv MASTER_ADDR pc1 -genv MASTER_PORT 29400"
    mpich = shlex.split(f"{mpich} -genv OMP_NUM_THREADS 1 -genv A 'b c' py -u train.py")
    assert mpiexec_command(work, "mpich", "/x/mpiexec") == mpich + WEIRD
    openmpi = "mpiexec -n 8 --map-by ppr:4:node --host pc1:4,pc2:4 --wdir /runs -x MASTER_ADDR=pc1"
    openmpi = shlex.split(
        f"{openmpi} -x MASTER_PORT=29400 -x OMP_NUM_THREADS=1 -x 'A=b c' -x PACELINE_JOB_KEY py -u train.py"
    )
    assert mpiexec_command(work, "openmpi") == openmpi + WEIRD
    assert mpiexec_command(work, "mpich", hosts="/runs/hosts")[5:7] == ["-f", "/runs/hosts"]
    assert mpiexec_command(work, "openmpi", hosts="/runs/hosts")[5:7] == ["--hostfile", "/runs/hosts"]
    assert host_file(work, "mpich") == "pc1:4\npc2:4\n"
    assert "-hosts" not in mpiexec_command(ClusterJob(("train.py",)), "mpich")


def test_a_driver_for_ray_carries_the_work():
    work = ClusterJob(
        ("train.py", *WEIRD, '"""'), hosts=2, ranks_per_host=3, env={"A": "b\nc"}, memory=1 << 30
    )
    tree = ast.parse(ray_driver(work))
    [carried] = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    assert isinstance(carried, ast.Constant)
    assert job_from_json(str(carried.value)) == work
    assert json.loads(str(carried.value))["program"][1] == WEIRD[0]
