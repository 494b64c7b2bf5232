"""PyTorchJob manifests against the published schema (kubeflow/README.md), and their YAML."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import ClusterJob
from paceline.launch.targets.kubernetes_manifest import (
    PodOptions,
    kubernetes_manifest,
    pytorch_job,
    yaml_text,
)

PUBLISHED = json.loads((Path(__file__).parent / "kubeflow" / "pytorchjob.v1.9.0.schema.json").read_text())
PODS = PodOptions("lab/train:1", claim="runs")


def strict(schema):
    """Return the schema with unknown fields refused, as the API server does, and its `int-or-string` known."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(inner) for name, inner in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module")
def check():
    validator = jsonschema.Draft202012Validator(strict(PUBLISHED))
    validator.check_schema(strict(PUBLISHED))
    return validator.validate


def test_a_job_is_one_of_the_published_schema(check):
    work = ClusterJob(
        ("train.py", "--lr", "1e-3"),
        name="gpt",
        hosts=4,
        min_hosts=2,
        ranks_per_host=8,
        cpus_per_rank=6,
        gpus_per_rank=1,
        memory=256 << 30,
        seconds=3600.5,
        env={"NCCL_DEBUG": "INFO"},
        folder="/runs",
        max_restarts=5,
    )
    job = pytorch_job(work, PodOptions("lab/train:1", claim="runs", namespace="us", shared_memory=32 << 30))
    check(job)
    spec = job["spec"]
    assert spec["nprocPerNode"] == "8"
    assert spec["runPolicy"] == {"cleanPodPolicy": "None", "backoffLimit": 5, "activeDeadlineSeconds": 3601}
    elastic = spec["elasticPolicy"]
    assert [elastic[name] for name in ("minReplicas", "maxReplicas", "maxRestarts")] == [2, 4, 5]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "OnFailure")
    pod = worker["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30, "torchrun kills its ranks 30 s after SIGTERM"
    [container] = pod["containers"]
    assert container["command"] == ["python3", "-m", "torch.distributed.run", "train.py", "--lr", "1e-3"]
    assert container["resources"] == {
        "requests": {"cpu": "48", "memory": str(256 << 30), "nvidia.com/gpu": "8"},
        "limits": {"nvidia.com/gpu": "8"},
    }
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/dev/shm", "/runs"]
    assert pod["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": str(32 << 30)}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    secret = {"name": "gpt-key", "key": "key", "optional": True}
    assert {"name": "PACELINE_JOB_KEY", "valueFrom": {"secretKeyRef": secret}} in container["env"]


def test_the_least_job_is_one_too(check):
    job = pytorch_job(ClusterJob(("-m", "my.module")), PodOptions("lab/train:1"))
    check(job)
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["-m", "my.module"]
    assert "workingDir" not in container


def test_the_check_refuses_the_same_as_the_server(check):
    job = pytorch_job(ClusterJob(("train.py",)), PodOptions("lab/train:1"))
    job["spec"]["elasticPolicy"]["maxRestart"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        check(job)
    del job["spec"]["elasticPolicy"]["maxRestart"]
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = "2"
    with pytest.raises(jsonschema.ValidationError, match="'2' is not of type 'integer'"):
        check(job)


@pytest.mark.parametrize(
    "word", ['a b"=0"', "no", "1", "x: y", "a\nb\n", " - #", "𝛼é\x85\u2028", "$(HOME)", "'", "{}"]
)
def test_arguments_are_quoted(word):
    work = ClusterJob(("train.py", word), env={"X": word}, folder="/runs")
    job = yaml.safe_load(kubernetes_manifest(work, PODS))
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    meant = word.replace("$(", "$$(")  # Kubernetes reads $$( as $(
    assert container["command"][-1] == meant
    assert {"name": "X", "value": meant} in container["env"]


VALUES = st.recursive(
    st.text() | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-zA-Z]{3,9}x", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.just("spec"), VALUES, min_size=1))
def test_yaml_round_trips(value):
    assert yaml.safe_load(yaml_text(value)) == value


def test_invalid_values_are_refused():
    with pytest.raises(UsageError, match="a pod needs an image"):
        PodOptions("")
    with pytest.raises(UsageError, match="shared_memory=5 bytes"):
        PodOptions("x", shared_memory=5)
    with pytest.raises(UsageError, match="no folder to mount it at"):
        kubernetes_manifest(ClusterJob(("train.py",)), PODS)
    with pytest.raises(UsageError, match="of them for /dev/shm"):
        kubernetes_manifest(ClusterJob(("train.py",), memory=1 << 30), PodOptions("x"))
