"""Ray: a driver program that runs a training on a Ray cluster (pure; the one that talks to Ray is `on_ray`).

Ray reserves room for all hosts at once (a placement group) and keeps a small actor on each; the actor runs
``paceline run``, and that the ranks. A rank that fails is started again with its fellows by `paceline run`, an actor or
a machine that is lost by Ray.

Running a training on a Ray cluster: the one file that talks to Ray.

Phases of :func:`run_on_ray`: join or make a cluster; reserve room for all hosts; start an actor on each; wait until all
have run the program to its end. An actor that is lost is made anew by Ray, where there is room, and its task tried
again: ``paceline run`` starts there anew, and the program goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from paceline._core.child_process import ChildProcess, end, sigterm_raises, with_pdeathsig
from paceline.errors import UsageError, WorldError
from paceline.launch.agent.job_outcome import exit_status
from paceline.launch.agent.rendezvous_address import RendezvousAddress, wait_for_server
from paceline.launch.targets.cluster_job import ClusterJob, run_command

__all__ = ["job_from_json", "ray_driver", "run_on_ray"]


def ray_driver(work: ClusterJob) -> str:
    """Return the text of a Python program that runs `work` on the Ray cluster where it is started.

    It joins the cluster that it runs in (``ray job submit`` too), or the one that RAY_ADDRESS names; else it makes one
    of this machine.

    Example:
        >>> "run_on_ray" in ray_driver(ClusterJob(("train.py",)))
        True
    """
    text = json.dumps(asdict(work))
    return (
        f'"""Run {work.name} on a Ray cluster: python THIS_FILE, or ray job submit -- python THIS_FILE."""\n\n'
        "import sys\n\n"
        "from paceline.launch.targets.ray_job import run_on_ray\n"
        "from paceline.launch.targets.ray_job import work_from_json\n\n"
        f"WORK = {text!r}\n\n"
        'if __name__ == "__main__":\n'
        "    sys.exit(run_on_ray(work_from_json(WORK)))\n"
    )


def job_from_json(text: str) -> ClusterJob:
    """Return the work that a driver carries."""
    told = json.loads(text)
    for name in ("program", "host_names"):
        told[name] = tuple(told[name])
    return ClusterJob(**told)


_RESERVE_SECONDS = 300.0


_SERVE_SECONDS = 60.0


_REACH_SECONDS = 10.0


_STORE_NBYTES = 80 << 20  # nothing is exchanged through Ray's object store; this is about its least size


_INSTALL = "pip install 'paceline[ray]'"


def run_on_ray(work: ClusterJob, address: str | None = None, *, wait: float = _RESERVE_SECONDS) -> int:
    """Run `work` on a Ray cluster, and return the first exit code of a host that is not 0, else 0.

    Args:
        work: what is to be run. Its program, folder and interpreter are to be there on all hosts.
        address: of the cluster; None: that which RAY_ADDRESS or ``ray start`` on this machine tells, else a cluster
            of this machine, for as long as the run.
        wait: seconds to wait for room on the cluster.

    Raises:
        UsageError: Ray is not installed, or no cluster is at the address.
        WorldError: the cluster has no room for the hosts in time; or a host was lost more often than allowed.
    """
    if find_spec("ray") is None:
        raise UsageError("Ray is not installed", remedy=_INSTALL)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    with sigterm_raises(), _cluster(ray, address), _room(ray, work, wait) as group:
        node = ray.util.get_node_ip_address()
        with _rendezvous(work, node) as rendezvous:
            hosts = [_host(ray, work, group, number) for number in range(work.hosts)]
            command = run_command(work, rendezvous)
            env = {name: value for name, value in work.variables().items() if name in work.env}
            running = [host.run.remote(command, env, work.folder) for host in hosts]
            return _await(ray, running)


@contextlib.contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    """Be part of a cluster: the one at `address`, the one that is here, or one of this machine."""
    quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
    folder = tempfile.mkdtemp(
        prefix="ray-", dir="/tmp"
    )  # Ray leaves its files there; short: sockets are in it
    told = address or os.environ.get("RAY_ADDRESS")
    try:
        _check_reachable(told or "")
        if told:
            ray.init(told, **quiet)
        else:
            ray.init(include_dashboard=False, object_store_memory=_STORE_NBYTES, _temp_dir=folder, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(
            f"no Ray cluster at {told or 'this machine'}: {str(error).splitlines()[0]}",
            remedy="start one with `ray start --head`, or leave the address out to use this machine alone",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Raise OSError unless something listens at HOST:PORT, where `address` is of that form; Ray would wait for long."""
    if address.startswith("ray://"):
        raise ValueError(
            "a client's connection can't reserve room and wait; start the driver on the cluster itself"
        )
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()


@contextlib.contextmanager
def _room(ray: Any, work: ClusterJob, wait: float) -> Iterator[Any]:
    """Reserve what the hosts need, each on a machine of its own, all or none."""
    from ray.util.placement_group import placement_group, remove_placement_group

    need: dict[str, float] = {"CPU": work.cpus_per_host}
    if work.gpus_per_rank:
        need["GPU"] = work.gpus_per_host
    if work.memory is not None:
        need["memory"] = work.memory
    group = placement_group([need] * work.hosts, strategy="STRICT_SPREAD" if work.hosts > 1 else "PACK")
    try:
        if not group.wait(wait):
            machines = len([one for one in ray.nodes() if one["Alive"]])
            raise WorldError(
                f"no room on the Ray cluster within {wait:g} s for {work.hosts} hosts with {need} each; "
                f"it has {machines} machine{'s' * (machines != 1)}, with {ray.cluster_resources()} in all",
                remedy="ask for less, wait until others have ended, or add machines",
            )
        yield group
    finally:
        remove_placement_group(group)


@contextlib.contextmanager
def _rendezvous(work: ClusterJob, node: str) -> Iterator[str]:
    """Serve the place where several hosts meet, here, so that it outlives any of them."""
    if work.hosts == 1:
        yield ""
        return
    with socket.socket() as probe:
        probe.bind((node, 0))
        address = RendezvousAddress(node, probe.getsockname()[1])
    command = with_pdeathsig([sys.executable, "-m", "paceline", "run", "--serve", str(address)])
    server = ChildProcess(subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0))
    try:
        wait_for_server(address, _SERVE_SECONDS, lambda told: None)  # else a host on this machine would serve it
        yield str(address)
    finally:
        end([server])


def _host(ray: Any, work: ClusterJob, group: Any, number: int) -> Any:
    """Return the actor on the host of that number, to be made anew by Ray where it is lost."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources: dict[str, Any] = {"num_cpus": work.cpus_per_host, "num_gpus": work.gpus_per_host}
    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    again = {"max_restarts": work.max_restarts, "max_task_retries": work.max_restarts}
    return ray.remote(_Host).options(scheduling_strategy=placed, **resources, **again).remote()


class _Host:
    """What runs on a host as Ray's actor: a program that ends with it."""

    def run(self, command: list[str], env: dict[str, str], folder: str) -> int:
        """Run `command`, and return its exit code."""
        threads = {"PYTHONUNBUFFERED": "1"}
        variables = {
            name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
        }  # Ray sets it
        process = subprocess.Popen(
            with_pdeathsig(command),
            env=variables | threads | env,
            cwd=folder or None,
            stdin=subprocess.DEVNULL,
        )
        return exit_status(process.wait())


def _await(ray: Any, running: list[Any]) -> int:
    """Return the first exit code that is not 0 once one is, or 0 once all have ended well."""
    waiting = list(running)
    while waiting:
        ended, waiting = ray.wait(waiting)
        try:
            code = ray.get(ended[0])
        except ray.exceptions.RayError as error:
            raise WorldError(
                f"a host of the Ray cluster was lost for good: {str(error).splitlines()[0]}",
                remedy="raise --max-restarts, or find out what ends its machine",
            ) from error
        if code:
            return int(code)
    return 0
