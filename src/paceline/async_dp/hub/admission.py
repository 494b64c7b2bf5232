"""Why a worker can't take part in a run (pure)."""

from __future__ import annotations

from paceline.async_dp.hub.membership import HubMembership
from paceline.async_dp.protocol.hub_messages import PROTOCOL_VERSION, meta_number
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.errors import DamagedEnvelope
from paceline.transport.envelope import Bytes
from paceline.transport.header_layout import Header

__all__ = ["layout_or_refusal"]

_MIN_RATE, _MAX_RATE = 100.0, 1e13  # bytes per second that a worker may ask for


def layout_or_refusal(
    header: Header,
    payload: Bytes,
    *,
    run: str,
    members: HubMembership,
    expected: ParameterLayout | None,
    hubs: int,
) -> ParameterLayout | str:
    """Return the layout of the model that a hello describes, or why its worker is refused.

    Args:
        header: of the hello.
        payload: of the hello.
        run: of the hub.
        members: the workers.
        expected: layout of the hub's model; None: that of this worker, the first one.
        hubs: number of hubs that share the fragments.
    """
    version, rate = header.meta.get("version"), meta_number(header.meta, "rate")
    if header.run not in ("", run):
        return f"this hub serves run {run!r}, the worker requests run {header.run!r}"
    if version != PROTOCOL_VERSION:
        return f"the worker has protocol version {version!r}, the hub {PROTOCOL_VERSION}"
    if rate is not None and not _MIN_RATE <= rate <= _MAX_RATE:
        return f"its bandwidth is {rate:g} bytes per second, it must be {_MIN_RATE:g} to {_MAX_RATE:g}"
    if members.get(header.source) is None and len(members.alive) >= members.limit:
        return f"this hub has {members.limit} workers already"
    try:
        layout = ParameterLayout.unpack(payload)
    except DamagedEnvelope as error:
        return str(error)
    if expected is None:
        if len(layout.fragments) < hubs:
            return f"its model has {len(layout.fragments)} fragments, too few for {hubs} hubs"
        return layout
    difference = expected.difference(layout)
    return f"its model differs from the hub's: {difference}" if difference else layout
