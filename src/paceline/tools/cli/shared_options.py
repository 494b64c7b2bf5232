"""Options that several commands share, and commands whose options are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

from typer import Option

from paceline._core.units import parse_count
from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_settings import HubOptimizer

__all__ = [
    "AccumulateOption",
    "AutocastOption",
    "BoundOption",
    "BucketsOption",
    "CheckpointingOption",
    "CsvOption",
    "DownOption",
    "JsonOption",
    "MarginOption",
    "NetworkOption",
    "OptimizerOption",
    "OuterLrOption",
    "OuterMomentumOption",
    "OuterOption",
    "OuterWarmupOption",
    "PopulationOption",
    "StalenessOption",
    "ThreadsOption",
    "UnstableOption",
    "expand_options",
    "hub_optimizer",
    "numbers_of",
    "parse_model_parameters",
]

# ---------------------------------------------------------------------- files

JsonOption = Annotated[Path | None, Option("--json", metavar="FILE", help="Write all results as JSON.")]
CsvOption = Annotated[Path | None, Option("--csv", metavar="FILE", help="Write the table as CSV.")]

# ---------------------------------------------------------------------- a training

OptimizerOption = Annotated[str, Option(help="Optimizer: adamw, sgd, sgd-momentum, or package.module:Class.")]
AutocastOption = Annotated[str, Option(help="Mixed precision: off, bf16 or fp16.")]
CheckpointingOption = Annotated[bool, Option(help="Recompute activations in backward.")]
AccumulateOption = Annotated[int, Option(help="Micro-batches per optimizer step.")]
BucketsOption = Annotated[str, Option(help="Bucket sizes in MiB, by commas; inf: one bucket.")]
ThreadsOption = Annotated[int, Option(help="Threads per rank.")]
NetworkOption = Annotated[str | None, Option(help="Network of the profile to plan for.")]

# ---------------------------------------------------------------------- how a hub merges updates

OuterOption = Annotated[str, Option(help="Outer optimizer: averaging, delayed-nesterov, nesterov.")]
OuterLrOption = Annotated[float | None, Option(help="Outer learning rate; default 1 (averaging), else 0.7.")]
OuterMomentumOption = Annotated[float, Option(help="Outer momentum.")]
OuterWarmupOption = Annotated[int, Option(help="Rounds of plain averaging before momentum starts.")]
UnstableOption = Annotated[bool, Option("--unstable", help="Allow Nesterov per arrival, which diverges.")]
StalenessOption = Annotated[str, Option(help="Stale updates: accept, down-weight, drop, wait.")]
BoundOption = Annotated[float, Option(help="Rounds beyond which an update is too stale.")]
DownOption = Annotated[str, Option(help="Encoding of parameters for workers: bf16, fp16, fp32, int8.")]
PopulationOption = Annotated[
    int | None, Option(metavar="STEPS", help="Train independently for this many steps; the best are adopted.")
]
MarginOption = Annotated[
    float, Option(help="Population: share behind the best at which the worst is replaced.")
]


def hub_optimizer(name: str, lr: float | None, momentum: float, warmup: int, unstable: bool) -> HubOptimizer:
    """Return the outer optimizer that the options describe.

    Raises:
        UsageError: the name is unknown, or a number is out of range.
    """
    from paceline.async_dp.hub.hub_settings import HubOptimizer

    default_lr = 1.0 if name == "averaging" else 0.7
    return HubOptimizer(name, default_lr if lr is None else lr, momentum, warmup, unstable)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- parsing


def parse_model_parameters(model: str | None, parameters: str | None) -> int:
    """Return the number of parameters of a model, given by ``--model`` or by ``--parameters``.

    Args:
        model: size of the reference GPT, or ``"xxl"``.
        parameters: the number itself, such as ``"7B"``.

    Raises:
        UsageError: both or none are given, the model is unknown, or the number is not valid.

    Example:
        >>> parse_model_parameters("xxl", None), parse_model_parameters(None, "20M")
        (219848638464, 20000000)
    """
    from paceline.tools.models.gpt_sizes import SIZES
    from paceline.tools.plan import xxl_worked_example

    if (model is None) == (parameters is None):
        raise UsageError(
            "which model?",
            remedy="pass either --parameters, such as 7B, or --model NAME, and only one of them",
        )
    if parameters is not None:
        count = parse_count(parameters)
        if count < 1:
            raise UsageError(f"--parameters {parameters}", remedy="pass 1 or more")
        return count
    if model == "xxl":
        return xxl_worked_example.PARAMETERS
    if model not in SIZES:
        raise unknown("model", model, [*SIZES, "xxl"])
    return SIZES[model].parameters()


def numbers_of(option: str, text: str, kind: type, example: str, mark: str = ",") -> list:
    """Return the numbers that an option lists; new code calls `paceline._core.units.parse_list`.

    Raises:
        UsageError: there is none, or one is not valid.
    """
    parts = [part.strip() for part in text.split(mark) if part.strip()]
    try:
        numbers = [kind(part) for part in parts]
    except ValueError as error:
        valid = ("whole numbers" if kind is int else "numbers") + " by commas" * (mark == ",")
        raise UsageError(f"{option} {text}: {error}", remedy=f"pass {valid}: {example}") from error
    if not numbers:
        raise UsageError(f"{option} names none", remedy=f"pass for example {example}")
    return numbers


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one option per field of the dataclass that annotates its first parameter.

    A field declares its option as a parameter would: ``lr: Annotated[float, Option(help="…")] = 1e-3``. Fields
    without ``Annotated`` are no options and keep their defaults. The other parameters stay options of their own.
    """
    first, *others = inspect.signature(command, eval_str=True).parameters.values()
    options = first.annotation
    hints = get_type_hints(options, include_extras=True)
    declared = {
        field.name: inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)
        if get_origin(hints[field.name]) is Annotated
    }

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        given = {name: values.pop(name) for name in declared}
        command(options(**given), **values)

    parameters = [
        *declared.values(),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others),
    ]
    expanded.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del expanded.__wrapped__
    return expanded
