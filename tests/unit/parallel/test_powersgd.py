"""PowerSGD's arithmetic against the paper's algorithm, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import UsageError
from paceline.parallel.compression.powersgd import LowRankFactors, as_matrix, worth_factoring

SHAPES = [(40, 30), (16, 4, 3, 3), (64, 50)]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def tensors_of(seed: int, device: str = "cpu") -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(device) for shape in SHAPES]


def round_of(lows: list[LowRankFactors], buckets: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """One round of several ranks: the sums in between are made here. Return each rank's mean as it sees it."""
    summed = torch.stack([low.project(bucket) for low, bucket in zip(lows, buckets, strict=True)]).sum(0)
    for low in lows:
        low.p.copy_(summed)
        low.orthogonalise()
    backs = torch.stack([low.project_back(bucket) for low, bucket in zip(lows, buckets, strict=True)])
    into = [[torch.full_like(tensor, 7.0) for tensor in bucket] for bucket in buckets]
    for low, outs in zip(lows, into, strict=True):
        low.q.copy_(backs.mean(0))
        low.reconstruct(outs)
    return into


def orthogonal_by_gram_schmidt(p: list[list[float]]) -> list[list[float]]:
    """Orthonormal columns, one after the other, in Python's float64."""
    rows, columns = len(p), len(p[0])
    done: list[list[float]] = []
    for column in range(columns):
        vector = [p[row][column] for row in range(rows)]
        for _ in range(2):
            for other in done:
                along = sum(a * b for a, b in zip(vector, other, strict=True))
                vector = [a - along * b for a, b in zip(vector, other, strict=True)]
        length = math.sqrt(sum(a * a for a in vector))
        done.append([a / length for a in vector])
    return [[vector[row] for vector in done] for row in range(rows)]


def mean_by_the_paper(
    matrices: list[list[list[float]]], q: list[list[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Algorithm 1 of arXiv 1905.13727 for some ranks' matrices: return the mean's approximation and the new Q."""
    rows, columns, rank, ranks = len(matrices[0]), len(matrices[0][0]), len(q[0]), len(matrices)
    p = [
        [sum(m[i][j] * q[j][r] for m in matrices for j in range(columns)) / ranks for r in range(rank)]
        for i in range(rows)
    ]
    p = orthogonal_by_gram_schmidt(p)
    q = [
        [sum(m[i][j] * p[i][r] for m in matrices for i in range(rows)) / ranks for r in range(rank)]
        for j in range(columns)
    ]
    return [[sum(p[i][r] * q[j][r] for r in range(rank)) for j in range(columns)] for i in range(rows)], q


def test_three_rounds_of_two_ranks_are_those_of_the_paper():
    lows = [LowRankFactors(SHAPES, rank=2, seed=5) for _ in range(2)]
    queries = [q.t().double().tolist() for _, q in lows[0].pairs]
    for number in range(3):
        buckets = [tensors_of(10 * number + rank) for rank in range(2)]
        seen = round_of(lows, buckets)
        for index, query in enumerate(queries):
            matrices = [as_matrix(bucket[index]).double().tolist() for bucket in buckets]
            expected, queries[index] = mean_by_the_paper(matrices, query)
            got = as_matrix(seen[0][index])
            assert torch.allclose(got, torch.tensor(expected), atol=1e-4)
        assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("true_rank", [0, 1, 3])
def test_a_matrix_of_at_most_that_rank_is_reproduced_exactly(true_rank, device):
    random = torch.Generator().manual_seed(true_rank)
    matrix = torch.randn(60, true_rank, generator=random) @ torch.randn(true_rank, 50, generator=random)
    low = LowRankFactors([(60, 50)], rank=3, device=device)
    ((seen,),) = round_of([low], [[matrix.to(device)]])
    assert (seen.cpu() - matrix).norm() <= 1e-5 * matrix.norm()


def test_error_feedback_sends_everything_in_time():
    """Sent values plus residual equal the input, and the residual stays bounded."""
    low, (matrix,) = LowRankFactors([(40, 30)], rank=2), tensors_of(0)[:1]
    left, sent = torch.zeros(40, 30), torch.zeros(40, 30, dtype=torch.float64)
    for _ in range(80):
        given = matrix + left
        ((seen,),) = round_of([low], [[given]])
        left = given - seen
        sent += seen
    assert ((sent + left - 80 * matrix.double()).norm() / (80 * matrix.norm())).item() < 1e-6
    assert left.norm() < 25 * matrix.norm()


def test_a_warm_start_improves_with_every_round():
    scales = torch.logspace(0, -3, 30)
    left, _ = torch.linalg.qr(torch.randn(40, 30, generator=torch.Generator().manual_seed(0)))
    right, _ = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(1)))
    matrix = left * scales @ right
    best = scales[4:].norm().item()
    low = LowRankFactors([(40, 30)], rank=4)
    off = [(round_of([low], [[matrix]])[0][0] - matrix).norm().item() for _ in range(20)]
    assert off[-1] < off[0]
    assert off[-1] == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "rank", "worth"),
    [
        ((40, 30), 2, True),
        ((40,), 2, False),
        ((16, 4, 3, 3), 2, True),
        ((2, 3), 2, False),
        ((), 2, False),
        ((64, 50), 2, True),
        ((2, 900), 8, False),
        ((0, 5), 1, False),
        ((5, 0), 1, False),
    ],
)
def test_tensors_are_factored_where_that_halves_them(shape, rank, worth):
    assert worth_factoring(shape, rank) is worth


def test_factors_are_packed_one_after_another():
    factors = LowRankFactors(SHAPES, rank=2)
    assert [(p.shape, q.shape) for p, q in factors.pairs] == [
        ((40, 2), (2, 30)),
        ((16, 2), (2, 36)),
        ((64, 2), (2, 50)),
    ]
    assert factors.p.numel() == 2 * (40 + 16 + 64)
    assert factors.q.numel() == 2 * (30 + 36 + 50)
    assert [p.storage_offset() for p, _ in factors.pairs] == [0, 80, 112]
    assert [q.storage_offset() for _, q in factors.pairs] == [0, 60, 132]
    assert [(p.shape, q.shape) for p, q in LowRankFactors([(2, 900)], rank=8).pairs] == [((2, 2), (2, 900))]


def test_the_first_q_is_the_seed_s():
    assert torch.equal(LowRankFactors(SHAPES, seed=1).q, LowRankFactors(SHAPES, seed=1).q)
    assert not torch.equal(LowRankFactors(SHAPES, seed=1).q, LowRankFactors(SHAPES, seed=2).q)


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.randn])
def test_any_columns_become_orthonormal(make):
    low = LowRankFactors([(50, 40)], rank=4)
    low.p.copy_(make(200))
    low.orthogonalise()
    p = low.p.view(50, 4)
    assert torch.allclose(p.T @ p, torch.eye(4), atol=1e-5)
    again = LowRankFactors([(50, 40)], rank=4)
    torch.manual_seed(0)
    again.p.copy_(torch.randn(200))
    low.p.copy_(again.p)
    low.orthogonalise()
    again.orthogonalise()
    assert torch.equal(low.p, again.p)


def test_a_round_without_gradient_does_not_end_learning():
    low, (matrix,) = LowRankFactors([(40, 30)], rank=2), tensors_of(0)[:1]
    ((nothing,),) = round_of([low], [[torch.zeros(40, 30)]])
    assert (nothing == 0).all()
    ((seen,),) = round_of([low], [[matrix]])
    assert seen.norm() > 0.1 * matrix.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_are_transmitted_and_leave_no_residual(bad):
    low, tensors = LowRankFactors(SHAPES, rank=2), tensors_of(0)
    tensors[0][3, 3] = bad
    (seen,) = round_of([low], [tensors])
    assert not seen[0].isfinite().all()
    assert seen[2].isfinite().all()
    (seen,) = round_of([low], [tensors_of(1)])
    assert all(tensor.isfinite().all() for tensor in seen)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_1_is_rejected(rank):
    with pytest.raises(UsageError):
        worth_factoring(SHAPES[0], rank)
