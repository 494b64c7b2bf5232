"""Tensor digests: equal for equal bits, different for one changed bit, in the CPU's and the GPU's algorithm."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.parallel import replica_digests
from paceline.parallel.replica_digests import find_divergence, mixed_digest, tensor_digest

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
    torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def mixed_digest_of(tensor):
    return mixed_digest(replica_digests._words_of(tensor))


@pytest.fixture(params=[tensor_digest, mixed_digest_of], ids=["xxh3", "mixed sum"])
def digest(request):
    return request.param


def made(dtype, *shape):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_bit_of_any_dtype_changes_the_digest(digest, dtype):
    tensor = made(dtype, 5, 7)
    same = tensor.clone()
    assert digest(tensor).dtype == torch.int64
    assert digest(tensor).shape == ()
    assert digest(tensor) == digest(same) == digest(tensor)
    assert torch.equal(tensor.view(-1).view(torch.uint8), same.view(-1).view(torch.uint8)), "it only looks"
    same.view(-1).view(torch.uint8)[-1] ^= 1
    assert digest(tensor) != digest(same)


def test_every_bit_of_a_tensor_counts(digest):
    tensor = torch.randn(9)
    seen = {digest(tensor).item()}
    for byte in range(36):
        for bit in range(8):
            other = tensor.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(digest(other).item())
    assert len(seen) == 1 + 9 * 32


def test_order_and_sign_of_zero_count_but_strides_do_not(digest):
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest(tensor) != digest(tensor.flip(0))
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3))
    nan = torch.full((3,), float("nan"))
    assert digest(nan) == digest(nan.clone())


def test_empty_and_scalar_tensors_have_digests(digest):
    assert digest(torch.ones(())) != digest(torch.zeros(()))
    assert digest(torch.ones(0)) == digest(torch.ones(0))


def test_zeros_at_the_end_count(digest):
    assert len({digest(torch.zeros(n)).item() for n in range(1, 6)}) == 5


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
def test_a_mixed_digest_does_not_depend_on_chunks(monkeypatch, chunk):
    words = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    whole = mixed_digest(words)
    monkeypatch.setattr(replica_digests, "_CHUNK", chunk)
    assert mixed_digest(words) == whole


def test_a_mixed_digest_equals_plain_integer_arithmetic():
    def one(word, position):
        x = (word + position * 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    draw = random.Random(1)
    words = [draw.randrange(-(2**63), 2**63) for _ in range(200)]
    expected = sum(one(word, at) for at, word in enumerate(words, start=1)) % 2**64
    assert mixed_digest(torch.tensor(words)).item() % 2**64 == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_computes_the_mixed_digest_without_changing_the_tensor(dtype):
    tensor = made(dtype, 5, 7)
    there = tensor.cuda()
    assert tensor_digest(there).device.type == "cuda"
    assert tensor_digest(there).cpu() == mixed_digest_of(tensor)
    assert torch.equal(there.cpu().view(torch.uint8), tensor.view(torch.uint8))


NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_digests_are_no_divergence(ranks):
    assert find_divergence(NAMES, [[1, 2, 3]] * ranks) is None
    assert find_divergence([], [[]] * ranks) is None


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("at", range(3))
def test_ranks_that_differ_from_the_majority_are_named(odd, at):
    held = [[1, 2, 3] for _ in range(3)]
    held[odd][at] = 9
    divergence = find_divergence(NAMES, held)
    assert divergence is not None
    assert (divergence.name, divergence.differing, divergence.compared) == (NAMES[at], 1, 3)
    assert (divergence.ranks, divergence.majority) == ((odd,), True)
    assert str(divergence) == f"rank {odd} holds another {NAMES[at]} than the majority"


def test_without_a_majority_ranks_are_compared_with_rank_0():
    divergence = find_divergence(NAMES, [[1, 2, 3], [1, 5, 6]])
    assert str(divergence) == "rank 1 holds another b than rank 0; 2 of 3 differ"
    divergence = find_divergence(NAMES, [[1, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]])
    assert str(divergence) == "ranks 2–3 hold another a than rank 0"
