"""The optimal truncation of the weighted sum: exact without a rank, the closest there is with one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfplug.errors import ConfigError
from hfplug.lowrank import CoreSpace, LowRank
from hfplug.tuners import SvdMerge, SvdMergeConfig


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def update(seed, rank, out, into):
    return LowRank(randn(2 * seed, rank, into), randn(2 * seed + 1, out, rank))


def merged(updates, weights, rank=None, **options):
    return SvdMerge(SvdMergeConfig(**options)).merge(updates, CoreSpace.of(updates), weights, rank, torch.Generator())


def total(updates, weights):
    return sum(w * u.delta() for w, u in zip(weights, updates, strict=True) if u is not None)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    shape=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    rank=st.integers(1, 14),
)
def test_it_is_the_closest_update_of_its_rank(seed, ranks, shape, rank):
    """Against the singular values of the sum at full size (Eckart and Young)."""
    updates = [update(seed + i, r, *shape) for i, r in enumerate(ranks)]
    weights = [1.0, -0.5, 2.0, 0.3, -1.0][: len(ranks)]
    exact = total(updates, weights)
    found = merged(updates, weights, rank)
    values = torch.linalg.svdvals(exact)
    best = values[rank:].square().sum().sqrt()
    measured = torch.linalg.matrix_norm(found.update.delta() - exact).item()
    assert measured == pytest.approx(best.item(), rel=1e-9, abs=1e-12 * values[0].item())
    assert found.update.rank <= rank
    for basis in found.basis:
        assert (basis.T @ basis - torch.eye(basis.shape[1], dtype=basis.dtype)).abs().max() < 1e-12
    whole = merged(updates, weights)
    assert torch.linalg.matrix_norm(whole.update.delta() - exact) < 1e-12 * values[0]
    assert whole.update.rank == torch.linalg.matrix_rank(exact, rtol=1e-11)


def test_the_factors_are_balanced():
    found = merged([update(1, 4, 9, 7), update(2, 2, 9, 7)], [1.0, 1.0], 5).update
    rows, columns = found.A.norm(dim=1), found.B.norm(dim=0)
    assert torch.allclose(rows, columns, rtol=1e-12)
    assert rows.diff().max() < 0  # in order of their singular values


def test_updates_that_cancel_leave_nothing():
    one = update(1, 3, 9, 7)
    assert merged([one, one], [1.0, -1.0]).update.rank == 0
    assert merged([one, one], [1.0, 1.0]).update.rank == 3  # shared directions are counted once
    other = LowRank(one.A * 1e-6, one.B)
    assert merged([one, other], [1.0, -1.0]).update.rank == 3


def test_missing_and_zero_updates():
    one = update(1, 3, 9, 7)
    found = merged([None, one, LowRank.zero((9, 7), 2)], [5.0, 1.0, 3.0])
    assert found.update.rank == 3
    assert torch.linalg.matrix_norm(found.update.delta() - one.delta()) < 1e-13 * torch.linalg.matrix_norm(one.delta())


def test_a_wrong_tolerance_is_named():
    with pytest.raises(ConfigError, match=r"tolerance=0\.0 must be in \(0, 1\)"):
        SvdMergeConfig(tolerance=0.0)
