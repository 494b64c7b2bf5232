"""Recovery of a hub: facts of a snapshot, and replay of the journal after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.async_dp.hub.membership import HubCounters, HubMembership
from paceline.async_dp.hub.update_merging import GlobalParams
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.transport.envelope import Bytes

__all__ = ["replay_records", "restore_snapshot", "snapshot_facts"]


def snapshot_facts(
    run: str, params: GlobalParams, members: HubMembership, counters: HubCounters
) -> dict[str, Any]:
    """Return the part of a snapshot without the tensors, as plain values."""
    return {
        "run": run,
        "layout": params.layout.pack().hex(),
        "global_params": params.facts(),
        "updates": counters.updates,
        "samples": counters.samples,
        "staleness": counters.histogram.counts,
        "members": {
            str(member.number): {
                "name": member.name,
                "updates": member.updates,
                "rounds": {str(fragment): list(judged) for fragment, judged in member.rounds.items()},
            }
            for member in members
            if member.rounds
        },
    }


def restore_snapshot(
    facts: Mapping[str, Any],
    tensors: Mapping[str, Any],
    make_params: Callable[[ParameterLayout], GlobalParams],
    members: HubMembership,
    counters: HubCounters,
) -> GlobalParams:
    """Fill empty `members` and `counters` from a snapshot, and return the global parameters.

    Raises:
        CheckpointError: the snapshot is of another outer optimizer or shard.
    """
    params = make_params(ParameterLayout.unpack(bytes.fromhex(facts["layout"])))
    params.load(tensors, facts["global_params"])
    counters.updates, counters.samples = facts["updates"], facts["samples"]
    counters.histogram.counts = list(facts["staleness"])
    for number, values in facts["members"].items():
        member = members.get_or_add(int(number))
        member.name, member.updates = values["name"], values["updates"]
        member.rounds = {int(fragment): (round, why) for fragment, (round, why) in values["rounds"].items()}
    return params


def replay_records(
    records: Iterable[tuple[Mapping[str, Any], Bytes]],
    params: GlobalParams,
    members: HubMembership,
    counters: HubCounters,
) -> int:
    """Apply the journal's records again; return the number of updates among them."""
    updates = 0
    for values, payload in records:
        if values["kind"] not in ("update", "refuse"):
            continue
        member = members.get_or_add(values["worker"])
        fragment = values["fragment"]
        member.rounds[fragment] = values["round"], values.get("why", "")
        if values["kind"] == "update":
            delta, _ = params.unpack(fragment, values["dtype"], payload)
            params.fragments[fragment].merge(delta, values["weight"], values["workers"])
            counters.add(member, values["samples"], values["staleness"])
            updates += 1
    return updates
