"""Ranks that a launcher such as torchrun or ``paceline lab`` has started, in which a benchmark takes part."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.world import ProcessPlace

__all__ = ["check_launched_ranks", "network_name", "under_launcher"]


def under_launcher(place: ProcessPlace) -> bool:
    """Return whether a launcher started this process as a rank."""
    return place.source != "arguments"


def network_name(network: str | None, place: ProcessPlace) -> str:
    """Return the network between the ranks: as given by ``--network``, else loopback or "between hosts"."""
    between_hosts = under_launcher(place) and (place.nodes or 1) > 1
    return network or ("between hosts" if between_hosts else "loopback")


def check_launched_ranks(option: str, ranks: set[int], place: ProcessPlace) -> None:
    """Refuse numbers of ranks that differ from that of the launcher.

    Args:
        option: text of ``--ranks``, for the message.
        ranks: its numbers.
        place: of this process, which a launcher started.

    Raises:
        UsageError: they differ.
    """
    if ranks != {place.size}:
        raise UsageError(
            f"--ranks {option}, but {place.source} started {place.size}",
            remedy="leave --ranks out under a launcher",
        )
