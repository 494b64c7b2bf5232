"""``paceline launch``: the command or file with which a launcher runs a script on a cluster; shown, or submitted.

Options that the launchers of ``paceline launch`` share, and the work that they describe.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from paceline._core.files import write_text
from paceline._core.units import parse_bytes, parse_seconds
from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import ClusterJob
from paceline.tools.result_files import check_writable

__all__ = [
    "CpusOption",
    "EnvOption",
    "FolderOption",
    "GpusOption",
    "HostOption",
    "HostsOption",
    "MemoryOption",
    "MinHostsOption",
    "NameOption",
    "OutOption",
    "PortOption",
    "ProgramArgument",
    "PythonOption",
    "RanksOption",
    "RestartsOption",
    "SubmitOption",
    "TimeOption",
    "app",
    "described",
]

app = typer.Typer(no_args_is_help=True)


_SCRIPT_LAST = {  # what follows the script is its own; -m begins a program too
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": ["-h", "--help"],
}


_SSH = "ssh -tt -o BatchMode=yes"


@app.command("torchrun", context_settings=_SCRIPT_LAST)
def torchrun(
    context: typer.Context,
    program: ProgramArgument,
    host: HostOption = None,
    ranks: RanksOption = 1,
    min_hosts: MinHostsOption = None,
    cpus: CpusOption = 1,
    env: EnvOption = None,
    folder: FolderOption = None,
    max_restarts: RestartsOption = 3,
    port: PortOption = 29400,
    python: PythonOption = None,
    name: NameOption = "train",
    out: OutOption = None,
    submit: SubmitOption = False,
    shell: Annotated[
        str, typer.Option(metavar="COMMAND", help="With --submit: runs a line on a host: COMMAND HOST LINE.")
    ] = _SSH,
) -> None:
    """Run a script by torchrun on hosts that you can log in to.

    Example: paceline launch torchrun --host pc1 --host pc2 --ranks 2 --submit train.py --epochs 3

    The same command is started on every host. With --submit this is done over ssh, and followed here.
    """
    from paceline.launch.targets.torchrun_command import torchrun_line, torchrun_script

    work, words = described(context.params), _words(shell)
    text = torchrun_script(work)
    _put(text, out, submit=submit)
    if submit:
        from paceline.launch.process.foreground_commands import run_commands

        line = torchrun_line(work)
        commands = {one: [*words, one, line] for one in work.host_names} or {"": ["sh", "-c", line]}
        _end(run_commands(commands))


@app.command("slurm", context_settings=_SCRIPT_LAST)
def slurm(
    context: typer.Context,
    program: ProgramArgument,
    hosts: HostsOption = 1,
    ranks: RanksOption = 1,
    cpus: CpusOption = 1,
    gpus: GpusOption = 0,
    memory: MemoryOption = None,
    time: TimeOption = None,
    partition: Annotated[str, typer.Option(help="Else Slurm's default.")] = "",
    account: Annotated[str, typer.Option(help="Else Slurm's default.")] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="--NAME=VALUE", help="Another option of sbatch; may be repeated."),
    ] = None,
    warn: Annotated[int, typer.Option(help="Seconds before the --time limit at which it is requeued.")] = 120,
    env: EnvOption = None,
    folder: FolderOption = None,
    max_restarts: RestartsOption = 3,
    python: PythonOption = None,
    name: NameOption = "train",
    out: OutOption = None,
    submit: SubmitOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Submit it and follow it until it has ended.")
    ] = False,
) -> None:
    """Run a script as a Slurm job that is requeued, and goes on from its newest checkpoint.

    Example: paceline launch slurm --hosts 4 --ranks 8 --gpus 1 --time 8h --watch train.py --epochs 3

    Without --submit or --watch the batch script is shown, for sbatch.
    """
    from paceline.launch.targets.slurm import SlurmOptions, batch_script

    work = described(context.params)
    text = batch_script(work, SlurmOptions(partition, account, tuple(option or ()), warn))
    if submit or watch:
        from paceline.tools.cli.launch_submit import submit_to_slurm

        _end(submit_to_slurm(work, text, out, watch=watch))
    _put(text, out)


@app.command("ray", context_settings=_SCRIPT_LAST)
def ray(
    context: typer.Context,
    program: ProgramArgument,
    hosts: HostsOption = 1,
    ranks: RanksOption = 1,
    min_hosts: MinHostsOption = None,
    cpus: CpusOption = 1,
    gpus: GpusOption = 0,
    memory: MemoryOption = None,
    env: EnvOption = None,
    folder: FolderOption = None,
    max_restarts: RestartsOption = 3,
    python: PythonOption = None,
    name: NameOption = "train",
    out: OutOption = None,
    submit: SubmitOption = False,
    address: Annotated[
        str | None,
        typer.Option(help="With --submit: of the cluster; else RAY_ADDRESS, or one of this machine."),
    ] = None,
    wait: Annotated[str, typer.Option(help="With --submit: how long to wait for room.")] = "5min",
) -> None:
    """Run a script on a Ray cluster.

    Example: paceline launch ray --hosts 4 --ranks 8 --gpus 1 --submit train.py --epochs 3

    Without --submit a driver is shown: a program to be started on the cluster, by `ray job submit` for example.
    """
    from paceline._core.units import parse_seconds
    from paceline.launch.targets.ray_job import ray_driver

    work = described(context.params)
    seconds = parse_seconds(wait)
    _put(ray_driver(work), out, submit=submit)
    if submit:
        from paceline.launch.targets.ray_job import run_on_ray

        _end(run_on_ray(work, address, wait=seconds))


@app.command("mpi", context_settings=_SCRIPT_LAST)
def mpi(
    context: typer.Context,
    program: ProgramArgument,
    host: HostOption = None,
    ranks: RanksOption = 1,
    flavour: Annotated[
        str, typer.Option("--mpi", help="Whose mpiexec: mpich (Intel's too) or openmpi.")
    ] = "mpich",
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the hosts there, rather than into the command.")
    ] = None,
    cpus: CpusOption = 1,
    env: EnvOption = None,
    folder: FolderOption = None,
    max_restarts: RestartsOption = 3,
    port: PortOption = 29400,
    python: PythonOption = None,
    out: OutOption = None,
    submit: SubmitOption = False,
) -> None:
    """Run a script as the ranks of an MPI world.

    Example: paceline launch mpi --host pc1 --host pc2 --ranks 4 --submit train.py --epochs 3

    MPI ends a world with the first rank that fails. With --submit it is started again then.
    """
    from paceline.tools.cli.launch_submit import build_mpiexec_command, run_with_restarts

    work = described(context.params)
    command = build_mpiexec_command(work, flavour, hostfile, submit=submit)
    _put(f"#!/bin/sh\nexec {shlex.join(command)}\n", out, submit=submit)
    if submit:
        _end(run_with_restarts(command, work.max_restarts))


@app.command("kubernetes", context_settings=_SCRIPT_LAST)
def kubernetes(
    context: typer.Context,
    program: ProgramArgument,
    image: Annotated[str, typer.Option(help="Of the container: Python, Paceline and the script.")],
    hosts: HostsOption = 1,
    ranks: RanksOption = 1,
    min_hosts: MinHostsOption = None,
    cpus: CpusOption = 1,
    gpus: GpusOption = 0,
    memory: MemoryOption = None,
    shared_memory: Annotated[str, typer.Option(help="Of /dev/shm in each pod; part of its memory.")] = "8GiB",
    claim: Annotated[str, typer.Option(help="Persistent volume claim, mounted at --folder.")] = "",
    namespace: Annotated[str, typer.Option(help="Else that of whoever applies it.")] = "",
    time: TimeOption = None,
    env: EnvOption = None,
    folder: Annotated[str, typer.Option(help="Where the program runs in the container.")] = "",
    max_restarts: RestartsOption = 3,
    port: PortOption = 23456,
    python: Annotated[str, typer.Option(help="The interpreter in the image.")] = "python3",
    name: NameOption = "train",
    out: OutOption = None,
) -> None:
    """Write the manifest of a PyTorchJob for the Kubeflow training operator.

    Example: paceline launch kubernetes --image lab/train:1 --hosts 4 --ranks 8 --gpus 1 --claim runs --folder /runs
    train.py | kubectl apply -f -
    """
    from paceline._core.units import parse_bytes
    from paceline.launch.targets.kubernetes_manifest import PodOptions, manifest

    work = described(context.params)
    _put(manifest(work, PodOptions(image, claim, namespace, parse_bytes(shared_memory))), out)


def _words(shell: str) -> list[str]:
    """Return the words of --shell.

    Raises:
        UsageError: there are none, or a quotation in it does not end.
    """
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise UsageError(f"--shell {shell!r}: {error}", remedy=f"for example --shell {_SSH!r}") from error
    if not words:
        raise UsageError("--shell names no program", remedy=f"for example --shell {_SSH!r}")
    return words


def _put(text: str, out: Path | None, *, submit: bool = False) -> None:
    """Write `text` to the file that was asked for, else to the terminal, unless it is submitted."""
    if out is not None:
        check_writable(out, "--out")
        write_text(out, text)
        if text.startswith("#!"):
            out.chmod(0o755)
    elif not submit:
        typer.echo(text, nl=False)


def _end(code: int) -> NoReturn:
    raise typer.Exit(code)


ProgramArgument = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT...", help="A Python script or -m MODULE, and its own arguments."),
]


NameOption = Annotated[str, typer.Option(help="Of the job.")]


HostsOption = Annotated[int, typer.Option(help="How many hosts.")]


HostOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A host; repeated, the ranks meet on the first.")
]


MinHostsOption = Annotated[
    int | None, typer.Option(help="Go on with so many hosts after a loss; else with all only.")
]


RanksOption = Annotated[int, typer.Option(help="Processes on each host.")]


CpusOption = Annotated[int, typer.Option(help="Cores for each rank.")]


GpusOption = Annotated[int, typer.Option(help="GPUs for each rank.")]


MemoryOption = Annotated[
    str | None, typer.Option(help="Of each host, such as 64GiB; else what the cluster gives.")
]


TimeOption = Annotated[
    str | None, typer.Option("--time", help="Limit, such as 8h; else what the cluster gives.")
]


EnvOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable to set; may be repeated.")
]


FolderOption = Annotated[
    str | None,
    typer.Option(help="Where the program runs, the same path on all hosts: on a shared disk. Else here."),
]


RestartsOption = Annotated[int, typer.Option(help="Failures after which the ranks are started again.")]


PortOption = Annotated[int, typer.Option(help="Where the ranks meet, on the first host.")]


PythonOption = Annotated[str | None, typer.Option(help="The interpreter on the hosts; else this one's path.")]


OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there; else to the terminal.")]


SubmitOption = Annotated[bool, typer.Option("--submit", help="Start it, rather than show it.")]


DEFAULT = ClusterJob(("train.py",))


def described(options: Mapping[str, Any]) -> ClusterJob:
    """Return the work that options describe; the number of hosts is that of their names, if they have any.

    Args:
        options: by name, of any command of ``paceline launch``; what it does not have is left at its default.

    Raises:
        UsageError: an option that can't be.
    """
    host, memory, time, folder = (options.get(name) for name in ("host", "memory", "time", "folder"))
    return ClusterJob(
        tuple(options["program"]),
        name=options.get("name", DEFAULT.name),
        hosts=len(host) if host else options.get("hosts", 1),
        host_names=tuple(host or ()),
        min_hosts=options.get("min_hosts"),
        ranks_per_host=options["ranks"],
        cpus_per_rank=options["cpus"],
        gpus_per_rank=options.get("gpus", 0),
        memory=None if memory is None else parse_bytes(memory),
        seconds=None if time is None else parse_seconds(time),
        env=_variables(options["env"] or ()),
        folder=os.getcwd() if folder is None else folder,
        max_restarts=options["max_restarts"],
        port=options.get("port", DEFAULT.port),
        python=options["python"] or sys.executable,
    )


def _variables(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``NAME=VALUE``.

    Raises:
        UsageError: a text of another form, or a name twice.
    """
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in variables:
            wrong = "is no NAME=VALUE" if not equals else f"sets {name} a second time"
            raise UsageError(f"--env {text!r} {wrong}", remedy="for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    return variables
