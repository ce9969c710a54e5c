"""MuSe's Triton kernels: forward and backward against the float64 reference, and what they take on four chips."""

from __future__ import annotations

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
    "several steps": (1, 40, 75, 40, 12, [[75, 33]]),
}
# G, R, M, D, Dv, keys without weight at the start, rows whose keys all have none.
ATTEND = {
    "small": (2, 5, 9, 20, 20, 2),
    "ones": (12, 1, 1, 1, 1, 0),
    "nothing seen": (3, 17, 16, 16, 33, 16),
    "nothing in the first step": (1, 33, 75, 40, 12, 40),
    "several steps": (2, 70, 37, 33, 65, 0),
}
# G, g, N, block, D, Dv
NEAR = {
    "one block": (1, 2, 7, 9, 20, 20),
    "ragged": (2, 3, 53, 20, 17, 33),
    "blocks of one": (1, 1, 5, 1, 4, 4),
    "one position": (6, 2, 1, 4, 1, 1),
    "many blocks": (1, 2, 75, 16, 40, 12),
}
# G, R, H, N, M, D, Dv: rows of a group read M of the N keys of one of H heads.
GATHERED = {
    "small": (3, 5, 2, 11, 9, 20, 20),
    "ones": (12, 1, 2, 1, 1, 1, 1),
    "several steps": (3, 37, 2, 90, 40, 33, 12),
}
CASES = {"tilt": TILT, "attend": ATTEND, "near": NEAR, "gathered": GATHERED}
# Bounds on the RMS error relative to the reference on the same rounded inputs: forward, backward. float16 has three bits more.
BOUNDS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (5e-3, 5e-3), torch.float16: (5e-3 / 8, 5e-3 / 8)}
GRID = [
    pytest.param(kind, case, dtype, id=f"{kind}-{case}-{str(dtype)[6:]}")
    for kind, cases in CASES.items()
    for case, dtype in itertools.product(cases, BOUNDS)
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
    for kind, cases in CASES.items():
        for case, dtype in itertools.product(cases, BOUNDS):
            found[kind, case, dtype] = (
                interpreted_tilt(case, dtype) if kind == "tilt" else interpreted_attention(kind, case, dtype)
            )
    return found


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
