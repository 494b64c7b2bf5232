"""Made-up folders of hubs: ledgers with the fields that a hub writes, for tests of their readers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from paceline.async_dp.wal.durable_files import write_checked_file

START = 1_785_000_000.0
NUMBERS = 1_000_000


def record(kind, t, **values):
    """Return a record `t` seconds after the beginning."""
    return {"kind": kind, "t": START + t, **values}


def join(t, worker, name=""):
    return record("join", t, worker=worker, name=name, every=20, delay=5)


def update(t, worker, **changes):
    values = {
        "worker": worker, "fragment": 0, "round": 0, "revision": 1, "base": 0, "dtype": "int4", "weight": 0.25,
        "workers": 4, "samples": 640.0, "steps": 20, "staleness": 0.5, "norm": 0.1, "score": None,
    }  # fmt: skip
    return record("update", t, **{**values, **changes})


def refuse(t, worker, why="not finite", until=0.0):
    return record("refuse", t, worker=worker, fragment=0, round=1, why=why, norm=None, until=until)


def traffic(t, sent=1000, received=500, *, seconds=5.0, bandwidth=None, workers=None):
    workers_of = workers or {}
    return record(
        "traffic", t, sent=sent, received=received, seconds=seconds, bandwidth=bandwidth, alive=len(workers_of),
        workers={str(key): value for key, value in workers_of.items()},
    )  # fmt: skip


def global_score(t, worker, score, revision=1):
    return record("global_score", t, worker=worker, revision=revision, score=score)


def begin(t, worker):
    return record("begin", t, worker=worker, run="demo", numbers=NUMBERS)


def write(folder: Path, records, *, name="demo") -> Path:
    """Write a folder as a hub leaves it, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_checked_file(folder / "run.json", {"run": name})
    with (folder / "ledger.jsonl").open("w") as file:
        file.writelines(line(number, each) for number, each in enumerate(records))
    return folder


def line(number, values) -> str:
    return json.dumps({"n": number, **values}, ensure_ascii=False) + "\n"


def long_run(lines: int, workers: int = 4, seconds: float = 3600.0) -> Iterator[dict[str, object]]:
    """Yield the records of a run of about so many lines, in which the global model gets better."""
    chance = random.Random(0)
    for worker in range(1, workers + 1):
        yield join(0.0, worker, f"w{worker}")
    yield begin(1.0, 1)
    noted = 0.0
    for number in range(lines):
        t = 1.0 + seconds * number / lines
        worker = chance.randrange(1, workers + 1)
        score = 1 + 4 * math.exp(-3 * number / lines) + chance.gauss(0, 0.02)
        if number % 7 == 6:
            yield global_score(t, worker, score, number)
        else:
            yield update(t, worker, staleness=chance.expovariate(1.0), score=score + 0.1)
        if t - noted >= 5:
            workers_of = {
                each: {"steps": number, "speed": 10.0 * each, "loss": score} for each in range(1, workers + 1)
            }
            yield traffic(t, 10**6, 10**5, seconds=t - noted, bandwidth=10**6, workers=workers_of)
            noted = t


def demo(folder: Path) -> Path:
    """Write a run of four workers: one is replaced, one refused, the hub is started again, one leaves."""
    workers_of = {each: {"steps": 100, "speed": 20.0 - each, "loss": 2.0} for each in (1, 2, 3, 4)}
    records = [join(0.0, 1, "ann"), join(0.1, 2, "bob"), join(0.2, 3, "cy"), join(0.3, 4, "dan")]
    records += [
        record("score", 1.0 + each / 10, worker=each, score=5.0 + each, steps=20, lr=0.1)
        for each in (1, 2, 3, 4)
    ]
    records += [
        record("replace", 1.5, worker=4, by=1, lr=0.1, why="score 9.0 is 50% behind the best, 6.0 of 1")
    ]
    records += [record("together", 2.0, worker=1, why="3 of 4 workers made 60 steps"), begin(2.1, 1)]
    for number in range(40):
        t = 3.0 + number / 2
        records.append(update(t, 1 + number % 3, staleness=number % 5 / 4, score=5.0 - number / 20))
        records.append(global_score(t + 0.1, 1 + number % 3, 4.8 - number / 20, number))
        if number % 10 == 9:
            records.append(traffic(t + 0.2, 10**6, 10**5, bandwidth=10**6, workers=workers_of))
            records.append(refuse(t + 0.3, 4, until=60.0 if number == 19 else 0.0))
    last = 3.0 + 39 / 2
    records += [join(last + 20, each, name) for each, name in ((1, "ann"), (2, "bob"), (3, "cy"))]
    records += [traffic(last + 26, 10**5, 10**4, bandwidth=10**6), update(last + 27, 1)]
    records += [record("leave", last + 28, worker=1), record("silent", last + 29, worker=2)]
    return write(folder, records)
