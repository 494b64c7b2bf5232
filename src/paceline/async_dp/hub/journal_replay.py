"""Recovery of a hub: facts of a snapshot, and replay of the journal after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.async_dp.hub.membership import HubCounters, HubMembership, Rounds
from paceline.async_dp.hub.quorum_merging import merge_pending
from paceline.async_dp.hub.update_intake import replay_update
from paceline.async_dp.hub.update_merging import GlobalParams
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.transport.envelope import Bytes

__all__ = ["replay_records", "restore_snapshot", "snapshot_facts"]

_REPLAYED = ("join", "back", "silent", "leave", "update", "refuse")


def snapshot_facts(
    run: str, params: GlobalParams, members: HubMembership, counters: HubCounters
) -> dict[str, Any]:
    """Return the part of a snapshot without the tensors, as plain values."""
    keys = members.keys
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
                "key": member.key,
                "updates": member.updates,
                "alive": member.number in members.alive,
                "throughput": member.throughput,
                "rounds": _plain_rounds(member.rounds),
            }
            for member in members
            if member.rounds or member.key or member.number in members.alive
        },
        "departed": {str(number): _plain_rounds(rounds) for number, rounds in members.departed.items()},
        "departed_keys": {str(number): keys[number] for number in members.departed if number in keys},
    }


def _plain_rounds(rounds: Rounds) -> dict[str, list[Any]]:
    return {str(fragment): list(judged) for fragment, judged in rounds.items()}


def _rounds(plain: Mapping[str, Any]) -> Rounds:
    return {int(fragment): (round, why) for fragment, (round, why) in plain.items()}


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
        member.key = values.get("key", "")
        member.rounds = _rounds(values["rounds"])
        if values.get("alive"):
            member.throughput = values["throughput"]
            members.mark_alive(member)
    members.restore_departed(
        {int(each): _rounds(plain) for each, plain in facts.get("departed", {}).items()},
        {int(each): key for each, key in facts.get("departed_keys", {}).items()},
    )
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
        kind = values["kind"]
        if kind == "merge":
            merge_pending(values, params, members)
        if kind not in _REPLAYED:
            continue
        member = members.get_or_add(values["worker"])
        if kind in ("join", "back"):
            member.name = values.get("name", member.name)
            member.key = values.get("key", member.key)
            members.mark_alive(member)
        elif kind in ("silent", "leave"):
            members.mark_dead(member)
        else:
            member.rounds[values["fragment"]] = values["round"], values.get("why", "")
        if kind == "update":
            members.report_throughput(member, values["rate"])
            replay_update(values, payload, params, member)
            counters.add(member, values["samples"], values["staleness"])
            updates += 1
    return updates
