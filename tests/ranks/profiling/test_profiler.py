"""A recorded training: its folder shows each rank on one clock, and recording changes no bit."""

from __future__ import annotations

import contextlib
import json
import math
import time

import pytest
import torch

import model_zoo
import paceline
from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.profiling.clock_sync import compare_clocks
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.step_breakdown import step_parts
from paceline.tools.report.run.straggler_detection import compare_arrivals
from paceline.tools.report.run.trace_reader import read_timeline

PLANS = [
    "naive",
    "bucketed",
    "sharded",
    "full-shard",
    paceline.Sync(2**-11),
    paceline.Sync(2**-11, compression="int8"),
]


def train(rank, size, folder, sync, steps, record=True, micros=1):
    """Train a small model, and return its parameters."""
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.05)

    def step(number, log):
        for micro in range(micros):
            made = torch.Generator().manual_seed(1000 * number + 10 * micro + rank)
            x = torch.randn(4, model_zoo.WIDTH, generator=made, dtype=torch.float64)
            loss = model_zoo.loss_of(model, "Plain", x, x[:, :1])
            if micro < micros - 1:
                with model.accumulate():
                    model.backward(loss, samples=4)
            else:
                model.backward(loss, samples=4)
        log(loss=loss, samples=4 + rank, lr=0.05)
        optim.step()
        optim.zero_grad()

    if record:
        with paceline.Profiler(folder, model, every=2) as kept:
            for number in range(steps):
                step(number, kept.log)
    else:
        for number in range(steps):
            step(number, lambda **_: None)
    assert step_state.recorder is None
    return [param.clone() for param in model.whole_parameters()]


def timelines(folder):
    return {rank: read_timeline(spans) for rank, spans in read_run(folder).spans_of_rank.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("sync", PLANS, ids=str)
def test_recording_changes_no_bit_and_every_step_adds_up(pool, tmp_path, sync, backend):
    plain = pool(2, backend).run(train, tmp_path, sync, 6, False)
    recorded = pool(2, backend).run(train, tmp_path, sync, 6)
    for before, after in zip(plain, recorded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    traces = timelines(tmp_path)
    assert sorted(traces) == [0, 1]
    for each in traces.values():
        assert [line.step for line in each.steps] == [0, 1, 2, 3, 4, 5]
        assert [line.quiet for line in each.steps] == [False, False, True, False, True, False]
        assert each.memory["resident"] > 0
        for line in each.steps:
            assert sum(step_parts(line).values()) == pytest.approx(line.seconds)
            assert line.samples == 4
            assert line.calls
            for call in line.calls:
                assert call.launched <= call.posted <= call.end <= line.seconds + 1e-6
        if sync != "full-shard":
            assert all(each.buckets_at(line.step) for line in each.warm)
            ready = [call.ready for call in each.steps[-1].calls if call.ready is not None]
            assert ready


def test_the_end_of_a_call_is_known_where_the_backend_reports_it(pool, tmp_path):
    for backend in ("gloo", "paceline"):
        pool(2, backend).run(train, tmp_path / backend, paceline.Sync(2**-11), 4)
        calls = [call for line in timelines(tmp_path / backend)[0].steps for call in line.calls]
        assert any(call.done is not None for call in calls), backend


def test_numbers_are_means_over_ranks_by_samples(pool, tmp_path):
    pool(2).run(train, tmp_path, "bucketed", 6)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4, 6]
    for line in lines:
        assert line["samples"] == 9
        assert line["lr"] == pytest.approx(0.05)
        assert line["samples_per_second"] > 0
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["world"] == {"size": 2, "nodes": 1, "backend": "gloo"}
    assert facts["synchronised"] == "bucketed, 25 MiB"
    assert facts["parameters"] == sum(param.numel() for param in model_zoo.build("Plain").parameters())


def logs_nan_without_samples(rank, size, folder):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=paceline.Sync(compression="int8"))
    with paceline.Profiler(folder, model, every=1) as record:
        x = torch.ones(4, model_zoo.WIDTH, dtype=torch.float64)
        model.backward(model_zoo.loss_of(model, "Plain", x, x[:, :1]), samples=4 * rank)
        record.log(loss=math.nan if rank == 0 else 2.0, samples=4 * rank)


def test_values_logged_without_samples_do_not_count(pool, tmp_path):
    pool(2).run(logs_nan_without_samples, tmp_path)
    assert read_run(tmp_path).steps[0].loss == 2.0
    assert json.loads((tmp_path / "run.json").read_text())["synchronised"] == "bucketed, 25 MiB, int8"


class Kept:
    """Keeps what a logger receives, and fails in step 4."""

    def __init__(self):
        self.config, self.lines, self.failed = None, [], None

    def start(self, config):
        self.config = config

    def log(self, metrics, step):
        if step == 4:
            raise OSError("unreachable")
        self.lines.append((step, metrics))

    def finish(self, failed):
        self.failed = failed


class Unusable(Kept):
    def start(self, config):
        raise UsageError("address in use")


def logs_to_loggers(rank, size, folder):
    kept, other = Kept(), Kept()
    model = paceline.DataParallel(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    with paceline.Profiler(folder, model, every=2, loggers=[kept, other]) as record:
        for _ in range(6):
            time.sleep(0.02 * rank)
            x = torch.ones(4, model_zoo.WIDTH, dtype=torch.float64)
            model.backward(model_zoo.loss_of(model, "Plain", x, x[:, :1]), samples=1 + rank)
            record.log(loss=float(rank), samples=1 + rank)
            optim.step()
            optim.zero_grad()
    with pytest.raises(UsageError, match="address in use"):
        paceline.Profiler(folder / "other", model, loggers=[Unusable()]).__enter__()
    with pytest.raises(UsageError, match="'wandb' is no logger"):
        paceline.Profiler(folder, model, loggers=["wandb"])
    return kept.config, kept.lines, kept.failed


def test_loggers_receive_global_metrics_on_rank_0(pool, tmp_path):
    (config, lines, failed), others = pool(2).run(logs_to_loggers, tmp_path)
    assert others == (None, [], None)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert config == facts | {"folder": str(tmp_path)}
    assert failed is False
    assert [step for step, _ in lines] == [1, 2]  # after the failure it is left alone for a minute
    written = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 2, 4, 6]
    for _, metrics in lines:
        assert metrics["loss"] == pytest.approx(2 / 3)
        assert metrics["samples"] == 3
        assert metrics["restarts"] == 0
    last = written[-1]
    assert last["step_seconds"] > 0.02
    assert last["exposed_seconds"] >= last["waiting_seconds"] > 0.01
    assert last["samples_per_second"] == pytest.approx(3 / last["step_seconds"])


def continues(rank, size, folder):
    train(rank, size, folder, "bucketed", 5)
    train(rank, size, folder, "bucketed", 3)


def test_a_folder_is_continued_and_repeated_steps_count_once(pool, tmp_path):
    pool(2).run(continues, tmp_path)
    traces = timelines(tmp_path)
    assert [line.step for line in traces[0].steps] == [0, 1, 2]
    names = [span.name for span in read_run(tmp_path).spans_of_rank[0]]
    assert names.count("session") == 2
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def trains_two(rank, size, folder):
    models = [paceline.DataParallel(model_zoo.build("Plain"), sync=paceline.Sync(2**-11)) for _ in range(2)]
    optims = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    x = torch.ones(4, model_zoo.WIDTH, dtype=torch.float64)
    with paceline.Profiler(folder, models[1]) as record:
        for _ in range(4):
            for model, optim in zip(models, optims, strict=True):
                loss = model_zoo.loss_of(model, "Plain", x, x[:, :1])
                model.backward(loss, samples=4 if model is models[1] else 3)
                optim.step()
                optim.zero_grad()
            record.log(loss=loss, samples=4)
        with pytest.raises(UsageError, match="a second timeline in one process"):
            paceline.Profiler(folder, models[0])


def test_of_two_models_the_steps_are_those_of_the_one_that_was_named(pool, tmp_path):
    pool(2).run(trains_two, tmp_path)
    for trace in timelines(tmp_path).values():
        assert [line.step for line in trace.steps] == [0, 1, 2, 3]
        assert len({len(line.calls) for line in trace.steps[1:]}) == 1
        for line in trace.steps:
            assert [phase.name for phase in line.phases].count("exchange") == 2
            assert sum(step_parts(line).values()) == pytest.approx(line.seconds)
            assert line.samples == 4
    assert [span.name for span in read_run(tmp_path).spans_of_rank[0]].count("plan") <= 2


def drags(rank, size, folder):
    model = paceline.DataParallel(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    with contextlib.chdir(folder.parent):
        profiler = paceline.Profiler(folder.name, model)
    with profiler:  # writes there from another directory too
        for _ in range(8):
            x = torch.ones(4, model_zoo.WIDTH, dtype=torch.float64)
            if rank == 1:
                time.sleep(0.03)
            loss = model_zoo.loss_of(model, "Plain", x, x[:, :1])
            loss.backward()
            optim.step()
            optim.zero_grad()


def test_a_slow_rank_is_found_by_when_it_arrives(pool, tmp_path):
    pool(2).run(drags, tmp_path)
    found = compare_arrivals(timelines(tmp_path)).straggler
    assert found.rank == 1
    assert found.lateness > 0.015
    assert max(found.excess, key=found.excess.__getitem__) == "other"


def refuses(rank, size, folder):
    model = paceline.DataParallel(model_zoo.build("Plain"))
    with pytest.raises(UsageError, match="rank 1"):
        paceline.Profiler(folder / "file" if rank == 1 else folder / "fine", model)
    with pytest.raises(UsageError, match="Profiler of a Plain"):
        paceline.Profiler(folder, model.module)
    for every in (0, "10min"):
        with pytest.raises(UsageError, match=f"every={every!r}"):
            paceline.Profiler(folder, model, every=every)
    with (
        paceline.Profiler(folder, model) as record,
        pytest.raises(UsageError, match="samples_per_second"),
    ):
        record.log(samples_per_second=3)
    with (
        paceline.Profiler(folder, model) as record,
        pytest.raises(UsageError, match="None with samples=4"),
    ):
        record.log(loss=None, samples=4)
    with paceline.Profiler(folder, model) as record:
        for values, message in (
            ({"loss": torch.ones(2)}, r"loss is a tensor of shape \[2\]"),
            ({"loss": "x"}, "a str"),
        ):
            with pytest.raises(UsageError, match=message):
                record.log(**values)
        with pytest.raises(UsageError, match="samples=-1"):
            record.log(samples=-1)


def test_invalid_values_are_refused_on_all_ranks(pool, tmp_path):
    (tmp_path / "file").write_text("")
    pool(2).run(refuses, tmp_path)


def compares(rank, size, skews, same):
    group = torch.distributed.group.WORLD
    key = f"clock {same[rank]}"
    offset = compare_clocks(group, torch.device("cpu"), key=key, clock=lambda: time.time() + skews[rank])
    return offset.seconds, offset.error


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_clocks_of_hosts_are_compared_and_ranks_of_one_share_it(pool, backend):
    found = pool(3, backend).run(compares, (0.0, 7.5, 7.5), (0, 1, 1))
    assert found[0] == (0.0, 0.0)
    assert found[1] == found[2]
    seconds, error = found[1]
    assert abs(seconds - 7.5) <= error
    assert pool(3, backend).run(compares, (0.0, 1.0, 1.0), (0, 0, 0)) == [(0.0, 0.0)] * 3
