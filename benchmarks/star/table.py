"""Write what was found into the tables of README.md.

    python benchmarks/star/table.py

Reads the JSON files beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import typer
from loss_figures import alone_share, loss_at, reached, read

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent
CURVES = HERE.parent / "slow-networks" / "loss-4x100Mbit.json"


def _read(name: str) -> dict[str, Any] | None:
    path = HERE / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def loss_table(result: dict[str, Any], curves: dict[str, Any]) -> str:
    """Return the table of times to the same loss."""
    rows = []
    for row in read(result, curves):
        star = "never" if row.star is None else f"{row.star:.0f}"
        local = "never" if row.local is None else f"{row.local:.0f}"
        ratio = "" if row.star is None else f"{row.ddp / row.star:.2f}"
        other = "" if row.star is None or row.local is None else f"{row.local / row.star:.2f}"
        times = [f"{row.ddp:.0f}", local, star, ratio, other]
        rows.append([str(row.seed), f"{row.target:.4f}", *times, f"{row.last:.4f}"])
    titles = ["seed", "DDP's last loss", "by DDP, s", "by LocalSGD, s", "by the star, s", "DDP ÷ star"]
    return table([*titles, "LocalSGD ÷ star", "star's last ÷ DDP's"], rows)


def steps_table(result: dict[str, Any]) -> str:
    """Return the table of seconds a step."""
    rows = [
        [f"torch DDP, {mib} MiB", f"{median(seconds):.3f}"]
        for mib, seconds in result["ddp"]["buckets"].items()
    ]
    rows.append([f"torch DDP, {result['ddp']['bucket_mib']} MiB", f"{median(result['ddp']['seconds']):.3f}"])
    rows.append(["LocalSGD, every 4, 2 late, int4", f"{median(result['local']['seconds']):.3f}"])
    return table(["in lock-step", "s a step"], rows)


def throughput_table(*results: dict[str, Any]) -> str:
    """Return the table of workers' speeds beside the star ÷ alone."""
    rows = []
    for result in results:
        fastest = f"{result['settings']['fastest_step']:g}"
        for rank, share in enumerate(alone_share(result["turns"])):
            alone = median(
                turn["alone"][rank]["steps"] / turn["alone"][rank]["seconds"] for turn in result["turns"]
            )
            speed = str(result["settings"]["speeds"][rank])
            rows.append([fastest, str(rank), speed, f"{alone:.2f}", f"{share:.3f}"])
    return table(
        ["fastest step, s", "worker", "speed", "steps a second alone", "with the star ÷ alone"], rows
    )


def peers_table(result: dict[str, Any], curves: dict[str, Any]) -> str:
    """Return the table of what libraries learn in the same time."""
    settings = result["settings"]
    target = curves["ddp"]["curves"][settings["seed"]][-1]["loss"]
    rows = []
    for row in result["rows"]:
        steps, sent = (sum(worker[name] for worker in row["workers"]) for name in ("steps", "sent"))
        at = reached(row["curve"], target, "seconds")
        rows.append(
            [
                row["name"].partition(", lr")[0],
                f"{row['settings']['lr']:g}",
                str(steps),
                f"{sent / 1e6:.0f}",
                f"{loss_at(row['curve'], settings['seconds']):.4f}",
                "not" if at is None else f"{at:.0f}",
            ]
        )
    titles = ["", "learning rate", "local steps of all", "MB sent by all"]
    found = [f"held-out loss after {settings['seconds']:.0f} s", f"at DDP's {target:.4f} after, s"]
    return table([*titles, *found], rows)


def share_table(result: dict[str, Any]) -> str:
    """Return the table of shares of a link."""
    rows = [
        [
            way,
            *(
                f"{100 * result[name][way]:.1f} %"
                for name in ("busiest", "mean", "file_alone", "file_beside")
            ),
        ]
        for way in ("up", "down")
    ]
    return table(["", "busiest second", "mean", "a file alone", "a file beside the star"], rows)


def storm_table(result: dict[str, Any]) -> str:
    """Return the table of what a storm left."""
    found, what = result["found"], [each["what"] for each in result["mishaps"]]
    by_pid: dict[int, list[float]] = {}
    for each in result["memory"]:
        by_pid.setdefault(each["pid"], []).append(each["rss"] / 2**20)
    longest = max(by_pid.values(), key=len)
    rows = [
        [
            "workers killed · stopped · cut off",
            " · ".join(str(what.count(each)) for each in ("kill", "stop", "cut")),
        ],
        ["hub killed", str(what.count("hub"))],
        ["updates taken in · rounds acknowledged", f"{found['updates']} · {found['acknowledged']}"],
        ["acknowledged and lost · taken in twice", f"{found['lost']} · {found['twice']}"],
        ["score of the centre, first → last", f"{found['first_score']:.3f} → {found['last_score']:.3f}"],
        ["workers that ended in order · with the centre", f"{found['ended']} · {found['ended_with_centre']}"],
        [
            "memory of the hub that lived longest: at a fifth · at its end",
            f"{longest[len(longest) // 5]:.0f} · {longest[-1]:.0f} MiB",
        ],
        ["refused", ", ".join(f"{why} {count}" for why, count in sorted(result["refused"].items()))],
    ]
    return table(["", ""], rows, words=2)


def virtual_table(result: dict[str, Any]) -> str:
    """Return the table of ways in virtual time."""
    rows = []
    for way in result["ways"]:
        losses = [each["loss"] for each in way["runs"]]
        told = "diverged" if any(each is None for each in losses) else f"{median(losses):.4f}"
        rows.append([way["name"], f"{way['lr']:g}, {way['falls']}", told, f"{way['runs'][0]['nbytes']:.0f}"])
    return table(["", "learning rate, falling", "held-out loss", "bytes a parameter and worker"], rows)


def thousand_table(result: dict[str, Any]) -> str:
    """Return the table of a large star."""
    titles = [
        "k, d",
        "local steps",
        "updates",
        "messages",
        "virtual time, s",
        "it took, s",
        "of a processor, s",
    ]
    rows = [
        [
            f"{row['every']}, {row['delay']}",
            *(f"{row[name]:,}" for name in ("steps", "updates", "messages")),
            *(f"{row[name]:.0f}" for name in ("virtual_seconds", "seconds", "processor_seconds")),
        ]
        for row in result["rows"]
    ]
    return table(titles, rows)


def main() -> None:
    """Fill the tables whose results are there."""
    readme = HERE / "README.md"
    text, curves = readme.read_text(encoding="utf-8"), json.loads(CURVES.read_text(encoding="utf-8"))
    loss = _read("loss-200Mbit.json")
    if loss is not None:
        text = fill(fill(text, "loss", loss_table(loss, curves)), "steps", steps_table(loss))
    speeds = [each for each in map(_read, ("throughput.json", "throughput-slower.json")) if each is not None]
    if speeds:
        text = fill(text, "throughput", throughput_table(*speeds))
    peers = _read("peers.json")
    if peers is not None:
        text = fill(text, "peers", peers_table(peers, curves))
    for name, make in (
        ("share", share_table),
        ("storm", storm_table),
        ("virtual", virtual_table),
        ("thousand", thousand_table),
    ):
        result = _read(f"{name}.json")
        if result is not None:
            text = fill(text, name, make(result))
    readme.write_text(text, encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    typer.run(main)
