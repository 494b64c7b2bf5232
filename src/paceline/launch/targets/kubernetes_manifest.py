"""Kubernetes: manifest of a PyTorchJob for the Kubeflow training operator (pure).

Every host is a pod that runs torchrun. The operator passes the rendezvous in torchrun's variables (``PET_…``), and
restarts failed pods. The job's key is in a Secret. The folder is a volume that all pods share, so checkpoints outlive
them. A pod that is to go gets SIGTERM, which torchrun passes on to its ranks. They have 30 s to save and leave, then it
kills them; so the pod has longer until it is killed itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from paceline._core.job_key import KEY_VARIABLE
from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import ClusterJob

__all__ = ["PodOptions", "kubernetes_manifest", "pytorch_job", "secret_name", "yaml_text"]

_GRACE_SECONDS = 60  # from SIGTERM to SIGKILL; torchrun gives its ranks half of it


@dataclass(frozen=True)
class PodOptions:
    """What Kubernetes needs besides the job.

    Attributes:
        image: container image with Python, Paceline and the program.
        claim: persistent volume claim mounted at the job's folder; with several hosts one that all can write to
            (ReadWriteMany).
        namespace: of the job; empty: the default of the user who applies the manifest.
        shared_memory: bytes of /dev/shm per pod, which ranks of a host use to communicate; part of the pod's memory.

    Raises:
        UsageError: no image, or no shared memory.
    """

    image: str
    claim: str = ""
    namespace: str = ""
    shared_memory: int = 8 << 30

    def __post_init__(self) -> None:
        if not self.image:
            raise UsageError("a pod needs an image", remedy="name one with Paceline in it (--image)")
        if self.shared_memory < 1 << 20:
            raise UsageError(
                f"shared_memory={self.shared_memory} bytes", remedy="give 1MiB or more, such as 8GiB"
            )


def kubernetes_manifest(job: ClusterJob, pods: PodOptions) -> str:
    """Return the PyTorchJob as YAML, for ``kubectl apply -f``; errors as for `pytorch_job`."""
    namespace = f" --namespace {pods.namespace}" if pods.namespace else ""
    secret = f"kubectl create secret generic {secret_name(job)}{namespace} --from-file=key=/dev/stdin"
    comment = f"# Once, a key by which the job's processes know each other: openssl rand -hex 32 | {secret}\n"
    return comment + yaml_text(pytorch_job(job, pods))


def pytorch_job(job: ClusterJob, pods: PodOptions) -> dict[str, Any]:
    """Return the PyTorchJob as plain values.

    Raises:
        UsageError: a volume without a folder, or memory that the shared memory alone would fill.

    Example:
        >>> manifest = pytorch_job(ClusterJob(("train.py",), hosts=4), PodOptions("example/train:1"))
        >>> manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        4
    """
    if pods.claim and not job.folder:
        raise UsageError(
            f"volume {pods.claim!r}, but no folder to mount it at", remedy="name one, such as --workdir /runs"
        )
    if job.memory is not None and job.memory <= pods.shared_memory:
        raise UsageError(
            f"{job.memory} bytes of memory, {pods.shared_memory} of them for /dev/shm",
            remedy="give a pod more memory, or less of it shared",
        )
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": job.max_restarts}
    if job.seconds is not None:
        policy["activeDeadlineSeconds"] = math.ceil(job.seconds)
    worker = {"replicas": job.hosts, "restartPolicy": "OnFailure", "template": {"spec": _pod(job, pods)}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name} | ({"namespace": pods.namespace} if pods.namespace else {}),
        "spec": {
            "nprocPerNode": str(job.ranks_per_host),
            "runPolicy": policy,
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvId": job.name,
                "rdzvPort": job.port,
                "minReplicas": job.fewest_hosts,
                "maxReplicas": job.hosts,
                "maxRestarts": job.max_restarts,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def _pod(job: ClusterJob, pods: PodOptions) -> dict[str, Any]:
    memory = {"medium": "Memory", "sizeLimit": str(pods.shared_memory)}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if pods.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": "runs", "mountPath": job.folder})
    container = {
        "name": "pytorch",  # the operator requires this name
        "image": pods.image,
        "command": [job.python, "-m", "torch.distributed.run", *map(_escape, job.program)],
        "env": [{"name": name, "value": _escape(value)} for name, value in job.variables().items()]
        + [_key(job)],
        "ports": [{"name": "pytorchjob-port", "containerPort": job.port}],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    if job.folder:
        container["workingDir"] = job.folder
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": _GRACE_SECONDS}


def _key(job: ClusterJob) -> dict[str, Any]:
    """Return the variable with the job's key, from a Secret; without that the pods start too."""
    reference = {"name": secret_name(job), "key": "key", "optional": True}
    return {"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}}


def secret_name(job: ClusterJob) -> str:
    """Return the name of the Secret with the job's key."""
    return f"{job.name}-key"


def _resources(job: ClusterJob) -> dict[str, dict[str, str]]:
    requests = {"cpu": str(job.cpus_per_host)}
    if job.memory is not None:
        requests["memory"] = str(job.memory)
    if not job.gpus_per_rank:
        return {"requests": requests}
    gpus = {"nvidia.com/gpu": str(job.gpus_per_host)}
    return {"requests": requests | gpus, "limits": gpus}


def _escape(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes would expand."""
    return text.replace("$(", "$$(")


class _QuotingDumper(yaml.SafeDumper):
    """Double-quotes every string but keys, so that none is read as another type; writes no aliases."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            key.style = None
        return node

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:
        return True


_QuotingDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def yaml_text(value: dict[str, Any]) -> str:
    """Return plain values as a YAML document.

    Example:
        >>> print(yaml_text({"a": {"b": 1, "c": ["no", "x: y"]}}), end="")
        a:
          b: 1
          c:
            - "no"
            - "x: y"
    """
    return yaml.dump(value, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True, width=math.inf)
