"""What outlives a hub beside the numbers of its centre, and how its heir takes it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.async_dp.hub.global_params import GlobalParams
from paceline.async_dp.hub.membership import HubMember, HubMembership
from paceline.async_dp.hub.update_screening import StalenessHistogram
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.transport.envelope import Bytes

__all__ = ["HubCounters", "snapshot_facts", "replay_records", "restore_snapshot"]


@dataclass
class HubCounters:
    """What a hub has taken in.

    Attributes:
        updates: how many. samples: that they were learnt from. histogram: of their staleness.
    """

    updates: int = 0
    samples: float = 0.0
    histogram: StalenessHistogram = field(default_factory=StalenessHistogram)

    def count(self, member: HubMember, samples: float, staleness: float) -> None:
        """Count an update."""
        self.updates += 1
        self.samples += samples
        self.histogram.add(staleness)
        member.updates += 1
        member.staleness = staleness


def snapshot_facts(run: str, centres: GlobalParams, members: HubMembership, tally: HubCounters) -> dict[str, Any]:
    """Return what goes into a snapshot, as plain values."""
    return {
        "run": run,
        "layout": centres.layout.packed().hex(),
        "centres": centres.facts(),
        "updates": tally.updates,
        "samples": tally.samples,
        "staleness": tally.histogram.counts,
        "members": {
            str(each.number): {
                "name": each.name,
                "updates": each.updates,
                "rounds": {str(key): list(value) for key, value in each.rounds.items()},
            }
            for each in members
            if each.rounds
        },
    }


def restore_snapshot(
    facts: Mapping[str, Any],
    tensors: Mapping[str, Any],
    make: Callable[[ParameterLayout], GlobalParams],
    members: HubMembership,
    tally: HubCounters,
) -> GlobalParams:
    """Fill everything from a snapshot, and return the centres.

    Args:
        facts, tensors: of the snapshot. make: makes centres for a layout. members, tally: still empty.

    Raises:
        CheckpointError: the snapshot is of another outer optimizer or shard.
    """
    centres = make(ParameterLayout.unpacked(bytes.fromhex(facts["layout"])))
    centres.load(tensors, facts["centres"])
    tally.updates, tally.samples = facts["updates"], facts["samples"]
    tally.histogram.counts = list(facts["staleness"])
    for key, told in facts["members"].items():
        member = members.admit(int(key), 0.0)
        member.name, member.updates = told["name"], told["updates"]
        member.rounds = {int(each): (value[0], value[1]) for each, value in told["rounds"].items()}
    return centres


def replay_records(
    records: Iterable[tuple[Mapping[str, Any], Bytes]],
    centres: GlobalParams,
    members: HubMembership,
    tally: HubCounters,
) -> int:
    """Do once more what records tell; return how many updates that were."""
    updates = 0
    for values, payload in records:
        if values["kind"] not in ("update", "refuse"):
            continue
        member = members.admit(values["worker"], 0.0)
        fragment = values["fragment"]
        member.rounds[fragment] = values["round"], values.get("why", "")
        if values["kind"] == "update":
            delta, _ = centres.unpacked(fragment, values["dtype"], payload)
            centres.take(fragment, delta, values["weight"], values["workers"])
            tally.count(member, values["samples"], values["staleness"])
            updates += 1
    return updates
