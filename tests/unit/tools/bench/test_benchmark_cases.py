"""What is measured, in which processes and turns; what fits into memory; which settings are refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from paceline.errors import UsageError
from paceline.tools.bench.collectives.benchmark_cases import (
    Case,
    cases_of,
    iterations_for,
    process_sets,
    turns_of,
)
from paceline.tools.bench.collectives.benchmarked_backends import MPI, RANKS, default_backends
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.memory_needed import (
    Room,
    fitting_cases,
    needed_nbytes,
    refuse_what_does_not_fit,
)

GIB = 2**30
BASE = {"backends": ("gloo", "paceline"), "ops": ("all-reduce",), "ranks": (2, 4), "sizes": (1000, 2000)}


def settings(**changes):
    return CollectiveSettings(**{**BASE, **changes})


def test_cases_go_by_ranks_operation_and_size():
    found = cases_of(settings(ops=("all-reduce", "all-gather")))
    assert [(case.ranks, case.op, case.nbytes) for case in found[:4]] == [
        *((2, "all-reduce", 1000), (2, "all-reduce", 2000)),
        *((2, "all-gather", 1000), (2, "all-gather", 2000)),
    ]
    assert [case.nbytes for case in found if case.ranks == 4][:2] == [1000, 2000]
    assert len(found) == 8


def test_sizes_that_round_to_the_same_are_one_case():
    assert [case.nbytes for case in cases_of(settings(ranks=(2,), sizes=(1, 2, 3, 4, 5)))] == [4]


def test_backends_share_processes_of_one_number_of_ranks():
    found = process_sets(cases_of(settings()))
    assert [(each.starter, each.ranks, len(each.cases)) for each in found] == [(RANKS, 2, 2), (RANKS, 4, 2)]
    assert {case.backends for each in found for case in each.cases} == {("gloo", "paceline")}


def test_a_backend_with_a_starter_of_its_own_has_processes_of_its_own(monkeypatch):
    from dataclasses import replace

    from paceline.tools.bench.collectives import benchmarked_backends

    mpi = replace(benchmarked_backends.BACKENDS["gloo"], name="mpi", starter="elsewhere")
    monkeypatch.setitem(benchmarked_backends.BACKENDS, "mpi", mpi)
    found = process_sets(cases_of(settings(backends=("gloo", "mpi", "paceline"), ranks=(2,), sizes=(1000,))))
    assert [(each.starter, each.cases[0].backends) for each in found] == [
        (RANKS, ("gloo", "paceline")),
        ("elsewhere", ("mpi",)),
    ]


def test_a_backend_takes_part_in_the_operations_that_it_has(monkeypatch):
    from dataclasses import replace

    from paceline.tools.bench.collectives import benchmarked_backends

    ring = replace(benchmarked_backends.BACKENDS["gloo"], name="ring", ops=("all-reduce",))
    monkeypatch.setitem(benchmarked_backends.BACKENDS, "ring", ring)
    found = cases_of(
        settings(backends=("gloo", "ring"), ops=("all-reduce", "broadcast"), ranks=(2,), sizes=(8,))
    )
    assert [(case.op, case.backends) for case in found] == [
        ("all-reduce", ("gloo", "ring")),
        ("broadcast", ("gloo",)),
    ]
    with pytest.raises(UsageError, match=r"(?s)'ring' has none of broadcast.*it has all-reduce"):
        settings(backends=("ring",), ops=("broadcast",))


def test_iterations_are_those_asked_for_or_what_the_time_holds():
    assert iterations_for(settings(iterations=7), [9.0, 9.0]) == 7
    assert iterations_for(settings(seconds=2.0), [0.01, 0.03]) == 100
    assert iterations_for(settings(seconds=2.0), [4.0, 6.0]) == 5
    assert iterations_for(settings(seconds=2.0), [1e-6]) == 1000


@pytest.mark.parametrize("iterations", [1, 3, 9, 10, 11, 57, 1000])
def test_turns_are_as_equal_as_can_be(iterations):
    turns = turns_of(iterations)
    assert sum(turns) == iterations
    assert len(turns) == min(10, iterations)
    assert max(turns) - min(turns) <= 1


def test_memory_is_ranks_times_buffers_and_scratch():
    case = Case(4, "all-reduce", GIB, ("gloo", "paceline"))
    process = needed_nbytes(Case(1, "all-reduce", 0, ("gloo",)), Room(0))
    assert needed_nbytes(case, Room(0)) == pytest.approx(4 * (process + 1.1 * GIB))  # one buffer for both
    arena = Case(4, "all-reduce", GIB, ("gloo", "paceline:arena"))
    assert needed_nbytes(arena, Room(0)) == pytest.approx(4 * (process + 2.1 * GIB))
    parts = Case(4, "all-gather", GIB, ("gloo",))
    assert needed_nbytes(parts, Room(0)) == pytest.approx(4 * (process + 1.25 * GIB + 1.2 * GIB))
    pairs = Case(4, "all-to-all", GIB, ("gloo",))
    assert needed_nbytes(pairs, Room(0)) == pytest.approx(4 * (process + 2.1 * GIB))
    assert needed_nbytes(pairs, Room(0, local_ranks=1)) == pytest.approx(process + 2.1 * GIB)


def test_what_does_not_fit_is_left_out_with_its_reason():
    cases = cases_of(settings(ranks=(2,), sizes=(10**6, 10**10)))
    kept, left_out = fitting_cases(cases, Room(8 * GIB))
    assert [case.nbytes for case in kept] == [10**6]
    (reason,) = left_out
    assert "all-reduce of 10 GB with 2 ranks needs about" in reason
    assert "8 GiB are free; up to" in reason
    largest = Case(2, "all-reduce", 10**6, ("gloo",))
    assert "would fit" in reason
    assert fitting_cases([largest], Room(8 * GIB)) == ([largest], [])


def test_what_is_asked_for_and_does_not_fit_is_refused_with_what_would():
    from paceline.tools.bench.collectives.memory_needed import largest_nbytes

    room = Room(4 * GIB)
    cases = cases_of(settings(sizes=(10**6, 10**10)))
    with pytest.raises(UsageError, match=r"(?s)10 GB with 2 ranks.*give --sizes up to [\d.]+MB"):
        refuse_what_does_not_fit(cases, room)
    largest = largest_nbytes(cases[-1], room)
    refuse_what_does_not_fit(cases_of(settings(ranks=(4,), sizes=(largest,))), room)
    with pytest.raises(UsageError):
        refuse_what_does_not_fit(cases_of(settings(ranks=(4,), sizes=(largest + 8,))), room)


def test_where_no_size_fits_none_is_recommended():
    cases = cases_of(settings(ranks=(4,), sizes=(10**6,)))
    with pytest.raises(UsageError, match=r"(?s)no size would fit.*give fewer --ranks or fewer") as caught:
        refuse_what_does_not_fit(cases, Room(GIB // 2))
    assert "--sizes" not in str(caught.value)


def test_a_gpu_has_to_hold_its_buffers():
    case = Case(2, "all-reduce", GIB, ("nccl",))
    assert fitting_cases([case], Room(64 * GIB, gpu_nbytes=2 * GIB))[1] == []
    assert "of a GPU" in fitting_cases([case], Room(64 * GIB, gpu_nbytes=GIB))[1][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": ("glooo",)}, "did you mean 'gloo'"),
        ({"backends": ("schedule:rnig",)}, "did you mean 'schedule:ring'"),
        ({"ops": ("allreduce",)}, "did you mean 'all-reduce'"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"rendezvous": "files"}, "did you mean 'file'"),
        ({"ranks": (0,)}, "--ranks 0: one rank has nobody"),
        ({"ranks": (1, 2)}, "give 2 or more"),
        ({"sizes": ()}, "--sizes names none"),
        ({"warmup": 0}, "the first call connects"),
        ({"iterations": 0}, "--iterations 0"),
        ({"seconds": 0.0}, "--seconds 0"),
        ({"seconds": float("nan")}, "--seconds nan"),
        ({"dtype": "bfloat16", "ranks": (12,)}, "at most 11 ranks"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        settings(**changes)


def test_settings_come_back_from_json():
    given = settings(iterations=3, network="1 Gbit/s star")
    assert CollectiveSettings.from_json(given.to_json() | {"complete": True}) == given


def test_gloo_and_paceline_take_part_by_default_and_mpi_where_it_can_be_started():
    assert default_backends({RANKS}) == ("gloo", "paceline")
    mpi = ("mpi4py",) if find_spec("mpi4py") else ()
    assert default_backends({RANKS, MPI}) == ("gloo", "paceline", *mpi)
