"""What must be alike on all ranks before anything begins: versions, and the program itself.

A rank with another version, or with yesterday's copy of the program, trains something else without a word, or fails
much later for reasons that point elsewhere. So every rank tells a few facts in its claim of the roll call, which
costs no message more, and every rank compares all of them: either none goes on, or all.

A fact that a rank does not tell is not compared: a rank with ``alike=False``, a program that was typed in, a
claim of an older Paceline.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from paceline._core.version import __version__
from paceline.errors import MismatchError
from paceline.world.rendezvous import format_ranks

__all__ = ["facts_of_this_process", "find_mismatch", "program_fact"]


def facts_of_this_process() -> dict[str, str]:
    """Return what this process tells of itself: versions, and its program where that is a file."""
    facts = {"paceline": __version__, "Python": platform.python_version().rpartition(".")[0]}
    for name in ("torch", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name).partition("+")[0]  # CPU and CUDA builds may train together
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is not None:
        name = getattr(getattr(main, "__spec__", None), "name", "")
        facts |= program_fact(Path(file), name, Path(sys.executable).parent)
    return facts


def program_fact(file: Path, name: str, scripts: Path) -> dict[str, str]:
    """Return the fact that tells a program, nothing where it can't be read.

    Args:
        file: the main script, or the file of a module that was run by ``-m``.
        name: of that module, or empty.
        scripts: where installers write commands: there the text is an installer's, so the name alone tells.
    """
    if file.parent == scripts:
        return {"the program": file.name}
    try:
        text = file.read_bytes().replace(b"\r\n", b"\n")
    except OSError:
        return {}
    return {"the program": f"{name or file.name} (text {hashlib.sha256(text).hexdigest()[:12]})"}


def find_mismatch(facts_of_rank: Sequence[Mapping[str, str]]) -> MismatchError | None:
    """Return the error for the first fact on which ranks differ, the same on every rank; None if there is none.

    Args:
        facts_of_rank: what each rank told, in the order of ranks.

    Example:
        >>> print(difference([{"torch": "2.13.0"}, {"torch": "2.12.1"}, {"torch": "2.13.0"}]))
        [rank 1] torch differs between ranks: 2.13.0 on ranks 0, 2; 2.12.1 on rank 1
          → install the same versions and copy the same program to every rank; if it is meant, pass alike=False
    """
    for name in dict.fromkeys(name for facts in facts_of_rank for name in facts):
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_rank):
            if name in facts:
                ranks_of.setdefault(facts[name], []).append(rank)
        if len(ranks_of) > 1:
            return _told(name, ranks_of)
    return None


def _told(name: str, ranks_of: Mapping[str, list[int]]) -> MismatchError:
    """Return the error for a fact, given who has which value; the rank to look at has not what most have."""
    ((usual, _),) = Counter({value: len(ranks) for value, ranks in ranks_of.items()}).most_common(1)
    odd = min(ranks[0] for value, ranks in ranks_of.items() if value != usual)
    held = "; ".join(
        f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
        for value, ranks in ranks_of.items()
    )
    return MismatchError(
        f"{name} differs between ranks: {held}",
        rank=odd,
        remedy="install the same versions and copy the same program to every rank; if it is meant, pass alike=False",
    )
