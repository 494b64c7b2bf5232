"""Checks at start-up that all ranks have the same versions and run the same program.

A rank with another version, or with an old copy of the program, silently trains something else, or fails much later for
misleading reasons. So every rank puts a few facts into its claim at the rendezvous, which takes no extra message, and
every rank compares all of them: either all continue, or none.

A fact that a rank does not give is not compared: with ``alike=False``, in an interactive session, in a claim of an
older Paceline.
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

from paceline._core import __version__
from paceline.errors import MismatchError
from paceline.world.rendezvous import format_ranks

__all__ = ["facts_of_this_process", "find_mismatch", "program_fact"]


def facts_of_this_process() -> dict[str, str]:
    """Return the facts of this process: versions, and its program if that is a file."""
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
    """Return the fact that identifies a program; empty if the file can't be read.

    Args:
        file: the main script, or the file of a module that was run by ``-m``.
        name: of that module, or empty.
        scripts: folder of installed commands, whose text is the installer's, so that only their name counts.
    """
    if file.parent == scripts:
        return {"the program": file.name}
    try:
        text = file.read_bytes().replace(b"\r\n", b"\n")
    except OSError:
        return {}
    return {"the program": f"{name or file.name} (text {hashlib.sha256(text).hexdigest()[:12]})"}


def find_mismatch(facts_of_rank: Sequence[Mapping[str, str]]) -> MismatchError | None:
    """Return the error for the first fact on which ranks differ, the same on every rank; None: they agree.

    Args:
        facts_of_rank: by rank.

    Example:
        >>> print(find_mismatch([{"torch": "2.13.0"}, {"torch": "2.12.1"}, {"torch": "2.13.0"}]))
        [rank 1] torch differs between ranks: 2.13.0 on ranks 0, 2; 2.12.1 on rank 1
          → install the same versions and copy the same program to every rank; if it is intended, pass alike=False
    """
    for name in dict.fromkeys(name for facts in facts_of_rank for name in facts):
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_of_rank):
            if name in facts:
                ranks_of.setdefault(facts[name], []).append(rank)
        if len(ranks_of) > 1:
            return _mismatch_error(name, ranks_of)
    return None


def _mismatch_error(name: str, ranks_of: Mapping[str, list[int]]) -> MismatchError:
    """Return the error for a fact with the ranks of each value; its rank is the first without the most common one."""
    ((usual, _),) = Counter({value: len(ranks) for value, ranks in ranks_of.items()}).most_common(1)
    held = "; ".join(
        f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
        for value, ranks in ranks_of.items()
    )
    return MismatchError(
        f"{name} differs between ranks: {held}",
        rank=min(ranks[0] for value, ranks in ranks_of.items() if value != usual),
        remedy="install the same versions and copy the same program to every rank; if it is intended, pass alike=False",
    )
