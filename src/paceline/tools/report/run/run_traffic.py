"""Bytes that a run sent, compared with uncompressed gradients, from the ``sent`` facts of ``run.json``.

Runs that were interrupted or written by older versions lack some or all of these facts; the rest is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline._core.format import format_decimal, format_percent, format_ratio
from paceline.tools.report.page.html_page import PageTable, SentBytes

__all__ = ["summarise_sent_bytes"]

_BUCKETS_SHOWN = 12


def summarise_sent_bytes(facts: Mapping[str, object]) -> SentBytes | None:
    """Return the section on bytes sent; None without such facts, or if there was nothing to send."""
    record = facts.get("sent")
    if not isinstance(record, Mapping):
        return None
    sent, would_be = _number(record, "sent_nbytes"), _number(record, "would_be_nbytes")
    if not would_be:
        return None
    rows = [["exchanges of rank 0", format_decimal(sent) if sent is not None else "not counted"]]
    rows += [["float32 gradients at every step", format_decimal(would_be)]]
    rows += _interface_rows(record.get("interface bytes"))
    tables = [PageTable(title="Bytes sent", table=[["counter", "bytes"], *rows])]
    if buckets := _bucket_rows(record.get("buckets")):
        tables.append(PageTable(title="Compression by bucket", table=buckets))
    return SentBytes(_sentence(sent, would_be), tables)


def _sentence(sent: float | None, would_be: float) -> str:
    if sent is None:
        return "Bytes sent by this strategy are not counted."
    text = f"Rank 0 sent {format_decimal(sent)}"
    if sent and would_be > 1.05 * sent:
        text += f", {format_ratio(would_be / sent)} less than float32 gradients at every step"
    return text + "."


def _interface_rows(counters: object) -> list[list[str]]:
    """Return the difference of the kernel's interface counters between begin and end."""
    if not isinstance(counters, Mapping):
        return []
    begin, end = counters.get("at begin"), counters.get("at end")
    if not isinstance(begin, Mapping) or not isinstance(end, Mapping):
        return []
    rows = []
    for direction in ("sent", "received"):
        first, last = _number(begin, direction), _number(end, direction)
        if first is not None and last is not None:
            rows.append([f"network interfaces of rank 0's host, {direction}", format_decimal(last - first)])
    return rows


def _bucket_rows(buckets: object) -> list[list[str]]:
    known = [each for each in buckets if isinstance(each, Mapping)] if isinstance(buckets, list) else []
    if not known:
        return []
    rows = [["bucket", "gradients", "sent per step", "uncompressed", "error"]]
    for bucket in known[:_BUCKETS_SHOWN]:
        error = _number(bucket, "error")
        sizes = (_number(bucket, key) or 0.0 for key in ("nbytes", "sent_nbytes", "uncompressed_nbytes"))
        rows.append(
            [
                f"{bucket.get('first parameter')} … ({bucket.get('parameters')})",
                *(format_decimal(size) for size in sizes),
                "–" if error is None else format_percent(error),
            ]
        )
    if len(known) > _BUCKETS_SHOWN:
        rows.append([f"and {len(known) - _BUCKETS_SHOWN} more", "", "", "", ""])
    return rows


def _number(record: Mapping[object, object], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else None
