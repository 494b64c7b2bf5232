"""Options that name the files which several commands, and benchmarks, write.

Options that say how a training is set up, of several commands that plan, measure or run one.

A model that is named, or told by its parameters: what commands have in common that plan for one.

Options that list numbers, by commas or another mark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline._core.units import parse_count
from paceline.errors import UsageError, unknown

__all__ = [
    "AccumulateOption",
    "AutocastOption",
    "BucketsOption",
    "CheckpointingOption",
    "CsvOption",
    "JsonOption",
    "JsonResultOption",
    "JsonRowsOption",
    "NetworkOption",
    "OptimizerOption",
    "ThreadsOption",
    "numbers_of",
    "parameters_of",
]

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it.")]


JsonRowsOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write machine, settings and rows there.")
]


JsonResultOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")
]


CsvOption = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table there.")]


OptimizerOption = Annotated[str, typer.Option(help="adamw, sgd, sgd-momentum, or package.module:Class.")]


AutocastOption = Annotated[str, typer.Option(help="off, bf16 or fp16.")]


CheckpointingOption = Annotated[bool, typer.Option(help="Run blocks again in backward.")]


AccumulateOption = Annotated[int, typer.Option(help="Micro-batches of a step.")]


BucketsOption = Annotated[
    str, typer.Option(help="Bucket sizes in MiB, separated by commas; inf: one for all.")
]


ThreadsOption = Annotated[int, typer.Option(help="Threads of a rank.")]


NetworkOption = Annotated[str | None, typer.Option(help="Of the profile: on which network.")]


def parameters_of(model: str | None, parameters: str | None) -> int:
    """Return how many parameters a model has.

    Args:
        model: its name, a size of the reference GPT or ``"xxl"``. parameters: or how many, such as ``"7B"``.

    Raises:
        UsageError: both or none are given, there is no such model, or no such count.

    Example:
        >>> parameters_of("xxl", None), parameters_of(None, "20M")
        (219848638464, 20000000)
    """
    from paceline.tools.models.gpt_sizes import SIZES
    from paceline.tools.plan import xxl_model

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
        return xxl_model.PARAMETERS
    if model not in SIZES:
        raise unknown("model", model, [*SIZES, "xxl"])
    return SIZES[model].parameters()


def numbers_of(option: str, text: str, kind: type, example: str, mark: str = ",") -> list:
    """Return the numbers that the text of an option lists.

    Args:
        option: its name, for messages. text: as it was given. kind: ``int`` or ``float``.
        example: what may be given instead. mark: stands between two numbers.

    Raises:
        UsageError: there is none, or something else is among them.

    Example:
        >>> numbers_of("--block", "2,10", int, "2,10,100")
        [2, 10]
    """
    parts = [part.strip() for part in text.split(mark) if part.strip()]
    try:
        numbers = [kind(part) for part in parts]
    except ValueError as error:
        what = ("whole numbers" if kind is int else "numbers") + " by commas" * (mark == ",")
        raise UsageError(f"{option} {text}: {error}", remedy=f"pass {what}: {example}") from error
    if not numbers:
        raise UsageError(f"{option} names none", remedy=f"pass for example {example}")
    return numbers
