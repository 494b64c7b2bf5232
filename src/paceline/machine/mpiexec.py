"""Where mpiexec is: beside this Python, where a wheel puts it, or on the PATH."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["find_mpiexec"]


def find_mpiexec(python: str | None = None, path: str | None = None) -> str | None:
    """Return the path of mpiexec, None if there is none.

    Args:
        python: the interpreter beside which it is looked for first; this one, if left out.
        path: folders to look in then, separated as in ``PATH``, which is the default.
    """
    folders = os.environ.get("PATH", "") if path is None else path
    return shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(python or sys.executable).parent), folders])
    )
