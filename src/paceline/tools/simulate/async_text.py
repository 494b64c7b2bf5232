"""What runs in virtual time mean, in sentences: which setting to take, what bounds it, what went wrong (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline._core.format import format_seconds
from paceline.tools.simulate.async_rows import AsyncRow

__all__ = ["async_findings"]

_BUSY = 0.8
"""Share of the time from which on a hub's link is called full."""

_LITTLE, _MUCH = 0.01, 0.25
_EQUAL = 1.05


def async_findings(
    rows: Sequence[AsyncRow], given: float | None = None, outer: str = "averaging"
) -> list[str]:
    """Return what follows from the rows, one sentence or two each.

    Args:
        rows: DDP's may be among them. given: the loss that times are told to, None if it is the one that DDP ends with.
        outer: optimizer of the hub.
    """
    ddp = next((row for row in rows if row.is_ddp), None)
    stars = [row for row in rows if not row.is_ddp]
    findings = [_advice(stars, ddp, given)]
    if ddp is not None:
        findings.append(_bound_of_ddp(ddp))
    findings += _full_links(stars)
    findings += [line for row in stars for line in _mishaps(row, outer)]
    return [line for line in findings if line]


def _advice(stars: Sequence[AsyncRow], ddp: AsyncRow | None, given: float | None) -> str:
    aim = "the loss that DDP ends with" if given is None else f"a loss of {given:g}"
    there = [row for row in stars if row.seconds_to_target is not None and not row.diverged]
    if not there:
        sound = [row for row in stars if not row.diverged]
        if not sound:
            return "All settings diverged: lower --lr or --outer-lr, or take averaging."
        best = min(sound, key=lambda row: row.loss)
        if ddp is None and given is None:
            return f"Best at the end: {best.name}, loss {best.loss:.4g}."
        return (
            f"None comes to {aim} in this time; the nearest is {best.name} with {best.loss:.4g}. "
            "Give it longer (--for), a smaller k, or take DDP."
        )
    best = min(there, key=lambda row: row.seconds_to_target or 0.0)
    when = f"comes to {aim} in {format_seconds(best.seconds_to_target or 0.0)}"
    if best.speedup is None:
        return f"Take {best.name}: it {when}. {_cheaper(best, there)}".rstrip()
    if best.speedup < 1 / _EQUAL:
        return f"Take DDP: {best.name} {when}, DDP itself {1 / best.speedup:.2g} times as soon."
    if best.speedup < _EQUAL:
        return f"No difference: {best.name} {when}, as soon as DDP, which is simpler and repeats to the bit."
    return f"Take {best.name}: it {when}, {best.speedup:.2g} times as soon as DDP. {_cheaper(best, there)}".rstrip()


def _cheaper(best: AsyncRow, there: Sequence[AsyncRow]) -> str:
    """Return that another setting is nearly as quick with far fewer bytes, if one is."""
    near = [
        row
        for row in there
        if row.nbytes < best.nbytes / 1.5
        and (row.seconds_to_target or 0) < 1.1 * (best.seconds_to_target or 0)
    ]
    if not near:
        return ""
    least = min(near, key=lambda row: row.nbytes)
    return f"{least.name} is nearly as quick with {least.nbytes / best.nbytes:.0%} of the bytes."


def _bound_of_ddp(ddp: AsyncRow) -> str:
    shares = {
        "the network": ddp.communication,
        "the slowest machine": ddp.waiting,
    }
    much = [f"{share:.0%} for {what}" for what, share in shares.items() if share >= _MUCH / 2]
    if not much:
        return "DDP waits for little here: machines are alike, and the network is quick enough for it."
    return f"DDP waits: of a worker's time {' and '.join(much)}."


def _full_links(stars: Sequence[AsyncRow]) -> list[str]:
    full = [row for row in stars if row.hub_busy >= _BUSY]
    if full:
        names = ", ".join(f"{row.name} ({row.hub_busy:.0%})" for row in full)
        return [
            f"The hub's link is full, so that it bounds what more workers would bring: {names}. "
            "Take a larger k, a smaller compression (--down int8), a quicker --hub-link, or several hubs in shards; "
            "fragments level out the peaks."
        ]
    busiest = max(stars, key=lambda row: row.hub_busy, default=None)
    if busiest is None:
        return []
    if busiest.hub_busy < _LITTLE:
        return ["The hub's link is hardly in use."]
    return [f"The hub's link is in use for at most {busiest.hub_busy:.0%} of the time ({busiest.name})."]


def _mishaps(row: AsyncRow, outer: str) -> list[str]:
    findings = []
    if row.diverged:
        findings.append(f"{row.name} diverged: {_why(outer)}")
    elif row.regressed:
        findings.append(f"{row.name} got worse again, from {row.lowest:.3g} to {row.loss:.3g}: {_why(outer)}")
    refused = {why: count for why, count in row.refused.items() if why not in ("repeated", "not in session")}
    if refused:
        reasons = ", ".join(f"{count} {why}" for why, count in refused.items())
        findings.append(f"{row.name}: the hub refused {reasons}.")
    findings += [f"{row.name}: replaced {each}." for each in row.replaced]
    skipped, sent = row.counts.get("skipped", 0), row.counts.get("sent", 0)
    if skipped > _MUCH * sent and skipped > 1:
        findings.append(
            f"{row.name}: {skipped:.0f} sendings were left out, since what was sent before was still under way: "
            "the links are too slow for this k, messages were lost, or the hub was away."
        )
    spoilt = {
        name.removeprefix("spoilt: "): count
        for name, count in row.counts.items()
        if name.startswith("spoilt")
    }
    if spoilt:
        what = ", ".join(f"{count} {name}" for name, count in spoilt.items())
        findings.append(
            f"{row.name}: of the messages {what}; {row.counts.get('resent', 0):.0f} were said again."
        )
    return findings


def _why(outer: str) -> str:
    """Return why a setting diverged, by its outer optimizer, and what to do."""
    if outer == "nesterov":
        return (
            "Nesterov at every arrival amplifies each of N updates that tell about the same, as if they were N steps. "
            "Take delayed-nesterov, or averaging."
        )
    return "steps are too large for so many of them apart. Take a smaller --lr or --outer-lr, or a smaller k."
