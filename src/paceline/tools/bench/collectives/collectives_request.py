"""From the words of a command line to what will be measured, refused or left out, before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UsageError
from paceline.tools.bench.collectives.benchmark_cases import Case, cases_of
from paceline.tools.bench.collectives.benchmarked_backends import (
    backend_of,
    check_backends,
    default_backends,
    gpus,
)
from paceline.tools.bench.collectives.collectives_settings import (
    CollectiveSettings,
    parse_names,
    parse_ranks,
    parse_sizes,
)
from paceline.tools.bench.collectives.memory_needed import Room, fitting_cases, refuse_what_does_not_fit
from paceline.world import ProcessPlace
from paceline.world.machine_facts import available_nbytes
from paceline.world.mpi_world import INSTALL_MPI

__all__ = ["DEFAULT_OPS", "DEFAULT_RANKS", "DEFAULT_SIZES", "Request", "is_joined", "make_request"]

DEFAULT_OPS, DEFAULT_RANKS, DEFAULT_SIZES = "all-reduce", "2,4,6", "1MB,10MB,100MB,1024MB"

_USED = 0.9
"""Share of the free memory that buffers may take: the rest is for what else the machine does."""


@dataclass(frozen=True)
class Request:
    """What will be measured.

    Attributes:
        settings: how.
        cases: what, in order.
        fits: for each case whether this host has room for it.
        left_out: of what was not asked for by name: what is not measured, and why.
    """

    settings: CollectiveSettings
    cases: tuple[Case, ...]
    fits: tuple[bool, ...]
    left_out: tuple[str, ...]

    @property
    def fitting(self) -> list[Case]:
        """The cases that this host has room for."""
        return [case for case, fits in zip(self.cases, self.fits, strict=True) if fits]


def is_joined(place: ProcessPlace) -> bool:
    """Return whether a launcher started this process as a rank."""
    return place.source != "arguments"


def make_request(
    place: ProcessPlace,
    starters: Collection[str],
    *,
    backends: str | None,
    ops: str,
    ranks: str | None,
    sizes: str | None,
    network: str | None,
    **others: Any,
) -> Request:
    """Return what the words of a command line ask for.

    Args:
        place: this process's place as launchers tell it: under one, its ranks are those that are measured.
        starters: what can start ranks here; under a launcher, whose ranks these are.
        backends, ops, ranks, sizes: lists separated by commas; None: the default.
        network: what is between the ranks, in words; None: loopback, or "between hosts".
        others: the other settings.

    Raises:
        UsageError: a value is wrong, a backend can't be had, or what was asked for does not fit into memory.
    """
    chosen = default_backends(starters) if backends is None else parse_names(backends, "--backends")
    between = is_joined(place) and (place.nodes or 1) > 1
    settings = CollectiveSettings(
        backends=chosen,
        ops=parse_names(ops, "--ops"),
        ranks=_ranks(ranks, place),
        sizes=parse_sizes(DEFAULT_SIZES if sizes is None else sizes),
        network=network or ("between hosts" if between else "loopback"),
        **others,
    )
    local = place.local_size if is_joined(place) else None
    if backends is None:
        cases, left_out = _without_gpu(settings, local)
    else:
        check_backends(settings.backends, local or max(settings.ranks))
        _check_starters(settings, place, starters)
        cases, left_out = cases_of(settings), []
    room = _room(local)
    if sizes is not None:
        refuse_what_does_not_fit(cases, room)
    kept, too_large = fitting_cases(cases, room)
    if not kept:
        raise UsageError(f"nothing fits: {too_large[0]}", remedy="give smaller --sizes or fewer --ranks")
    return Request(
        settings, tuple(cases), tuple(case in kept for case in cases), tuple([*left_out, *too_large])
    )


def _ranks(text: str | None, place: ProcessPlace) -> tuple[int, ...]:
    if not is_joined(place):
        return parse_ranks(DEFAULT_RANKS if text is None else text)
    if text is not None and parse_ranks(text) != (place.size,):
        raise UsageError(
            f"--ranks {text}, but {place.source} started {place.size}",
            remedy="leave --ranks out under a launcher",
        )
    return (place.size,)


def _without_gpu(settings: CollectiveSettings, local: int | None) -> tuple[list[Case], list[str]]:
    """Return the cases without backends on GPUs where there are too few of them, and what is left out so."""
    there, cases, left_out = len(gpus()), [], []
    for case in cases_of(settings):
        needed = local or case.ranks
        kept = tuple(name for name in case.backends if backend_of(name).device == "cpu" or needed <= there)
        cases.append(replace(case, backends=kept))
        lost = [name for name in case.backends if name not in kept]
        left_out += [
            f"{name} with {case.ranks} ranks needs {needed} GPUs, there are {there}" for name in lost
        ]
    return cases, list(dict.fromkeys(left_out))


def _check_starters(settings: CollectiveSettings, place: ProcessPlace, starters: Collection[str]) -> None:
    """Refuse backends whose ranks nothing here can start, or that another launcher must start."""
    for name in settings.backends:
        needed = backend_of(name).starter
        if needed in starters:
            continue
        if is_joined(place):
            raise UsageError(
                f"backend {name!r}: its ranks are started by {needed}, and {place.source} has started these",
                remedy=f"leave {name} out, or run the command without {place.source}",
            )
        raise UsageError(
            f"backend {name!r}: its ranks are started by {needed}, which is not here", remedy=INSTALL_MPI
        )


def _room(local: int | None) -> Room:
    smallest = min((gpu.memory_nbytes for gpu in gpus()), default=0)
    return Room(int(_USED * available_nbytes()), int(_USED * smallest), local)
