"""A model that is named, or told by its parameters: what commands have in common that plan for one."""

from __future__ import annotations

from paceline.errors import UsageError, unknown
from paceline.units import parse_count

__all__ = ["parameters_of"]


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
    from paceline.lm.sizes import SIZES
    from paceline.plan import xxl

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
        return xxl.PARAMETERS
    if model not in SIZES:
        raise unknown("model", model, [*SIZES, "xxl"])
    return SIZES[model].parameters()
