"""Arbitrary messages of an admitted worker or of a hub break neither, and only valid updates are merged."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hub_driver import LAYOUT, NUMEL, PACKING, HubDriver
from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import split_message
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS, UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_session import HubSession
from paceline.transport.envelope import Envelope
from paceline.transport.transport_interface import HUB

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([math.nan, math.inf, -math.inf, 1.5, -1.0, 1e300]),
    st.text(max_size=20),
)
META = st.dictionaries(
    st.sampled_from(
        ["base", "samples", "steps", "rate", "score", "before", "revision", "lr", "version", "name", "every"]
        + [
            "session",
            "fragment",
            "have",
            "layout",
            "why",
            "workers",
            "run",
            "phase",
            "slot",
            "slots",
            "yours",
        ]
    ),
    VALUES,
    max_size=8,
)
KINDS = st.sampled_from(
    ["hello", "update", "fetch", "parameters", "score", "beat", "bye", "welcome", "refusal", "who", "ack"]
    + ["global_params", "ask", "adopt", "together", "strange"]
)
PAYLOADS = st.one_of(
    st.binary(max_size=80),
    st.just(bytes(PACKING.nbytes)),
    st.just(bytes(PACKING.pack(torch.full((NUMEL,), math.nan)))),
    st.just(LAYOUT.pack()),
)


@st.composite
def messages(draw: Any, source: int, target: int) -> HubMessage:
    return HubMessage(
        draw(KINDS),
        source,
        target,
        draw(st.integers(0, 2**63 - 1)),
        draw(st.integers(-3, 3)),
        draw(META),
        draw(PAYLOADS),
        draw(st.sampled_from([*UPDATE_CODECS, "", "topk"])),
    )


@pytest.mark.thorough
@given(st.lists(st.tuples(messages(1, HUB), st.integers(0, 3)), max_size=25))
@settings(max_examples=150, deadline=None)
def test_a_hub_survives_arbitrary_messages_of_an_admitted_worker(sent: list[tuple[HubMessage, int]]) -> None:
    driver = HubDriver()
    driver.join(1, 2)
    for message, pause in sent:
        driver.now += pause
        message.payload = bytes(message.payload)
        for envelope in driver.envelopes(message, frame_nbytes=4096):
            driver.deliver(envelope)
    assert torch.isfinite(driver.theta).all()
    driver.sessions[2] = 4242
    driver.hello(2)
    latest = driver.hub.members.get(2)
    assert latest is not None
    before = driver.hub.updates
    (answer, *_) = [
        each
        for each in driver.update(2, 0, torch.zeros(NUMEL), base=driver.hub.updates)
        if each.kind == "ack"
    ]
    assert answer.meta["why"] == ""
    assert driver.hub.updates == before + 1


@given(st.lists(messages(HUB, 7), max_size=25))
@settings(max_examples=150, deadline=None)
def test_a_worker_survives_arbitrary_messages_of_its_hub(sent: list[HubMessage]) -> None:
    net = torch.nn.Linear(4, 3)
    (fragment,) = LAYOUT.fragments
    replica = FragmentReplica(fragment, dict(net.named_parameters()), UpdateCodec(fragment, "fp32"))
    sessions = iter(range(1, 10**6))
    session = HubSession(
        7, "w", LAYOUT, {0: replica}, Outbox(None, 7), hello_meta={}, new_session_id=lambda: next(sessions)
    )
    for number, message in enumerate(sent):
        for envelope in split_message(message, "run", number, 1, 4096):
            header = envelope.header
            if header.target == 7:
                session.receive(Envelope(header, bytes(envelope.payload)), float(number))
        session.pump(float(number))
        session.next_due()
