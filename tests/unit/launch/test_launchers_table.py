"""Table of launchers: each cell shows the worst result of its tests."""

from __future__ import annotations

from types import SimpleNamespace

from launchers_table import cells, show


def report(when, *cell):
    return SimpleNamespace(when=when, user_properties=[("launcher", cell)] if cell else [])


def test_a_cell_is_the_worst_of_its_tests():
    stats = {
        "passed": [report("call", "Slurm", "finishes"), report("setup", "MPI", "finishes"), report("call")],
        "failed": [report("call", "Slurm", "resumes")],
        "error": [report("teardown", "Ray", "finishes")],
        "skipped": [report("setup", "Slurm", "finishes"), report("setup", "Ray", "resumes")],
    }
    stats["passed"] += [report("call", "Slurm", "resumes"), report("call", "Ray", "finishes")]
    assert cells(stats) == {
        "Slurm": {"finishes": "yes", "resumes": "failed"},
        "Ray": {"finishes": "failed", "resumes": "skipped"},
    }


def test_skipped_tests_do_not_count_as_passed():
    assert cells({}) == {}
    assert show({"MPI": {"finishes": "yes"}, "Ray": {"resumes": "skipped"}}).splitlines()[2:] == [
        "| MPI | yes | not tried |",
        "| Ray | not tried | skipped |",
    ]
