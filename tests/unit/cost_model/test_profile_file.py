"""profile.json: round trip, merging, lookups, and refusal of damaged files."""

from __future__ import annotations

import copy
import json
import math

import pytest

from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import CallCost, CollectiveCost, Rate, Source
from paceline.errors import UsageError

SOURCE = Source("paceline bench fit x.json", "2026-01-02T03:04:05+00:00", {"cpu": "a"}, {"torch": "2.13"})
LATER = Source("paceline bench machine", "2026-02-03T04:05:06+00:00")


def collective(backend="gloo", network="loopback", scale=1.0, op="all-reduce"):
    points = [
        MeasuredPoint(n, p, scale * (1e-5 * p + 1e-9 * n * 2 * (p - 1) / p * (1 + 0.1 * (p - 2))))
        for n in (4**k for k in range(5, 13))
        for p in (2, 4)
    ]
    return CollectiveCost(backend, network, fit_points(points, op), SOURCE)


def rate(kind="copy", value=1e10, threads=2, dtype="float32", source=LATER):
    return Rate(
        kind=kind,
        device="cpu",
        dtype=dtype,
        threads=threads,
        value=value,
        low=0.9 * value,
        high=1.1 * value,
        shape="64 MiB",
        source=source,
    )


def call(ranks=2, seconds=1e-4):
    return CallCost(
        backend="gloo",
        network="loopback",
        op="all-reduce",
        ranks=ranks,
        nbytes=4,
        seconds=seconds,
        source=SOURCE,
    )


PROFILE = Profile(
    collectives=(collective(), collective("nccl", "NVLink")),
    calls=(call(), call(4)),
    rates=(rate(), rate("matmul", 1e11)),
)


def test_the_tested_profile_has_common_segments_and_segments_of_ranks():
    assert [each.ranks for each in PROFILE.collectives[0].fit.segments_of_ranks] == [2, 4]


def test_load_returns_the_saved_values(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert list(tmp_path.iterdir()) == [path]
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["kind"], record["schema"], len(record["sources"])) == ("paceline-profile", 1, 2)


def test_an_empty_profile_survives_json():
    assert Profile.from_json(Profile().to_json()) == Profile()


def test_a_loaded_profile_predicts_as_the_fit_did(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json").collective("all-reduce", "gloo")
    assert loaded.predict(10**6, 4) == PROFILE.collectives[0].fit.predict(10**6, 4)
    with pytest.raises(UsageError, match="beyond what was measured"):
        loaded.predict(10**6, 64)
    assert loaded.predict(10**6, 64, extrapolate=True).extrapolated == "2, 4 ranks were"


def test_entries_of_several_runs_are_kept_and_a_new_measurement_replaces_the_old_one():
    lab = collective(network="lab star 1 Gbit/s")
    both = PROFILE.with_entries(collectives=[lab])
    assert len(both.collectives) == 3
    again = collective(scale=2.0)
    merged = both.merged(Profile(collectives=(again,), rates=(rate(value=2e10),)))
    assert len(merged.collectives) == 3
    assert merged.collective("all-reduce", "gloo", "loopback") is again
    assert merged.collective("all-reduce", "gloo", "lab star 1 Gbit/s") is lab
    assert merged.rate("copy").value == 2e10
    assert merged.calls == PROFILE.calls


def test_an_ambiguous_or_failed_lookup_lists_the_measurements():
    both = PROFILE.with_entries(collectives=[collective(network="lab")])
    with pytest.raises(UsageError, match="several networks: 'loopback', 'lab'"):
        both.collective("all-reduce", "gloo")
    with pytest.raises(UsageError, match="it has: all-reduce on gloo, loopback; all-reduce on nccl, NVLink"):
        PROFILE.collective("all-reduce", "mpi4py")
    with pytest.raises(UsageError, match="did you mean 'all-reduce'"):
        PROFILE.collective("allreduce", "gloo")
    with pytest.raises(UsageError, match="network 'lab'"):
        PROFILE.collective("all-reduce", "gloo", "lab")
    with pytest.raises(UsageError, match="bench collectives"):
        Profile().collective("all-reduce", "gloo")


def test_rates_are_found():
    more = PROFILE.with_entries(rates=[rate(value=6e9, threads=1)])
    assert more.rate("copy").threads == 2
    assert more.rate("copy", threads=1).value == 6e9
    with pytest.raises(
        UsageError, match=r"no copy bfloat16 on cpu\n.*it has: copy float32 on cpu, 2 threads"
    ):
        PROFILE.rate("copy", dtype="bfloat16")
    with pytest.raises(UsageError, match="bench machine"):
        Profile().rate("copy")


def test_two_profiles_are_compared_where_both_measured():
    twice = Profile(
        collectives=(collective(scale=2.0),),
        calls=(call(seconds=3e-4),),
        rates=(rate(value=1.05e10), rate("add")),
    )
    found = PROFILE.compare(twice)
    times = [each for each in found if each.what.startswith("all-reduce on gloo, loopback, 4 ranks")]
    assert len(times) == 3
    assert all(each.ratio == pytest.approx(2.0) and each.clear for each in times)
    of = {each.what: each for each in found if each not in times}
    assert set(of) == {"a call of all-reduce on gloo, loopback, 2 ranks", "copy float32 on cpu, 2 threads"}
    assert of["a call of all-reduce on gloo, loopback, 2 ranks"].ratio == pytest.approx(3.0)
    assert not of["copy float32 on cpu, 2 threads"].clear
    assert all(each.ratio == 1 and not each.clear for each in PROFILE.compare(PROFILE))


RECORD = PROFILE.to_json()


def damaged(path, value):
    """Return the record with one field replaced, or removed if `value` is `...`."""
    record = copy.deepcopy(RECORD)
    *parents, last = path
    place = record
    for step in parents:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["kind"], "bench-step", "is no profile: its kind is 'bench-step'"),
        (["kind"], ..., "p.kind is missing"),
        (["schema"], 2, "has schema 2; this version reads up to 1"),
        (["schema"], "1", r'p.schema is "1": expected `int`'),
        (["schema"], True, r"p.schema is true: expected `int`"),
        (["sources"], {}, "p.sources is {}: expected `array`"),
        (["collectives"], ..., "p.collectives is missing"),
        (["collectives", 0], 7, r"p.collectives\[0\] is 7: expected `object`"),
        (
            ["collectives", 1, "op"],
            "all-reduse",
            r'collectives\[1\].op is "all-reduse": expected one of all-reduce; ',
        ),
        (
            ["collectives", 0, "algorithm"],
            "rign",
            r'collectives\[0\].algorithm is "rign": expected one of ring; ',
        ),
        (["collectives", 0, "ranks"], [], r"collectives\[0\].ranks is \[\]: expected `array` of length >= 1"),
        (["collectives", 0, "ranks"], [2, 1], r"ranks\[1\] is 1: expected `int` >= 2"),
        (["collectives", 0, "segments"], [], r"segments is \[\]: expected `array` of length >= 1"),
        (
            ["collectives", 0, "segments", 0, "alpha"],
            -1.0,
            r"segments\[0\].alpha is -1.0: expected `float` >= 0",
        ),
        (["collectives", 0, "segments", 0, "beta"], math.nan, r"segments\[0\].beta is NaN: expected `float`"),
        (["collectives", 0, "segments", 0, "beta"], 10**400, r"segments\[0\].beta is 1000"),
        (
            ["collectives", 0, "segments", 0, "low"],
            math.inf,
            r"\[0\].low is Infinity: expected a finite number",
        ),
        (["collectives", 0, "segments", 0, "low"], 0, r"segments\[0\].low is 0: expected `float` > 0"),
        (
            ["collectives", 0, "segments", 0, "high"],
            1,
            r"segments\[0\] is .*: high is 1, expected 1024 bytes or more",
        ),
        (["collectives", 0, "segments", 0, "points"], 1.5, "points is 1.5: expected `int`"),
        (["collectives", 0, "sizes_error", "median"], None, "sizes_error.median is null: expected `float`"),
        (["collectives", 0, "segments_of_ranks"], ..., "segments_of_ranks is missing"),
        (
            ["collectives", 0, "segments_of_ranks", 0, "ranks"],
            1,
            r"segments_of_ranks\[0\].ranks is 1: expected",
        ),
        (
            ["collectives", 0, "segments_of_ranks", 1, "segments"],
            [],
            r"segments_of_ranks\[1\].segments is \[\]",
        ),
        (["collectives", 0, "sizes_error"], ..., r"collectives\[0\].sizes_error is missing"),
        (["collectives", 0, "algorithm_told"], "yes", 'algorithm_told is "yes": expected `bool`'),
        (
            ["collectives", 0, "source"],
            9,
            r"collectives\[0\].source is 9: expected the number of one of 2 sources",
        ),
        (["calls", 0, "seconds"], 0, r"calls\[0\].seconds is 0: expected `float` > 0"),
        (["calls", 1, "backend"], None, r"calls\[1\].backend is null: expected `str`"),
        (["rates", 0, "kind"], "triad", r'rates\[0\].kind is "triad": expected one of copy; add; matmul'),
        (["rates", 0, "value"], "fast", r'rates\[0\].value is "fast": expected `float`'),
        (["sources", 0, "machine"], [], r"sources\[0\].machine is \[\]: expected `object`"),
    ],
)
def test_a_damaged_file_is_refused_and_the_field_is_named(tmp_path, path, value, message):
    file = tmp_path / "p"
    file.write_text(json.dumps(damaged(path, value)), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        Profile.load(file)


def test_segments_must_be_in_ascending_order():
    record = copy.deepcopy(RECORD)
    record["collectives"][0]["segments"] *= 2
    with pytest.raises(UsageError, match="in ascending order of size"):
        Profile.from_json(record)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "\x00"])
def test_a_file_that_holds_something_else_is_refused(tmp_path, text):
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"p\.json"):
        Profile.load(file)


def test_an_absent_or_unwritable_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Profile.load(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="can't read"):
        Profile.load(tmp_path)
    with pytest.raises(UsageError, match="can't write"):
        PROFILE.save(tmp_path / "absent" / "p.json")


def test_a_rate_of_an_unknown_kind_cannot_be_made():
    with pytest.raises(UsageError, match="did you mean 'copy'"):
        rate("kopy")
