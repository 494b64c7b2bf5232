"""What kernels take for themselves while they run, beside their results: by operator, with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["workspace_nbytes"]


def workspace_nbytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that the kernel of an operator allocates and frees before it returns."""
    return 0
