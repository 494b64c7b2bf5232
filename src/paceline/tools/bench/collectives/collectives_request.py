"""From the options of `paceline bench collectives` to the cases that are measured, refused or left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from paceline._core.units import parse_bytes, parse_list, parse_sweep
from paceline.errors import UsageError
from paceline.tools.bench.collectives.benchmarked_backends import (
    check_backends,
    default_backends,
    find_backend,
    usable_gpus,
)
from paceline.tools.bench.collectives.collectives_cases import (
    CollectiveCase,
    HostMemory,
    check_cases_fit,
    fitting_cases,
    list_cases,
)
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.rank_jobs import check_launched_ranks, network_name, under_launcher
from paceline.world import ProcessPlace
from paceline.world.machine_facts import available_nbytes
from paceline.world.mpi_world import INSTALL_MPI

__all__ = ["DEFAULT_RANKS", "DEFAULT_SIZES", "CollectivesRequest", "make_request"]

DEFAULT_RANKS, DEFAULT_SIZES = "2,4,6", "1MB,10MB,100MB,1024MB"

_USED = 0.9  # share of the free memory that buffers may take


@dataclass(frozen=True)
class CollectivesRequest:
    """Cases to measure, known before anything is started.

    Attributes:
        settings: of the measurement.
        cases: in order.
        fits: for each case, whether it fits into the memory of this host.
        left_out: reasons why cases that were not named explicitly are left out.
    """

    settings: CollectiveSettings
    cases: tuple[CollectiveCase, ...]
    fits: tuple[bool, ...]
    left_out: tuple[str, ...]

    @property
    def fitting(self) -> list[CollectiveCase]:
        """The cases that fit into the memory of this host."""
        return [case for case, fits in zip(self.cases, self.fits, strict=True) if fits]


def make_request(
    place: ProcessPlace,
    launchers: Collection[str],
    *,
    backends: str | None,
    ops: str,
    ranks: str | None,
    sizes: str | None,
    network: str | None,
    **others: Any,
) -> CollectivesRequest:
    """Return the cases that command-line options select.

    Args:
        place: of this process; under a launcher, that launcher's ranks are measured.
        launchers: that are available here; under a launcher, those whose ranks these are.
        backends: names separated by commas; None: `default_backends`.
        ops: names separated by commas.
        ranks: numbers separated by commas; None: `DEFAULT_RANKS`.
        sizes: sizes or sweeps separated by commas; None: `DEFAULT_SIZES`, as far as they fit.
        network: name of the network between the ranks; None: loopback, or "between hosts".
        others: the other settings.

    Raises:
        UsageError: a value is wrong, a backend can't be used, or a named size does not fit into memory.
    """
    if backends is None:
        names = default_backends(launchers)
    else:
        names = parse_list("--backend", backends, str, example="gloo,paceline", unique=True)
    settings = CollectiveSettings(
        backends=names,
        ops=parse_list("--op", ops.replace("_", "-"), str, example="all-reduce,broadcast", unique=True),
        ranks=_parse_ranks(ranks, place),
        sizes=_parse_sizes(DEFAULT_SIZES if sizes is None else sizes),
        network=network_name(network, place),
        **others,
    )
    local = place.local_size if under_launcher(place) else None
    if backends is None:
        cases, left_out = _without_missing_gpus(settings, local)
    else:
        check_backends(settings.backends, local or max(settings.ranks))
        _check_launchers(settings, place, launchers)
        cases, left_out = list_cases(settings), []
    smallest_gpu = min((gpu.memory_nbytes for gpu in usable_gpus()), default=0)
    host = HostMemory(int(_USED * available_nbytes()), int(_USED * smallest_gpu), local)
    if sizes is not None:
        check_cases_fit(cases, host)
    kept, too_large = fitting_cases(cases, host)
    if not kept:
        raise UsageError(
            f"nothing fits: {too_large[0]}", remedy="give smaller --bytes or fewer --nproc-per-node"
        )
    fits = tuple(case in kept for case in cases)
    return CollectivesRequest(settings, tuple(cases), fits, tuple([*left_out, *too_large]))


def _parse_sizes(text: str) -> tuple[int, ...]:
    example = "1MB,64KiB:64MiB:x2"
    found = parse_sweep("--bytes", text, parse_bytes, example=example, strict=True)
    return tuple(int(size) for size in found)


def _parse_ranks(text: str | None, place: ProcessPlace) -> tuple[int, ...]:
    if under_launcher(place) and text is None:
        return (place.size,)
    found = parse_list(
        "--nproc-per-node", DEFAULT_RANKS if text is None else text, int, example=DEFAULT_RANKS
    )
    if under_launcher(place) and text is not None:
        check_launched_ranks(text, set(found), place)
        return (place.size,)
    return tuple(sorted(set(found)))


def _without_missing_gpus(
    settings: CollectiveSettings, local: int | None
) -> tuple[list[CollectiveCase], list[str]]:
    """Return the cases without the backends that have too few GPUs, and the reasons."""
    gpus, cases, left_out = len(usable_gpus()), [], []
    for case in list_cases(settings):
        needed = local or case.ranks
        lost = [name for name in case.backends if find_backend(name).device != "cpu" and needed > gpus]
        cases.append(replace(case, backends=tuple(name for name in case.backends if name not in lost)))
        left_out += [f"{name} with {case.ranks} ranks needs {needed} GPUs, there are {gpus}" for name in lost]
    return cases, list(dict.fromkeys(left_out))


def _check_launchers(settings: CollectiveSettings, place: ProcessPlace, launchers: Collection[str]) -> None:
    """Refuse backends whose launcher is missing here, or is not the one that started these ranks."""
    for name in settings.backends:
        needed = find_backend(name).launcher
        if needed in launchers:
            continue
        if under_launcher(place):
            raise UsageError(
                f"backend {name!r}: its ranks are started by {needed}, and {place.source} has started these",
                remedy=f"leave {name} out, or run the command without {place.source}",
            )
        raise UsageError(
            f"backend {name!r}: its ranks are started by {needed}, which is not installed", remedy=INSTALL_MPI
        )
