"""Why a worker can't take part in a run; its model may be one that the hub can't hold."""

from __future__ import annotations

from paceline._core.format import format_bytes
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.hub.membership import HubMembership
from paceline.async_dp.protocol.hub_messages import PROTOCOL_VERSION, meta_number
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.errors import DamagedEnvelope
from paceline.transport.envelope import Bytes
from paceline.transport.header_layout import Header
from paceline.world.machine_facts import available_nbytes

__all__ = ["layout_or_refusal"]

_PACKED_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
_MIN_RATE, _MAX_RATE = 100.0, 1e13  # bytes per second that a worker may ask for


def layout_or_refusal(
    header: Header,
    payload: Bytes,
    *,
    run: str,
    members: HubMembership,
    expected: ParameterLayout | None,
    rules: HubRules,
) -> ParameterLayout | str:
    """Return the layout of the model that a hello describes, or why its worker is refused.

    Args:
        header: of the hello.
        payload: of the hello.
        run: of the hub.
        members: the workers.
        expected: layout of the hub's model; None: that of this worker, the first one.
        rules: of the hub.
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
        return _problem(layout, rules) or layout
    difference = expected.difference(layout)
    return f"its model differs from the hub's: {difference}" if difference else layout


def _problem(layout: ParameterLayout, rules: HubRules) -> str:
    """Return why a hub can't serve a model, empty if it can; nothing is allocated."""
    hubs = rules.shard.count
    if len(layout.fragments) < hubs:
        return f"its model has {len(layout.fragments)} fragments, too few for {hubs} hubs"
    if too_long := layout.oversized_fragment():
        return f"{too_long}; use more fragments (fragments=)"
    served = layout.fragments[rules.shard.index :: hubs]
    needed, available = _needed_nbytes([each.numel for each in served], rules), available_nbytes()
    if needed > available:
        return (
            f"its model of {layout.numel:,} parameters needs {format_bytes(needed)} of memory in this hub, "
            f"{format_bytes(available)} are available; use several hubs (--shard) or a machine with more"
        )
    return ""


def _needed_nbytes(numels: list[int], rules: HubRules) -> int:
    """Return the memory for fragments: parameters, momentum and its sum, an unpacked update, packed copies."""
    delayed = rules.outer.has_momentum and rules.outer.name == "delayed-nesterov"
    per_element = 4 * (2 + rules.outer.has_momentum + delayed) + _PACKED_NBYTES[rules.down]
    return per_element * sum(numels) + 4 * max(numels)
