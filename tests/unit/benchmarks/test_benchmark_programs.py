"""Benchmark programs: options that are refused before anything is measured, and the head of every result."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

import forked_child

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PUBLISHED = "nccl-tables/tables.json"  # by others
FOLDERS_OF_RUNS = "report"  # as paceline train leaves them


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (
            "slow-networks/tradeoff.py",
            ["run", "--only", "averagd every 4, int4"],
            "did you mean 'averaged every 4",
        ),
        ("plan-memory/plan_memory.py", ["run", "--only", "huge"], "no model is called so"),
        ("exposed/exposed.py", ["run", "--only", "0"], "greater than or equal to 1"),
        ("device/overhead.py", ["run", "--device", "cpu"], "a result from a CPU is none"),
        ("slow-networks/loss.py", ["run", "--seeds", "0"], "greater than or equal to 1"),
        (
            "slow-networks/loss.py",
            ["run", "--keep-curves", "--hosts", "3"],
            "has DDP's curves of 0 seeds, not of 3",
        ),
        ("slow-networks/many.py", ["run", "--hosts", "4"], "greater than or equal to 6"),
        ("kills/kills.py", ["run", "--kills", "0"], "greater than or equal to 1"),
        ("failover/failover.py", ["run", "--repeats", "0"], "greater than or equal to 1"),
        ("checkpoint/disk.py", ["run", "--turns", "0"], "greater than or equal to 1"),
        ("peers/set_up.py", ["--only", "horovod"], "is none of torchft, hivemind"),
    ],
)
def test_invalid_options_are_refused_and_no_result_is_replaced(program, arguments, message, tmp_path):
    # The others find it themselves.
    writes_json = program.startswith(("slow-networks", "plan-memory", "exposed"))
    place = ["--json", str(tmp_path / "result.json")] if writes_json else []
    home = tmp_path / "home"
    home.mkdir()

    def work():
        with (tmp_path / "err").open("wb") as err:
            os.dup2(err.fileno(), 2)
        os.environ |= {"COLUMNS": "200", "HOME": str(home)}
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        sys.path.insert(0, str((BENCHMARKS / program).parent))
        sys.argv = [program, *arguments, *place]
        try:
            runpy.run_path(str(BENCHMARKS / program), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code not in (None, 0)
        except Exception:  # noqa: BLE001 — as the interpreter ends
            sys.excepthook(*sys.exc_info())
            return True
        finally:
            sys.stderr.flush()

    assert forked_child.in_child(work, 120) == 0
    err = (tmp_path / "err").read_text()
    assert message in err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "home"]
    assert list(home.iterdir()) == []


def results():
    for path in sorted(BENCHMARKS.glob("*/**/*.json")):
        name = path.relative_to(BENCHMARKS).as_posix()
        if name != PUBLISHED and path.relative_to(BENCHMARKS).parts[0] != FOLDERS_OF_RUNS:
            yield pytest.param(path, id=name)


@pytest.mark.parametrize("path", list(results()))
def test_a_result_names_its_kind_and_command(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "seen.json":
        assert all("block" in row for row in result)
        return
    assert result["kind"]
    if result["kind"] == "paceline-profile":
        assert all(source["command"] for source in result["sources"])
    elif result["kind"] != "launchers":
        assert result["schema"] >= 1
        assert result["command"].startswith(("paceline ", "python ", "torchrun "))
