"""MuSe's Triton kernels: forward and backward against the float64 reference, and what they take on four chips."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from hfplug import ConfigError, UnsupportedError
from hfplug.kernels.muse import primitives_reference as reference
from hfplug.testing.kernels import (
    CHIPS,
    assert_fence,
    assert_fits,
    assert_rms,
    assert_written,
    compile_only,
    fenced,
    interpret,
    poisoned,
)

# G, C, P, D, Dv, members of each tile: none, one, all, and counts that end inside a step.
TILT = {
    "small": (1, 5, 9, 20, 20, [[9, 0, 4]]),
    "ones": (12, 1, 1, 1, 1, [[1]] * 12),
    "groups": (2, 17, 16, 16, 33, [[16, 1], [0, 7]]),
    "several steps": (1, 35, 40, 36, 12, [[40, 17]]),
}
# G, R, M, D, Dv, keys without weight at the start, rows whose keys all have none.
ATTEND = {
    "small": (2, 5, 9, 20, 20, 2),
    "ones": (12, 1, 1, 1, 1, 0),
    "nothing seen": (3, 17, 16, 16, 33, 16),
    "nothing in the first step": (1, 17, 40, 20, 12, 35),
    "several steps": (2, 35, 37, 33, 65, 0),
}
# G, g, N, block, D, Dv
NEAR = {
    "one block": (1, 2, 7, 9, 20, 20),
    "ragged": (2, 3, 37, 12, 17, 33),
    "blocks of one": (1, 1, 70, 1, 4, 4),  # the last key of a whole tile of rows stands alone in its step
    "one position": (6, 2, 1, 4, 1, 1),
    "many blocks": (1, 2, 40, 8, 20, 12),
}
# G, R, H, N, M, D, Dv: rows of a group read M of the N keys of one of H heads.
GATHERED = {
    "small": (3, 5, 2, 11, 9, 20, 20),
    "ones": (12, 1, 2, 1, 1, 1, 1),
    "several steps": (2, 33, 2, 50, 37, 33, 12),
}
CASES = {"tilt": TILT, "attend": ATTEND, "near": NEAR, "gathered": GATHERED}
# Bounds on the RMS error relative to the reference on the same rounded inputs: forward, backward. float16 has three bits more.
BOUNDS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (5e-3, 5e-3), torch.float16: (5e-3 / 8, 5e-3 / 8)}
GRID = [
    pytest.param(kind, case, dtype, id=f"{kind}-{case}-{str(dtype)[6:]}")
    for kind, cases in CASES.items()
    for case, dtype in itertools.product(cases, BOUNDS)
    if dtype != torch.float16 or case == list(cases)[-1]
]
SCALE = 0.4
MARGIN = 1 << 14  # elements; more than a tile takes in any case


class Numbers:
    """Normal numbers, the same in every process."""

    def __init__(self, *seed):
        self.generator = torch.Generator().manual_seed(sum(map(ord, "".join(map(str, seed)))))

    def __call__(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.generator).to(dtype)


def tilt_data(case, dtype):
    """Inputs of the forward, results of the reference in the dtypes the kernels give, and gradients of the three."""
    G, C, P, D, Dv, count = TILT[case]
    count, numbers = torch.tensor(count, dtype=torch.int32), Numbers("tilt", case)
    T = count.shape[1]
    mu, k, v = (numbers(*shape, dtype=dtype) for shape in ((G, C, D), (G, T, P, D), (G, T, P, Dv)))
    free = torch.arange(P) >= count[..., None]
    for x in (k, v):
        x[free] = float("nan")  # what free slots hold must not matter
    inputs = {"mu": mu, "k": k, "v": v, "count": count, "scale": SCALE}
    L, kbar, vbar = reference.tilt(**inputs)
    made = {"L": L.float(), "kbar": kbar.to(dtype), "vbar": vbar.to(dtype)}
    grads = {"dL": numbers(G, C, T), "dkbar": numbers(G, C, T, D), "dvbar": numbers(G, C, T, Dv)}
    return inputs, made, grads


def whole_rows(numbers, lse, Dv, dtype):
    """Log-sum-exp, gradient and delta of rows that see more than this part; the first row sees nothing at all."""
    lse = torch.logaddexp(lse.float(), numbers(*lse.shape))
    lse[..., 0] = float("-inf")
    return {"lse": lse, "grad": numbers(*lse.shape, Dv, dtype=dtype), "delta": numbers(*lse.shape)}


def attend_data(case, dtype):
    G, R, M, D, Dv, hidden = ATTEND[case]
    numbers = Numbers("attend", case)
    inputs = {name: numbers(*shape, dtype=dtype) for name, shape in (("q", (G, R, D)), ("k", (G, M, D)), ("v", (G, M, Dv)))}
    bias = 2 * numbers(G, M)
    bias[0, :hidden] = float("-inf")
    inputs |= {"bias": bias, "scale": SCALE}
    return inputs, whole_rows(numbers, reference.attend(**inputs)[1], Dv, dtype)


def near_data(case, dtype):
    G, g, N, block, D, Dv = NEAR[case]
    numbers = Numbers("near", case)
    inputs = {name: numbers(*shape, dtype=dtype) for name, shape in (("q", (G, g, N, D)), ("k", (G, N, D)), ("v", (G, N, Dv)))}
    inputs |= {"block": block, "scale": SCALE}
    return inputs, whole_rows(numbers, reference.near(**inputs)[1], Dv, dtype)


def gathered_data(case, dtype):
    G, R, H, N, M, D, Dv = GATHERED[case]
    numbers = Numbers("gathered", case)
    inputs = {name: numbers(*shape, dtype=dtype) for name, shape in (("q", (G, R, D)), ("k", (H, N, D)), ("v", (H, N, Dv)))}
    index = torch.randint(-1, N, (G, M), generator=numbers.generator, dtype=torch.int32)
    index[-1] = -1 if G > 1 else 0  # the last group reads nothing
    source = (torch.arange(G) * 2 % H).to(torch.int32)
    inputs |= {"index": index, "source": source, "scale": SCALE}
    return inputs, whole_rows(numbers, gathered_reference(inputs)[1], Dv, dtype)


def picked(inputs):
    """The keys and values of a gathered case, copied, and a bias of -inf where there is none."""
    head, at = inputs["source"].long()[:, None], inputs["index"].long()
    bias = torch.zeros(at.shape).masked_fill(at < 0, float("-inf"))
    return inputs["k"][head, at.clamp(min=0)], inputs["v"][head, at.clamp(min=0)], bias


def gathered_reference(inputs):
    return reference.attend(inputs["q"], *picked(inputs), inputs["scale"])


# -- in the interpreter ------------------------------------------------------------------------------------------------


def inside(tensors):
    """The same with every tensor of floating point between fences."""
    return {n: fenced(t, MARGIN) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in tensors.items()}


def like(tensors):
    return [fenced(torch.full_like(t, float("nan")), MARGIN) for t in tensors]


def interpreted_tilt(case, dtype):
    """Runs in the interpreter: results by name, and once more between fences."""
    from hfplug.kernels.muse import triton, triton_backward

    inputs, made, grads = map(inside, tilt_data(case, dtype))
    with poisoned():
        forward = triton.tilt(**inputs)
        backward = triton.tilt_backward(**inputs, **made, **grads)
    fences = like(forward), like(backward)
    triton.tilt_launch(**inputs, **dict(zip(("L", "kbar", "vbar"), fences[0], strict=True))).run()
    mean = like([made["L"]])[0]
    outputs = dict(zip(("mean", "dk", "dv"), (mean, *fences[1]), strict=True))
    for launch in triton_backward.tilt_backward_launches(**inputs, **made, **grads, **outputs).values():
        launch.run()
    assert_fence(mean)
    return dict(zip(("L", "kbar", "vbar", "dk", "dv"), (*forward, *backward), strict=True)), [*fences[0], *fences[1]]


def interpreted_attention(kind, case, dtype):
    """Runs in the interpreter: as above, for the three forms of attention."""
    from hfplug.kernels.muse import triton, triton_backward
    from hfplug.kernels.muse.triton_common import Seen

    inputs, rows = map(inside, DATA[kind](case, dtype))
    name = {"gathered": "attend_gathered"}.get(kind, kind)
    with poisoned():
        forward = getattr(triton, name)(**inputs)
        backward_of = getattr(triton, f"{name}_backward")
        if kind == "gathered":
            sums = [torch.ones(inputs[x].shape) for x in ("k", "v")]  # it adds
            backward = backward_of(**inputs, **rows, dk=sums[0], dv=sums[1]), *sums
        elif kind == "near":
            backward = backward_of(**inputs, o=forward[0], **rows)
        else:
            backward = backward_of(**inputs, **rows)
    fences = like(forward), like(backward)
    if kind == "gathered":
        fences[1][1].fill_(1.0)
        fences[1][2].fill_(1.0)
    q = inputs["q"] if kind == "near" else inputs["q"][:, None]
    seen = Seen(**{n: inputs[n] for n in ("bias", "index", "source", "block") if n in inputs})
    triton.attend_launch(q, inputs["k"], inputs["v"], seen, SCALE, *fences[0]).run()
    outputs = fences[1] if len(fences[1]) == 4 else [*fences[1], None]
    for launch in triton_backward.attend_backward_launches(q, inputs["k"], inputs["v"], seen, SCALE, **rows,
            **dict(zip(("dq", "dk", "dv", "dbias"), outputs, strict=True))).values():  # fmt: skip
        launch.run()
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dbias"), (*forward, *backward), strict=False)), [*fences[0], *fences[1]]


DATA = {"attend": attend_data, "near": near_data, "gathered": gathered_data}


def interpreted_results():
    """Runs in the interpreter; one process, as starting it takes longer than all the rest."""
    found = {}
    for kind, case, dtype in (parameters.values for parameters in GRID):
        run = interpreted_tilt if kind == "tilt" else functools.partial(interpreted_attention, kind)
        found[kind, case, dtype] = run(case, dtype)
    found["too many"] = interpreted_too_many()
    return found


def interpreted_too_many():
    """Runs in the interpreter: a count that is larger than a tile, and the last tile of the keys, between fences."""
    from hfplug.kernels.muse import triton

    inputs, made, grads = map(inside, tilt_data("small", torch.float32))
    inputs["count"] = torch.tensor([[9, 0, 4]], dtype=torch.int32)
    right = [*triton.tilt(**inputs), *triton.tilt_backward(**inputs, **made, **grads)]
    inputs["k"], inputs["v"] = (inside({"x": inputs[name].nan_to_num(0.5)})["x"] for name in "kv")
    inputs["count"] = torch.tensor([[99, 0, 99]], dtype=torch.int32)
    return right, [*triton.tilt(**inputs), *triton.tilt_backward(**inputs, **made, **grads)]


@pytest.fixture(scope="module")
def interpreted():
    return interpret(interpreted_results)


def expected_of(kind, case, dtype):
    if kind == "tilt":
        inputs, _, grads = tilt_data(case, dtype)
        names = "L", "kbar", "vbar", "dk", "dv"
        return dict(zip(names, (*reference.tilt(**inputs), *reference.tilt_gradients(**inputs, **grads)), strict=True))
    inputs, rows = DATA[kind](case, dtype)
    if kind == "attend":
        dq, dk, dv, ds = reference.attend_gradients(**inputs, **rows)
        o, lse = reference.attend(**inputs)
        return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dbias": ds.sum(1)}
    if kind == "near":
        q, k, v = (inputs[n].double() for n in "qkv")
        heads = q.shape[1]
        k, v = (x[:, None].expand(-1, heads, -1, -1) for x in (k, v))
        bias = reference.near_bias(q.shape[2], inputs["block"]).expand(*q.shape[:2], -1, -1)
        dq, dk, dv, _ = reference.attend_gradients(q, k, v, bias, SCALE, **rows)
        o, lse = reference.near(**inputs)
        return {"o": o, "lse": lse, "dq": dq, "dk": dk.sum(1), "dv": dv.sum(1)}
    dq, dkm, dvm, _ = reference.attend_gradients(inputs["q"], *picked(inputs), SCALE, **rows)
    head, at = (inputs["source"].long()[:, None].expand(inputs["index"].shape), inputs["index"].long())
    held = at >= 0
    sums = {}
    for name, part in (("dk", dkm), ("dv", dvm)):
        sums[name] = torch.ones(inputs[name[1]].shape, dtype=torch.float64)
        sums[name].index_put_((head[held], at[held]), part[held], accumulate=True)
    o, lse = gathered_reference(inputs)
    return {"o": o, "lse": lse, "dq": dq, **sums}


@pytest.mark.parametrize(("kind", "case", "dtype"), GRID)
def test_b60_the_kernels_agree_with_the_reference_in_the_interpreter(interpreted, kind, case, dtype):
    found, fences = interpreted[kind, case, dtype]
    expected = expected_of(kind, case, dtype)
    assert set(found) == set(expected)
    forward, backward = BOUNDS[dtype]
    for (name, value), fence in zip(found.items(), fences, strict=True):
        single = name in {"L", "lse", "dbias"} or (kind == "gathered" and name in {"dk", "dv"})
        assert value.dtype == (torch.float32 if single else dtype), name
        assert_written(value, fence)
        infinite = expected[name].isinf()
        assert torch.equal(value.isinf(), infinite), name
        clean, goal = value.masked_fill(infinite, 0.0), expected[name].masked_fill(infinite, 0.0)
        assert_rms(clean, goal, backward if name.startswith("d") else forward, name)
        assert torch.equal(fence, value), name
        assert_fence(fence)


def test_b60_free_slots_get_a_gradient_of_exactly_zero(interpreted):
    for case, dtype in itertools.product(TILT, (torch.float32, torch.bfloat16)):
        _, _, P, *_, count = TILT[case]
        free = torch.arange(P) >= torch.tensor(count)[..., None]
        found, _ = interpreted["tilt", case, dtype]
        assert free.any() or case == "ones"
        assert not found["dk"][free].any()
        assert not found["dv"][free].any()


def test_b60_a_count_that_is_too_large_reads_no_memory_outside(interpreted):
    right, wrong = interpreted["too many"]
    for one, other in zip(right, wrong, strict=True):
        assert_written(other)  # NaN would have come from the margins of the inputs
        if one.dim() == 4 and one.shape[1] != 3:  # summaries of the first tile, which is full
            assert torch.equal(one[:, :, 0], other[:, :, 0])


# -- the whole method --------------------------------------------------------------------------------------------------


def whole_data():
    """q, k, v, a gradient, and a setting with two levels, the last ragged."""
    from hfplug.kernels.muse.scheme import Setting

    numbers = Numbers("whole")
    q, k, v, grad = (numbers(*shape) for shape in ((1, 2, 77, 12), (1, 77, 12), (1, 77, 12), (1, 2, 77, 12)))
    return (q, k, v), grad, Setting(4, 3, 16, 2, 1, False, SCALE)


def whole_results():
    from hfplug.kernels.muse import scheme

    inputs, grad, setting = whole_data()
    o, lse, made = scheme.forward(*inputs, setting)
    return o, lse, *scheme.backward(*inputs, setting, o, lse, made, grad, (grad * o).sum(-1))


def interpreted_whole():
    """Runs in the interpreter: MuSe over its kernels, and how often it called each."""
    from hfplug.kernels.muse import primitives, triton

    called = []

    class Spy:
        def __getattr__(self, name):
            called.append(name)
            return getattr(triton, name)

    primitives._kernels = lambda tensor: Spy()
    return whole_results(), called


def test_b60_muse_over_its_kernels_is_muse_over_torch():
    found, called = interpret(interpreted_whole)
    assert set(called) == {"tilt", "tilt_backward", "attend", "attend_backward", "near", "near_backward"}
    for name, one, expected in zip(("o", "lse", "dq", "dk", "dv"), found, whole_results(), strict=True):
        assert_rms(one, expected, 1e-6 if name in {"o", "lse"} else 1e-5, name)


# -- the reference -----------------------------------------------------------------------------------------------------


def doubles(tensors):
    return {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in tensors.items()}


@pytest.mark.parametrize("case", TILT)
def test_the_formulas_of_tilt_are_its_autograd(case):
    inputs, _, grads = map(doubles, tilt_data(case, torch.float32))
    k, v = inputs["k"].requires_grad_(), inputs["v"].requires_grad_()
    L, kbar, vbar = reference.tilt(**inputs)
    seen = ~L.isinf()
    objective = (L[seen] * grads["dL"][seen]).sum() + (kbar * grads["dkbar"]).sum() + (vbar * grads["dvbar"]).sum()
    expected = torch.autograd.grad(objective, (k, v))
    for found, goal in zip(reference.tilt_gradients(**inputs, **grads), expected, strict=True):
        assert_rms(found.detach(), goal, 1e-13)
    assert not reference.tilt(**inputs)[0].isnan().any()


def test_the_formulas_of_attention_are_the_autograd_of_a_softmax_over_all_parts():
    # Two parts of the same rows, each given the log-sum-exp and delta of the whole; the second has no bias.
    numbers = Numbers("parts")
    q, grad = numbers(2, 7, 5).double().requires_grad_(), numbers(2, 7, 3).double()
    k, v, bias = (numbers(2, 11, *shape).double().requires_grad_() for shape in ((5,), (3,), ()))
    with torch.no_grad():
        bias[:, 6:] = 0.0
        bias[0, :2] = float("-inf")
    a = SCALE * torch.einsum("grd,gmd->grm", q, k) + bias[:, None]
    o, lse = torch.softmax(a, -1) @ v, torch.logsumexp(a, -1)
    expected = torch.autograd.grad((o * grad).sum(), (q, k, v, bias))
    delta = (o * grad).sum(-1)
    parts = [
        reference.attend_gradients(q, k[:, s], v[:, s], bias[:, s], SCALE, lse, grad, delta) for s in (slice(6), slice(6, 11))
    ]
    dq, (dk, dv) = parts[0][0] + parts[1][0], (torch.cat([part[i] for part in parts], 1) for i in (1, 2))
    dbias = torch.cat([part[3].sum(1) for part in parts], 1)
    for found, goal in zip((dq, dk, dv, dbias), expected, strict=True):
        assert_rms(found.detach(), goal, 1e-13)
    whole = reference.attend(q, k, v, bias, SCALE)
    assert_rms(whole[0].detach(), o.detach(), 1e-14)
    assert_rms(whole[1].detach(), lse.detach(), 1e-14)


@pytest.mark.parametrize(("n", "block"), [(1, 1), (7, 3), (12, 4), (9, 20)])
def test_the_near_part_is_the_own_block_and_the_one_before(n, block):
    bias = reference.near_bias(n, block)
    for i, j in itertools.product(range(n), repeat=2):
        start = i - i % block
        assert (bias[i, j] == 0) == (start - block <= j <= i), (i, j)


# -- what is refused ---------------------------------------------------------------------------------------------------


def of(kind, **changes):
    inputs = (
        tilt_data("small", torch.float32)
        if kind == "tilt"
        else DATA[kind]("small" if kind != "near" else "ragged", torch.float32)
    )[0]
    return {**inputs, **{name: change(inputs[name]) for name, change in changes.items()}}


REFUSED = {
    r"k has the shape \(1, 3, 9\); it must be \(G, T, P, D\)": ("tilt", {"k": lambda k: k[..., 0]}),
    r"mu has the shape \(1, 5, 19\); it must be \(1, 5, 20\)": ("tilt", {"mu": lambda mu: mu[..., 1:].contiguous()}),
    "mu is torch.bfloat16; it must be torch.float32": ("tilt", {"mu": lambda mu: mu.bfloat16()}),
    "count is torch.int64; it must be torch.int32": ("tilt", {"count": lambda count: count.long()}),
    r"v has the shape \(1, 3, 8, 20\); it must be \(1, 3, 9, 20\)": ("tilt", {"v": lambda v: v[:, :, 1:].contiguous()}),
    "q has the strides .*; it must be contiguous": ("attend", {"q": lambda q: q.mT.contiguous().mT}),
    "bias is on meta; it must be on cpu": ("attend", {"bias": lambda bias: bias.to("meta")}),
    "k is torch.float64; it must be torch.float32 or torch.bfloat16 or torch.float16": ("attend", {"k": lambda k: k.double()}),
    r"q has the shape \(2, 37, 17\); it must be \(G, g, N, D\)": ("near", {"q": lambda q: q[:, 0]}),
    "block is 0; it must be at least 1": ("near", {"block": lambda _: 0}),
    r"source has the shape \(2,\); it must be \(3,\)": ("gathered", {"source": lambda source: source[1:]}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_named(message):
    kind, changes = REFUSED[message]
    with pytest.raises(ConfigError, match=message):
        kernel(kind)(**of(kind, **changes))


def kernel(kind):
    from hfplug.kernels.muse import triton

    return getattr(triton, {"gathered": "attend_gathered"}.get(kind, kind))


def test_rows_too_wide_for_the_kernels_are_refused():
    wide = {name: torch.zeros(1, 3, 257) for name in "qkv"}
    with pytest.raises(UnsupportedError, match="k has rows of 257 elements; the Triton kernels take 1 to 256"):
        kernel("attend")(**wide, bias=torch.zeros(1, 3), scale=1.0)


# -- the kernels on four chips -----------------------------------------------------------------------------------------


def launches(monkeypatch, chip, *sizes, **more):
    """The launches of a step on a chip, by name; some tiles are AMD's own."""
    from hfplug.kernels.muse.triton import launches_of_a_step

    monkeypatch.setattr(torch.version, "hip", "6.4" if CHIPS[chip].backend == "hip" else None)
    return launches_of_a_step(*sizes, **more)


def compiled(launch, chip):
    return compile_only(launch.kernel, launch.arguments, chip, **launch.options)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernels_fit_every_chip(monkeypatch, chip):
    step = launches(monkeypatch, chip, 64, 64, torch.bfloat16)
    for name in ("tilt", "tilt_dkv", "attend", "attend_dkv", "near", "near_dq"):
        assert_fits(compiled(step[name], chip))


def test_exact_float32_fits(monkeypatch):
    step = launches(monkeypatch, "sm_80", 64, 64, torch.float32)
    for name in ("tilt", "tilt_dkv", "attend", "attend_dkv", "near", "near_dq"):
        assert_fits(compiled(step[name], "sm_80"))


def test_sizes_of_one_compile(monkeypatch):
    # Triton makes a constant of an integer equal to 1, which then has no dtype; the interpreter does not.
    ones = dict.fromkeys(("groups", "heads", "N", "block", "C", "T", "P", "R", "M"), 1)
    for launch in launches(monkeypatch, "sm_80", 1, 1, torch.bfloat16, **ones).values():
        assert_fits(compiled(launch, "sm_80"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_no_tiles_spill_whatever_the_sizes(monkeypatch, chip, dtype):
    few = {"C": 9, "P": 7, "R": 7, "M": 20}
    many = {"C": 200, "P": 200, "R": 200, "M": 999}
    seen = set()
    for width, sizes in ((20, few), (64, many), (64, few), (100, many), (128, few), (256, many)):
        for name, launch in launches(monkeypatch, chip, width, width, dtype, **sizes).items():
            # Tiles, and which integers are 1 or divisible by 16, are all that distinguishes two compilations.
            numbers = {k: v for k, v in launch.arguments.items() if isinstance(v, int)}
            tiles = tuple(v if k.startswith(("B", "D")) else (v == 1, v % 16 == 0) for k, v in numbers.items())
            if (name, tiles) not in seen:
                seen.add((name, tiles))
                assert_fits(compiled(launch, chip))
    assert len(seen) > 50
