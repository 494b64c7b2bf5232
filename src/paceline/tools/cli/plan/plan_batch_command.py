"""``paceline plan batch``: fewest devices, micro-batch, accumulation, and whether a step is compute-bound."""

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
from paceline.tools.cli.shared_options import JsonOption, parse_model_parameters
from paceline.tools.command_options import own, shared
from paceline.tools.plan.devices_needed import STATES
from paceline.tools.plan.xxl_worked_example import DerivedFigure
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.batch_plan import BatchPlan, BatchRequest
    from paceline.tools.plan.communication_roofline import RateEstimate
    from paceline.tools.plan.micro_batch_split import BatchSplit

__all__ = ["batch", "show_figures", "show_xxl"]

_WIDTH, _INDENT = 112, "    "
_MODEL, _BATCH, _DEVICES, _LINKS = "Model", "Batch and strategy", "Devices", "Links"


def batch(
    model: Annotated[
        str | None,
        shared("model", ": tiny … 2.7b, or xxl; sets parameters, activations and context", panel=_MODEL),
    ] = None,
    parameters: Annotated[str | None, shared("parameters", ", of any other model", panel=_MODEL)] = None,
    activations: Annotated[
        str | None,
        own(
            "SIZE",
            "Bytes saved for backward per token: 4MB; default: estimated for --model, or left out.",
            panel=_MODEL,
        ),
    ] = None,
    tokens: Annotated[int | None, shared("context", "; default: the model's, or 1", panel=_MODEL)] = None,
    strategy: Annotated[
        str, shared("strategy", f": {', '.join(STATES)}, or an alias of the API", panel=_BATCH)
    ] = "bucketed",
    global_batch_size: Annotated[int | None, shared("global-batch-size", panel=_BATCH)] = None,
    divided_activations: Annotated[
        str, own("PERCENT", "Part of a micro-batch's activations that devices divide.", panel=_BATCH)
    ] = "0%",
    world_size: Annotated[
        int | None,
        shared("world-size", ", one per device; default: the fewest that are enough", panel=_DEVICES),
    ] = None,
    hardware: Annotated[
        str | None, shared("hardware", "; sets memory, FLOP/s and link", panel=_DEVICES)
    ] = None,
    device_memory: Annotated[str | None, shared("device-memory", panel=_DEVICES)] = None,
    usable: Annotated[str, own("PERCENT", "Part of the memory to plan with.", panel=_DEVICES)] = "80%",
    dtype: Annotated[
        str | None,
        shared(
            "dtype",
            " of matrix products: bf16, fp16, tf32, fp32; default: the device's first",
            panel=_DEVICES,
        ),
    ] = None,
    flops: Annotated[
        str | None, own("RATE", "C, FLOP/s per device: 400T; overrides profile and table.", panel=_DEVICES)
    ] = None,
    link: Annotated[
        str | None,
        shared(
            "link", " (W): a name (ndr, 10gbe) or a rate (12GB/s); default: the device's link", panel=_LINKS
        ),
    ] = None,
    nproc_per_node: Annotated[int, shared("nproc-per-node", ", one per device", panel=_LINKS)] = 1,
    inside: Annotated[
        str | None,
        shared(
            "inside",
            ", with --nproc-per-node: a name (nvlink4, pcie4) or a rate; default: the device's link",
            panel=_LINKS,
        ),
    ] = None,
    gradient_bytes: Annotated[int, shared("gradient-bytes", panel=_LINKS)] = 4,
    profile: Annotated[
        Path | None, shared("profile", " with C and W as measured, with their errors", panel=_LINKS)
    ] = None,
    backend: Annotated[str, shared("backend", " of the profile: whose all-reduce", panel=_LINKS)] = "gloo",
    network: Annotated[str | None, shared("network", panel=_LINKS)] = None,
    json_file: JsonOption = None,
) -> None:
    """Plan how many devices a training needs, how its global batch is split, and what bounds a step.

    Examples: paceline plan batch --model medium --hardware rtx-4090 --link 10gbe --world-size 8
    --global-batch-size 512

    paceline plan batch --parameters 7B --activations 4MB --context 2048 --strategy full-shard --hardware h100
    --world-size 64 --global-batch-size 1024 --nproc-per-node 8 --link ndr

    paceline plan batch --model mini --device-memory 24GB --world-size 4 --global-batch-size 64
    --profile profile.json --dtype fp32
    """
    from paceline.cost_model.hardware_catalog import find_device
    from paceline.tools.plan.batch_plan import BatchRequest

    count, token_nbytes, context = _model_sizes(model, parameters)
    if device_memory is None and hardware is None:
        raise UsageError(
            "no device memory is given", remedy="pass --hardware NAME or --device-memory, such as 24GB"
        )
    if gradient_bytes not in (1, 2, 4):
        raise UsageError(f"--gradient-bytes {gradient_bytes}", remedy="pass 1, 2 or 4 bytes")
    if nproc_per_node == 1 and inside is not None:
        raise UsageError(
            "--inside without --nproc-per-node", remedy="pass the number of devices per host too"
        )
    if nproc_per_node != 1 and link is None:
        raise UsageError(
            f"--nproc-per-node {nproc_per_node} without --link",
            remedy="pass the link between hosts too, such as --link ndr",
        )
    wired = ("--link", link) if nproc_per_node == 1 else ("--inside", inside)
    request = BatchRequest(
        parameters=count,
        strategy=strategy,
        memory=find_device(hardware or "").memory_nbytes
        if device_memory is None
        else parse_bytes(device_memory),
        usable=parse_share(usable),
        token_activations=token_nbytes if activations is None else float(parse_bytes(activations)),
        shared=parse_share(divided_activations),
        sample_tokens=context if tokens is None else tokens,
        devices=world_size,
        samples=global_batch_size,
        flops=_matmul_rate(flops, profile, dtype, hardware),
        wire=_link_rate(wired, profile, backend, network, world_size, hardware),
        gradient_nbytes=float(gradient_bytes),
        between=_parse_link("--link", link) if link is not None and nproc_per_node != 1 else None,
        group=nproc_per_node,
    )
    _plan(request, json_file)


def _plan(request: BatchRequest, json_file: Path | None) -> None:
    """Print the plan, and write it to `json_file`."""
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.batch_plan import plan_batch

    plan = plan_batch(request)
    if json_file is not None:
        check_writable(json_file, "--json")
    show_figures(plan.figures)
    typer.echo("")
    if plan.split is not None:
        print_wide(_split_table(plan.split))
    typer.echo("\n".join(plan.sentences))
    if json_file is not None:
        write_json(json_file, _facts(request, plan))
        typer.echo(json_file)


def _model_sizes(model: str | None, parameters: str | None) -> tuple[int, float | None, int]:
    """Return parameters, bytes of activations per token (None: unknown) and tokens per sample."""
    from paceline.tools.models.gpt_sizes import SIZES
    from paceline.tools.plan import xxl_worked_example
    from paceline.tools.plan.devices_needed import transformer_token_nbytes

    count = parse_model_parameters(model, parameters)
    if model is None:
        return count, None, 1
    if model == "xxl":
        return count, float(xxl_worked_example.TOKEN_NBYTES), 1
    size = SIZES[model]
    return count, transformer_token_nbytes(size.d_model, size.layers, size.vocabulary), size.context


def _matmul_rate(
    flops: str | None, profile: Path | None, dtype: str | None, device: str | None
) -> RateEstimate | None:
    """Return C: as given, as measured, or of the device; None if unknown."""
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.communication_roofline import catalog_matmul_rate, measured_matmul_rate

    if flops is not None:
        return _given("--flops", flops, float(parse_count(flops)), "FLOP/s above 0, such as 400T")
    if profile is not None:
        return measured_matmul_rate(Profile.load(profile), dtype or "bf16", device or "cpu")
    return None if device is None else catalog_matmul_rate(device, dtype)


def _link_rate(
    given: tuple[str, str | None],
    profile: Path | None,
    backend: str,
    network: str | None,
    devices: int | None,
    device: str | None,
) -> RateEstimate | None:
    """Return W: as given by an option and its value, as measured, or of the device's link; None if unknown."""
    from paceline.cost_model.hardware_catalog import find_device
    from paceline.cost_model.profile import Profile
    from paceline.tools.plan.communication_roofline import catalog_link_rate, measured_link_rate

    option, link = given
    if link is not None:
        return _parse_link(option, link)
    if profile is not None:
        return measured_link_rate(Profile.load(profile), backend, network, max(2, devices or 2))
    return None if device is None else catalog_link_rate(find_device(device).link)


def _parse_link(option: str, text: str) -> RateEstimate:
    """Return a rate such as ``12GB/s``, or that of a known link."""
    from paceline.tools.plan.communication_roofline import catalog_link_rate

    if "/s" not in text:
        return catalog_link_rate(text)
    return _given(option, text, parse_rate(text), "a rate above 0, such as 12GB/s")


def _given(option: str, text: str, rate: float, valid: str) -> RateEstimate:
    from paceline.tools.plan.communication_roofline import RateEstimate

    if rate <= 0:
        raise UsageError(f"{option} {text}", remedy=f"pass {valid}")
    return RateEstimate(rate, rate, rate, "given", measured=False)


def _split_table(split: BatchSplit) -> Table:
    """Return the requested global batch, and the nearest ones that divide."""
    from paceline.tools.console_table import make_table

    unit = split.ranks * split.accumulation
    even = [each for each in (split.below, split.above) if each and split.missing]
    rows = [(split.samples, split.micro, split.accumulation, split.ranks, split.missing)]
    rows += [(each, each // unit, split.accumulation, split.ranks, 0) for each in even]
    if split.exact is not None:
        rows.append((split.samples, split.exact.micro, split.exact.accumulation, split.exact.ranks, 0))
    columns = ("global batch", "micro-batch", "accumulation", "ranks", "missing")
    return make_table(columns, [[str(number) for number in row] for row in rows], left=0)


def _facts(request: BatchRequest, plan: BatchPlan) -> dict[str, Any]:
    figures = [asdict(figure) for figure in plan.figures]
    for figure in figures:
        figure["value"] = None if figure["value"] == float("inf") else figure["value"]
    return {
        "kind": "plan-batch",
        "schema": 1,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "asked": asdict(request),
        "figures": figures,
        "split": None if plan.split is None else plan.split.facts(),
        "sentences": list(plan.sentences),
    }


def show_xxl() -> None:
    """Print every figure of the XXL model with its derivation."""
    from paceline.tools.plan.xxl_worked_example import derive_figures

    typer.echo("XXL: 126 blocks of two linear layers, 16384 → 53248 → 16384; M is the memory of a device.\n")
    show_figures(derive_figures())


def show_figures(figures: Sequence[DerivedFigure]) -> None:
    """Print figures, each with its formula, the reason for it, and the usual mistake."""
    for figure in figures:
        typer.echo(f"{figure.what}: {figure.shown}")
        lines = [
            figure.formula,
            figure.why and f"since {figure.why}",
            figure.wrong and f"wrong: {figure.wrong}",
        ]
        for line in filter(None, lines):
            typer.echo(textwrap.fill(line, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))
