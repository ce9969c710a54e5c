"""Compress-then-merge: the exact properties of its card, against full-size matrices and a reference without core space."""

from __future__ import annotations

import itertools

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfplug
from hfplug.errors import ConfigError
from hfplug.lowrank import CoreSpace, LowRank
from hfplug.testing import models
from hfplug.tuners import CtM, CtMConfig
from hfplug.tuners.ctm.rules import RULES, Draw, elect, trim
from hfplug.tuners.ctm.subspace import rescaled, signs, subspaces

OUT, IN = 24, 20


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def update(seed, rank=3, norm=1.0, out=OUT, into=IN):
    """A random update whose singular values differ, of a given Frobenius norm."""
    spread = torch.linspace(1, 0.3, rank, dtype=torch.float64)
    made = LowRank(randn(2 * seed, rank, into), randn(2 * seed + 1, out, rank) * spread)
    return LowRank(made.A, made.B * (norm / torch.linalg.matrix_norm(made.delta())))


def five(norms=(1.0, 2.0, 0.5, 4.0, 1.5), rank=3):
    return [update(i, rank, norm) for i, norm in enumerate(norms)]


def ctm(updates, weights=None, rank=3, seed=0, **options):
    """The merged module."""
    weights = [1.0] * len(updates) if weights is None else weights
    generator = torch.Generator().manual_seed(seed)
    return CtM(CtMConfig(**options)).merge(updates, CoreSpace.of(updates), weights, rank, generator)


def delta(*arguments, **options):
    return ctm(*arguments, **options).update.delta()


def off(found, expected):
    return (torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected)).item()


def orthonormal(matrix):
    return (matrix.T @ matrix - torch.eye(matrix.shape[1], dtype=matrix.dtype)).abs().max().item()


# -- 1 and 2: one adapter, and copies of one ---------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("rank", [3, 8, None])
def test_one_adapter_comes_back_unchanged(beta, rank):
    one = update(1)
    for rule in ("linear", "mean"):
        assert off(delta([one], rank=rank, beta=beta, rule=rule), one.delta()) < 1e-14
    # O is diagonal with one adapter, so TIES keeps it all if its share covers the diagonal
    assert off(delta([one], rank=rank, beta=beta, rule="ties", density=3 / 9), one.delta()) < 1e-14
    assert off(delta([one], rank=rank, beta=beta, rule="ties", density=2 / 9), one.delta()) > 1e-2


def test_copies_of_one_adapter():
    one = update(1)
    for copies in (2, 5):
        for rule in ("mean", "ties"):
            assert off(delta([one] * copies, rule=rule, density=1.0), one.delta()) < 1e-13, rule
        assert off(delta([one] * copies), copies * one.delta()) < 1e-13


# -- 3 and 4: rank, bases, the path without core space, order, scale ---------------------------------------------------


@pytest.mark.parametrize("rule", [*RULES, torch.sum])
def test_the_rank_is_bounded_and_the_bases_are_orthonormal(rule):
    chosen = (lambda coordinates: coordinates.sum(0)) if rule is torch.sum else rule
    for rank in (1, 4, 100):
        merged = ctm(five(), rank=rank, rule=chosen)
        kept = min(rank, 15)
        assert merged.update.A.shape == (kept, IN)
        assert merged.update.B.shape == (OUT, kept)
        assert torch.linalg.matrix_rank(merged.update.delta()) <= kept
        assert max(map(orthonormal, merged.basis)) < 1e-12


def full_size(updates, weights, rank, beta, rule, density, iterations):
    """The authors' procedure on matrices of full size, from one singular value decomposition to the next."""
    deltas = [u.delta() for u in updates]
    norms = [torch.linalg.matrix_norm(d) for d in deltas]
    mean = sum(norms) / len(norms)
    X = [d / n * (beta * n + (1 - beta) * mean) for d, n in zip(deltas, norms, strict=True)]
    U = torch.linalg.svd(torch.cat(X, 1)).U[:, :rank]
    V = torch.linalg.svd(torch.cat([x.T for x in X], 1)).U[:, :rank]
    for _ in range(iterations):
        U = torch.linalg.svd(torch.cat([x @ V for x in X], 1)).U[:, :rank]
        V = torch.linalg.svd(torch.cat([x.T @ U for x in X], 1)).U[:, :rank]
    coordinates = torch.stack([w * U.T @ d @ V for w, d in zip(weights, deltas, strict=True)])
    return U @ RULES[rule](coordinates, Draw(density, 0.0, torch.Generator())) @ V.T, U, V


@pytest.mark.parametrize("rule", ["linear", "mean", "ties"])
@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_the_core_path_is_the_full_path(rule, beta):
    """The card: 1e-12, iterate for iterate."""
    weights = [1.0, -0.5, 2.0, 1.0, 0.3]
    merged = ctm(five(), weights, 4, beta=beta, rule=rule, density=0.5)
    assert merged.iterations > 3
    expected, U, V = full_size(five(), weights, 4, beta, rule, 0.5, merged.iterations)
    for mine, other in zip(merged.basis, (U, V), strict=True):
        assert (mine.abs() - other.abs()).abs().max() < 1e-12  # vector by vector, up to signs: no rotation
    assert off(merged.update.delta(), expected) < 1e-12


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(5)), factor=st.sampled_from([1e-6, 0.3, 1e5]))
def test_order_does_not_matter_and_scale_passes_through(order, factor):
    updates, weights = five(), [1.0, -0.5, 2.0, 1.0, 0.3]
    for rule in ("linear", "ties"):
        expected = delta(updates, weights, rule=rule)
        assert off(delta([updates[i] for i in order], [weights[i] for i in order], rule=rule), expected) < 1e-10
        scaled = [LowRank(u.A, u.B * factor) for u in updates]
        assert off(delta(scaled, weights, rule=rule), factor * expected) < 1e-10


# -- 5 and 6: what beta does, what is lossless -------------------------------------------------------------------------


def test_with_beta_zero_the_norm_of_an_adapter_has_no_say_in_the_subspaces():
    updates = five()
    louder = [LowRank(u.A, u.B * (50 if i == 2 else 1)) for i, u in enumerate(updates)]
    before, after = ctm(updates, beta=0.0), ctm(louder, beta=0.0)
    for mine, other in zip(before.basis, after.basis, strict=True):
        assert (mine - other).abs().max() < 1e-10
    U, V = before.basis
    added = 49 * U @ (U.T @ updates[2].delta() @ V) @ V.T  # its coordinates are those of the update itself
    assert off(after.update.delta(), before.update.delta() + added) < 1e-10
    raw = ctm(louder, beta=1.0).basis[0]
    assert (raw - ctm(updates, beta=1.0).basis[0]).abs().max() > 0.1


def test_weights_act_on_the_coordinates_alone():
    updates = five()
    plain, heavy = ctm(updates), ctm(updates, [1, 1, 9.0, 1, 1])
    assert all(torch.equal(a, b) for a, b in zip(plain.basis, heavy.basis, strict=True))
    negative = delta(updates, [-1.0] * 5, rule="ties")
    assert torch.equal(negative, -delta(updates, rule="ties"))


def shared_space(count=4, rank=3):
    B, A = randn(90, OUT, rank), randn(91, rank, IN)
    return [LowRank(randn(100 + i, rank, rank) @ A, B * (i + 1)) for i in range(count)]


def test_adapters_in_one_subspace_are_summed_without_loss():
    updates, weights = shared_space(), [1.0, -2.0, 0.5, 0.1]
    expected = sum(w * u.delta() for w, u in zip(weights, updates, strict=True))
    for beta in (0.0, 0.25, 1.0):
        assert off(delta(updates, weights, beta=beta), expected) < 1e-12
    assert off(delta(updates, weights, rank=2), expected) > 1e-3


def test_a_weak_direction_of_a_shared_subspace_is_not_lost():
    """The start squares the singular values; a direction a million times weaker must survive it."""
    B, A = randn(90, OUT, 3) * torch.tensor([1, 1e-3, 1e-6], dtype=torch.float64), randn(91, 3, IN)
    updates = [LowRank(A * (i + 1), B) for i in range(3)]
    assert off(delta(updates), 6 * B @ A) < 1e-13


# -- 7: the objective --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 8), beta=st.sampled_from([0.0, 0.25, 1.0]))
def test_the_objective_never_falls(seed, rank, beta):
    cores = randn(seed, 5, 8, 9)
    targets = rescaled(cores, beta)
    found = subspaces(targets, rank, 200, 0.0)
    values = found.objective
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(values))
    U, V = (torch.linalg.svd(w).U[:, :rank] for w in (targets.permute(1, 0, 2).flatten(1), targets.permute(2, 0, 1).flatten(1)))
    start = (U.T @ targets @ V).square().sum().item()
    assert values[0] == pytest.approx(start, rel=1e-10)
    assert values[-1] == pytest.approx((found.U.T @ targets @ found.V).square().sum().item(), rel=1e-12)
    assert values[-1] <= targets.square().sum().item() * (1 + 1e-12)


def test_every_column_comes_from_a_decomposition_however_few_iterations():
    """Rules that work entry by entry need singular vectors in order; any rotation of them would be another result."""
    targets = rescaled(randn(5, 5, 8, 9), 0.25)
    for iterations in (1, 2, 3, 50):
        found = subspaces(targets, 3, iterations, 1e-6)
        assert found.iterations <= iterations
        held = (targets.mT @ found.U).permute(1, 0, 2).flatten(1)  # V diagonalises this, in order
        gram = found.V.T @ held @ held.T @ found.V
        assert (gram - gram.diag().diag()).abs().max() < 1e-10 * gram.max()
        assert gram.diag().diff().max() <= 0


def test_the_subspaces_are_at_a_maximum():
    """Not the largest there is (the problem is not convex), but no step away from it in any direction raises the objective."""
    targets = rescaled(torch.stack([u.delta() for u in five()]), 0.25)
    found = subspaces(targets, 3, 3000, 0.0)
    best = found.objective[-1]
    for seed in range(30):
        for size in (1e-3, 1e-1):
            U = torch.linalg.qr(found.U + size * randn(seed, OUT, 3)).Q
            V = torch.linalg.qr(found.V + size * randn(seed + 50, IN, 3)).Q
            assert (U.T @ targets @ V).square().sum().item() < best


# -- 8: signs, PEFT's scalings (the reload is in tests/core/test_merge_seam.py) ----------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_signs_of_the_basis_change_not_one_bit(rule):
    U, V = ctm(five(), rank=5).basis
    left, right = (randn(seed, 5).sign() for seed in (1, 2))

    def merged(U, V):
        coordinates = torch.stack([(U.T @ u.B) @ (u.A @ V) for u in five()])
        draw = Draw(0.4, 0.3, torch.Generator().manual_seed(3))
        return U @ RULES[rule](coordinates, draw) @ V.T

    assert torch.equal(merged(U * left, V * right), merged(U, V))


def test_the_basis_returned_has_no_arbitrary_signs():
    U = randn(3, 9, 4)
    flipped = U * torch.tensor([1, -1, -1, 1.0], dtype=torch.float64)
    assert torch.equal(U * signs(U), flipped * signs(flipped))
    assert all(torch.equal(signs(b), torch.ones(3, dtype=b.dtype)) for b in ctm(five()).basis)


def test_a_rotation_of_the_basis_would_change_ties():
    """Why the basis must be canonical: inside one subspace TIES depends on it."""
    U, V = ctm(five(), rank=3).basis
    turn = torch.linalg.qr(randn(4, 3, 3)).Q
    results = []
    for basis in (U, U @ turn):
        coordinates = torch.stack([(basis.T @ u.B) @ (u.A @ V) for u in five()])
        results.append(basis @ RULES["ties"](coordinates, Draw(0.25, 0.0, torch.Generator())) @ V.T)
    assert off(results[1], results[0]) > 0.1


def test_b47_scalings_of_every_kind_end_in_the_forward(tmp_path):
    """Adapters in one subspace, alpha and rsLoRA mixed: CtM is lossless, so its forward is the scaled sum of theirs."""
    kinds = ({"lora_alpha": 10}, {"use_rslora": True, "lora_alpha": 3}, {"alpha_pattern": {"v_proj": 1}})
    targets = ["q_proj", "v_proj"]
    for number, options in enumerate(kinds):
        config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": targets, **options})
        model = peft.get_peft_model(models.tiny_llama(), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    place = sum(map(ord, name))  # the same factors in every adapter, but for a mixing of B
                    mixing = randn(number, 3, 3).float() if "lora_B" in name else torch.eye(3)
                    shared = randn(place, *parameter.shape).float()
                    parameter.copy_(shared @ mixing if "lora_B" in name else shared)
        model.save_pretrained(tmp_path / str(number))
    folders, weights = [tmp_path / str(i) for i in range(3)], [1.0, -0.5, 0.25]
    report = hfplug.tuners.merge(folders, weights, output=tmp_path / "out")
    assert report.error < 1e-6
    layers = [
        dict(peft.PeftModel.from_pretrained(models.tiny_llama(), f).get_base_model().named_modules())
        for f in (*folders, tmp_path / "out")
    ]
    x = randn(7, 5, 32).float()
    for module in report.modules:
        plain = models.tiny_llama().get_submodule(module.module)(x)
        added = [layer[module.module](x) - plain for layer in layers]
        expected = sum(w * a for w, a in zip(weights, added, strict=False))
        assert (added[-1] - expected).abs().max() < 1e-5 * expected.abs().max()


# -- zero updates, missing targets, shapes -----------------------------------------------------------------------------


def test_an_adapter_without_an_update_is_zero_and_changes_no_other():
    updates = five()
    expected = ctm(updates)
    for nothing in (None, LowRank.zero((OUT, IN), 3), LowRank(randn(8, 3, IN), torch.zeros(OUT, 3, dtype=torch.float64))):
        found = ctm([*updates, nothing])
        assert off(found.update.delta(), expected.update.delta()) < 1e-12
        mean = delta([*updates, nothing], rule="mean")  # a mean over six, one of them zero
        assert off(mean, expected.update.delta() / 6) < 1e-12


def test_updates_that_are_all_zero_stay_zero():
    merged = ctm([LowRank.zero((OUT, IN), 2), None])
    assert torch.equal(merged.update.delta(), torch.zeros(OUT, IN, dtype=torch.float64))
    assert max(map(orthonormal, merged.basis)) < 1e-12


def test_a_weight_of_zero_is_as_if_the_adapter_was_not_given():
    updates = five()
    expected = delta([updates[0], updates[3]])
    assert off(delta(updates, [1.0, 0, 0, 1.0, 0]), expected) < 1e-12


def test_ranks_may_differ_and_the_rank_is_bounded_by_the_shapes():
    updates = [update(1, 2, out=5), update(2, 6, out=5), update(3, 1, out=5)]
    merged = ctm(updates, rank=50)
    assert merged.update.rank == 5  # out_features, less than the 9 of the ranks
    assert off(merged.update.delta(), sum(u.delta() for u in updates)) < 1e-12
    padded = merged.update.padded(8)
    assert padded.rank == 8
    assert torch.equal(padded.delta(), merged.update.delta())
    with pytest.raises(ValueError, match="rank=3 is less"):
        merged.update.padded(3)
    assert CtM(CtMConfig()).default_rank([2, 6, 1]) == 6


# -- the rules, on numbers done by hand --------------------------------------------------------------------------------

HAND = torch.tensor([[[4.0, -1.0], [2.0, 0.5]], [[1.0, -3.0], [-6.0, 0.25]]], dtype=torch.float64)


def draw(density=0.25, drop=0.0, seed=0):
    return Draw(density, drop, torch.Generator().manual_seed(seed))


def test_ties_by_hand():
    half = trim(HAND, 0.5)
    assert torch.equal(half, torch.tensor([[[4.0, 0], [2, 0]], [[0, -3.0], [-6, 0]]], dtype=torch.float64))
    # sums 4, -3, -4, 0; the mean is over those that agree and are not trimmed
    assert torch.equal(elect(half), torch.tensor([[4.0, -3], [-6, 0]], dtype=torch.float64))
    assert torch.equal(RULES["ties"](HAND, draw(1.0)), torch.tensor([[2.5, -2], [-6, 0.375]], dtype=torch.float64))
    assert torch.equal(elect(torch.stack([HAND[0], -HAND[0]])), torch.zeros(2, 2, dtype=torch.float64))  # no majority


def test_linear_and_mean_by_hand():
    assert torch.equal(RULES["linear"](HAND, draw()), torch.tensor([[5.0, -4], [-4, 0.75]], dtype=torch.float64))
    assert torch.equal(RULES["mean"](HAND, draw()), torch.tensor([[2.5, -2], [-2, 0.375]], dtype=torch.float64))


def test_dare_drops_its_share_and_keeps_the_expectation():
    ones = torch.ones(4, 100, 100, dtype=torch.float64)
    found = RULES["dare_linear"](ones, draw(drop=0.3))
    assert found.mean().item() == pytest.approx(4, rel=0.02)
    assert set((found * 0.7).round(decimals=9).unique().tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(found, RULES["dare_linear"](ones, draw(drop=0.3)))
    assert not torch.equal(found, RULES["dare_linear"](ones, draw(drop=0.3, seed=1)))
    assert torch.equal(RULES["dare_ties"](HAND, draw(0.5)), RULES["ties"](HAND, draw(0.5)))  # drop 0


def test_a_rule_of_one_s_own_is_a_function_of_the_coordinates():
    seen = {}

    def median(coordinates):
        seen["shape"] = tuple(coordinates.shape)
        return coordinates.median(0).values

    assert torch.isfinite(delta(five(), rule=median)).all()
    assert seen["shape"] == (5, 3, 3)
    assert off(delta(five(), rule=lambda c: c.sum(0), scale=0.5), 0.5 * delta(five())) < 1e-15
    with pytest.raises(ConfigError, match=r"returned \(5, 3, 3\).*expected \(3, 3\)"):
        delta(five(), rule=lambda c: c)


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_it_balances_what_truncation_gives_to_the_loudest():
    """The card's toy: truncated SVD is closer to the sum, CtM keeps more of the adapter that is kept least."""
    from hfplug.tuners import SvdMerge, SvdMergeConfig

    updates = five((4.0, 3.0, 1.0, 0.5, 0.25))
    space, weights = CoreSpace.of(updates), [1.0] * 5
    results = {
        "ctm": ctm(updates, rank=6),
        "svd": SvdMerge(SvdMergeConfig()).merge(updates, space, weights, 6, torch.Generator()),
    }
    total = sum(u.delta() for u in updates)
    kept = {}
    for name, merged in results.items():
        U, V = merged.basis
        norms = [(torch.linalg.matrix_norm(U.T @ u.delta() @ V), torch.linalg.matrix_norm(u.delta())) for u in updates]
        kept[name] = min((inside / whole).item() for inside, whole in norms)
    assert off(results["svd"].update.delta(), total) < off(results["ctm"].update.delta(), total)
    assert kept["ctm"] > 1.5 * kept["svd"]
