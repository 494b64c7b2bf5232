"""The computed shuffle: a bijection of any size, even, the same everywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_strategies import chi_squared
from paceline._core.keyed_random import derive_key, keyed_hash
from paceline.data.sampling.shuffle import MAX_LISTED, MAX_SIZE, Shuffle
from paceline.errors import UsageError

MIXED = [3207296026000306913, 14232521865600346940, 4532161160992623299]
KEYS = [0, 4361977758313117227, 17153583634484706263, 14178424926433637697]
SHUFFLED = {
    (10, 0): [4, 1, 5, 6, 0, 8, 2, 9, 3, 7],
    (10, 1): [4, 0, 5, 6, 3, 9, 7, 1, 8, 2],
    (4096, 7): [1059, 1566, 3524, 699, 1860, 1823, 861, 1971, 2206, 3636],
    (4097, 7): [959, 2495, 2480, 2112, 3440, 1854, 1688, 291, 77, 2962],
    (1000000000000, 7): [
        786153835913,
        81319587149,
        938293086592,
        414512536348,
        390438259498,
        138768483202,
        46751801422,
        681242650362,
        346673213776,
        33538159599,
    ],
    (1000000000000000000, 18446744073709551615): [
        113523621652541758,
        978463447549239488,
        18433625147758759,
        295028840179058317,
        454365894025022403,
        55492073139077549,
        959050042775009296,
        29112347900483133,
        113877558370817237,
        983586774824211885,
    ],
}
BACK = [402724923045242137, 335435695532886277]


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_a_shuffle_is_a_bijection(key):
    for size in [*range(300), MAX_LISTED - 1, MAX_LISTED, MAX_LISTED + 1, 9973, 65_536]:
        row, shuffle = np.arange(size), Shuffle(size, key)
        found = shuffle(row)
        assert found.dtype == np.int64
        assert sorted(found.tolist()) == row.tolist()
        assert shuffle.inverse(found).tolist() == row.tolist()


@given(size=st.integers(1, MAX_SIZE), key=st.integers(0, 2**64 - 1), data=st.data())
@settings(deadline=None)
def test_inverse_at_any_size(size, key, data):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    shuffle = Shuffle(size, key)
    found = shuffle(places)
    assert 0 <= found.min() <= found.max() < size
    assert len(set(found.tolist())) == len(places)
    assert shuffle.inverse(found).tolist() == places.tolist()
    assert shuffle(shuffle.inverse(places)).tolist() == places.tolist()


@pytest.mark.parametrize("size", [MAX_SIZE, MAX_SIZE - 1, (1 << 30) ** 2 - (1 << 30), 3_037_000_499])
def test_first_and_last_elements_of_the_largest_size(size):
    ends = np.array([0, 1, size // 2, size - 2, size - 1])
    shuffle = Shuffle(size, 5)
    assert shuffle.inverse(shuffle(ends)).tolist() == ends.tolist()


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_a_size_out_of_range_is_refused(size):
    with pytest.raises(UsageError, match=f"can't shuffle {size} elements"):
        Shuffle(size, 0)


# Keys in a row are as good as any: adjacent seeds must be as unrelated as others.


@pytest.mark.parametrize(("size", "keys"), [(2, 1000), (3, 1200), (4, 2400), (5, 2400), (6, 7200)])
def test_all_orders_of_a_few_elements_are_equally_likely(size, keys):
    weights = size ** np.arange(size)
    codes = [int(Shuffle(size, key)(np.arange(size)) @ weights) for key in range(keys)]
    found = np.unique(codes, return_counts=True)[1]
    assert len(found) == math.factorial(size)
    assert abs(chi_squared(found, keys / len(found))) < 5


def ends_of_many_keys(size, keys):
    ends = np.array([0, 1, size - 1])
    return np.array([Shuffle(size, key)(ends) for key in range(keys)])


@pytest.mark.parametrize("size", [5, 12, 30])
def test_positions_of_elements_and_pairs_are_uniform(size):
    keys = 3000
    found = ends_of_many_keys(size, keys)
    for place in range(3):
        assert abs(chi_squared(np.bincount(found[:, place], minlength=size), keys / size)) < 5
    for other in (1, 2):
        pairs = np.bincount(found[:, 0] * size + found[:, other], minlength=size * size).reshape(size, size)
        assert pairs.trace() == 0
        assert abs(chi_squared(pairs[~np.eye(size, dtype=bool)], keys / (size * (size - 1)))) < 5


@pytest.mark.sweep
@pytest.mark.parametrize("size", [MAX_LISTED, MAX_LISTED + 1, 4999, 65_536, 10**9, MAX_SIZE])
def test_positions_of_a_large_shuffle_hold_any_elements(size):
    keys = 3000
    tenths = ends_of_many_keys(size, keys) // -(-size // 10)
    for place in range(3):
        assert abs(chi_squared(np.bincount(tenths[:, place], minlength=10), keys / 10)) < 5
    for other in (1, 2):
        pairs = np.bincount(tenths[:, 0] * 10 + tenths[:, other], minlength=100)
        assert abs(chi_squared(pairs, keys / 100)) < 5


@pytest.mark.parametrize("size", [1000, MAX_LISTED + 1, 99_991])
def test_neighbours_are_moved_anywhere(size):
    found = Shuffle(size, 3)(np.arange(size))
    cells = np.bincount(found[:-1] * 10 // size * 10 + found[1:] * 10 // size, minlength=100)
    assert abs(chi_squared(cells, (size - 1) / 100)) < 5


@pytest.mark.parametrize("size", [1000, MAX_LISTED + 1, 100_000])
def test_adjacent_keys_are_unrelated(size):
    rows = [Shuffle(size, key)(np.arange(size)) for key in range(6)]
    for one, other in pairwise(rows):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)
        assert int((one == other).sum()) <= 8  # 1 on average
        cells = np.bincount(one * 10 // size * 10 + other * 10 // size, minlength=100)
        assert abs(chi_squared(cells, size / 100)) < 5


def test_keys_depend_on_all_parts_and_their_order():
    keys = [
        derive_key(*parts) for parts in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (-1,)]
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_half_of_a_keys_bits_change_with_one_of_its_parts():
    keys = np.array([[derive_key(seed, 3), derive_key(seed + 1, 3)] for seed in range(1000)], np.uint64)
    changed = [int(each).bit_count() for each in keys[:, 0] ^ keys[:, 1]]
    assert abs(np.mean(changed) - 32) < 5 * 4 / math.sqrt(1000)


def test_the_same_on_every_platform():
    assert keyed_hash(np.arange(3, dtype=np.uint64), 7).tolist() == MIXED
    assert [derive_key(), derive_key(0), derive_key(1, 2, 3), derive_key(-1)] == KEYS
    for (size, key), found in SHUFFLED.items():
        assert Shuffle(size, key)(np.arange(min(size, 10))).tolist() == found
    assert Shuffle(10**18, 9).inverse(np.array([0, 10**18 - 1])).tolist() == BACK
