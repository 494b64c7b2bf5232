"""Predicted and measured steps of all variants, on hosts around a slow switch and on one host.

    python benchmarks/plan-step/plan_step.py run      (as root, on Linux: plays hosts with `paceline.testing.netlab`)
    python benchmarks/plan-step/plan_step.py table
    python benchmarks/plan-step/plan_step.py chart

One rank runs on each host. For every number of hosts and every rate the same ranks first measure the parts of a step
into ``profile-….json``, then whole steps, which go to ``steps-….json`` in the form of ``paceline bench step --json``.
``table`` predicts each from the profile and writes ``predicted.json`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.strategy_steps import GPT_11M, build_trainers, time_trainers
from paceline._core.files import write_json
from paceline._core.units import MIB
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Source
from paceline.cost_model.step_costs import StepCosts, pick_step_costs
from paceline.cost_model.step_time import StepTime, best_simulated_bucket, predict_steps
from paceline.tools.bench.bench_result_reader import (
    MeasuredStep,
    load_measured_steps,
    measured_by_strategy,
    pair_with_measured,
    step_prediction_error,
)
from paceline.tools.bench.step.step_strategies import NO_SYNC, StrategyVariant
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.bench.step_parts.parts_settings import PartsSettings
from paceline.tools.bench.step_parts.parts_worker import measure_parts
from paceline.tools.bench.step_parts.training_workload import reference_workload
from paceline.tools.bench.turn_statistics import round_times, step_breakdown
from paceline.tools.cli.bench.profile_file import load_or_new_profile, measurement_source
from paceline.tools.cli.plan.plan_step_command import draw_breakdown, draw_buckets
from paceline.tools.report.charts.chart_style import Chart
from paceline.tools.result_files import result_head
from paceline.world import init, shutdown

BATCH = 2
VARIANTS = [
    *map(StrategyVariant, (NO_SYNC, "naive", "flat", "overlap")),
    *(StrategyVariant("bucketed", size) for size in (1.0, 5.0, 25.0, 100.0)),
    *(StrategyVariant("sharded", size) for size in (1.0, 5.0, 25.0)),
    StrategyVariant("full-shard"),
    *(StrategyVariant("ddp", size) for size in (None, 1.0, 5.0)),
]
DRAWN = ("4x200Mbit", "2x1Gbit")

bench = Benchmark(__file__)


@bench.run
def run(
    hosts: Annotated[str, Option(help="Numbers of hosts, a rank on each.")] = "2,4",
    rates: Annotated[str, Option(help="Rates of every link, each direction.")] = "200Mbit/s,1Gbit/s",
    local: Annotated[str, Option(help="Backends of two ranks on one host; empty: none.")] = "paceline,gloo",
    backend: Annotated[str, Option(help="Of Paceline's exchanges between hosts.")] = "paceline",
    rounds: Annotated[int, Option(min=1, help="Turns of each variant.")] = 3,
    steps: Annotated[int, Option(min=1, help="Steps of a turn, of which the median counts.")] = 3,
    seconds: Annotated[float, Option(help="Time for an exchange of one size, at most about.")] = 3.0,
    out: Annotated[Path, Option(metavar="FOLDER", help="Where the files go.")] = bench.folder,
) -> None:
    """Measure parts and steps in every setting; files of other settings stay."""

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    settings: list[tuple[int, str | None, str, str]] = [
        (int(number), rate, backend, f"{number}x{rate.removesuffix('/s')}")
        for rate in names(rates)
        for number in names(hosts)
    ]
    settings += [(2, None, name, f"2-{name}") for name in names(local)]
    for setting in settings:
        measure(*setting, out, rounds, steps, seconds)


def measure(
    ranks: int, rate: str | None, backend: str, name: str, out: Path, rounds: int, steps: int, seconds: float
) -> None:
    """Measure one setting and write its two files.

    Args:
        ranks: one on each host, or, without a rate, all on one host.
        rate: of the links. backend: of Paceline's exchanges.
        name: of the setting, in the files' names.
        out: folder of the files.
        rounds: turns of each variant. steps: of a turn.
        seconds: for an exchange of one size.
    """
    network = "one host" if rate is None else f"lab, {rate}"
    parts = PartsSettings(
        ranks=ranks,
        batch_size=BATCH,
        context=GPT_11M.context,
        backend=backend,
        network=network,
        steps=12,
        seconds=1.0 if rate is None else seconds,
    )
    path, profile = bench.output(out / f"steps-{name}.json", name), out / f"profile-{name}.json"
    load_or_new_profile(profile)  # refuses another file
    source = measurement_source(result_head("plan-step")["command"])
    job = {"parts": asdict(parts), "profile": str(profile.absolute()), "source": vars(source)}
    job |= {"rounds": rounds, "steps": steps}
    turns = 1 + (1 + rounds) * len(VARIANTS)
    found = bench.start_ranks(job, ranks, rate=rate, turns=turns, title=name)
    described = {
        "hosts": 1 if rate is None else ranks,
        "ranks": ranks,
        "network": network,
        "backend": backend,
    }
    described |= {"rounds": rounds, "steps": steps, "threads": 1, "batch": BATCH, "model": vars(GPT_11M)}
    bench.write(path, "bench-step", described, rows=rows_of(found, ranks))


@bench.rank
def rank(job: dict[str, Any]) -> list[Any] | None:
    """Add the parts of a step to the profile, then return the seconds of whole steps, on the same links."""
    settings, path = PartsSettings(**job["parts"]), Path(job["profile"])
    world = init(settings.backend)
    workload = reference_workload(GPT_11M, BATCH, GPT_11M.context, world.device)
    earlier = Profile.load(path) if path.exists() else Profile()
    found = measure_parts(world, settings, workload, earlier, Source(**job["source"]))
    if world.rank == 0:
        earlier.merged(found).save(path)
    bench.tick()
    trainers = build_trainers(VARIANTS, GPT_11M, world)
    batch = random_batch(GPT_11M, BATCH, GPT_11M.context, world.rank, world.device)
    seconds = time_trainers(trainers, batch, world, rounds=job["rounds"], steps=job["steps"], tick=bench.tick)
    shutdown()
    return seconds if world.rank == 0 else None


def rows_of(seconds: Sequence[Any], ranks: int) -> list[dict[str, Any]]:
    """Return the rows of a result from the seconds of `time_trainers`."""
    rounds_of = {
        variant: [round_times(turn) for turn in turns]
        for variant, turns in zip(VARIANTS, seconds, strict=True)
    }
    return [
        {
            "model": GPT_11M.name,
            **variant.to_json(),
            "ranks": ranks,
            "step_ms": 1e3 * median(each.step for each in rounds),
            **{
                f"{name}_ms": 1e3 * value
                for name, value in vars(step_breakdown(rounds, rounds_of[StrategyVariant(NO_SYNC)])).items()
            },
            "rounds": [1e3 * each.step for each in rounds],
        }
        for variant, rounds in rounds_of.items()
    ]


# ---------------------------------------------------------------------- predicted and measured


@dataclass(frozen=True)
class Setting:
    """Predicted and measured steps of one setting.

    Attributes:
        title: such as ``"2 ranks, one host, gloo"``.
        costs: that the predictions are made from.
        bare: milliseconds of the measured step without synchronisation.
        pairs: predicted and measured.
    """

    title: str
    costs: StepCosts
    bare: float
    pairs: list[tuple[StepTime, MeasuredStep]]

    @property
    def counted(self) -> list[tuple[StepTime, MeasuredStep]]:
        """All but full-shard, of which the prediction is a lower bound."""
        return [(time, seen) for time, seen in self.pairs if time.strategy.name != "full-shard"]


def predict() -> dict[str, Setting]:
    """Return the predictions of all settings by name."""
    found = {}
    for name, result in bench.find("steps-*").items():
        name, settings = name.removeprefix("steps-"), result["settings"]
        ranks, backend, network = (settings[each] for each in ("ranks", "backend", "network"))
        model, profile = settings["model"]["name"], Profile.load(bench.folder / f"profile-{name}.json")
        costs = pick_step_costs(profile, model, ranks=ranks, backend=backend, network=network)
        seen = measured_by_strategy(load_measured_steps(bench.folder / f"steps-{name}.json"), model, ranks)
        bare = next(row["step_ms"] for row in result["rows"] if row["strategy"] == NO_SYNC)
        pairs = pair_with_measured(predict_steps(costs, seen), seen)
        found[name] = Setting(f"{ranks} ranks, {network}, {backend}", costs, bare, pairs)
    return found


def facts(setting: Setting) -> dict[str, Any]:
    """Return predicted and measured steps for JSON."""
    errors = step_prediction_error(setting.counted, setting.costs.ranks)
    rows = [
        {
            "way": time.strategy.label,
            "predicted": {
                name: value for name, value in vars(time).items() if name not in ("strategy", "beyond")
            },
            "predicted_seconds": time.seconds,
            "measured": {name: value for name, value in vars(seen).items() if name != "strategy"},
            "error": time.seconds / seen.seconds - 1,
        }
        for time, seen in setting.pairs
    ]
    off = {
        name: median(getattr(time, name) - getattr(seen, name) for time, seen in setting.pairs)
        for name in ("forward", "backward", "exposed", "optimizer")
    }
    return {"accuracy": None if errors is None else vars(errors), "median_seconds_off": off, "rows": rows}


def accuracy(title: str, pairs: Sequence[tuple[StepTime, MeasuredStep]], quiet: str = "") -> list[str]:
    """Return the row of errors of a setting; none if it has no steps."""
    errors = step_prediction_error(pairs, 0)
    if errors is None:
        return []
    inside = sum(time.low <= seen.seconds <= time.high for time, seen in pairs)
    cells = [f"{100 * value:.1f} %" for value in (errors.median, errors.p90, errors.maximum)]
    return [title, str(errors.points), *cells, f"{inside} of {errors.points}", quiet]


def steps_row(label: str, settings: Sequence[Setting]) -> list[str]:
    """Return the row of a strategy: for each setting measured, predicted, and how far that was off."""
    cells = []
    for setting in settings:
        cell = ""
        for time, seen in setting.pairs:
            if time.strategy.label == label:
                off = f"{100 * (time.seconds / seen.seconds - 1):+.0f} %".replace("-", "−")
                cell = f"{seen.seconds:.3g} · {time.seconds:.3g} · {off}"
        cells.append(cell)
    return [label, *cells]


def bucket_row(setting: Setting) -> list[str]:
    """Return the row of bucket sizes: simulated, by the closed form, and what the best measured one was."""
    closed_form = setting.costs.equal_buckets()
    tried = [(time, seen) for time, seen in setting.pairs if time.strategy.name == "bucketed"]
    fastest = min(tried, key=lambda pair: pair[1].seconds)
    chosen = min(tried, key=lambda pair: pair[0].seconds)
    return [
        setting.title,
        f"{best_simulated_bucket(setting.costs).cap / MIB:.3g}",
        "" if closed_form is None else f"{closed_form.best().nbytes / MIB:.3g}",
        *(f"{time.strategy.bucket_mib:g}" for time, _ in (fastest, chosen)),
        f"{100 * (chosen[1].seconds / fastest[1].seconds - 1):.1f} %",
    ]


@bench.tables
def tables() -> dict[str, str]:
    """Write predicted.json; return the tables of errors, of steps and of bucket sizes."""
    settings = list(predict().values())
    counted = [pair for setting in settings for pair in setting.counted]
    whole = step_prediction_error(counted, 0)
    record = {
        "accuracy": vars(whole) if whole else None,
        "settings": {each.title: facts(each) for each in settings},
    }
    write_json(bench.folder / "predicted.json", result_head("plan-step-accuracy") | record)
    errors = [
        accuracy(each.title, each.counted, f"{each.bare / 1e3 / each.costs.bare_seconds:.2f}")
        for each in settings
    ]
    errors.append(accuracy("**all**", counted))
    titles = ["", "points", "median error", "9 in 10", "largest", "within the range", "no synchronisation ÷"]
    labels = dict.fromkeys(time.strategy.label for each in settings for time, _ in each.pairs)
    sizes = [
        "",
        "simulated, MiB",
        "closed form, MiB",
        "fastest measured",
        "fastest predicted",
        "costs more by",
    ]
    return {
        "accuracy": table(titles, [row for row in errors if row]),
        "steps": table(
            ["", *(each.title for each in settings)], [steps_row(label, settings) for label in labels]
        ),
        "buckets": table(sizes, list(map(bucket_row, settings))),
    }


@bench.charts
def charts() -> dict[str, Chart]:
    """Draw the parts of steps, and their time by bucket size, as ``paceline plan step`` does."""
    found = predict()
    for name in DRAWN:
        times = [time for time, _ in found[name].pairs]
        seen = {time.strategy: measured for time, measured in found[name].pairs}
        for kind, draw in (("breakdown", draw_breakdown), ("buckets", draw_buckets)):
            path = bench.folder / f"step-{kind}-{name}.png"
            draw(path, found[name].costs, times, seen)
            print(path)
    return {}


if __name__ == "__main__":
    bench.main()
