"""`paceline bench parts` with real ranks: every strategy is predicted, with the engine's own buckets and calls."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from paceline.cost_model.bucket_assignment import plan_buckets
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Source
from paceline.cost_model.step_costs import pick_step_costs
from paceline.cost_model.step_strategy import StepStrategy, standard_strategies
from paceline.cost_model.step_time import predict_step
from paceline.errors import UsageError
from paceline.tools.bench.step_parts.exchange_times import EXCHANGE_OPS, fit_exchange_cost, sizes_up_to
from paceline.tools.models.gpt_sizes import gpt_size

SIZE = gpt_size("tiny")
SOURCE = Source("test", "2026-01-02T03:04:05+00:00")
WAYS = standard_strategies([0.25, 1.0, math.inf], compressions=["bf16"])


def measure(rank, size, backend):
    """Return the entries of a short measurement, as JSON."""
    import paceline
    from paceline.tools.bench.step_parts.parts_settings import PartsSettings
    from paceline.tools.bench.step_parts.parts_worker import measure_parts
    from paceline.tools.bench.step_parts.training_workload import reference_workload

    settings = PartsSettings(
        ranks=size, size="tiny", batch_size=1, context=8, backend=backend, steps=3, rounds=1, seconds=0.02
    )
    world = paceline.init()
    workload = reference_workload(SIZE, 1, 8, world.device)
    return measure_parts(world, settings, workload, Profile(), SOURCE).to_json()


def engines(rank, size, ways):
    """Return, by way, the engine's buckets as names of parameters, and the calls of a step."""
    from paceline.tools.bench.step.step_strategies import StrategyVariant
    from paceline.tools.bench.step.strategy_trainers import build_trainer, random_batch, run_step

    batch = random_batch(SIZE, 1, 8, seed=rank, device="cpu")
    found = []
    for strategy, bucket_mib in ways:
        trainer = build_trainer(StrategyVariant(strategy, bucket_mib), SIZE, "cpu", seed=0)
        run_step(trainer, batch)
        run_step(trainer, batch)
        plan = [names for _, names in trainer.model.bucket_plan() if names]
        found.append((plan, trainer.model.timings.calls))
    return found


@pytest.fixture(scope="module", params=["gloo", "paceline"])
def measured(request, pool):
    return Profile.from_json(
        pool(2, request.param).run(measure, request.param, timeout=200)[0]
    ), request.param


@pytest.mark.thorough
def test_the_profile_has_all_parts(measured):
    profile, backend = measured
    (step,) = profile.models
    assert step.nbytes == 4 * SIZE.parameters()
    assert {each.name for each in step.parameters} == {f"{name}" for name in names_of_tiny()}
    assert min(step.forward, step.backward, step.buffered, step.optimizer) > 0
    assert step.parameters[-1].seconds <= step.buffered
    assert {each.unit for each in step.parameters} == {0, 1, 2, 3, 4}  # the root and four blocks
    ours = {
        (each.backend, each.fit.op, each.queued) for each in profile.exchanges if each.caller == "paceline"
    }
    assert ours == {(backend, op, queued) for op in EXCHANGE_OPS for queued in (False, True)}
    assert {each.backend for each in profile.exchanges if each.caller == "torch"} == {"gloo"}
    assert len(profile.contentions) == len(EXCHANGE_OPS) + 1
    assert all(each.launch_seconds > 0 for each in profile.contentions)


def names_of_tiny():
    from paceline.tools.models.gpt import GPT

    return [name for name, param in GPT(SIZE).named_parameters() if param.requires_grad]


def test_every_strategy_is_predicted(measured):
    profile, backend = measured
    costs = pick_step_costs(profile, "tiny", ranks=2, backend=backend)
    for way in WAYS:
        time = predict_step(costs, way)
        assert 0 < time.low <= time.seconds <= time.high < math.inf
        assert time.beyond is None


def test_predicted_are_the_engines_own_buckets_and_calls(measured, pool):
    profile, backend = measured
    costs = pick_step_costs(profile, "tiny", backend=backend)
    ways = [
        StepStrategy("naive"),
        StepStrategy("flat"),
        StepStrategy("overlap"),
        StepStrategy("bucketed", 0.25),
        StepStrategy("bucketed", 1),
        StepStrategy("sharded", 0.25),
    ]
    found = pool(2, backend).run(engines, [(way.name, way.bucket_mib) for way in ways], timeout=120)[0]
    names, sizes, kinds = zip(*((p.name, p.nbytes, p.kind) for p in costs.step.parameters), strict=True)
    for way, (plan, calls) in zip(ways, found, strict=True):
        grouped = plan_buckets(range(len(names)), sizes, kinds, way.caps(sum(sizes)))
        assert [[names[index] for index in members] for members in grouped] == plan
        assert predict_step(costs, way).calls == calls


@pytest.mark.thorough
def test_the_command_measures_and_the_plan_predicts(tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "300"}
    profile = tmp_path / "profile.json"

    def run(*arguments):
        command = [sys.executable, "-m", "paceline", *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    short = ["--steps", 2, "--rounds", 1, "--seconds", 0.02]
    own = tmp_path / "net.py"
    own.write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))\n"
        "    batch = torch.ones(8, 64)\n"
        "    return net, lambda model: model(batch).square().mean(), 8\n"
    )
    output = run(
        "bench", "parts", "--model", f"{own}:make", "--backend", "gloo", *short, "--profile", profile
    )
    assert "net:make, 8 samples a rank" in output
    assert Profile.load(profile).models[0].source.command.startswith("paceline bench parts --model")
    output = run(
        "plan", "step", "--profile", profile, "--json", tmp_path / "plan.json", "--out", tmp_path / "out"
    )
    assert "The shortest step" in output
    assert json.loads((tmp_path / "plan.json").read_text())["model"] == "net:make"
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".svg"}


# ---------------------------------------------------------------- without ranks


def test_sizes_end_with_the_model():
    assert sizes_up_to(50 << 20)[-2:] == [16 << 20, 50 << 20]
    assert sizes_up_to(17 << 20)[-2:] == [4 << 20, 17 << 20]
    assert sizes_up_to(10) == [1024, 4096, 16384, 65536, 262144, 1 << 20]


def test_other_numbers_of_ranks_join_the_fit():
    def points(ranks):
        return [MeasuredPoint(1024 * 4**at, ranks, 1e-4 * ranks + 1e-9 * 4**at) for at in range(6)]

    def fit(network, points, earlier):
        key = ("paceline", "all-reduce", False)
        options = {"backend": "gloo", "network": network, "source": SOURCE}
        return fit_exchange_cost(key, points, earlier=earlier, **options)

    two = fit("lab", points(2), [])
    both = fit("lab", points(4), [two])
    assert both.fit.ranks == (2, 4)
    assert len(both.points) == 12
    again = fit("lab", points(4), [both])
    assert len(again.points) == 12
    elsewhere = fit("wifi", points(4), [two])
    assert elsewhere.fit.ranks == (4,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net.py", "names no Python file"),
        ("nothing.py:make", "names no Python file"),
        ("{}:other", "has no function 'other'"),
    ],
)
def test_a_missing_workload_is_refused(tmp_path, text, message):
    from paceline.tools.bench.step_parts.training_workload import user_workload

    path = tmp_path / "net.py"
    path.write_text("def make():\n    return 3\n")
    with pytest.raises(UsageError, match=message):
        user_workload(text.format(path))
    with pytest.raises(UsageError, match="returned int"):
        user_workload(f"{path}:make")


def test_a_workload_that_returns_something_else_is_refused_with_its_types(tmp_path):
    from paceline.tools.bench.step_parts.training_workload import user_workload

    path = tmp_path / "net.py"
    path.write_text("import torch\ndef make():\n    return torch.nn.Linear(1, 1), torch.sum, 'eight'\n")
    with pytest.raises(UsageError, match=r"returned \(Linear, builtin_function_or_method, str\)"):
        user_workload(f"{path}:make")


def test_a_workload_may_have_dataclasses_of_its_own(tmp_path):
    from paceline.tools.bench.step_parts.training_workload import user_workload

    path = tmp_path / "net.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import torch\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    width: int = 3\n"
        "def make():\n"
        "    return torch.nn.Linear(Sizes().width, 1), lambda model: model(torch.ones(2, 3)).sum(), 2\n"
    )
    workload = user_workload(f"{path}:make")
    assert (workload.name, workload.batch) == ("net:make", 2)
    assert workload.loss_of(workload.build()).shape == ()
