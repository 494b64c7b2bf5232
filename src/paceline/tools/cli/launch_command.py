"""``paceline launch``: prints or submits the command or file that runs a script on a cluster."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer import Argument

from paceline._core.files import write_text
from paceline._core.units import parse_bytes, parse_seconds
from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import DRAW_JOB_KEY, ClusterJob
from paceline.tools.cli.shared_options import NNODES_NOTE, expand_options, parse_nnodes
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import check_writable

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_SCRIPT_LAST = {  # arguments after the script belong to it; -m begins a program too
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": ["-h", "--help"],
}
_SSH = "ssh -tt -o BatchMode=yes"

NameOption = Annotated[str, shared("name", ", and of its job")]
NnodesOption = Annotated[str, shared("nnodes", NNODES_NOTE)]
HostOption = Annotated[
    list[str] | None, own("NAME", "A host; may be repeated. The first one is the rendezvous.")
]
GpusOption = Annotated[int, own("N", "GPUs per rank.")]
MemoryOption = Annotated[
    str | None, own("SIZE", "Memory per host, such as 64GiB; default that of the cluster.")
]
TimeOption = Annotated[
    str | None, own("TIME", "Time limit, such as 8h; default that of the cluster.", "--time")
]
PortOption = Annotated[int, own("PORT", "Port of the rendezvous on the first host.")]
SubmitOption = Annotated[bool, own(None, "Start it instead of printing it.", "--submit")]


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """Options that all launchers share: the script, its ranks, and where the output goes."""

    program: Annotated[
        list[str], Argument(metavar="SCRIPT...", help="Script or -m MODULE, and its arguments.")
    ]
    nproc_per_node: Annotated[int, shared("nproc-per-node")] = 1
    cpus: Annotated[int, own("N", "Cores per rank.")] = 1
    env: Annotated[list[str] | None, own("NAME=VALUE", "Environment variable; may be repeated.")] = None
    workdir: Annotated[
        str | None,
        own("FOLDER", "Working directory: the same path on all hosts, on a shared disk; default this one."),
    ] = None
    max_restarts: Annotated[int, shared("max-restarts")] = 3
    python: Annotated[
        str | None, own("PATH", "Python interpreter on the hosts; default the path of this one.")
    ] = None
    file: Annotated[Path | None, own("FILE", "File to write to, not the terminal.")] = None

    def job(
        self,
        *,
        name: str = "train",
        host: list[str] | None = None,
        nnodes: str | None = None,
        gpus: int = 0,
        memory_per_node: str | None = None,
        time: str | None = None,
        port: int = 29400,
    ) -> ClusterJob:
        """Return the job that the options describe.

        The parameters are further options; `nnodes` defaults to the number of names (`host`), or 1.

        Raises:
            UsageError: an option is not valid, or `nnodes` is another number than that of the names.
        """
        least, hosts = parse_nnodes(str(len(host or ()) or 1) if nnodes is None else nnodes)
        if host and hosts != len(host):
            raise UsageError(
                f"--nnodes {nnodes}, but --host names {len(host)}",
                remedy="name every host, or leave --nnodes out",
            )
        return ClusterJob(
            tuple(self.program),
            name=name,
            hosts=hosts,
            host_names=tuple(host or ()),
            min_hosts=None if least == hosts else least,
            ranks_per_host=self.nproc_per_node,
            cpus_per_rank=self.cpus,
            gpus_per_rank=gpus,
            memory=None if memory_per_node is None else parse_bytes(memory_per_node),
            seconds=None if time is None else parse_seconds(time),
            env=_parse_variables(self.env or ()),
            folder=os.getcwd() if self.workdir is None else self.workdir,
            max_restarts=self.max_restarts,
            port=port,
            python=self.python or sys.executable,
        )

    def write(self, text: str, *, submitted: bool = False) -> None:
        """Write `text` to ``--file``, or to the terminal unless the job is `submitted`."""
        if self.file is not None:
            check_writable(self.file, "--file")
            write_text(self.file, text)
            if text.startswith("#!"):
                self.file.chmod(0o755)
        elif not submitted:
            typer.echo(text, nl=False)


@dataclass(frozen=True, kw_only=True)
class ContainerOptions(ScriptOptions):
    """`ScriptOptions` for a script in a container."""

    workdir: Annotated[str | None, own("FOLDER", "Working directory in the container.")] = ""
    python: Annotated[str | None, own("PATH", "Python interpreter in the image.")] = "python3"


@app.command("torchrun", context_settings=_SCRIPT_LAST)
@expand_options
def torchrun(
    script: ScriptOptions,
    host: HostOption = None,
    nnodes: Annotated[str | None, shared("nnodes", NNODES_NOTE + "; default those of --host")] = None,
    port: PortOption = 29400,
    name: NameOption = "train",
    submit: SubmitOption = False,
    shell: Annotated[str, own("COMMAND", "With --submit: runs a line on a host: COMMAND HOST LINE.")] = _SSH,
) -> None:
    """Run a script by torchrun on hosts that you can log in to.

    Example: paceline launch torchrun --host pc1 --host pc2 --nproc-per-node 2 --submit train.py --epochs 3

    The same command is started on every host; --submit does this over ssh, and shows the output here.
    """
    from paceline.launch.targets.torchrun_command import torchrun_line, torchrun_script

    job = script.job(host=host, nnodes=nnodes, port=port, name=name)
    shell_words = _split_shell(shell)
    script.write(torchrun_script(job), submitted=submit)
    if submit:
        from paceline.launch.process.foreground_commands import run_commands

        line = torchrun_line(job)
        commands = {one: [*shell_words, one, line] for one in job.host_names} or {"": ["sh", "-c", line]}
        _exit(run_commands(commands))


@app.command("slurm", context_settings=_SCRIPT_LAST)
@expand_options
def slurm(
    script: ScriptOptions,
    nnodes: Annotated[str, shared("nnodes")] = "1",
    gpus: GpusOption = 0,
    memory_per_node: MemoryOption = None,
    time: TimeOption = None,
    partition: Annotated[str, own("NAME", "Partition; default that of Slurm.")] = "",
    account: Annotated[str, own("NAME", "Account; default that of Slurm.")] = "",
    option: Annotated[
        list[str] | None, own("--NAME=VALUE", "Another option of sbatch; may be repeated.")
    ] = None,
    warn: Annotated[int, own("N", "Seconds before the time limit at which to requeue.")] = 120,
    name: NameOption = "train",
    submit: SubmitOption = False,
    watch: Annotated[bool, own(None, "Submit it and follow its log.", "--watch")] = False,
) -> None:
    """Run a script as a Slurm job that is requeued, and resumes from its newest checkpoint.

    Example: paceline launch slurm --nnodes 4 --nproc-per-node 8 --gpus 1 --time 8h --watch train.py --epochs 3

    Without --submit or --watch the batch script is printed, for sbatch.
    """
    from paceline.launch.targets.slurm import SlurmOptions, batch_script

    if ":" in nnodes:
        raise UsageError(
            f"--nnodes {nnodes}: Slurm starts a fixed number", remedy="give one, such as --nnodes 4"
        )
    job = script.job(nnodes=nnodes, gpus=gpus, memory_per_node=memory_per_node, time=time, name=name)
    text = batch_script(job, SlurmOptions(partition, account, tuple(option or ()), warn))
    if submit or watch:
        from paceline.tools.cli.launch_submit import submit_to_slurm

        _exit(submit_to_slurm(job, text, script.file, watch=watch))
    script.write(text)


@app.command("ray", context_settings=_SCRIPT_LAST)
@expand_options
def ray(
    script: ScriptOptions,
    nnodes: NnodesOption = "1",
    gpus: GpusOption = 0,
    memory_per_node: MemoryOption = None,
    name: NameOption = "train",
    submit: SubmitOption = False,
    address: Annotated[
        str | None,
        own("ADDRESS", "With --submit: address of the cluster; default RAY_ADDRESS, or a local one."),
    ] = None,
    wait: Annotated[str, shared("wait", ", with --submit")] = "5min",
) -> None:
    """Run a script on a Ray cluster.

    Example: paceline launch ray --nnodes 4 --nproc-per-node 8 --gpus 1 --submit train.py --epochs 3

    Without --submit a driver is printed: a program to start on the cluster, for example by `ray job submit`.
    """
    from paceline.launch.targets.ray_job import ray_driver

    job = script.job(nnodes=nnodes, gpus=gpus, memory_per_node=memory_per_node, name=name)
    seconds = parse_seconds(wait)
    script.write(ray_driver(job), submitted=submit)
    if submit:
        from paceline.launch.targets.ray_job import run_on_ray

        _exit(run_on_ray(job, address, wait=seconds))


@app.command("mpi", context_settings=_SCRIPT_LAST)
@expand_options
def mpi(
    script: ScriptOptions,
    host: HostOption = None,
    flavour: Annotated[
        str, own("NAME", "MPI of mpiexec: mpich (Intel's too) or openmpi.", "--mpi")
    ] = "mpich",
    hostfile: Annotated[Path | None, own("FILE", "Write the hosts to this file.")] = None,
    port: PortOption = 29400,
    submit: SubmitOption = False,
) -> None:
    """Run a script as the ranks of an MPI world.

    Example: paceline launch mpi --host pc1 --host pc2 --nproc-per-node 4 --submit train.py --epochs 3

    MPI ends a world with the first rank that fails; --submit then restarts it.
    """
    from paceline.tools.cli.launch_submit import build_mpiexec_command, run_with_restarts

    job = script.job(host=host, port=port)
    command = build_mpiexec_command(job, flavour, hostfile, submit=submit)
    script.write(f"#!/bin/sh\n{DRAW_JOB_KEY}\nexec {shlex.join(command)}\n", submitted=submit)
    if submit:
        _exit(run_with_restarts(command, job.max_restarts))


@app.command("kubernetes", context_settings=_SCRIPT_LAST)
@expand_options
def kubernetes(
    script: ContainerOptions,
    image: Annotated[str, own("IMAGE", "Image with Python, Paceline and the script.")],
    nnodes: NnodesOption = "1",
    gpus: GpusOption = 0,
    memory_per_node: MemoryOption = None,
    shared_memory: Annotated[str, own("SIZE", "/dev/shm of a pod, part of its memory.")] = "8GiB",
    claim: Annotated[str, own("NAME", "Volume claim, mounted at --workdir.")] = "",
    namespace: Annotated[str, own("NAME", "Namespace; default that of kubectl.")] = "",
    time: TimeOption = None,
    port: PortOption = 23456,
    name: NameOption = "train",
) -> None:
    """Write the manifest of a PyTorchJob for the Kubeflow training operator.

    Example: paceline launch kubernetes --image lab/train:1 --nnodes 4 --nproc-per-node 8 --gpus 1 --claim runs
    --workdir /runs train.py | kubectl apply -f -
    """
    from paceline.launch.targets.kubernetes_manifest import PodOptions, kubernetes_manifest

    job = script.job(
        nnodes=nnodes,
        gpus=gpus,
        memory_per_node=memory_per_node,
        time=time,
        port=port,
        name=name,
    )
    script.write(kubernetes_manifest(job, PodOptions(image, claim, namespace, parse_bytes(shared_memory))))


def _split_shell(shell: str) -> list[str]:
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise UsageError(f"--shell {shell!r}: {error}", remedy=f"for example --shell {_SSH!r}") from error
    if not words:
        raise UsageError("--shell names no program", remedy=f"for example --shell {_SSH!r}")
    return words


def _parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``.

    Raises:
        UsageError: a text has another form, or sets a variable again.
    """
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in variables:
            problem = "is not NAME=VALUE" if not equals else f"sets {name} a second time"
            raise UsageError(f"--env {text!r} {problem}", remedy="for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    return variables


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)
