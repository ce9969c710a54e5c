"""The core space of several updates: exact, whatever their ranks, norms and shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfplug.lowrank import CoreSpace, LowRank


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def update(seed, rank, out, into, scale=1.0):
    return LowRank(randn(2 * seed, rank, into), randn(2 * seed + 1, out, rank) * scale)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    shape=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    scale=st.sampled_from([1.0, 1e-9, 1e9]),
)
def test_the_core_loses_nothing(seed, ranks, shape, scale):
    """Each update is exact relative to its own norm, though one beside it is 1e9 times as large or as small."""
    updates = [None if r == 0 and i else update(seed + i, r, *shape, scale**i) for i, r in enumerate(ranks)]
    space = CoreSpace.of(updates)
    for basis, size in ((space.U, shape[0]), (space.V, shape[1])):
        assert basis.shape == (size, min(size, sum(ranks)))
        assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype), atol=1e-12, rtol=0)
    for core, one in zip(space.cores, updates, strict=True):
        if one is None:
            assert not core.any()
        else:
            exact = one.delta()
            assert torch.linalg.matrix_norm(space.U @ core @ space.V.T - exact) <= 1e-12 * torch.linalg.matrix_norm(exact)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 6), shape=st.tuples(st.integers(2, 14), st.integers(2, 14)))
def test_distances_are_those_of_the_matrices(seed, rank, shape):
    """Also of an update that lies outside the space, by much or by the rounding of its factors to float32."""
    updates = [update(seed + i, 2, *shape) for i in range(2)]
    space = CoreSpace.of(updates)
    total = sum(u.delta() for u in updates)
    core = space.cores.sum(0)
    near = LowRank(torch.cat([u.A for u in updates]).float().double(), torch.cat([u.B for u in updates], 1).float().double())
    for other in (update(seed + 9, rank, *shape), near):
        expected = torch.linalg.matrix_norm(other.delta() - total).item()
        assert space.distance(core, other) == pytest.approx(expected, rel=1e-7, abs=1e-14 * total.norm().item())
    assert space.distance(core, near) > 1e-9


def test_padding_changes_nothing():
    one = update(1, 3, 7, 5)
    assert one.padded(6).rank == 6
    assert torch.equal(one.padded(6).delta(), one.delta())
    assert one.shape == (7, 5)
    with pytest.raises(ValueError, match="rank=2 is less than the 3 rows"):
        one.padded(2)
