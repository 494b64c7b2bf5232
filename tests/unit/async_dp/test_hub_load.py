"""A hub with many workers on slow and fast links: every message arrives whole, in bounded memory, at a fair share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

import pytest
import torch
from torch import nn

from hub_driver import HubDriver
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.async_dp.protocol.hub_messages import PROTOCOL_VERSION, HubMessage
from paceline.async_dp.protocol.message_assembly import MessageAssembler
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import LinearTask
from paceline.tools.simulate.simulated_machines import SimulatedMachine
from paceline.transport.envelope import Envelope

CENTRE_NBYTES = 8 << 20


class Links:
    """An exchange with a queue of eight frames per target, which leave at the rate of the target's link."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates, self.now = rates, 0.0
        self.refused, self.sent_nbytes, self.received_nbytes = Counter[str](), 0, 0
        self._leaving: dict[int, list[float]] = defaultdict(list)
        self.arrived: dict[int, list[tuple[float, HubMessage]]] = defaultdict(list)
        self._assemblers = {target: MessageAssembler(lambda header: 1 << 30) for target in rates}

    def send(self, envelope: Envelope) -> bool:
        target, nbytes = envelope.header.target, len(envelope.payload)
        leaving = self._leaving[target] = [each for each in self._leaving[target] if each > self.now]
        if len(leaving) >= 8:
            return False
        leaving.append(max([self.now, *leaving]) + nbytes / self.rates[target])
        self.sent_nbytes += nbytes
        message = self._assemblers[target].add(envelope)
        if message is not None:
            self.arrived[target].append((leaving[-1], message))
        return True

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        return []

    def peers(self) -> Collection[int]:
        return self.rates

    def close(self) -> None:
        pass


@pytest.mark.parametrize("targets", [16, 40, pytest.param(200, marks=pytest.mark.thorough)])
def test_every_message_arrives_whole_however_many_targets_there_are(targets: int) -> None:
    links = Links({target: 1e8 if target % 2 else 1e6 for target in range(1, targets + 1)})
    payload, sent = bytes(range(256)) * (CENTRE_NBYTES // 256), []
    sender = FrameSender(links, lambda: "run", on_sent=sent.append)
    for target in links.rates:
        sender.enqueue(HubMessage("global_params", 0, target, 7, 0, {}, payload, "fp32"))
    while sender.queued:
        links.now += min(sender.pump(links.now), 1.0)
    assert len(sent) == targets
    for target in links.rates:
        ((_, message),) = links.arrived[target]
        assert bytes(message.payload) == payload
    fast = max(links.arrived[target][0][0] for target in links.rates if target % 2)
    assert fast < 0.3, "the slow ones, which take 8 s, delay no fast one"


def test_frames_of_a_cancelled_message_are_left_out() -> None:
    links, sent = Links({1: 1e6}), []
    sender = FrameSender(links, lambda: "run", on_sent=sent.append)
    sender.enqueue(HubMessage("update", 1, 1, 3, 0, {}, bytes(CENTRE_NBYTES), "fp32"))
    sender.enqueue(HubMessage("update", 1, 1, 4, 0, {}, bytes(CENTRE_NBYTES), "fp32"))
    sender.pump(0.0)
    sender.cancel("update", 3, 0)
    while sender.queued:
        links.now += min(sender.pump(links.now), 1.0)
    assert [each.round for each in sent] == [4]
    assert links.sent_nbytes < CENTRE_NBYTES + (4 << 20)


def large_driver(workers: int, numel: int) -> HubDriver:
    """Return a hub of a model with so many numbers, and workers that have joined."""
    layout = ParameterLayout.of(nn.Linear(numel, 1, bias=False))
    driver = HubDriver(HubRules(down="fp32", screen=HubRules().screen))
    for worker in range(1, workers + 1):
        driver.hello(worker, layout)
    packet = bytes(UpdateCodec(layout.fragments[0], "fp32").pack(torch.ones(numel)))
    for envelope in driver.envelopes(HubMessage("parameters", 1, 0, 0, 0, {}, packet, "fp32")):
        driver.deliver(envelope)
    return driver


def test_packets_in_transit_are_bounded_and_a_slow_worker_is_sent_one_at_a_time() -> None:
    numel, workers = 1 << 21, 100  # 8 MiB
    driver = large_driver(workers, numel)
    hub, now = driver.hub, 0.0
    assert hub.params is not None
    fetches = hub._fetches
    fetches._max_nbytes = 64 << 20
    held: list[HubMessage] = []
    for worker in range(1, workers + 1):
        hub.params.fragments[0].revision += 1  # as if an update was merged
        for _ in range(3):  # the answer takes longer than the worker waits
            for envelope in driver.envelopes(HubMessage("fetch", worker, 0)):
                hub.receive(envelope, now)
        held += hub.commit(now)
    assert fetches.held_nbytes <= 64 << 20
    assert [each.target for each in held] == list(range(1, workers + 1)), "one packet each, and none waits"
    assert len({id(each.payload) for each in held}) == 8
    assert {each.round for each in held[8:]} == {held[7].round}
    for message in held:
        hub.sent(message)
    assert fetches.held_nbytes == 0


def test_a_worker_never_gets_parameters_without_its_own_update() -> None:
    numel = 1 << 16
    driver = large_driver(8, numel)
    hub = driver.hub
    hub._fetches._max_nbytes = 0  # four packets
    packet = bytes(UpdateCodec(hub.params.layout.fragments[0], "fp32").pack(torch.ones(numel)))
    revisions, held = {}, []
    for worker in range(1, 8):
        meta = {"samples": 1.0, "steps": 1, "base": hub.updates}
        for envelope in driver.envelopes(HubMessage("update", worker, 0, 1, 0, meta, packet, "fp32")):
            hub.receive(envelope, 0.0)
        revisions[worker] = hub.updates
        for envelope in driver.envelopes(HubMessage("fetch", worker, 0)):
            hub.receive(envelope, 0.0)
        held += [each for each in hub.commit(0.0) if each.kind == "global_params"]
    assert [each.target for each in held] == [1, 2, 3, 4]
    while held:
        message = held.pop(0)
        assert message.round >= revisions[message.target]
        hub.sent(message)
        held += hub.commit(0.0)
        revisions.pop(message.target)
    assert not revisions


def test_a_worker_with_a_new_session_gets_nothing_of_the_one_before() -> None:
    driver = large_driver(2, 1 << 20)
    links = Links({1: 1e5, 2: 1e5})
    server = HubServer(driver.hub, links)
    server.turn(driver.envelopes(HubMessage("fetch", 1, 0)), 0.0)
    assert server.queued == 1
    driver.sessions[1] = 4242
    hello = HubMessage(
        "hello", 1, 0, 0, 0, {"version": PROTOCOL_VERSION, "name": "w1"}, driver.hub.params.layout.pack()
    )
    links.now = 1.0
    server.turn(driver.envelopes(hello), 1.0)
    server.turn(driver.envelopes(HubMessage("fetch", 1, 0)), 1.0)
    while server.queued:
        links.now += min(server.turn((), links.now), 1.0)
    assert [message.kind for _, message in links.arrived[1]] == ["welcome", "global_params"]


def test_a_hub_without_memory_for_all_updates_takes_them_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.async_dp.hub import hub

    monkeypatch.setattr(hub, "_PARTIAL_NBYTES", 1 << 16)
    monkeypatch.setattr(hub, "_PARTIAL_NBYTES_PER_NUMBER", 0)
    plan = AsyncPlan(
        machines=[SimulatedMachine(step_seconds=0.05, up=2e6, down=1e8)] * 30,
        steps=400,
        cadence=SyncSchedule(20, 1, 5),
        compression=None,
        parameters=1 << 21,
        hub_up=1e9,
        hub_down=1e9,
    )
    found = simulate_async(plan, LinearTask(width=64))
    assert found.refused["no memory"] > 0, "30 updates of 8 KiB arrive at a time, in memory for 8"
    merged = [each["acknowledged"] for each in found.counts]
    assert min(merged) >= 0.5 * sum(merged) / len(merged)
    assert sum(merged) == found.updates


@pytest.mark.parametrize("workers", [40, pytest.param(200, marks=pytest.mark.thorough)])
def test_slow_links_get_their_share_and_take_none_from_fast_ones(workers: int) -> None:
    slow, fast, seconds = 1e6, 1.25e7, 120.0
    rates = [slow if number % 2 else fast for number in range(workers)]
    plan = AsyncPlan(
        machines=[SimulatedMachine(step_seconds=0.1, up=rate, down=rate) for rate in rates],
        seconds=seconds,
        cadence=SyncSchedule(20, 1, 5),
        compression="bf16",
        parameters=1 << 21,
        hub_up=1.25e9,
        hub_down=1.25e9,
    )
    found = simulate_async(plan, LinearTask(width=64))
    taken = [each["taken"] for each in found.counts]
    for group, rate in ((taken[1::2], slow), (taken[0::2], fast)):
        round_seconds = max(2.0, 1.045 * (8 << 20) / rate)  # k steps, or the link: 4 MiB up, then 4 MiB down
        assert min(group) >= 0.5 * seconds / round_seconds
        assert min(group) >= 0.8 * max(group)
