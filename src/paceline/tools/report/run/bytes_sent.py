"""What a run has sent, beside what it would have: the words and tables of the report, from ``run.json``.

A run that was cut off, or is of an older version, tells less or nothing; then less is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline._core.format import format_decimal

__all__ = ["SentBytes", "summarise_sent_bytes"]

_BUCKETS_SHOWN = 12


@dataclass(frozen=True)
class SentBytes:
    """What the page shows.

    Attributes:
        sentence: the gist. table: what was counted where, head first. buckets: what compression did to each bucket of
            gradients, head first; empty where nothing was compressed.
    """

    sentence: str
    table: Sequence[Sequence[str]]
    buckets: Sequence[Sequence[str]]


def summarise_sent_bytes(facts: Mapping[str, object]) -> SentBytes | None:
    """Return what the facts of a run tell of bytes; None: nothing, or there was nothing to be sent."""
    told = facts.get("sent")
    if not isinstance(told, Mapping):
        return None
    sent, would_be = _number(told, "sent_nbytes"), _number(told, "would_be_nbytes")
    if not would_be:
        return None
    rows = [["rank 0's exchanges", format_decimal(sent) if sent is not None else "not counted"]]
    rows += [["float32 gradients every step would have been", format_decimal(would_be)]]
    rows += _interface_rows(told.get("interface bytes"))
    return SentBytes(_sentence(sent, would_be), [["", "bytes"], *rows], _bucket_rows(told.get("buckets")))


def _sentence(sent: float | None, would_be: float) -> str:
    if sent is None:
        return "What this strategy sends is not counted."
    text = f"Rank 0 sent {format_decimal(sent)}"
    if sent and would_be > 1.05 * sent:
        text += f", {_times(would_be / sent)} less than float32 gradients every step"
    return text + "."


def _interface_rows(told: object) -> list[list[str]]:
    """Return what the kernel counted between begin and end."""
    if not isinstance(told, Mapping):
        return []
    begin, end = told.get("at begin"), told.get("at end")
    if not isinstance(begin, Mapping) or not isinstance(end, Mapping):
        return []
    rows = []
    for way in ("sent", "received"):
        first, last = _number(begin, way), _number(end, way)
        if first is not None and last is not None:
            rows.append([f"the interfaces of rank 0's host, {way}", format_decimal(last - first)])
    return rows


def _bucket_rows(buckets: object) -> list[list[str]]:
    known = [each for each in buckets if isinstance(each, Mapping)] if isinstance(buckets, list) else []
    if not known:
        return []
    rows = [["bucket", "gradients", "sent a step", "uncompressed", "error"]]
    for bucket in known[:_BUCKETS_SHOWN]:
        error = _number(bucket, "error")
        rows.append(
            [
                f"{bucket.get('first parameter')} … ({bucket.get('parameters')})",
                *(
                    format_decimal(_number(bucket, key) or 0.0)
                    for key in ("nbytes", "sent_nbytes", "uncompressed_nbytes")
                ),
                "–" if error is None else f"{100 * error:.2g}\u00a0%",
            ]
        )
    if len(known) > _BUCKETS_SHOWN:
        rows.append([f"and {len(known) - _BUCKETS_SHOWN} more", "", "", "", ""])
    return rows


def _number(told: Mapping[object, object], key: str) -> float | None:
    value = told.get(key)
    return float(value) if isinstance(value, int | float) else None


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 9.95 else f"{ratio:.2g} times"
