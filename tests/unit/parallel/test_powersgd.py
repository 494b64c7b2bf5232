"""PowerSGD's arithmetic against the paper's algorithm, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import UsageError
from paceline.parallel.compression.powersgd import PowerSGD, as_matrix, factors_of

SHAPES = [(40, 30), (40,), (16, 4, 3, 3), (2, 3), (), (64, 50)]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def tensors_of(seed: int, device: str = "cpu") -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(device) for shape in SHAPES]


def round_of(lows: list[PowerSGD], buckets: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """One round of several ranks: the sums in between are made here. Return each rank's mean as it sees it."""
    summed = torch.stack([low.project(bucket) for low, bucket in zip(lows, buckets, strict=True)]).sum(0)
    for low in lows:
        low.p.copy_(summed)
        low.orthogonalise()
    backs = torch.stack([low.back(bucket) for low, bucket in zip(lows, buckets, strict=True)])
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
    lows = [PowerSGD(SHAPES, rank=2, seed=5) for _ in range(2)]
    queries = {
        thin.index: lows[0]
        .q[thin.q_start : thin.q_start + 2 * thin.columns]
        .view(2, -1)
        .t()
        .double()
        .tolist()
        for thin in lows[0].factors.thin
    }
    for number in range(3):
        buckets = [tensors_of(10 * number + rank) for rank in range(2)]
        seen = round_of(lows, buckets)
        for index, query in queries.items():
            matrices = [as_matrix(bucket[index]).double().tolist() for bucket in buckets]
            expected, queries[index] = mean_by_the_paper(matrices, query)
            got = as_matrix(seen[0][index])
            assert torch.allclose(got, torch.tensor(expected), atol=1e-4)
        assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("true_rank", [0, 1, 3])
def test_a_matrix_of_no_more_than_that_rank_comes_out_exactly(true_rank, device):
    random = torch.Generator().manual_seed(true_rank)
    matrix = torch.randn(60, true_rank, generator=random) @ torch.randn(true_rank, 50, generator=random)
    low = PowerSGD([(60, 50)], rank=3, device=device)
    ((seen,),) = round_of([low], [[matrix.to(device)]])
    assert (seen.cpu() - matrix).norm() <= 1e-5 * matrix.norm()


def test_error_feedback_sends_everything_in_time():
    """What was sent and what is left are what was given, and what is left stays bounded."""
    low, (matrix,) = PowerSGD([(40, 30)], rank=2), tensors_of(0)[:1]
    left, sent = torch.zeros(40, 30), torch.zeros(40, 30, dtype=torch.float64)
    for _ in range(80):
        given = matrix + left
        ((seen,),) = round_of([low], [[given]])
        left = given - seen
        sent += seen
    assert ((sent + left - 80 * matrix.double()).norm() / (80 * matrix.norm())).item() < 1e-6
    assert left.norm() < 25 * matrix.norm()


def test_a_warm_start_comes_closer_round_by_round():
    scales = torch.logspace(0, -3, 30)
    left, _ = torch.linalg.qr(torch.randn(40, 30, generator=torch.Generator().manual_seed(0)))
    right, _ = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(1)))
    matrix = left * scales @ right
    best = scales[4:].norm().item()
    low = PowerSGD([(40, 30)], rank=4)
    off = [(round_of([low], [[matrix]])[0][0] - matrix).norm().item() for _ in range(20)]
    assert off[-1] < off[0]
    assert off[-1] == pytest.approx(best, rel=0.01)


def test_what_is_worth_it_is_sent_thin():
    factors = factors_of(SHAPES, rank=2, min_ratio=2.0)
    assert [thin.index for thin in factors.thin] == [0, 2, 5]
    assert factors.raw == (1, 3, 4)
    assert [(thin.rows, thin.columns, thin.rank) for thin in factors.thin] == [
        (40, 30, 2),
        (16, 36, 2),
        (64, 50, 2),
    ]
    assert factors.p_numel == 2 * (40 + 16 + 64)
    assert factors.q_numel == 2 * (30 + 36 + 50)
    assert [thin.p_start for thin in factors.thin] == [0, 80, 112]
    assert [thin.q_start for thin in factors.thin] == [0, 60, 132]
    assert factors_of(SHAPES, rank=2, min_ratio=100).thin == ()
    assert [thin.rank for thin in factors_of([(2, 900)], rank=8, min_ratio=0.1).thin] == [2]
    assert factors_of([(0, 5), (5, 0)], rank=1).raw == (0, 1)


def test_raw_tensors_are_left_alone():
    low = PowerSGD(SHAPES, rank=2)
    (seen,) = round_of([low], [tensors_of(0)])
    for index in low.factors.raw:
        assert (seen[index] == 7).all()


def test_the_first_q_is_the_seed_s():
    assert torch.equal(PowerSGD(SHAPES, seed=1).q, PowerSGD(SHAPES, seed=1).q)
    assert not torch.equal(PowerSGD(SHAPES, seed=1).q, PowerSGD(SHAPES, seed=2).q)


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.randn])
def test_columns_become_orthonormal_whatever_they_are(make):
    low = PowerSGD([(50, 40)], rank=4)
    low.p.copy_(make(200))
    low.orthogonalise()
    p = low.p.view(50, 4)
    assert torch.allclose(p.T @ p, torch.eye(4), atol=1e-5)
    again = PowerSGD([(50, 40)], rank=4)
    torch.manual_seed(0)
    again.p.copy_(torch.randn(200))
    low.p.copy_(again.p)
    low.orthogonalise()
    again.orthogonalise()
    assert torch.equal(low.p, again.p)


def test_a_round_without_gradient_is_no_end():
    low, (matrix,) = PowerSGD([(40, 30)], rank=2), tensors_of(0)[:1]
    ((nothing,),) = round_of([low], [[torch.zeros(40, 30)]])
    assert (nothing == 0).all()
    ((seen,),) = round_of([low], [[matrix]])
    assert seen.norm() > 0.1 * matrix.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_comes_out_as_such_and_does_not_stay(bad):
    low, tensors = PowerSGD(SHAPES, rank=2), tensors_of(0)
    tensors[0][3, 3] = bad
    (seen,) = round_of([low], [tensors])
    assert not seen[0].isfinite().all()
    assert seen[5].isfinite().all()
    (seen,) = round_of([low], [tensors_of(1)])
    assert all(tensor.isfinite().all() for tensor in seen)


@pytest.mark.parametrize(("rank", "min_ratio"), [(0, 2.0), (-1, 2.0), (1, 0.0), (1, math.nan)])
def test_what_is_no_rank_is_refused(rank, min_ratio):
    with pytest.raises(UsageError):
        factors_of(SHAPES, rank, min_ratio)
