"""``paceline plan batch``: how many devices, which micro-batch, and what a step is bound by."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.file_options import JsonOption
from paceline.cli.model_option import parameters_of
from paceline.cli.plan_batch_options import (
    ActivationsOption,
    BackendOption,
    BetweenOption,
    DeviceOption,
    DevicesOption,
    DtypeOption,
    FlopsOption,
    GradientsOption,
    GroupOption,
    LinkOption,
    MemoryOption,
    ModelOption,
    ParametersOption,
    ProfileOption,
    SamplesOption,
    SharedOption,
    StrategyOption,
    TokensOption,
    UsableOption,
)
from paceline.cli.training_options import NetworkOption
from paceline.cli.writable import check_writable
from paceline.durable import write_json
from paceline.errors import UsageError
from paceline.units import parse_bytes, parse_count, parse_rate, parse_share

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.plan.batch import BatchSplit
    from paceline.plan.batch_answer import Answer, Asked
    from paceline.plan.rates import Quantity

__all__ = ["batch"]


def batch(
    model: ModelOption = None,
    parameters: ParametersOption = None,
    activations: ActivationsOption = None,
    tokens: TokensOption = None,
    strategy: StrategyOption = "fsdp",
    shared: SharedOption = "0%",
    device: DeviceOption = None,
    memory: MemoryOption = None,
    usable: UsableOption = "80%",
    devices: DevicesOption = None,
    samples: SamplesOption = None,
    dtype: DtypeOption = None,
    flops: FlopsOption = None,
    link: LinkOption = None,
    group: GroupOption = 8,
    between: BetweenOption = None,
    gradients: GradientsOption = 2,
    profile: ProfileOption = None,
    backend: BackendOption = "gloo",
    network: NetworkOption = None,
    json_file: JsonOption = None,
) -> None:
    """Tell how many devices it takes, how a global batch is dealt, and what a step is then bound by.

    Examples: paceline plan batch --model medium --device rtx-4090 --link 10gbe --devices 8 --batch 512

    paceline plan batch --parameters 7B --activations 4MB --tokens 2048 --device h100 --devices 64 --batch 1024
    --between ndr

    paceline plan batch --model mini --memory 24GB --devices 4 --batch 64 --profile profile.json --dtype fp32
    """
    from paceline.cli.plan_xxl import show_derived
    from paceline.cli.wide_table import print_wide
    from paceline.plan.batch_answer import answer

    options = dict(locals())
    asked = _asked(options)
    found = answer(asked)
    if json_file is not None:
        check_writable(json_file, "--json")
    show_derived(found.figures)
    typer.echo("")
    if found.split is not None:
        print_wide(_splits(found.split))
    typer.echo("\n".join(found.sentences))
    if json_file is not None:
        write_json(json_file, _facts(asked, found))
        typer.echo(json_file)


def _asked(options: dict[str, Any]) -> Asked:
    """Return what the options ask for.

    Raises:
        UsageError: one makes no sense, or what is needed is missing.
    """
    from paceline.plan.batch_answer import Asked
    from paceline.plan.hardware import device

    count, token, context = _model(options)
    memory = options["memory"]
    if memory is None and options["device"] is None:
        raise UsageError(
            "no memory of a device is given", remedy="pass --device NAME or --memory, such as 24GB"
        )
    if options["gradients"] not in (1, 2, 4):
        raise UsageError(f"--gradients {options['gradients']}", remedy="pass 1, 2 or 4 bytes")
    if options["activations"] is not None:
        token = float(parse_bytes(options["activations"]))
    return Asked(
        count,
        options["strategy"],
        parse_bytes(memory) if memory is not None else device(options["device"]).memory_nbytes,
        parse_share(options["usable"]),
        token,
        parse_share(options["shared"]),
        options["tokens"] if options["tokens"] is not None else context,
        options["devices"],
        options["samples"],
        _flops(options),
        _wire(options),
        float(options["gradients"]),
        _link("--between", options["between"]) if options["between"] is not None else None,
        options["group"],
    )


def _model(options: dict[str, Any]) -> tuple[int, float | None, int]:
    """Return parameters, activations of a token (None: not known) and tokens of a sample."""
    from paceline.lm.sizes import SIZES
    from paceline.plan import xxl
    from paceline.plan.batch import token_nbytes

    name = options["model"]
    count = parameters_of(name, options["parameters"])
    if name is None:
        return count, None, 1
    if name == "xxl":
        return count, float(xxl.TOKEN_NBYTES), 1
    size = SIZES[name]
    return count, token_nbytes(size.d_model, size.layers, size.vocabulary), size.context


def _flops(options: dict[str, Any]) -> Quantity | None:
    from paceline.plan.profile import Profile
    from paceline.plan.rates import Quantity, matmul_of, matmul_rate

    if options["flops"] is not None:
        rate = float(parse_count(options["flops"]))
        if rate <= 0:
            raise UsageError(f"--flops {options['flops']}", remedy="pass FLOP/s above 0, such as 400T")
        return Quantity(rate, rate, rate, "given", measured=False)
    if options["profile"] is not None:
        return matmul_rate(
            Profile.load(options["profile"]), options["dtype"] or "bf16", options["device"] or "cpu"
        )
    return matmul_of(options["device"], options["dtype"]) if options["device"] is not None else None


def _wire(options: dict[str, Any]) -> Quantity | None:
    from paceline.plan.hardware import device
    from paceline.plan.profile import Profile
    from paceline.plan.rates import wire_of, wire_rate

    if options["link"] is not None:
        return _link("--link", options["link"])
    if options["profile"] is not None:
        loaded = Profile.load(options["profile"])
        return wire_rate(loaded, options["backend"], options["network"], max(2, options["devices"] or 2))
    return wire_of(device(options["device"]).link) if options["device"] is not None else None


def _link(option: str, text: str) -> Quantity:
    """Return a rate that is given, or a known link's."""
    from paceline.plan.rates import Quantity, wire_of

    if "/s" not in text:
        return wire_of(text)
    rate = parse_rate(text)
    if rate <= 0:
        raise UsageError(f"{option} {text}", remedy="pass a rate above 0, such as 12GB/s")
    return Quantity(rate, rate, rate, "given", measured=False)


def _splits(split: BatchSplit) -> Table:
    """Return the global batch that was asked for, and those near it that divide."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("global batch", "micro-batch", "accumulation", "ranks", "short of it"):
        table.add_column(name, justify="right", no_wrap=True)
    unit = split.ranks * split.accumulation
    alike = [each for each in (split.below, split.above) if each and split.missing]
    rows = [(split.asked, split.micro, split.accumulation, split.ranks, split.missing)]
    rows += [(each, each // unit, split.accumulation, split.ranks, 0) for each in alike]
    if split.exact is not None:
        rows.append((split.asked, split.exact.micro, split.exact.accumulation, split.exact.ranks, 0))
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _facts(asked: Asked, found: Answer) -> dict[str, Any]:
    """Return all of it for JSON."""
    figures = [figure.facts() for figure in found.figures]
    for figure in figures:
        figure["value"] = None if figure["value"] == float("inf") else figure["value"]
    return {
        "kind": "plan-batch",
        "schema": 1,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "asked": asdict(asked),
        "figures": figures,
        "split": None if found.split is None else asdict(found.split),
        "sentences": list(found.sentences),
    }
