"""What holds of MuSe exactly, whatever the data: the limits where nothing is approximated, causality, bounds, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from hfplug.kernels.muse import muse, primitives, scheme
from hfplug.kernels.muse.clustering import kmeans, make_tiles, nearest
from hfplug.kernels.muse.reference import clusters_of, reference
from hfplug.kernels.muse.scheme import Setting, units
from hfplug.testing.kernels import assert_rms, rms_ratio

RAGGED = (1, 7, 8, 16, 17, 24, 31, 33, 40, 47, 48, 57, 64, 65, 96, 100, 129)
SCALE = 0.4


def setting(clusters=4, query_clusters=3, block=8, retrieve=0, iterations=1, leaky=False, scale=SCALE):
    return Setting(clusters, query_clusters, block, retrieve, iterations, leaky, scale)


def tensors(n, groups=2, g=3, dim=6, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (groups, g, n, dim), (groups, n, dim), (groups, n, dim)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def exact(q, k, v, sinks=None):
    """From the definition, in the dtype given."""
    logits = SCALE * q @ k[:, None].transpose(2, 3)
    n = q.shape[2]
    logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[..., None, None].expand(-1, -1, n, 1)], -1)
    return torch.softmax(logits, -1)[..., :n] @ v[:, None]


def run(q, k, v, s, sinks=None):
    return muse(q, k, v, sinks, s.clusters, s.query_clusters, s.block, s.retrieve, s.iterations, s.leaky, s.scale)[0]


def gradients(f, *inputs, seed=9):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def off(a, b):
    return float((a - b).abs().max())


# -- the decomposition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 5, 8])
def test_every_pair_is_covered_exactly_once(block):
    for n in range(1, 140, 3):
        seen = torch.zeros(n, n, dtype=torch.long)
        for i in range(n):
            seen[i, max(0, (i // block - 1) * block) : i + 1] += 1
        for children in units(n, block):
            for child in children:
                for start, stop in child.keys:
                    assert stop <= child.queries[0] - block  # neighbours are for the near part
                    seen[slice(*child.queries), start:stop] += 1
                assert child.codebook[1] <= child.queries[0]
        assert torch.equal(seen, torch.ones(n, n, dtype=torch.long).tril()), n


# -- where it is exact -------------------------------------------------------------------------------------------------

LIMITS = {
    "one key per cluster": setting(clusters=1000),
    "all clusters retrieved": setting(retrieve=1000),
    "all positions near": setting(block=1000),
    # with the block's own queries as centroids, one each, every query is its own centroid
    "one query per centroid": setting(query_clusters=1000, iterations=0, leaky=True),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("n", RAGGED)
def test_it_is_exact_in_the_limit(limit, n):
    inputs = tensors(n)
    found = run(*inputs, LIMITS[limit])
    assert off(found, exact(*inputs)) <= 1e-12


@pytest.mark.parametrize("limit", ["one key per cluster", "all clusters retrieved", "all positions near"])
@pytest.mark.parametrize("n", [17, 33, 57, 100])
def test_gradients_are_exact_in_the_limit_with_sinks(limit, n):
    inputs = [*tensors(n), torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))]
    found = gradients(lambda q, k, v, s: run(q, k, v, LIMITS[limit], s), *inputs)
    for name, ours, theirs in zip(("o", "dq", "dk", "dv", "ds"), found, gradients(exact, *inputs), strict=True):
        assert off(ours, theirs) <= 1e-11, name


def test_copies_of_a_key_in_one_cluster_are_exact():
    q, k, v = tensors(70, groups=1)
    kinds = torch.arange(70) % 4
    k = k[:, kinds]
    made = clusters_of(q[0], k[0], v[0], setting())
    s = setting()
    recorded = []
    for x in made:  # labels of keys stand behind the centroids of their parent: (1, keys)
        if x.dtype == torch.int32 and x.shape[0] == 1:
            span = x.shape[1]
            recorded.append((torch.arange(span) % 4).int()[None])  # spans start at multiples of 4
        else:
            recorded.append(x)
    o, _, _ = scheme.forward(q, k, v, s, recorded)
    assert off(o, exact(q, k, v)) <= 1e-12
    recorded = [x.roll(1, 1) if x.dtype == torch.int32 and x.shape[0] == 1 and i % 2 else x for i, x in enumerate(recorded)]
    mixed = [(x * 0 if x.dtype == torch.int32 and x.shape[0] == 1 else x) for x in recorded]
    assert off(scheme.forward(q, k, v, s, mixed)[0], exact(q, k, v)) > 1e-4  # all kinds in one cluster


# -- value and gradient where it approximates --------------------------------------------------------------------------


@pytest.mark.parametrize("retrieve", [0, 2])
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("n", [33, 41, 70])
def test_forward_and_backward_are_those_of_the_reference(n, leaky, retrieve):
    s = setting(retrieve=retrieve, leaky=leaky)
    q, k, v = tensors(n, groups=1)
    made = clusters_of(q[0], k[0], v[0], s)
    found = gradients(lambda q, k, v: run(q, k, v, s), q, k, v)
    expected = gradients(lambda q, k, v: reference(q[0], k[0], v[0], s, made)[None], q, k, v)
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        assert off(ours, theirs) <= 1e-12, name
    assert off(found[0], exact(q, k, v)) > 1e-3


def test_orders_of_the_expansion():
    """Each is nearer than the one before; order 0 gives queries no gradient from far away, which is why it is no option."""
    s = setting(clusters=2, query_clusters=12)
    q, k, v = tensors(90, groups=1, dim=5, seed=4)
    q = 0.2 * q + 0.5  # queries near their centroids: what an expansion is for
    made = clusters_of(q[0], k[0], v[0], s)
    errors = [rms_ratio(reference(q[0], k[0], v[0], s, made, order)[None], exact(q, k, v)) for order in (0, 1, 2)]
    # order 1 has the logit to first order, but not the value: the first-order term of that is in order 2
    assert errors[0] > 1.2 * errors[1] > 6 * errors[2]
    q[..., 0], k[..., 0] = 10.0, 0.0
    k[:, 72:, 0] = -100.0  # the keys near the last queries draw no attention
    leaf = q[0].clone().requires_grad_()
    norms = [torch.autograd.grad(reference(leaf, k[0], v[0], s, made, o)[:, 80:].square().sum(), leaf)[0].norm() for o in (0, 1)]
    assert norms[0] <= 1e-12
    assert norms[1] > 1e-2


def test_the_logit_of_a_cluster_is_a_lower_bound():
    """Jensen and Hoeffding: 0 <= log Z(q) - a(q) <= range(s delta.k)^2 / 8."""
    q, k, _ = tensors(40, groups=1, g=1)
    mu = q[:, 0, :5]
    tiled = k[:, :36].view(1, 4, 9, 6)
    count = torch.tensor([[9, 9, 5, 0]])
    L, kbar, _ = primitives.tilt(mu, tiled, tiled, count, SCALE)
    worst = 0.0
    for c in range(5):
        for j, size in enumerate((9, 9, 5)):
            members, delta = tiled[0, j, :size], q[0, 0] - mu[0, c]
            true = torch.logsumexp(SCALE * q[0, 0] @ members.T, -1)
            gap = true - (L[0, c, j] + SCALE * delta @ kbar[0, c, j])
            spread = SCALE * delta @ members.T
            bound = (spread.amax(-1) - spread.amin(-1)) ** 2 / 8
            assert (gap >= -1e-12).all()
            assert (gap <= bound + 1e-12).all()
            worst = max(worst, float((gap / bound.clamp(min=1e-9)).max()))
    assert worst > 0.1  # the bound says something
    assert L[0, :, 3].isinf().all()
    assert (kbar[0, :, 3] == 0).all()


def test_the_output_lies_within_the_values():
    q, k, v = tensors(129)
    out = run(3 * q, 3 * k, v, setting())
    for group in range(2):
        assert (out[group] <= v[group].amax(0) + 1e-12).all()
        assert (out[group] >= v[group].amin(0) - 1e-12).all()
    constant = torch.full_like(v, 1.75)
    assert off(run(q, k, constant, setting()), constant[:, None].expand_as(out)) <= 1e-12


def test_a_shift_of_all_keys_changes_nothing():
    q, k, v = tensors(100, groups=1)
    made = clusters_of(q[0], k[0], v[0], setting())
    o, _, _ = scheme.forward(q, k, v, setting(), made)
    shifted, _, _ = scheme.forward(q, k + torch.linspace(-3, 3, 6, dtype=torch.float64), v, setting(), made)
    assert off(o, shifted) <= 1e-12


def test_the_order_of_keys_in_a_cluster_does_not_matter():
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (1, 30), generator=g)
    order = torch.randperm(30, generator=g)
    q, k, v = tensors(30, groups=1, g=1)
    found = []
    for index in (torch.arange(30), order):
        tiles = make_tiles(labels[:, index], 3, 30)
        tiled = [x[0, index][tiles.index] for x in (k, v)]
        found.append(primitives.tilt(q[:, 0, :4], *tiled, tiles.count, SCALE))
    for one, other in zip(*found, strict=True):
        assert off(one, other) <= 1e-12


def test_more_clusters_or_retrieval_mean_less_error():
    generator = torch.Generator().manual_seed(0)
    errors = {}
    for clusters, retrieve in ((2, 0), (8, 0), (32, 0), (8, 2), (8, 6)):
        total = []
        for seed in range(4):
            topics = 2.0 * torch.randn(6, 8, generator=generator, dtype=torch.float64)
            q, k, v = tensors(256, groups=1, g=2, dim=8, seed=seed)
            which = torch.randint(6, (256,), generator=generator)
            k, q = 0.4 * k + topics[which], 0.4 * q + topics[which]
            s = setting(clusters=clusters, query_clusters=8, block=32, retrieve=retrieve, scale=8**-0.5)
            logits = torch.softmax((s.scale * q @ k[:, None].mT).masked_fill(~torch.ones(256, 256).tril().bool(), -math.inf), -1)
            total.append(rms_ratio(run(q, k, v, s), logits @ v[:, None]))
        errors[clusters, retrieve] = sum(total) / 4
    assert errors[2, 0] > errors[8, 0] > errors[32, 0]
    assert errors[8, 0] > errors[8, 2] > errors[8, 6]


# -- causality ---------------------------------------------------------------------------------------------------------


def _leak(leaky, retrieve):
    """What the outputs before position 71 have to do with the tokens from there on: values and gradients."""
    s, cut = setting(retrieve=retrieve, leaky=leaky, query_clusters=4), 71
    inputs = tensors(120, seed=2)
    changed = [x.clone() for x in inputs]
    for x, noise in zip(changed, tensors(120, seed=5), strict=True):
        x[..., cut:, :] = 3 * noise[..., cut:, :]
    value = off(run(*inputs, s)[:, :, :cut], run(*changed, s)[:, :, :cut])
    leaves = [x.clone().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(run(*leaves, s)[:, :, :cut].square().sum(), leaves)
    assert all(float(x[..., :cut, :].abs().max()) > 1e-3 for x in grads)
    return value, max(float(x[..., cut:, :].abs().max()) for x in grads)


@pytest.mark.parametrize("retrieve", [0, 2])
def test_no_output_depends_on_later_tokens(retrieve):
    value, gradient = _leak(leaky=False, retrieve=retrieve)
    assert value <= 1e-12
    assert gradient == 0.0


@pytest.mark.parametrize("retrieve", [0, 2])
def test_the_leaking_codebook_does_leak(retrieve):
    """The mutation of the test above: with the block's own queries as centroids, it must see the difference."""
    value, _ = _leak(leaky=True, retrieve=retrieve)
    assert value > 1e-3


# -- clusters and tiles ------------------------------------------------------------------------------------------------


def test_tiles_hold_every_member_once_with_its_cluster():
    generator = torch.Generator().manual_seed(0)
    for n, clusters, size in ((50, 7, 4), (9, 3, 9), (64, 1, 5), (31, 31, 1), (20, 6, 3)):
        labels = torch.randint(clusters, (3, n), generator=generator)
        labels[1] = 0
        tiles = make_tiles(labels, clusters, size)
        for row in range(3):
            held = tiles.index[row][tiles.valid[row]]
            assert torch.equal(held.sort().values, torch.arange(n))
            assert torch.equal(tiles.index[row].flatten()[tiles.place[row]], torch.arange(n))
            for tile in range(tiles.index.shape[1]):
                members = tiles.index[row, tile][tiles.valid[row, tile]]
                assert (labels[row, members] == tiles.cluster[row, tile]).all()
            sizes = [tiles.count[row][(tiles.cluster[row] == c) & (tiles.count[row] > 0)] for c in range(clusters)]
            assert all(x.max() - x.min() <= 1 for x in sizes if len(x)), "a large cluster is split evenly"
        assert int(tiles.count.max()) <= size


def test_kmeans_finds_separate_groups_and_keeps_empty_centres():
    centres = 20.0 * torch.eye(4, 6, dtype=torch.float64)[None]
    which = torch.arange(64) % 4
    points = centres[:, which] + 0.1 * tensors(64, groups=1)[1]
    labels = nearest(points, kmeans(points, 12, 2))[0]
    assert all(len(which[labels == c].unique()) == 1 for c in labels.unique()), "groups are mixed"
    same = kmeans(torch.ones(1, 10, 3), 4, 2)
    assert torch.equal(same, torch.ones(1, 4, 3))


def test_groups_do_not_see_each_other():
    """One group whose keys are all alike has fewer tiles than its neighbour: the free ones must count for nothing."""
    q, k, v = tensors(100)
    k[0] = k[0, :1]
    together, _, _ = scheme.forward(q, k, v, setting(retrieve=1))
    for group in range(2):
        part = slice(group, group + 1)
        alone, _, _ = scheme.forward(q[part], k[part], v[part], setting(retrieve=1))
        assert off(together[part], alone) <= 1e-12
    assert off(together[:1], exact(q[:1], k[:1], v[:1])) <= 1e-12  # copies of one key


# -- the operator ------------------------------------------------------------------------------------------------------


def test_torch_accepts_the_operator():
    inputs = [x.requires_grad_() for x in tensors(40)]
    sinks = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    for extra in (None, sinks):
        torch.library.opcheck(muse, (*inputs, extra, 4, 3, 8, 1, 1, False, SCALE))


def test_it_is_compiled_whole():
    inputs = tensors(40, dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: 2 * run(q, k, v, setting()), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), 2 * run(*inputs, setting()))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_inputs_and_outputs_only(dtype):
    rounded = [x.to(dtype) for x in tensors(100, dtype=torch.float32)]
    found = gradients(lambda q, k, v: run(q, k, v, setting()).float(), *rounded)
    expected = gradients(lambda q, k, v: run(q, k, v, setting()), *(x.float() for x in rounded))
    assert run(*rounded, setting()).dtype == dtype
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        assert_rms(ours.float(), theirs, 5e-3, name)


def test_memory_between_forward_and_backward_is_linear():
    """Bytes kept for the backward: q, k, v, o, and per token and level a label; nothing of N x N."""
    kept = {}
    for n in (2048, 4096):
        inputs = [x.requires_grad_() for x in tensors(n, groups=1, g=1, dim=16, dtype=torch.float32)]
        total: list[int] = []

        def keep(t, total=total):
            total.append(t.numel() * t.element_size())
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            run(*inputs, setting(clusters=16, query_clusters=8, block=128))
        kept[n] = sum(total)
    assert kept[4096] <= 2.2 * kept[2048]
    assert kept[4096] <= 1.5 * 4 * 4096 * 16 * 4  # 1.5 times q, k, v and o
