"""Cases of the collectives benchmark: processes and their order, memory, refused settings."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from paceline._core.json_codec import decode, encode
from paceline.errors import UsageError
from paceline.tools.bench.collectives.benchmarked_backends import LOCAL_RANKS, MPIEXEC, default_backends
from paceline.tools.bench.collectives.collectives_cases import (
    CollectiveCase,
    HostMemory,
    check_cases_fit,
    choose_iterations,
    fitting_cases,
    list_cases,
    needed_nbytes,
    process_sets,
    split_into_turns,
)
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings

GIB = 2**30
BASE = {"backends": ("gloo", "paceline"), "ops": ("all-reduce",), "ranks": (2, 4), "sizes": (1000, 2000)}


def settings(**changes):
    return CollectiveSettings(**{**BASE, **changes})


def test_cases_go_by_ranks_operation_and_size():
    found = list_cases(settings(ops=("all-reduce", "all-gather")))
    assert [(case.ranks, case.op, case.nbytes) for case in found[:4]] == [
        *((2, "all-reduce", 1000), (2, "all-reduce", 2000)),
        *((2, "all-gather", 1000), (2, "all-gather", 2000)),
    ]
    assert [case.nbytes for case in found if case.ranks == 4][:2] == [1000, 2000]
    assert len(found) == 8


def test_sizes_that_round_to_the_same_are_one_case():
    assert [case.nbytes for case in list_cases(settings(ranks=(2,), sizes=(1, 2, 3, 4, 5)))] == [4]


def test_backends_share_processes_of_one_number_of_ranks():
    found = process_sets(list_cases(settings()))
    assert [(each.launcher, each.ranks, len(each.cases)) for each in found] == [
        (LOCAL_RANKS, 2, 2),
        (LOCAL_RANKS, 4, 2),
    ]
    assert {case.backends for each in found for case in each.cases} == {("gloo", "paceline")}


def test_a_backend_with_another_launcher_has_separate_processes(monkeypatch):
    from dataclasses import replace

    from paceline.tools.bench.collectives import benchmarked_backends

    mpi = replace(benchmarked_backends.BACKENDS["gloo"], name="mpi", launcher="elsewhere")
    monkeypatch.setitem(benchmarked_backends.BACKENDS, "mpi", mpi)
    found = process_sets(
        list_cases(settings(backends=("gloo", "mpi", "paceline"), ranks=(2,), sizes=(1000,)))
    )
    assert [(each.launcher, each.cases[0].backends) for each in found] == [
        (LOCAL_RANKS, ("gloo", "paceline")),
        ("elsewhere", ("mpi",)),
    ]


def test_a_backend_runs_the_operations_that_it_has(monkeypatch):
    from dataclasses import replace

    from paceline.tools.bench.collectives import benchmarked_backends

    ring = replace(benchmarked_backends.BACKENDS["gloo"], name="ring", ops=("all-reduce",))
    monkeypatch.setitem(benchmarked_backends.BACKENDS, "ring", ring)
    found = list_cases(
        settings(backends=("gloo", "ring"), ops=("all-reduce", "broadcast"), ranks=(2,), sizes=(8,))
    )
    assert [(case.op, case.backends) for case in found] == [
        ("all-reduce", ("gloo", "ring")),
        ("broadcast", ("gloo",)),
    ]
    with pytest.raises(UsageError, match=r"(?s)'ring' has none of broadcast.*it has all-reduce"):
        settings(backends=("ring",), ops=("broadcast",))


def test_iterations_are_those_of_the_settings_or_fit_into_the_time():
    assert choose_iterations(settings(iterations=7), [9.0, 9.0]) == 7
    assert choose_iterations(settings(seconds=2.0), [0.01, 0.03]) == 100
    assert choose_iterations(settings(seconds=2.0), [4.0, 6.0]) == 5
    assert choose_iterations(settings(seconds=2.0), [1e-6]) == 1000


@pytest.mark.parametrize("iterations", [1, 3, 9, 10, 11, 57, 1000])
def test_turns_are_nearly_equal(iterations):
    turns = split_into_turns(iterations)
    assert sum(turns) == iterations
    assert len(turns) == min(10, iterations)
    assert max(turns) - min(turns) <= 1


def test_memory_is_ranks_times_buffers_and_scratch():
    case = CollectiveCase(4, "all-reduce", GIB, ("gloo", "paceline"))
    process = needed_nbytes(CollectiveCase(1, "all-reduce", 0, ("gloo",)), HostMemory(0))
    # One buffer for both.
    assert needed_nbytes(case, HostMemory(0)) == pytest.approx(4 * (process + 1.1 * GIB))
    arena = CollectiveCase(4, "all-reduce", GIB, ("gloo", "paceline:arena"))
    assert needed_nbytes(arena, HostMemory(0)) == pytest.approx(4 * (process + 2.1 * GIB))
    parts = CollectiveCase(4, "all-gather", GIB, ("gloo",))
    assert needed_nbytes(parts, HostMemory(0)) == pytest.approx(4 * (process + 1.25 * GIB + 1.2 * GIB))
    pairs = CollectiveCase(4, "all-to-all", GIB, ("gloo",))
    assert needed_nbytes(pairs, HostMemory(0)) == pytest.approx(4 * (process + 2.1 * GIB))
    assert needed_nbytes(pairs, HostMemory(0, local_ranks=1)) == pytest.approx(process + 2.1 * GIB)


def test_cases_that_do_not_fit_are_left_out_with_the_reason():
    cases = list_cases(settings(ranks=(2,), sizes=(10**6, 10**10)))
    kept, left_out = fitting_cases(cases, HostMemory(8 * GIB))
    assert [case.nbytes for case in kept] == [10**6]
    (reason,) = left_out
    assert "all-reduce of 10 GB with 2 ranks needs about" in reason
    assert "8 GiB are free; up to" in reason
    largest = CollectiveCase(2, "all-reduce", 10**6, ("gloo",))
    assert "would fit" in reason
    assert fitting_cases([largest], HostMemory(8 * GIB)) == ([largest], [])


def test_named_sizes_that_do_not_fit_are_refused_with_those_that_do():
    from paceline.tools.bench.collectives.collectives_cases import largest_nbytes

    room = HostMemory(4 * GIB)
    cases = list_cases(settings(sizes=(10**6, 10**10)))
    with pytest.raises(UsageError, match=r"(?s)10 GB with 2 ranks.*give --bytes up to [\d.]+MB"):
        check_cases_fit(cases, room)
    largest = largest_nbytes(cases[-1], room)
    check_cases_fit(list_cases(settings(ranks=(4,), sizes=(largest,))), room)
    with pytest.raises(UsageError):
        check_cases_fit(list_cases(settings(ranks=(4,), sizes=(largest + 8,))), room)


def test_no_size_is_recommended_if_none_fits():
    cases = list_cases(settings(ranks=(4,), sizes=(10**6,)))
    with pytest.raises(
        UsageError, match=r"(?s)no size would fit.*give fewer --nproc-per-node or fewer"
    ) as caught:
        check_cases_fit(cases, HostMemory(GIB // 2))
    assert "--bytes" not in str(caught.value)


def test_a_gpu_has_to_hold_its_buffers():
    case = CollectiveCase(2, "all-reduce", GIB, ("nccl",))
    assert fitting_cases([case], HostMemory(64 * GIB, gpu_nbytes=2 * GIB))[1] == []
    assert "of a GPU" in fitting_cases([case], HostMemory(64 * GIB, gpu_nbytes=GIB))[1][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": ("glooo",)}, "did you mean 'gloo'"),
        ({"backends": ("schedule:rnig",)}, "did you mean 'schedule:ring'"),
        ({"ops": ("allreduce",)}, "did you mean 'all-reduce'"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"rendezvous": "files"}, "did you mean 'file'"),
        ({"ranks": (0,)}, "--nproc-per-node 0: one rank has no peer"),
        ({"ranks": (1, 2)}, "give 2 or more"),
        ({"sizes": ()}, "--bytes is empty"),
        ({"warmup": 0}, "the first call connects"),
        ({"iterations": 0}, "--iterations 0"),
        ({"seconds": 0.0}, "--seconds 0"),
        ({"seconds": float("nan")}, "--seconds nan"),
        ({"dtype": "bfloat16", "ranks": (12,)}, "at most 11 ranks"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        settings(**changes)


def test_settings_survive_json():
    given = settings(iterations=3, network="1 Gbit/s star")
    assert decode(encode(given) | {"complete": True}, CollectiveSettings, "settings") == given


def test_gloo_and_paceline_are_the_default_and_mpi_if_it_can_be_started():
    assert default_backends({LOCAL_RANKS}) == ("gloo", "paceline")
    mpi = ("mpi4py",) if find_spec("mpi4py") else ()
    assert default_backends({LOCAL_RANKS, MPIEXEC}) == ("gloo", "paceline", *mpi)
