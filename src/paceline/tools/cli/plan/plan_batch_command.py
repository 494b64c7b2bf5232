"""``paceline plan batch``: how many devices, which micro-batch, and what a step is bound by.

Options of ``paceline plan batch``.

Shows the XXL model's figures, each with its derivation; ``paceline plan memory --model xxl`` calls it.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.files import write_json
from paceline._core.units import parse_bytes, parse_count, parse_rate, parse_share
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption, NetworkOption, parameters_of
from paceline.tools.plan.xxl_model import DerivedFigure
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.batch_answer import BatchPlan, BatchRequest
    from paceline.tools.plan.batch_split import BatchSplit
    from paceline.tools.plan.communication_roofline import RateEstimate

__all__ = [
    "ActivationsOption",
    "BackendOption",
    "BetweenOption",
    "DeviceOption",
    "DevicesOption",
    "DtypeOption",
    "FlopsOption",
    "GradientsOption",
    "GroupOption",
    "LinkOption",
    "MemoryOption",
    "ModelOption",
    "ParametersOption",
    "ProfileOption",
    "SamplesOption",
    "SharedOption",
    "StrategyOption",
    "TokensOption",
    "UsableOption",
    "batch",
    "show",
    "show_derived",
]


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
    pass  # moved
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.batch_answer import plan_batch

    options = dict(locals())
    asked = _asked(options)
    found = plan_batch(asked)
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


def _asked(options: dict[str, Any]) -> BatchRequest:
    """Return what the options ask for.

    Raises:
        UsageError: one makes no sense, or what is needed is missing.
    """
    from paceline.cost_model.hardware_catalog import find_device
    from paceline.tools.plan.batch_answer import BatchRequest

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
    return BatchRequest(
        count,
        options["strategy"],
        parse_bytes(memory) if memory is not None else find_device(options["device"]).memory_nbytes,
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
    from paceline.tools.models.gpt_sizes import SIZES
    from paceline.tools.plan import xxl_model
    from paceline.tools.plan.batch_split import transformer_token_nbytes

    name = options["model"]
    count = parameters_of(name, options["parameters"])
    if name is None:
        return count, None, 1
    if name == "xxl":
        return count, float(xxl_model.TOKEN_NBYTES), 1
    size = SIZES[name]
    return count, transformer_token_nbytes(size.d_model, size.layers, size.vocabulary), size.context


def _flops(options: dict[str, Any]) -> RateEstimate | None:
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.communication_roofline import (
        RateEstimate,
        catalog_matmul_rate,
        measured_matmul_rate,
    )

    if options["flops"] is not None:
        rate = float(parse_count(options["flops"]))
        if rate <= 0:
            raise UsageError(f"--flops {options['flops']}", remedy="pass FLOP/s above 0, such as 400T")
        return RateEstimate(rate, rate, rate, "given", measured=False)
    if options["profile"] is not None:
        return measured_matmul_rate(
            Profile.load(options["profile"]), options["dtype"] or "bf16", options["device"] or "cpu"
        )
    return catalog_matmul_rate(options["device"], options["dtype"]) if options["device"] is not None else None


def _wire(options: dict[str, Any]) -> RateEstimate | None:
    from paceline.cost_model.hardware_catalog import find_device
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.communication_roofline import catalog_link_rate, measured_link_rate

    if options["link"] is not None:
        return _link("--link", options["link"])
    if options["profile"] is not None:
        loaded = Profile.load(options["profile"])
        return measured_link_rate(
            loaded, options["backend"], options["network"], max(2, options["devices"] or 2)
        )
    return catalog_link_rate(find_device(options["device"]).link) if options["device"] is not None else None


def _link(option: str, text: str) -> RateEstimate:
    """Return a rate that is given, or a known link's."""
    from paceline.tools.plan.communication_roofline import RateEstimate, catalog_link_rate

    if "/s" not in text:
        return catalog_link_rate(text)
    rate = parse_rate(text)
    if rate <= 0:
        raise UsageError(f"{option} {text}", remedy="pass a rate above 0, such as 12GB/s")
    return RateEstimate(rate, rate, rate, "given", measured=False)


def _splits(split: BatchSplit) -> Table:
    """Return the global batch that was asked for, and those near it that divide."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("global batch", "micro-batch", "accumulation", "ranks", "short of it"):
        table.add_column(name, justify="right", no_wrap=True)
    unit = split.ranks * split.accumulation
    alike = [each for each in (split.below, split.above) if each and split.missing]
    rows = [(split.samples, split.micro, split.accumulation, split.ranks, split.missing)]
    rows += [(each, each // unit, split.accumulation, split.ranks, 0) for each in alike]
    if split.exact is not None:
        rows.append((split.samples, split.exact.micro, split.exact.accumulation, split.exact.ranks, 0))
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _facts(asked: BatchRequest, found: BatchPlan) -> dict[str, Any]:
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


ModelOption = Annotated[
    str | None, typer.Option(help="By name: tiny … 2.7b, or xxl; brings its sizes along.")
]


ParametersOption = Annotated[str | None, typer.Option(help="Of a model that is not known by name: 7B, 350M.")]


ActivationsOption = Annotated[
    str | None,
    typer.Option(help="That a token saves for backward: 4MB. Else estimated with --model, or left out."),
]


TokensOption = Annotated[int | None, typer.Option(help="Of a sample; else the model's context, or 1.")]


StrategyOption = Annotated[
    str, typer.Option(help="Who keeps what: ddp, zero1, zero2, fsdp (everything shared).")
]


SharedOption = Annotated[str, typer.Option(help="Part of a micro-batch's activations that devices share.")]


DeviceOption = Annotated[
    str | None, typer.Option(help="By name: gtx-1660 … b200; brings memory and FLOP/s along.")
]


MemoryOption = Annotated[str | None, typer.Option(help="Of a device: 80GB.")]


UsableOption = Annotated[str, typer.Option(help="Part of it to plan with.")]


DevicesOption = Annotated[int | None, typer.Option(help="How many there are; else as many as it takes.")]


SamplesOption = Annotated[
    int | None, typer.Option("--batch", metavar="SAMPLES", help="Global batch, in samples.")
]


DtypeOption = Annotated[
    str | None,
    typer.Option(help="Of matrix products: bf16, fp16, tf32, fp32; else the first that the device has."),
]


FlopsOption = Annotated[
    str | None, typer.Option(help="C, a device's FLOP/s: 400T; before profile and table.")
]


LinkOption = Annotated[
    str | None,
    typer.Option(help="W, one way: a name (nvlink4, pcie4, ndr, 10gbe) or a rate (12GB/s)."),
]


GroupOption = Annotated[int, typer.Option(help="Devices of a node, which --link connects; with --between.")]


BetweenOption = Annotated[
    str | None, typer.Option(help="Link of a device between nodes: a name or a rate; else all are alike.")
]


GradientsOption = Annotated[int, typer.Option(help="Bytes of a gradient on the wire: 1, 2 or 4.")]


ProfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="C and W as measured, with their errors: profile.json."),
]


BackendOption = Annotated[str, typer.Option(help="Of the profile: whose all-reduce.")]


_WIDTH, _INDENT = 112, "    "


def show() -> None:
    """Print every figure of the XXL model: what it is, its formula with numbers, why, and what people get wrong."""
    from paceline.tools.plan.xxl_model import derive_figures

    typer.echo("XXL: 126 blocks of two linear layers, 16384 → 53248 → 16384; M is the memory of a device.\n")
    show_derived(derive_figures())


def show_derived(figures: Sequence[DerivedFigure]) -> None:
    """Print figures with their derivations, one after another."""
    for figure in figures:
        typer.echo(f"{figure.what}: {figure.shown}")
        lines = [
            figure.formula,
            figure.why and f"since {figure.why}",
            figure.wrong and f"wrong: {figure.wrong}",
        ]
        for line in filter(None, lines):
            typer.echo(textwrap.fill(line, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))
