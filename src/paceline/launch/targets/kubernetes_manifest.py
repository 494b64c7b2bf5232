"""Kubernetes: a PyTorchJob of the Kubeflow training operator, as a manifest (pure).

Every host is a pod that runs torchrun; the operator tells it by torchrun's variables (``PET_…``) where the pods meet,
and starts a pod again that fails. The folder is a volume that all pods share, so checkpoints outlive them.

Plain values as YAML: blocks for people; texts in quotes, so that none is taken for anything else (pure).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import ClusterJob

__all__ = ["PodOptions", "kubernetes_manifest", "pytorch_job", "yaml_text"]

_SHARED_MEMORY = {"name": "shared-memory", "mountPath": "/dev/shm"}


@dataclass(frozen=True)
class PodOptions:
    """What Kubernetes wants to be told besides the work.

    Attributes:
        image: of the container, with Python, Paceline and the program in it.
        claim: the persistent volume claim that is mounted at the work's folder; with several hosts one that can be
            written from all (ReadWriteMany).
        namespace: empty: that of whoever applies the manifest.
        shared_memory: bytes of /dev/shm in each pod, where ranks of a host exchange; they count as the pod's memory.

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


def pytorch_job(work: ClusterJob, pods: PodOptions) -> dict[str, Any]:
    """Return the PyTorchJob, as plain values.

    Raises:
        UsageError: a volume without a folder, or memory that the shared memory alone would fill.

    Example:
        >>> job = pytorch_job(ClusterJob(("train.py",), hosts=4), PodOptions("example/train:1"))
        >>> job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        4
    """
    if pods.claim and not work.folder:
        raise UsageError(
            f"volume {pods.claim!r}, but no folder to mount it at", remedy="name one, such as --folder /runs"
        )
    if work.memory is not None and work.memory <= pods.shared_memory:
        raise UsageError(
            f"{work.memory} bytes of memory, {pods.shared_memory} of them for /dev/shm",
            remedy="give a pod more memory, or less of it shared",
        )
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": work.max_restarts}
    if work.seconds is not None:
        policy["activeDeadlineSeconds"] = math.ceil(work.seconds)
    worker = {"replicas": work.hosts, "restartPolicy": "OnFailure", "template": {"spec": _pod(work, pods)}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": work.name} | ({"namespace": pods.namespace} if pods.namespace else {}),
        "spec": {
            "nprocPerNode": str(work.ranks_per_host),
            "runPolicy": policy,
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvId": work.name,
                "rdzvPort": work.port,
                "minReplicas": work.fewest_hosts,
                "maxReplicas": work.hosts,
                "maxRestarts": work.max_restarts,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def kubernetes_manifest(work: ClusterJob, pods: PodOptions) -> str:
    """Return the PyTorchJob as YAML, for ``kubectl apply -f``."""
    return yaml_text(pytorch_job(work, pods))


def _pod(work: ClusterJob, pods: PodOptions) -> dict[str, Any]:
    memory = {"medium": "Memory", "sizeLimit": str(pods.shared_memory)}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts = [dict(_SHARED_MEMORY)]
    if pods.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": "runs", "mountPath": work.folder})
    container = {
        "name": "pytorch",  # the operator looks for it by this name
        "image": pods.image,
        "command": [work.python, "-m", "torch.distributed.run", *map(_literal, work.program)],
        "env": [{"name": name, "value": _literal(value)} for name, value in work.variables().items()],
        "ports": [{"name": "pytorchjob-port", "containerPort": work.port}],
        "resources": _resources(work),
        "volumeMounts": mounts,
    }
    if work.folder:
        container["workingDir"] = work.folder
    return {"containers": [container], "volumes": volumes}


def _resources(work: ClusterJob) -> dict[str, dict[str, str]]:
    asked = {"cpu": str(work.cpus_per_host)}
    if work.memory is not None:
        asked["memory"] = str(work.memory)
    if not work.gpus_per_rank:
        return {"requests": asked}
    gpus = {"nvidia.com/gpu": str(work.gpus_per_host)}
    return {"requests": asked | gpus, "limits": gpus}


def _literal(text: str) -> str:
    """Return `text` so that Kubernetes leaves it as it is: it expands ``$(NAME)``, unless the $ is doubled."""
    return text.replace("$(", "$$(")


def yaml_text(value: dict[str, Any]) -> str:
    """Return `value`, made of dicts, lists, texts, numbers and booleans, as a YAML document.

    Example:
        >>> print(yaml_text({"a": {"b": 1, "c": ["no", "x: y"]}}), end="")
        a:
          b: 1
          c:
            - "no"
            - "x: y"
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a dict or list that holds something."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _entry(f"{name}:", inner)
    else:
        for inner in value:
            first, *rest = _lines(inner) if _is_block(inner) else [_scalar(inner)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(name: str, value: Any) -> Iterator[str]:
    if not _is_block(value):
        yield f"{name} {_scalar(value)}"
        return
    yield name
    yield from (f"  {line}" for line in _lines(value))


def _is_block(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _scalar(value: Any) -> str:
    """Return a value as JSON has it, which YAML 1.2 includes; what can't be seen is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
