"""What the hub does with an update: screens it, journals it, merges it and acknowledges it.

The journal has an update before the global parameters do: what can't be written is neither merged nor acknowledged, and
its worker sends it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.hub.membership import HubCounters, HubMember, HubMembership
from paceline.async_dp.hub.quorum_merging import QuorumMerging, add_pending
from paceline.async_dp.hub.update_merging import GlobalParams, MergedFragment
from paceline.async_dp.hub.update_screening import UpdateScreen
from paceline.async_dp.protocol.hub_messages import HubMessage, UpdateHeader
from paceline.async_dp.row_arithmetic import FloatRow

__all__ = ["UpdateIntake", "replay_update"]


class UpdateIntake:
    """Takes in the updates of all workers, in the order in which they arrive.

    Args:
        rules: of the hub.
        members: the workers.
        counters: totals of merged updates.
        refused: counts of refused messages, by reason.
        record: writes a decision to the journal.
        acknowledge: sends the decision to the worker: member, message, why it was refused (empty if it was accepted),
            the time, and whether the update came for the first time.

    Attributes:
        since_snapshot: accepted updates since the last snapshot.
        screen: screens updates.
        merging: merges updates by quorum.
    """

    def __init__(
        self,
        rules: HubRules,
        members: HubMembership,
        counters: HubCounters,
        refused: Counter[str],
        record: Callable[..., object],
        acknowledge: Callable[[HubMember, HubMessage, str, float, bool], object],
    ) -> None:
        self._rules, self._members, self._counters, self._refused = rules, members, counters, refused
        self._record, self._acknowledge = record, acknowledge
        self.screen = UpdateScreen(rules.screen)
        self.merging = QuorumMerging(rules.merge, members, record)
        self.since_snapshot = 0

    def on_update(self, message: HubMessage, member: HubMember, params: GlobalParams, now: float) -> None:
        """Merge an update, let it wait for a merge, or refuse it; and acknowledge it.

        Raises:
            DamagedEnvelope: its packet has another size than it must.
            CheckpointError: the journal can't take it; nothing was changed.
        """
        fragment = message.fragment
        unexpected = member.unexpected_round(fragment, message.round)
        if unexpected is not None:
            reason, why = unexpected
            self._refused[reason] += 1
            self._acknowledge(member, message, why, now, False)
            return
        header = UpdateHeader.parse(message.meta)
        merged = params.fragments[fragment]
        workers = max(1, len(self._members.alive))
        staleness = (merged.revision - header.base) / workers
        delta, norm = params.unpack(fragment, message.dtype, message.payload)
        why = self._screened(message, header, params, norm, staleness, now)
        if why:
            self._record(
                "refuse",
                worker=member.number,
                fragment=fragment,
                round=message.round,
                norm=norm,
                why=why,
                until=self.quarantine_left(member, now),
            )
            member.refused += 1
            self._refused[why.partition(":")[0]] += 1
        else:
            self._accept(message, header, member, merged, delta, norm=norm, staleness=staleness, now=now)
            self._counters.add(member, header.samples, staleness)
            self.since_snapshot += 1
        member.score = member.score if header.score is None else float(header.score)
        member.rounds[fragment] = message.round, why
        self._acknowledge(member, message, why, now, True)

    def _accept(
        self,
        message: HubMessage,
        header: UpdateHeader,
        member: HubMember,
        merged: MergedFragment,
        delta: FloatRow,
        *,
        norm: float,
        staleness: float,
        now: float,
    ) -> None:
        """Merge an update, or let it wait for a merge."""
        self._members.report_throughput(member, header.rate)
        workers, weight = max(1, len(self._members.alive)), self._rules.staleness.weight(staleness)
        waits = self._rules.merge.on == "quorum"
        if waits:
            decided = self.merging.weigh(message.fragment, header, staleness, weight)
        else:
            weight *= self._members.share(member)
            decided = {"revision": merged.revision + 1, "weight": weight}
        self._record(
            "update",
            message.payload,
            worker=member.number,
            fragment=message.fragment,
            round=message.round,
            norm=norm,
            base=header.base,
            samples=header.samples,
            steps=header.steps,
            rate=header.rate,
            score=header.score,
            before=header.before,
            dtype=message.dtype,
            workers=workers,
            staleness=staleness,
            **decided,
        )
        if waits:
            add_pending(decided, delta, merged, member)
            self.merging.add(message.fragment, member.number, header, now)
        else:
            merged.merge(delta, weight, workers)
            member.merged[message.fragment] = merged.revision

    def quarantine_left(self, member: HubMember, now: float) -> float:
        """Return the seconds that a worker stays in quarantine."""
        return round(self.screen.quarantine_left(member.number, now), 1)

    def _screened(
        self,
        message: HubMessage,
        header: UpdateHeader,
        params: GlobalParams,
        norm: float,
        staleness: float,
        now: float,
    ) -> str:
        """Return why an update is refused, empty if it is merged."""
        fragment = message.fragment
        if not header.is_plausible(params.fragments[fragment].revision):
            return "implausible revision, samples or steps"
        why = self.screen.check(message.source, fragment, norm, header, now, lambda: params.norm(fragment))
        if not why and self._rules.staleness.weight(staleness) == 0.0:
            return f"stale: {staleness:.1f} rounds old"
        return why


def replay_update(values: Mapping[str, Any], payload: Any, params: GlobalParams, member: HubMember) -> None:
    """Merge an update from the journal again, with the weight that it had, or let it wait again."""
    fragment = params.fragments[values["fragment"]]
    delta, _ = params.unpack(values["fragment"], values["dtype"], payload)
    if "weight" not in values:
        add_pending(values, delta, fragment, member)
        return
    fragment.merge(delta, values["weight"], values["workers"])
    member.merged[values["fragment"]] = fragment.revision
