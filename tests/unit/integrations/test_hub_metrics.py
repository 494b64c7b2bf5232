"""A hub's metrics for Prometheus are those of the hub, and are there while it serves."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
import torch

from hub_driver import NUMEL, ONES, HubDriver
from hub_process import HubProcess
from paceline.async_dp.hub.hub_settings import HubRules, ScreeningRules
from paceline.errors import UsageError
from paceline.integrations.loggers.hub_metrics import HubMetrics

pytest.importorskip("prometheus_client")


def scraped(url):
    """Return the values by name and labels."""
    lines = urlopen(url, timeout=10).read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_values_are_those_of_the_hub(monkeypatch):
    driver = HubDriver(HubRules(screen=ScreeningRules(quarantine_seconds=30)))
    monkeypatch.setattr(time, "monotonic", lambda: driver.now)
    exchange = SimpleNamespace(
        sent_nbytes=7, received_nbytes=9, refused=Counter(damaged=2), rejected=Counter({"no key": 1})
    )
    server = SimpleNamespace(hub=driver.hub, exchange=exchange, queued=3)
    with HubMetrics(server, 0) as metrics:
        empty = scraped(metrics.url)
        driver.join(1, 2)
        for round in range(2):
            driver.update(1, round, ONES, base=round, samples=4.0)
        driver.update(1, 2, ONES, base=0)
        for round in range(3):
            driver.update(2, round, torch.full((NUMEL,), math.nan))
        metrics.refresh()
        assert scraped(metrics.url) == empty  # not a second later
        driver.now = 1.5
        metrics.refresh()
        found = scraped(metrics.url)
    assert empty["paceline_hub_updates_total"] == 0
    assert empty['paceline_hub_info{phase="empty",run="a run"}'] == 1
    values = {
        "workers": 2, "updates_total": 3, "samples_total": 9, "queued_messages": 3, "quarantined_workers": 1,
        "sent_bytes_total": 7, "received_bytes_total": 9, "storage_failed": 0,
        'refused_total{reason="not finite"}': 3, 'refused_total{reason="damaged"}': 2,
        'refused_total{reason="no key"}': 1, 'worker_updates{number="1",worker="w1"}': 3,
        'worker_refused{number="2",worker="w2"}': 3, 'worker_staleness{number="1",worker="w1"}': 1,
        'staleness_rounds_bucket{le="+Inf"}': 3,
    }  # fmt: skip
    assert {name: found[f"paceline_hub_{name}"] for name in values} == values
    below = {float(re.findall('"(.*)"', name)[0]): n for name, n in found.items() if "_rounds_bucket" in name}
    assert sum(count for edge, count in below.items() if 0.9 < edge < 1.0) == 2  # the third is 1 round old
    assert below[math.nextafter(1.5, 0)] == 3


def test_a_hub_serves_metrics_where_its_option_says(tmp_path):
    hub = HubProcess(tmp_path / "hub", "--prometheus", "127.0.0.1:0", "--until", "60s")
    try:
        (url,) = re.findall(r"metrics at (\S+)", hub.process.stdout.readline())
        assert scraped(url)["paceline_hub_workers"] == 0
    finally:
        hub.end()
    assert hub.process.returncode == 0


def test_an_address_that_is_none_is_refused():
    driver = HubDriver()
    exchange = SimpleNamespace(sent_nbytes=0, received_nbytes=0, refused=Counter())
    server = SimpleNamespace(hub=driver.hub, exchange=exchange, queued=0)
    with pytest.raises(UsageError, match="'here' is no address"):
        HubMetrics(server, "here")
