"""Pacing on links: a share of the link is reached, and no second exceeds it by a tenth, headers included."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import paceline
from paceline.testing.netlab import Lab

pytestmark = pytest.mark.alone

LINK = 25e6  # 200 Mbit/s
SHARE, MOST, LEAST = "30%", 0.33, 0.25
SECONDS = 8.0
PROGRAM = str(Path(__file__).with_name("paced_sender.py"))
ENV = {"PYTHONPATH": str(Path(paceline.__file__).parents[1])}
HUB, WORKER = 0, 1


@pytest.fixture(scope="module")
def hosts():
    with Lab(hosts=2, rate="200Mbit/s") as lab:
        yield lab


def watched(lab, host, jobs, disturb=lambda seconds: None):
    """Return samples of time, bytes sent and bytes received of a host while jobs run."""
    samples, started = [], time.monotonic()
    while any(job.running() for job in jobs):
        traffic = lab.bytes(host)
        samples.append((time.monotonic(), traffic.sent, traffic.received))
        disturb(time.monotonic() - started)
        time.sleep(0.1)
    return samples


def shares(samples, column):
    """Return the most of any second, and the mean from soon after the first frame to soon before the last one."""
    most = 0.0
    for index, first in enumerate(samples):
        for last in samples[index + 1 :]:
            if last[0] - first[0] >= 1.0:
                most = max(most, (last[column] - first[column]) / (last[0] - first[0]))
                break
    frame = 256 << 10
    begin = next(each[0] for each in samples if each[column] > samples[0][column] + frame)
    end = next(each[0] for each in reversed(samples) if each[column] < samples[-1][column] - frame)
    inner = [each for each in samples if begin + 0.5 <= each[0] <= end - 0.5]
    mean = (inner[-1][column] - inner[0][column]) / (inner[-1][0] - inner[0][0])
    return most / LINK, mean / LINK


def start_hub_and_worker(lab, hub_share, worker_share):
    """Start a hub and a worker, on a host each."""
    port = 7000 + next(_PORTS)
    address = f"tcp://{lab.addresses[HUB]}:{port}"
    return [
        lab.start(
            [sys.executable, PROGRAM, role, address, str(SECONDS), share, str(LINK)],
            on=on,
            env=os.environ | ENV,
        )
        for role, share, on in (("hub", hub_share, HUB), ("worker", worker_share, WORKER))
    ]


_PORTS = iter(range(1000))


def finished(jobs):
    """Return the payload bytes that hub and worker received."""
    return [int(job.wait(30)[0].stdout) for job in jobs]


def test_a_sender_with_a_share_gets_it_and_no_second_exceeds_it(hosts):
    jobs = start_hub_and_worker(hosts, "-", SHARE)
    samples = watched(hosts, WORKER, jobs)
    to_hub, _ = finished(jobs)
    most, mean = shares(samples, 1)
    assert most <= MOST
    assert mean >= LEAST
    assert to_hub > 0.25 * LINK


@pytest.mark.thorough
def test_a_receiver_with_a_share_gets_it_and_no_second_exceeds_it(hosts):
    jobs = start_hub_and_worker(hosts, SHARE, "-")
    samples = watched(hosts, WORKER, jobs)
    _, to_worker = finished(jobs)
    most, mean = shares(samples, 2)
    assert most <= MOST
    assert mean >= LEAST
    assert to_worker > 0.25 * LINK


@pytest.mark.thorough
def test_both_directions_at_once(hosts):
    jobs = start_hub_and_worker(hosts, SHARE, SHARE)
    samples = watched(hosts, WORKER, jobs)
    finished(jobs)
    for column in (1, 2):
        most, mean = shares(samples, column)
        assert most <= MOST
        assert mean >= LEAST


@pytest.mark.thorough
def test_messages_held_by_a_disconnected_link_do_not_arrive_all_at_once(hosts):
    state = {"cut": False}

    def disturb(seconds):
        cut = 3.0 <= seconds % 10.0 < 3.4
        if cut != state["cut"]:
            state["cut"] = cut
            (hosts.cut if cut else hosts.mend)(HUB)

    jobs = start_hub_and_worker(hosts, SHARE, SHARE)
    samples = watched(hosts, WORKER, jobs, disturb)
    hosts.mend(HUB)
    finished(jobs)
    for column in (1, 2):
        most, mean = shares(samples, column)
        assert most <= MOST
        assert mean > 0.15, "it goes on"
