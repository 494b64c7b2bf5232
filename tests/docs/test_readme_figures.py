"""Every number in README.md: computed anew from the committed result that its paragraph links to."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from statistics import median

import pytest
from manual import ROOT

from bench_harness.turns import Ratio, ratio_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = re.sub(r"^(```|~~~).*?^\1$", "", README, flags=re.M | re.S)  # code blocks show no figures

NOT_MEASURED = (
    "alpha (0.1)",
    "two cores",
    "Python ≥ 3.11",
    "Python 3.11",
    "PyTorch ≥ 2.9",
    "1 Gbit/s or less",
    "FSDP2",
    "1/N",
    "int8",
    "float32",
    "fp16",
    "1 … N ranks",
    "Apache-2.0",
    "95 % interval",
    "one box with 4 GPUs",
    "1 Gbit/s Ethernet",
    "bf16",
)
"""Numbers in README.md that are names, requirements or settings."""


def result(path: str) -> dict:
    return json.loads((ROOT / "benchmarks" / f"{path}.json").read_text(encoding="utf-8"))


def interval(ratio: Ratio, digits: int, percent: str = "") -> str:
    return f"{ratio.median:.{digits}f}× ({percent}{ratio.low:.{digits}f} to {ratio.high:.{digits}f})"


def step_over_gloo(model: str) -> str:
    """The best row of Paceline, by its median step, over the best of torch DDP."""
    rows = [row for row in result("step/step")["rows"] if row["model"] == model]
    ours = [
        row for row in rows if row["strategy"] in ("flat", "overlap", "bucketed", "sharded", "full-shard")
    ]
    best, ddp = (
        min(each, key=lambda row: row["step_ms"]) for each in (ours, [r for r in rows if r["best_ddp"]])
    )
    ratio = ratio_of(best["rounds"], ddp["rounds"])
    return interval(ratio, 2, "95 % interval " if model == "tiny" else "")


def all_reduce_over_gloo() -> str:
    (row,) = [row for row in result("all_reduce/2-ranks")["rows"] if row["nbytes"] == 100_000_000]
    ratio = ratio_of(row["rounds"]["gloo at its best"], row["rounds"]["paceline"])
    return f"100 MB is {interval(ratio, 1)} faster than gloo's"


def torch_tests() -> str:
    sys.path.append(str(ROOT / "tests" / "peers"))
    try:
        suite = import_module("suite")
    finally:
        sys.path.pop()
    passing = [name for name in suite.ddp_names() if name not in suite.skipped()]
    return f"{len(passing) - len(suite.DATA['ddp']['differs'])} of the {len(passing)} tests"


def step_predictions() -> str:
    found = result("plan-step/predicted")["accuracy"]
    error = f"{100 * found['median']:.1f} %"
    return f"over {found['points']} measured points the median error of a step's time is {error}"


def loader_shares() -> str:
    settings = result("loader/exact")["settings"]
    shares = " ".join(f"{share:.2f}".removeprefix("0") for share in settings["shares"])
    return f"shares {shares} of {settings['samples']} samples"


def slow_step() -> str:
    settings = result("slow-networks/step-4x200Mbit")["settings"]
    mega = settings["parameters"] / 1e6
    return f"With {mega:.0f} M parameters on {number(settings['hosts'])} hosts at 200 Mbit/s"


def slow_step_over(prefix: str) -> Ratio:
    rows = result("slow-networks/step-4x200Mbit")["rows"]
    peers = [row["seconds"] for name, row in rows.items() if re.fullmatch(rf"{prefix}, \d+ MiB", name)]
    return ratio_of(min(peers, key=median), rows["Paceline, int8"]["seconds"])


def times_to_loss(hosts: int, *, fp16: bool) -> str:
    """The range over seeds of DDP's time to its last loss, over Paceline's to the same loss."""
    found = result(f"slow-networks/loss-{hosts}x100Mbit")
    step = median(found["ddp"]["seconds"])
    if fp16:
        step /= ratio_of(found["ddp"]["seconds"], found["ddp_fp16"]["seconds"]).median
    faster = []
    for ddp, ours in zip(found["ddp"]["curves"], found["ours"]["curves"], strict=True):
        reached = next(point for point in ours if point["loss"] <= ddp[-1]["loss"])
        faster.append(ddp[-1]["step"] * step / reached["seconds"])
    assert len(faster) == 3
    return f"{min(faster):.1f} to {max(faster):.1f}×"


def loss_steps() -> str:
    found = result("slow-networks/loss-4x100Mbit")
    return f"The loss of {found['ddp']['curves'][0][-1]['step']} steps of DDP"


def kills() -> str:
    found = result("kills/kills")
    assert all(run["same weights"] and run["every sample once"] for run in found["runs"])
    return f"in {len(found['runs'])} runs with {found['kills']} SIGKILLs no weight and no sample differed"


def warnings() -> str:
    found = result("save-on-warning/save-on-warning")
    assert found["all the same"]
    return f"after {found['saved the very step']} of {found['signals']} SIGTERMs, that very step"


def same_bits() -> str:
    cases = result("virtual-ranks/same-bits")["cases"]
    assert len({each["sha256"] for each in cases}) == 1
    ranks = [each["ranks"] for each in cases]
    assert max(each["hosts"] for each in cases) == 2
    return f"on {min(ranks)} to {max(ranks)} ranks of one host or two, with dropout: {len(cases)} trainings ended"


def random_failures() -> str:
    runs = result("live-recovery/random-failures")["runs"]
    assert all(run["ended"] and not run["restarts"] for run in runs)
    assert all(run["same bits"] and run["every sample once"] and run["same processes"] for run in runs)
    return (
        f"{len(runs)} runs with {sum(len(run['events']) for run in runs)} random failures ended with the bits"
    )


def number(count: int) -> str:
    return ("no", "one", "two", "three", "four")[count]


@dataclass(frozen=True)
class Claim:
    """A figure of README.md: `text` computes it, `source` is linked in its paragraph."""

    source: str
    text: Callable[[], str]


CLAIMS = {
    "step, tiny": Claim("benchmarks/README.md", lambda: step_over_gloo("tiny")),
    "step, mini": Claim("benchmarks/README.md", lambda: step_over_gloo("mini")),
    "all-reduce": Claim("benchmarks/all_reduce/README.md", all_reduce_over_gloo),
    "torch's tests": Claim("tests/peers/README.md", torch_tests),
    "predicted steps": Claim("benchmarks/plan-step/README.md", step_predictions),
    "shares": Claim("benchmarks/loader/README.md", loader_shares),
    "slow step": Claim("benchmarks/slow-networks/README.md", slow_step),
    "int8, DDP": Claim(
        "benchmarks/slow-networks/README.md",
        lambda: f"{interval(slow_step_over('torch DDP'), 1)} faster than DDP's",
    ),
    "int8, fp16 hook": Claim(
        "benchmarks/slow-networks/README.md",
        lambda: f"{interval(slow_step_over('torch DDP, fp16 hook'), 1)} faster than with",
    ),
    "loss, steps": Claim("benchmarks/slow-networks/README.md", loss_steps),
    "loss, DDP": Claim(
        "benchmarks/slow-networks/README.md", lambda: f"{times_to_loss(4, fp16=False)} sooner than by DDP"
    ),
    "loss, fp16 hook": Claim(
        "benchmarks/slow-networks/README.md", lambda: f"{times_to_loss(4, fp16=True)} sooner than with its"
    ),
    "loss, two hosts": Claim(
        "benchmarks/slow-networks/README.md",
        lambda: f"{times_to_loss(2, fp16=False)} and {times_to_loss(2, fp16=True)} sooner",
    ),
    "kills": Claim("benchmarks/kills/README.md", kills),
    "warnings": Claim("benchmarks/save-on-warning/README.md", warnings),
    "same bits": Claim("benchmarks/virtual-ranks/README.md", same_bits),
    "random failures": Claim("benchmarks/live-recovery/README.md", random_failures),
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_figure_is_that_of_the_committed_result_and_its_paragraph_links_there(claim):
    paragraphs = [" ".join(part.split()) for part in TEXT.split("\n\n")]
    (paragraph,) = [part for part in paragraphs if claim.text() in part]
    assert f"]({claim.source}" in paragraph


def test_no_other_number_is_in_the_text():
    rest = re.sub(r"!\[[^\]]*\]|\]\([^)]*\)|`[^`]*`", "", TEXT)
    rest = " ".join(rest.split())
    for known in sorted([*(claim.text() for claim in CLAIMS.values()), *NOT_MEASURED], key=len, reverse=True):
        rest = rest.replace(known, "")
    assert re.findall(r".{0,30}\d+.{0,30}", rest) == []


def test_it_is_read_in_a_minute():
    assert len(README.splitlines()) <= 150
