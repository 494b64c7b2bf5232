"""Loggers of a run: what each library stores or serves, resumed runs, failures that the training survives."""

from __future__ import annotations

import json
import logging
import time
from importlib import util
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from paceline.errors import UsageError
from paceline.integrations.loggers import (
    LoggerGroup,
    MlflowLogger,
    PrometheusLogger,
    TensorBoardLogger,
    WandbLogger,
    make_loggers,
)

CONFIG = {"run_id": "a1b2", "world": {"size": 2}, "lr": 0.1, "resumed": None}


def log_run(logger, steps, failed=False, **config):
    logger.start(CONFIG | config)
    for step in steps:
        logger.log({"loss": 6.0 / step}, step)
    logger.finish(failed)


def test_tensorboard_has_scalars_and_the_configuration(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_run(TensorBoardLogger(), [1, 2, 3], folder=str(tmp_path))
    log_run(TensorBoardLogger(), [2, 3, 4], folder=str(tmp_path))
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 6), (2, 3), (3, 2), (4, 1.5)]
    (text,) = {event.tensor_proto.string_val[0] for event in read.Tensors("config/text_summary")}
    assert json.loads(text.decode().strip("`json\n"))["world"] == {"size": 2}


def wandb_records(path):
    """Yield the records in a file of W&B: a log of LevelDB, whose blocks of 32 KiB begin after 7 bytes."""
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_runs(folder):
    """Return id, project, configuration, history and exit code of each offline run, oldest first."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        found = {"history": []}
        for record in wandb_records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    found["id"], found["project"] = record.run.run_id, record.run.project
                    found["config"] = {
                        each.key: json.loads(each.value_json) for each in record.run.config.update
                    }
                case "history":
                    items = record.history.item
                    row = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in items}
                    found["history"].append((row["step"], row["loss"]))
                case "exit":
                    found["exit"] = record.exit.exit_code
        yield found


def test_wandb_keeps_the_id_of_a_resumed_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_run(WandbLogger("speed"), [1, 2, 3], folder=str(tmp_path))
    time.sleep(1)  # its folders are named by the second
    log_run(WandbLogger("speed"), [2, 3], failed=True, folder=str(tmp_path))
    deadline = time.monotonic() + 60
    while not all("exit" in run for run in wandb_runs(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)  # W&B's own process writes the files, the last records a little later
    first, second = wandb_runs(tmp_path)
    assert first["id"] == second["id"] == "a1b2"
    assert first["project"] == "speed"
    assert first["config"]["world"] == {"size": 2}
    assert first["history"] == [(1, 6.0), (2, 3.0), (3, 2.0)]
    assert second["history"] == [(2, 3.0), (3, 2.0)]
    assert (first["exit"], second["exit"]) == (0, 1)


def test_mlflow_continues_the_run_with_the_same_id(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = tmp_path.as_uri()
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UsageError, match=r"(?s)MLflow can't use 'file:.*MLFLOW_ALLOW_FILE_STORE=true"):
        MlflowLogger(tracking_uri=uri).start(CONFIG)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_run(MlflowLogger("speed", tracking_uri=uri), [1, 2])
    log_run(MlflowLogger("speed", tracking_uri=uri), [2, 3], failed=True, lr=0.2)
    log_run(MlflowLogger("speed", tracking_uri=uri), [1], run_id="other")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("speed").experiment_id
    runs = {run.data.tags["paceline.run_id"]: run for run in client.search_runs([experiment])}
    assert sorted(runs) == ["a1b2", "other"]
    assert runs["a1b2"].data.params == {"run_id": "a1b2", "world.size": "2", "lr": "0.1"}
    assert (runs["a1b2"].info.status, runs["other"].info.status) == ("FAILED", "FINISHED")
    history = client.get_metric_history(runs["a1b2"].info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == [(1, 6.0), (2, 3.0), (2, 3.0), (3, 2.0)]


def test_prometheus_serves_the_latest_values_while_the_run_lasts():
    pytest.importorskip("prometheus_client")
    logger = PrometheusLogger(0)
    logger.start(CONFIG)
    logger.log({"loss": 2.0, "grad norm": 1.0}, 1)
    logger.log({"loss": 1.5}, 2)
    url = logger.url
    served = urlopen(url, timeout=10).read().decode().splitlines()
    assert {"paceline_loss 1.5", "paceline_step 2.0", "paceline_grad_norm 1.0"} <= set(served)
    assert 'paceline_run_info{run_id="a1b2"} 1.0' in served
    with pytest.raises(UsageError, match=r"can't serve metrics at 127\.0\.0\.1"):
        PrometheusLogger(int(url.split(":")[2].split("/")[0])).start(CONFIG)
    logger.finish()
    with pytest.raises(URLError):
        urlopen(url, timeout=10)
    log_run(PrometheusLogger(url.split("/")[2]), [1])  # the port is free again
    for address in ("localhost", "host:70000", -1):
        with pytest.raises(UsageError, match="no address for Prometheus"):
            PrometheusLogger(address)


class Unreliable:
    """Fails as often as it is given, and takes some time."""

    def __init__(self, failures, seconds=0.0):
        self.failures, self.seconds = failures, seconds
        self.calls = []

    def _work(self, what):
        time.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        self.calls.append(what)

    def start(self, config):
        self._work("start")

    def log(self, metrics, step):
        self._work((step, metrics))

    def finish(self, failed):
        self._work("failed" if failed else "finished")


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of LoggerGroup."""
    now = [0.0]
    monkeypatch.setattr("paceline.profiling.run_loggers.time.monotonic", lambda: now[0])
    return now


def test_a_logger_that_fails_is_reported_once_and_called_again_later(clock, caplog):
    logger, other = Unreliable(2), Unreliable(0)
    group = LoggerGroup([logger, other])
    group.start(CONFIG)
    for step, at in ((1, 10), (2, 61), (3, 62), (4, 125)):
        clock[0] = at
        group.log({"loss": 1.0, "note": "text", "none": None, "flag": True}, step)
    group.finish(failed=True)
    assert logger.calls == ["start", (4, {"loss": 1.0}), "failed"]
    assert other.calls == ["start", *((step, {"loss": 1.0}) for step in (1, 2, 3, 4)), "failed"]
    reported, missed = (record.getMessage() for record in caplog.records)
    assert reported.startswith("Unreliable failed; the training goes on")
    assert "no route to host" in caplog.text
    assert missed == "Unreliable has no metrics of 3 logged steps"


def test_a_failing_logger_takes_at_most_a_twentieth_of_the_time(clock, monkeypatch):
    logger = Unreliable(2)
    group = LoggerGroup([logger])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 30))
    for step, at in ((1, 100), (2, 700), (3, 731), (4, 1000), (5, 1400)):
        clock[0] = at  # it fails at 130, and again at 761 after the pause of 600 s
        group.log({}, step)
    assert logger.calls == ["start", (5, {})]


def test_a_slow_logger_is_reported_once(clock, monkeypatch, caplog):
    group = LoggerGroup([Unreliable(0)])
    group.start(CONFIG)
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 4))
    for step in range(1, 5):
        clock[0] += 10
        group.log({"loss": 1.0}, step)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Unreliable took 8.0 s of 28.0 s" in record.getMessage()


def test_what_is_no_logger_is_refused():
    for wrong, shown in (("wandb", "'wandb'"), (TensorBoardLogger, "class"), (3, "a int")):
        with pytest.raises(UsageError, match=f"{shown}.*is no logger"):
            LoggerGroup([wrong])


def test_loggers_by_name():
    names = [type(each).__name__ for each in make_loggers("tensorboard, wandb=speed,mlflow,prometheus=:0")]
    assert names == ["TensorBoardLogger", "WandbLogger", "MlflowLogger", "PrometheusLogger"]
    with pytest.raises(
        UsageError, match="unknown logger 'wand'; valid: tensorboard, wandb, mlflow, prometheus"
    ):
        make_loggers("tensorboard,wand")
    with pytest.raises(UsageError, match="'mlflow' is listed twice"):
        make_loggers("mlflow,mlflow=a")
    with pytest.raises(UsageError, match="'nowhere' is no address"):
        make_loggers("prometheus=nowhere")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "prometheus"])
def test_a_missing_library_is_named_with_its_remedy(monkeypatch, name):
    module = {"prometheus": "prometheus_client"}.get(name, name)
    monkeypatch.setattr(
        "paceline.integrations.loggers.logger_library.find_spec",
        lambda wanted: None if wanted == module else util.find_spec(wanted),
    )
    with pytest.raises(
        UsageError, match=rf"needs {module}, which is not installed\n.*pip install 'paceline\[log"
    ):
        make_loggers(name)
