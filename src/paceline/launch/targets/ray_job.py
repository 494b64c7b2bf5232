"""Ray: a driver program that runs a job on a Ray cluster, and the code that it calls.

Ray reserves resources for all hosts at once (a placement group) and runs a small actor on each; the actor runs
``paceline run``, which starts the ranks. The driver gives all of them a job key, through Ray. `paceline run` restarts
failed ranks; Ray restarts lost actors and machines, where it has room, and retries their task: ``paceline run`` starts
again there, and the program resumes from its newest checkpoint. SIGTERM or SIGUSR1 to the driver is passed on to every
``paceline run``, so that the ranks save and leave.
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
from importlib.util import find_spec
from typing import Any

from paceline._core.format import plural
from paceline._core.job_key import JobKey
from paceline._core.json_codec import decode, encode
from paceline._core.processes.child_process import (
    ChildProcess,
    sigterm_raises,
    stop_processes,
    with_pdeathsig,
)
from paceline._core.processes.warning_signals import WarningSignals
from paceline.errors import UsageError, WorldError
from paceline.launch.agent.rendezvous_address import RendezvousAddress, wait_for_server
from paceline.launch.process.rank_process import exit_status
from paceline.launch.targets.cluster_job import ClusterJob, run_command
from paceline.world.live_file import LEFT_EXIT_CODE

__all__ = ["job_from_json", "ray_driver", "run_on_ray"]

_RESERVE_SECONDS = 300.0
_SERVE_SECONDS = 60.0
_REACH_SECONDS = 10.0
_POLL_SECONDS = 0.5
_STORE_NBYTES = 80 << 20  # nothing is sent through Ray's object store; this is close to its minimum


def ray_driver(job: ClusterJob) -> str:
    """Return the text of a Python program that runs `job` on the Ray cluster where it is started.

    It joins the cluster that it runs in (``ray job submit`` too), or the one that RAY_ADDRESS names; else it makes one
    of this machine.

    Example:
        >>> "run_on_ray" in ray_driver(ClusterJob(("train.py",)))
        True
    """
    return (
        f'"""Run {job.name} on a Ray cluster: python THIS_FILE, or ray job submit -- python THIS_FILE."""\n\n'
        "import sys\n\n"
        "from paceline.launch.targets.ray_job import job_from_json, run_on_ray\n\n"
        f"JOB = {json.dumps(encode(job))!r}\n\n"
        'if __name__ == "__main__":\n'
        "    sys.exit(run_on_ray(job_from_json(JOB)))\n"
    )


def job_from_json(text: str) -> ClusterJob:
    """Return the job that a driver contains."""
    return decode(json.loads(text), ClusterJob, "job")


def run_on_ray(job: ClusterJob, address: str | None = None, *, wait: float = _RESERVE_SECONDS) -> int:
    """Run `job` on a Ray cluster, and return the first exit code of a host that is not 0, else 0.

    Args:
        job: to run. Its program, folder and interpreter must exist on all hosts.
        address: of the cluster; None: the one in RAY_ADDRESS or from ``ray start`` on this machine, else a temporary
            cluster of this machine.
        wait: seconds to wait for resources.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
        WorldError: the cluster has no resources in time, or a host was lost more often than allowed.
    """
    if find_spec("ray") is None:
        raise UsageError("Ray is not installed", remedy="pip install 'paceline[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    key = JobKey.from_environment(os.environ) or JobKey.generate()
    with (
        sigterm_raises(),
        _cluster(ray, address),
        _placement_group(ray, job, wait) as group,
        _rendezvous(job, ray.util.get_node_ip_address(), key) as rendezvous,
    ):
        actors = [_actor(ray, job, group, number) for number in range(job.hosts)]
        command = run_command(job, rendezvous)
        env = {name: value for name, value in job.variables().items() if name in job.env}
        env |= key.environment()
        running = [actor.run.remote(command, env, job.folder) for actor in actors]
        return _wait(ray, running, actors)


@contextlib.contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    """Join the cluster at `address` or on this machine, or make one of this machine."""
    options: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # for Ray's files; short, since it holds sockets
    given = address or os.environ.get("RAY_ADDRESS")
    try:
        _check_reachable(given or "")
        if given:
            ray.init(given, **options)
        else:
            ray.init(include_dashboard=False, object_store_memory=_STORE_NBYTES, _temp_dir=folder, **options)
    except (OSError, RuntimeError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(
            f"no Ray cluster at {given or 'this machine'}: {str(error).splitlines()[0]}",
            remedy="start one with `ray start --head`, or leave the address out to use this machine alone",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Raise OSError unless something listens at an address of the form HOST:PORT, since Ray would wait long."""
    if address.startswith("ray://"):
        raise ValueError(
            "a client connection can't reserve resources and wait; start the driver on the cluster itself"
        )
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()


@contextlib.contextmanager
def _placement_group(ray: Any, job: ClusterJob, wait: float) -> Iterator[Any]:
    """Reserve the resources of all hosts, each on its own machine, all or none."""
    from ray.util.placement_group import placement_group, remove_placement_group

    need: dict[str, float] = {"CPU": job.cpus_per_host}
    if job.gpus_per_rank:
        need["GPU"] = job.gpus_per_host
    if job.memory is not None:
        need["memory"] = job.memory
    group = placement_group([need] * job.hosts, strategy="STRICT_SPREAD" if job.hosts > 1 else "PACK")
    try:
        if not group.wait(wait):
            machines = len([one for one in ray.nodes() if one["Alive"]])
            raise WorldError(
                f"no room on the Ray cluster within {wait:g} s for {job.hosts} hosts with {need} each; "
                f"it has {plural(machines, 'machine')}, with {ray.cluster_resources()} in all",
                remedy="request less, wait until others have ended, or add machines",
            )
        yield group
    finally:
        remove_placement_group(group)


@contextlib.contextmanager
def _rendezvous(job: ClusterJob, node: str, key: JobKey) -> Iterator[str]:
    """Serve the rendezvous of several hosts from this process, so that it outlives each of them."""
    if job.hosts == 1:
        yield ""
        return
    with socket.socket() as probe:
        probe.bind((node, 0))
        address = RendezvousAddress(node, probe.getsockname()[1])
    command = with_pdeathsig([sys.executable, "-m", "paceline", "run", "--serve", str(address)])
    env = os.environ | key.environment()
    server = ChildProcess(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, process_group=0))
    try:
        # Else a host on this machine would serve it.
        wait_for_server(address, _SERVE_SECONDS, lambda line: None)
        yield str(address)
    finally:
        stop_processes([server])


def _actor(ray: Any, job: ClusterJob, group: Any, number: int) -> Any:
    """Return the actor on a host, which Ray restarts if it is lost."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(_HostActor)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            num_cpus=job.cpus_per_host,
            num_gpus=job.gpus_per_host,
            max_restarts=job.max_restarts,
            max_task_retries=job.max_restarts,
            max_concurrency=2,  # a signal while the program runs
        )
        .remote()
    )


class _HostActor:
    """Ray actor that runs a program, which ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the program, if it has been started."""
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, command: list[str], env: dict[str, str], folder: str) -> int:
        """Run `command`, and return its exit status."""
        variables = os.environ | {"PYTHONUNBUFFERED": "1"}
        variables.pop("OMP_NUM_THREADS", None)  # Ray sets it
        self._process = subprocess.Popen(
            with_pdeathsig(command),
            env=variables | env,
            cwd=folder or None,
            stdin=subprocess.DEVNULL,
        )
        return exit_status(self._process.wait())


def _wait(ray: Any, running: list[Any], actors: list[Any]) -> int:
    """Return the first exit code that is not 0, or 0 once all have ended well; after a warning, 75 if ranks left so."""
    taken: list[int] = []
    signals = WarningSignals(taken.append)  # Ray would replace an exception by its own
    signals.install(replace=True)
    passed_on, codes = False, []
    try:
        while running and (taken or not any(codes)):
            ended, running = ray.wait(running, timeout=_POLL_SECONDS)
            codes += [_exit_code(ray, one) for one in ended]
            if taken and not passed_on:
                passed_on = True
                ray.get([actor.signal.remote(taken[0]) for actor in actors])
    finally:
        signals.restore()
    if taken and LEFT_EXIT_CODE in codes:
        return LEFT_EXIT_CODE
    return next((code for code in codes if code), 0)


def _exit_code(ray: Any, ended: Any) -> int:
    try:
        return int(ray.get(ended))
    except ray.exceptions.RayError as error:
        raise WorldError(
            f"a host of the Ray cluster was lost for good: {str(error).splitlines()[0]}",
            remedy="raise --max-restarts, or find out what ends its machine",
        ) from error
