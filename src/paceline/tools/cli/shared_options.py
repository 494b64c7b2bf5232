"""Options that several commands share, and commands whose options are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

from typer import Option

from paceline._core.units import parse_count, parse_share
from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_settings import HubOptimizer, MergeRules

__all__ = [
    "NNODES_NOTE",
    "CsvOption",
    "JsonOption",
    "expand_options",
    "hub_optimizer",
    "merge_rules",
    "parse_model_parameters",
    "parse_nnodes",
]

JsonOption = Annotated[
    Path | None, Option("--json", metavar="FILE", help="JSON file to write all results to.")
]
CsvOption = Annotated[Path | None, Option("--csv", metavar="FILE", help="CSV file to write the table to.")]


NNODES_NOTE = ", or MIN:MAX, to continue with MIN after a loss"


def parse_nnodes(text: str) -> tuple[int, int]:
    """Return fewest and most hosts of ``--nnodes N`` or ``--nnodes MIN:MAX``, which torchrun has too.

    Raises:
        UsageError: the text is not valid.

    Example:
        >>> parse_nnodes("4"), parse_nnodes("2:4")
        ((4, 4), (2, 4))
    """
    least, colon, most = text.partition(":")
    parts = (least, most) if colon else (text, text)
    if not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"--nnodes {text}", remedy="give a number of hosts, or MIN:MAX, such as 4 or 2:4")
    return int(parts[0]), int(parts[1])


def hub_optimizer(name: str, lr: float | None, momentum: float, warmup: int, unstable: bool) -> HubOptimizer:
    """Return the outer optimizer that the options describe.

    Raises:
        UsageError: the name is unknown, or a number is out of range.
    """
    from paceline.async_dp.hub.hub_settings import HubOptimizer

    default_lr = 1.0 if name == "averaging" else 0.7
    return HubOptimizer(name, default_lr if lr is None else lr, momentum, warmup, unstable)  # type: ignore[arg-type]


def merge_rules(merge: str, quorum: str | None) -> MergeRules:
    """Return when a hub merges updates, as ``--merge`` and ``--quorum`` describe.

    Raises:
        UsageError: the values are not valid, or there is a quorum without ``--merge quorum``.

    Example:
        >>> merge_rules("quorum", "75%"), merge_rules("quorum", "3")
        (MergeRules(on='quorum', quorum=0.75), MergeRules(on='quorum', quorum=3))
    """
    from paceline.async_dp.hub.hub_settings import MergeRules

    if quorum is None:
        return MergeRules(merge)  # type: ignore[arg-type] # checks it
    rules = MergeRules(merge, int(quorum) if quorum.isdecimal() else _share_of_workers(quorum))  # type: ignore[arg-type]
    if merge != "quorum":
        raise UsageError(f"--quorum {quorum} with --merge {merge}", remedy="add --merge quorum")
    return rules


def _share_of_workers(text: str) -> float:
    try:
        share = parse_share(text)
    except UsageError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(
            f"--quorum {text}", remedy="give a number of workers, such as 3, or a share of them, such as 50%"
        )
    return share


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
