"""`paceline train --log`: the same metrics in every logger, one id over a resume, invalid names."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch

SMALL = ["--context", 8, "--micro-batch-size", 2, "--eval-every", 0, "--threads", 1, "--nproc-per-node", 1]


@pytest.fixture
def train(command, tmp_path, monkeypatch):
    """Return a function that trains a few steps in this process."""
    text = tmp_path / "text.py"
    text.write_bytes((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:20_000])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "ml").as_uri())
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    threads = torch.get_num_threads()

    def call(*arguments):
        code, _, err = command("train", *arguments, "--data", text, "--out", tmp_path / "run", *SMALL)
        assert code == 0, err

    yield call
    torch.set_num_threads(threads)


def test_metrics_reach_the_loggers(tmp_path, train):
    pytest.importorskip("tensorboard")
    mlflow = pytest.importorskip("mlflow")
    train("--steps", 3, "--log", "tensorboard,mlflow=speed")
    lines = {each["step"]: each for each in map(json.loads, (tmp_path / "run/steps.jsonl").open())}
    assert sorted(lines) == [1, 3]
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("speed").experiment_id])
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert run.data.params["run_id"] == facts["run_id"]
    assert run.data.params["settings.micro_batch_size"] == "2"
    assert run.data.params["world.size"] == "1"
    assert run.info.status == "FINISHED"
    assert {name for name in lines[3] if lines[3][name] is not None} - {"step"} == set(run.data.metrics)
    for name, value in run.data.metrics.items():
        assert value == pytest.approx(lines[3][name]), name
    assert 0 <= lines[3]["waiting_seconds"] <= lines[3]["exposed_seconds"] <= lines[3]["step_seconds"]
    assert list((tmp_path / "run/tensorboard").iterdir())


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_id_and_a_new_one_has_another(tmp_path, train):
    pytest.importorskip("wandb")

    def ids():
        return {path.name.rpartition("-")[2] for path in (tmp_path / "run/wandb").glob("offline-run-*")}

    train("--steps", 2, "--log", "wandb")
    (first,) = ids()
    train("--steps", 3, "--log", "wandb", "--resume")
    assert ids() == {first} == {json.loads((tmp_path / "run/run.json").read_text())["run_id"]}
    train("--steps", 1, "--log", "wandb", "--overwrite")
    assert first not in ids()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("tensorboad", "unknown logger 'tensorboad'; valid: tensorboard, wandb, mlflow, prometheus"),
        ("prometheus=here", "'here' is no address for Prometheus"),
    ],
)
def test_invalid_names_are_refused_before_anything_starts(command, tmp_path, names, message):
    code, _, err = command("train", "--out", tmp_path / "run", "--log", names)
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())
