"""The Triton kernels of the 4-bit formats: in the interpreter against the torch form, and what they take on four chips."""

from __future__ import annotations

import itertools

import pytest
import torch

from hfplug.kernels.mxfp4_plus import codec, ops
from hfplug.kernels.mxfp4_plus.formats import SCALES, Format
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

BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-3 / 8, torch.bfloat16: 5e-3}
FORMATS = {
    "plain 32": (Format(32, "floor"), Format(32, "floor")),
    "macro 16": (Format(mbs="dynamic"), Format(mbs="static")),
    "mixed": (Format(32, "even", "static", 64), Format(16, "rceil")),
    "activations alone": (Format(16), Format(32, mbs="static", macro=256)),
}
SIZES = {"ones": (1, 9, 1), "odd": (17, 33, 150), "several tiles": (35, 65, 20)}
PRODUCTS = [
    case
    for case in itertools.product(FORMATS, SIZES, BOUNDS)
    if case[1] == "odd" or (case[2] == torch.float32) == (case[1] == "several tiles")
]
QUANTIZED = [Format(block, rule) for block, rule in itertools.product((16, 32), SCALES)]
QUANTIZED += [Format(mbs="static"), Format(32, "even", "static", 64), Format(16, "floor", "static", 32)]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def special(width):
    x = numbers(11, width) * torch.exp2(torch.arange(11.0) * 10 - 50)[:, None]
    if width >= 64:
        x[0, 3], x[1, 40], x[2, 1] = float("inf"), float("nan"), -0.0
        x[3], x[4], x[5] = 0.0, x[4] * 1e-36, x[5].sign() * 3e38
        x[6, :7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return x


def pair(name, size):
    M, N, K = SIZES[size]
    weights, act = FORMATS[name]
    return numbers(M, K, seed=1), codec.quantize(numbers(N, K, seed=2), weights), numbers(N, seed=3), act


def plain(p):
    return [t for t in (p.codes, p.scales, p.factors) if t is not None]


def interpreted_results():
    """Runs in the interpreter; one process, as starting it takes longer than all the rest."""
    from hfplug.kernels.mxfp4_plus import triton

    found = {}
    for index, fmt in enumerate(QUANTIZED):
        for width in (1, 100)[index > 1 :]:
            with poisoned():
                found["quantize", index, width] = plain(triton.quantize(fenced(special(width)), fmt))
    for name, size, dtype in PRODUCTS:
        x, p, bias, act = pair(name, size)
        x = fenced(x.to(dtype))
        for kind in (None, act):
            with poisoned():
                y = triton.linear(x, p, bias if size == "odd" else None, kind)
            fence = fenced(torch.full_like(y, float("nan")))
            launch = triton.weights_launch if kind is None else triton.both_launch
            launch(x if kind is None else triton.quantize(x, kind), p, bias if size == "odd" else None, fence).run()
            found["linear", name, size, dtype, kind is None] = y, fence
    ops._why_torch = lambda x: None
    found["layer"] = layer()
    return found


@pytest.fixture(scope="module")
def interpreted():
    return interpret(interpreted_results)


@pytest.mark.parametrize("index", range(len(QUANTIZED)), ids=lambda i: str(QUANTIZED[i]))
def test_b60_quantising_is_the_torch_form_bit_for_bit(interpreted, index):
    for width in (1, 100)[index > 1 :]:
        expected = plain(codec.quantize(special(width), QUANTIZED[index]))
        for name, one, other in zip(
            ("codes", "scales", "factors"), interpreted["quantize", index, width], expected, strict=False
        ):
            assert torch.equal(one, other), (name, width)


@pytest.mark.parametrize(("name", "size", "dtype"), PRODUCTS)
def test_b60_products_are_those_of_the_dequantised_in_float64(interpreted, name, size, dtype):
    for weights_only in (True, False):
        found = interpreted["linear", name, size, dtype, weights_only]
        x, p, bias, act = pair(name, size)
        x = x.to(dtype)
        seen = x.double() if weights_only else reference_values(codec.quantize(x, act))
        expected = seen @ reference_values(p).T + (bias.double() if size == "odd" else 0)
        y, fence = found
        assert y.dtype == dtype
        assert_written(y, fence)
        assert_rms(y, expected, BOUNDS[dtype], f"weights alone: {weights_only}")
        assert torch.equal(y, fence)
        assert_fence(fence)


def reference_values(p):
    """What is stored, float64: the slices' factors divide exactly."""
    f = 1.0 if p.factors is None else 1 + p.factors.double().repeat_interleave(p.format.macro, -1)[:, : p.shape[-1]] / 256
    plain_format = Format(p.format.block, p.format.scale)
    return codec.dequantize(codec.Packed(p.codes, p.scales, None, p.shape, plain_format)).double() / f


def layer():
    """The layer's result and its gradients."""
    x, p, bias, act = pair("macro 16", "ones")
    x, bias = x.requires_grad_(), bias.requires_grad_()
    y = ops.linear(x, p, bias, act_format=act)
    return y.detach(), *torch.autograd.grad(y, (x, bias), torch.ones_like(y))


def test_b60_the_layer_over_its_kernels_is_the_layer_over_torch(interpreted):
    for one, other in zip(interpreted["layer"], layer(), strict=True):
        assert_rms(one, other, 1e-6)


def test_formats_the_kernels_do_not_take_are_named():
    from hfplug.kernels.mxfp4_plus import triton

    assert triton.why_not(Format(mbs="static"), Format(mbs="static")) is None
    assert triton.why_not(Format(), None) is None
    assert triton.why_not(Format(mbs="static", macro=96), None) == "macro blocks of 96, and the kernels take 32, 64, 128, 256"


# -- on four chips -----------------------------------------------------------------------------------------------------


def launches(monkeypatch, chip, dtype, M, N, K, weights, act):
    """The three launches of a layer, by name."""
    from hfplug.kernels.mxfp4_plus import triton

    monkeypatch.setattr(torch.version, "hip", "6.4" if CHIPS[chip].backend == "hip" else None)
    x, y, bias = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((M, K), (M, N), (N,)))
    a, p = empty(M, K, act.activations), empty(N, K, weights.activations)
    return {
        "quantize": triton.quantize_launch(x, a),
        "weights": triton.weights_launch(x, p, bias, y),
        "both": triton.both_launch(a, p, bias, y),
    }


def empty(rows, width, fmt):
    padded = fmt.padded(width)
    sizes = [padded // 2, padded // fmt.block, fmt.macros(width)]
    codes, scales, factors = (torch.empty(rows, size, dtype=torch.uint8, device="meta") for size in sizes)
    return codec.Packed(codes, scales, None if fmt.mbs == "none" else factors, (rows, width), fmt)


def compiled(launch, chip):
    return compile_only(launch.kernel, launch.arguments, chip, **launch.options)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernels_fit_every_chip(monkeypatch, chip):
    fmt = Format(mbs="hybrid")
    for launch in launches(monkeypatch, chip, torch.bfloat16, 512, 576, 576, fmt, fmt).values():
        assert_fits(compiled(launch, chip))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_no_tiles_spill_whatever_the_sizes(monkeypatch, chip, dtype):
    formats = [Format(mbs="hybrid"), Format(32, "even"), Format(32, mbs="static", macro=32), Format(mbs="static", macro=256)]
    for (M, N, K), fmt in itertools.product(((1, 1, 1), (1, 4096, 4096), (300, 100, 576), (4096, 4096, 4096)), formats):
        for launch in launches(monkeypatch, chip, dtype, M, N, K, fmt, fmt).values():
            assert_fits(compiled(launch, chip))
