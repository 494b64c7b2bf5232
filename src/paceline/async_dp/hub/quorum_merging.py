"""Merges the waiting updates of a hub by quorum; records say which updates a merge consists of.

    add     an update waits: it is added to the sum of those of its fragment
    merge   once its window is due, their mean makes one step

Records come first, so a hub that is restarted repeats both to the bit, whatever its clock says then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.async_dp.hub.hub_settings import MergeRules
from paceline.async_dp.hub.membership import HubMember, HubMembership
from paceline.async_dp.hub.merge_window import MergeWindow, SampleWeights, merge_scale
from paceline.async_dp.hub.update_merging import GlobalParams, MergedFragment
from paceline.async_dp.protocol.hub_messages import UpdateHeader
from paceline.async_dp.row_arithmetic import FloatRow
from paceline.errors import DamagedCheckpoint

__all__ = ["QuorumMerging", "add_pending", "merge_pending"]


class QuorumMerging:
    """The windows of all fragments.

    Args:
        rules: quorum.
        members: the workers.
        record: writes a decision to the journal.

    Attributes:
        merges: number of merges since the hub started.
        latest: values of the last merge's record; None before the first.
    """

    def __init__(self, rules: MergeRules, members: HubMembership, record: Callable[..., object]) -> None:
        self._rules, self._members, self._record = rules, members, record
        self._windows: dict[int, MergeWindow] = {}
        self._weights: dict[int, SampleWeights] = {}
        self.merges = 0
        self.latest: dict[str, Any] | None = None

    def weigh(self, fragment: int, header: UpdateHeader, staleness: float, weight: float) -> dict[str, Any]:
        """Return the values that the record of a waiting update needs besides the usual ones.

        Args:
            fragment: of the update.
            header: of the update.
            staleness: in rounds.
            weight: relative to a fresh update.
        """
        counted = self._weights.setdefault(fragment, SampleWeights()).counted(header.samples)
        return {"counted": counted, "relative": weight, "late": staleness > 0}

    def add(self, fragment: int, worker: int, header: UpdateHeader, now: float) -> None:
        """Register an update that waits."""
        interval = header.samples / header.rate if header.rate is not None and header.rate > 0 else math.nan
        self._window(fragment).add(worker, now, interval)

    def restore(self, params: GlobalParams) -> None:
        """Register the updates that a restarted hub finds waiting."""
        for number, fragment in params.fragments.items():
            for worker in fragment.pending.workers if fragment.pending is not None else ():
                self._window(number).restore(worker)

    def holds(self, worker: int, fragment: int) -> bool:
        """Return whether a worker has to wait for a merge before it gets parameters that include its update."""
        window = self._windows.get(fragment)
        return window is not None and worker in window.waiting

    def next_due(self, now: float) -> float:
        """Return when the next merge is due, as far as is known."""
        if not self._windows:
            return math.inf
        return min(self._due(window, now) for window in self._windows.values())

    def merge_due(self, params: GlobalParams, now: float) -> None:
        """Merge all that is due.

        Raises:
            CheckpointError: the journal can't take it; what remains stays due.
        """
        for number, window in self._windows.items():
            if self._due(window, now) <= now:
                self._merge(number, window, params, now)

    def _merge(self, number: int, window: MergeWindow, params: GlobalParams, now: float) -> None:
        fragment, workers = params.fragments[number], max(1, len(self._members.alive))
        pending = fragment.pending
        assert pending is not None, "a window with updates has some that wait"
        updates = len(pending.workers)
        values: dict[str, Any] = {
            "fragment": number,
            "revision": fragment.revision + updates,
            "updates": updates,
            "workers": workers,
            "scale": merge_scale(updates, workers),
            "quorum": self._rules.needed(workers),
            "grace": round(window.grace(now), 6),
            "of": pending.workers,
            "late": pending.late,
        }
        self._record("merge", **values)
        merge_pending(values, params, self._members)
        window.close()
        self.merges += 1
        self.latest = values

    def _window(self, fragment: int) -> MergeWindow:
        return self._windows.setdefault(fragment, MergeWindow())

    def _due(self, window: MergeWindow, now: float) -> float:
        if not window.waiting:
            return math.inf
        if self._rules.on == "arrival":  # a hub that merged by quorum left them
            return now
        alive = self._members.alive
        return window.due(alive, self._rules.needed(len(alive)), now)


def add_pending(
    values: Mapping[str, Any], delta: FloatRow, fragment: MergedFragment, member: HubMember
) -> None:
    """Add an update to those that wait, by the values of its record."""
    fragment.wait(delta, member.number, values["counted"], values["relative"], late=values["late"])


def merge_pending(values: Mapping[str, Any], params: GlobalParams, members: HubMembership) -> None:
    """Merge the waiting updates of a fragment, by the values of a merge's record.

    Raises:
        DamagedCheckpoint: others wait than the record says.
    """
    number, fragment = values["fragment"], params.fragments[values["fragment"]]
    waiting = [] if fragment.pending is None else fragment.pending.workers
    if waiting != values["of"]:
        raise DamagedCheckpoint(
            f"a merge of fragment {number} is of workers {values['of']}; before it, the journal has updates of "
            f"{waiting}",
            remedy="restore the hub's folder from a copy",
        )
    fragment.merge_pending(values["scale"], values["workers"])
    for worker in waiting:
        member = members.get(worker)
        if member is not None:
            member.merged[number] = fragment.revision
