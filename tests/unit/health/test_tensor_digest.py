"""Digests of tensors: equal bits give equal ones, one bit another one, on the CPU's way and on a GPU's."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.health import replica_check
from paceline.health.replica_check import digest_of, find_divergence, mixed_sum

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
    torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def mixed(tensor):
    return mixed_sum(replica_check._words_of(tensor))


@pytest.fixture(params=[digest_of, mixed], ids=["xxh3", "mixed sum"])
def way(request):
    return request.param


def made(dtype, *shape):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_any_dtype_is_seen_and_nothing_else(way, dtype):
    tensor = made(dtype, 5, 7)
    same = tensor.clone()
    assert way(tensor).dtype == torch.int64
    assert way(tensor).shape == ()
    assert way(tensor) == way(same) == way(tensor)
    assert torch.equal(tensor.view(-1).view(torch.uint8), same.view(-1).view(torch.uint8)), "it only looks"
    same.view(-1).view(torch.uint8)[-1] ^= 1
    assert way(tensor) != way(same)


def test_every_bit_of_a_tensor_counts(way):
    tensor = torch.randn(9)
    seen = {way(tensor).item()}
    for byte in range(36):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(way(other).item())
    assert len(seen) == 1 + 9 * 32


def test_order_and_sign_of_zero_count_and_strides_do_not(way):
    tensor = torch.arange(12.0).reshape(3, 4)
    assert way(tensor) != way(tensor.flip(0))
    assert way(tensor) == way(tensor.t().contiguous().t())
    assert way(torch.zeros(3)) != way(-torch.zeros(3))
    nan = torch.full((3,), float("nan"))
    assert way(nan) == way(nan.clone())


def test_empty_and_scalar_tensors_have_digests(way):
    assert way(torch.ones(())) != way(torch.zeros(()))
    assert way(torch.ones(0)) == way(torch.ones(0))


def test_zeros_at_the_end_count(way):
    assert len({way(torch.zeros(n)).item() for n in range(1, 6)}) == 5


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
def test_a_sum_does_not_depend_on_its_pieces(monkeypatch, chunk):
    words = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    whole = mixed_sum(words)
    monkeypatch.setattr(replica_check, "_CHUNK", chunk)
    assert mixed_sum(words) == whole


def test_a_sum_is_what_plain_integers_give():
    def one(word, position):
        x = (word + position * 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    draw = random.Random(1)
    words = [draw.randrange(-(2**63), 2**63) for _ in range(200)]
    expected = sum(one(word, at) for at, word in enumerate(words, start=1)) % 2**64
    assert mixed_sum(torch.tensor(words)).item() % 2**64 == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_mixed_sum_and_looks_only(dtype):
    tensor = made(dtype, 5, 7)
    there = tensor.cuda()
    assert digest_of(there).device.type == "cuda"
    assert digest_of(there).cpu() == mixed(tensor)
    assert torch.equal(there.cpu().view(torch.uint8), tensor.view(torch.uint8))


NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_digests_are_no_verdict(ranks):
    assert find_divergence(NAMES, [[1, 2, 3]] * ranks) is None
    assert find_divergence([], [[]] * ranks) is None


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("at", range(3))
def test_who_differs_from_the_majority_is_named(odd, at):
    held = [[1, 2, 3] for _ in range(3)]
    held[odd][at] = 9
    verdict = find_divergence(NAMES, held)
    assert verdict is not None
    assert (verdict.name, verdict.differing, verdict.of) == (NAMES[at], 1, 3)
    assert (verdict.ranks, verdict.majority) == ((odd,), True)
    assert str(verdict) == f"rank {odd} holds another {NAMES[at]} than the majority"


def test_without_a_majority_it_is_rank_0_that_others_differ_from():
    verdict = find_divergence(NAMES, [[1, 2, 3], [1, 5, 6]])
    assert str(verdict) == "rank 1 holds another b than rank 0; 2 of 3 differ"
    verdict = find_divergence(NAMES, [[1, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]])
    assert str(verdict) == "ranks 2–3 hold another a than rank 0"
