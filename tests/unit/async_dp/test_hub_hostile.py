"""Ten thousand malformed, hostile or extreme messages of an admitted worker: the hub lives, and names the worker."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hub_driver import LAYOUT, NUMEL, ONES, PACKING, RUN, HubDriver, kinds
from paceline.async_dp.hub.hub_settings import HubRules, ScreeningRules
from paceline.async_dp.protocol.hub_messages import PROTOCOL_VERSION, HubMessage
from paceline.async_dp.protocol.update_codec import UPDATE_CODECS, UpdateCodec
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.transport.envelope import Envelope
from paceline.transport.header_layout import Header

EXTREME = [
    *(math.nan, math.inf, -math.inf, 1e300, 5e-324, -1.0, 0, -(2**63), 2**63 - 1, 2**64 - 1),
    *(True, None, "", "x" * 15_000, "\0", "1e9", 1.5),
]
NAMES = (
    *("base", "samples", "steps", "rate", "score", "before", "revision", "lr", "every", "delay", "speed"),
    *("loss", "have", "layout", "version", "name", "session", "fragment", "why", "what", "ready"),
)
KINDS = (
    *["update"] * 12,
    *("hello", "fetch", "parameters", "score", "beat", "welcome", "later", "ack", "strange"),
)


class Hostile:
    """Makes messages that no correct worker sends."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        huge = {codec: torch.full((NUMEL,), 1e30 if codec != "fp16" else 6e4) for codec in UPDATE_CODECS}
        self.packets = [
            (codec, bytes(UpdateCodec(LAYOUT.fragments[0], codec).pack(value)))
            for codec, value in huge.items()
        ]
        for value in (math.nan, -math.inf):
            self.packets.append(("fp32", bytes(PACKING.pack(torch.full((NUMEL,), value)))))
        self.payloads = [
            *(packet for _, packet in self.packets),
            *(b"", b"\xff" * PACKING.nbytes, bytes(1), bytes(1 << 16), b"\xff" * 100, LAYOUT.pack()[:-3]),
        ]

    def meta(self) -> dict[str, Any]:
        """Return what an update needs, with some values replaced."""
        draw = self.random
        chosen = draw.sample(NAMES, draw.choice([0, 1, 1, 2, 6]))
        return {"samples": 1.0, "steps": 1, "base": 0} | {name: draw.choice(EXTREME) for name in chosen}

    def envelope(self, session: int, sequence: int) -> Envelope:
        draw = self.random
        kind, payload = draw.choice(KINDS), draw.choice(self.payloads)
        dtype = draw.choice([*UPDATE_CODECS, "", "topk"])
        if draw.random() < 0.7:
            dtype, payload = draw.choice(self.packets)
        meta = {"session": session, "fragment": 0, "version": PROTOCOL_VERSION} | self.meta()
        frames, offset, total, frame = 1, 0, len(payload), 0
        if draw.random() < 0.2:
            frames = draw.choice([2, 7, 2**40])
            frame = draw.randrange(frames)
            total = draw.choice([len(payload), len(payload) * 2, 2**50])
            offset = draw.randrange(total - len(payload) + 1)
        return Envelope(
            Header(
                draw.choice([*[RUN] * 20, "", "other"]), kind, 1, draw.choice([*[0] * 20, 9]), sequence,
                2**63 - 1 if sequence % 1000 == 999 else sequence, frame, frames, offset, total, dtype, (),
                len(payload), 0, meta,
            ),
            payload,
        )  # fmt: skip


def test_ten_thousand_hostile_messages_of_an_admitted_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = Hostile(seed=7)
    caplog.set_level(logging.WARNING, "paceline.async_dp")
    with HubJournal.open(tmp_path, resume=True) as journal:
        screen = ScreeningRules(strikes=10, quarantine_seconds=0.001)  # so that all of them are looked at
        driver = HubDriver(HubRules(screen=screen), journal)
        driver.join(1, 2, 3, numbers=ONES)
        for round in range(10):
            for worker in (2, 3):
                driver.update(worker, round, 1e-3 * ONES, base=driver.hub.updates)
        before, updates = driver.theta.clone(), driver.hub.updates
        for number in range(10_000):
            if number % 50 == 0:
                driver.hello(1)
                driver.hub.members.get(1).rounds.clear()  # a round of 2**63 hides all later ones
            driver.now += 0.01
            driver.hub.receive(hostile.envelope(driver.sessions[1], 10**6 + number), driver.now)
            if number % 20 == 0:
                driver.commit()
        driver.commit()
        assert torch.equal(driver.theta, before)
        assert driver.hub.updates == updates
        reasons = {"not finite", "exploding", "DamagedEnvelope", "too long", "too many frames", "unexpected"}
        assert all(driver.hub.refused[each] > 20 for each in reasons), driver.hub.refused
        assert driver.hub.refused["invalid"] == 0, [each.message for each in caplog.records if each.exc_info]
        (answer,) = driver.update(2, 99, 1e-3 * ONES, base=updates)
        assert (answer.kind, answer.meta["why"]) == ("ack", "")
        assert kinds(driver.send("fetch", 3)) == ["global_params"]
        assert driver.hub.members.share(driver.hub.members.get(2)) == pytest.approx(1 / 3)
        driver.hub.snapshot()
        after = driver.theta.clone()
    assert "worker w1 (1) sent an invalid message" in caplog.text
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert {each["worker"] for each in ledger if each["kind"] in ("offence", "refuse")} == {1}
    assert len([each for each in ledger if each["kind"] == "offence"]) < 10, "at most one a minute"
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert torch.equal(HubDriver(journal=journal).theta, after)


@pytest.mark.parametrize("rate", [math.inf, 5e-324, math.nan, -1.0, 0, 1e300])
def test_a_hello_with_an_impossible_bandwidth_is_refused(rate: float) -> None:
    driver = HubDriver()
    (answer,) = driver.hello(1, rate=rate)
    assert answer.kind == "refusal"
    assert "bytes per second" in answer.meta["why"]


def test_whatever_a_handler_raises_the_hub_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HubDriver()
    driver.join(1, 2)

    def broken(message: HubMessage, member: object, now: float) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setitem(driver.hub._handlers, "score", broken)
    for _ in range(3):
        assert driver.send("score", 1, score=1.0) == []
    assert driver.hub.refused["invalid"] == 3
    assert driver.hub.quarantined(driver.now) == 1
    assert kinds(driver.update(2, 0, ONES)) == ["ack"]


@pytest.mark.parametrize(
    "meta",
    [
        {"steps": 1e300},
        {"steps": 2**53},
        {"score": 0.1, "before": 9.0},
        {"score": 0.1, "before": 9.0, "steps": 2**52},
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_no_report_of_a_worker_excuses_a_huge_update(meta: dict[str, Any], known: bool) -> None:
    driver = HubDriver()
    driver.join(1, 2, numbers=ONES)
    for round in range(10 if known else 0):
        driver.update(2, round, 1e-3 * ONES, base=driver.hub.updates)
    before = driver.theta.clone()
    (answer,) = driver.update(1, 0, 1e6 * ONES, base=driver.hub.updates, **meta)
    assert answer.meta["why"]
    assert torch.equal(driver.theta, before)
