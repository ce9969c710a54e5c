"""MoLoRA's grouped product: torch path and Triton kernels against the reference, and what the kernels take on four chips."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hfplug import ConfigError
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
from hfplug.tuners.molora import grouped, reference
from hfplug.tuners.molora.grouped import TORCH, Backend, _GroupedLinear, grouped_linear, triton_backend

# Rows of each expert, d_in, d_out.
CASES = {
    "no rows": ([0, 0, 0], 8, 8),
    "one row": ([0, 1, 0], 5, 7),
    "one group": ([33], 16, 16),
    "empty groups": ([0, 20, 0, 0, 17, 0], 33, 3),
    "rank 3, up": ([5, 18, 1], 3, 70),
    "rank 3, down": ([5, 18, 1], 70, 3),
    "whole tiles": ([64, 32, 16], 32, 64),
    "several tiles each": ([70, 0, 1, 50], 40, 20),
    "more experts than rows": ([0, 1] * 9 + [0, 0], 17, 19),
}
# Bounds on the RMS error relative to the reference on the same rounded inputs: product, gradients. float16 has three bits more.
BOUNDS = {
    torch.float32: (1e-6, 1e-5),
    torch.bfloat16: (5e-3, 5e-3),
    torch.float16: (5e-3 / 8, 5e-3 / 8),
}
GRID = [pytest.param(case, dtype, id=f"{case}-{str(dtype)[6:]}") for case, dtype in itertools.product(CASES, BOUNDS)]
MARGIN = 1 << 14  # elements; more than a tile of 64 rows takes in any case


def offsets_of(counts):
    return torch.tensor([0, *itertools.accumulate(counts)])


def data(case, dtype):
    """x, weight, offsets and a gradient for the output."""
    counts, d_in, d_out = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    shapes = (sum(counts), d_in), (len(counts), d_out, d_in), (sum(counts), d_out)
    x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, offsets_of(counts), grad


def results(backend, case, dtype):
    """Product and gradients through autograd, and once more each product alone, between fences; poisoned throughout."""
    x, weight, offsets, grad = data(case, dtype)
    x, weight, grad = (fenced(t, MARGIN) for t in (x, weight, grad))
    with poisoned():
        y = _GroupedLinear.apply(x.requires_grad_(), weight.requires_grad_(), offsets, backend)
        grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    found = {"y": y.detach(), "grad_x": grad_x, "grad_weight": grad_weight}
    fences = {name: fenced(torch.full_like(t, float("nan")), MARGIN) for name, t in found.items()}
    with torch.no_grad():
        backend.multiply_rows(x, weight.transpose(1, 2), offsets, fences["y"])
        backend.multiply_rows(grad, weight, offsets, fences["grad_x"])
        backend.sum_outer(x, grad, offsets, fences["grad_weight"])
    return found, fences


def check(found, fences, case, dtype):
    x, weight, offsets, grad = data(case, dtype)
    expected = (reference.grouped_linear(x, weight, offsets), *reference.gradients(x, weight, offsets, grad))
    forward, backward = BOUNDS[dtype]
    for name, value in zip(("y", "grad_x", "grad_weight"), expected, strict=True):
        bound = forward if name == "y" else backward
        assert found[name].dtype == dtype
        assert_written(found[name], fences[name])
        assert_rms(found[name], value, bound, name)
        assert torch.equal(fences[name], found[name]), name
        assert_fence(fences[name])


# -- the torch path ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_the_torch_path_agrees_with_the_reference(case, dtype):
    check(*results(TORCH, case, dtype), case, dtype)


def test_sums_of_16_bit_inputs_are_taken_in_float32():
    # 4096 products of one sign: summed in 16 bits they would stop growing, summed in float32 they are rounded once.
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.rand(3, 4096).to(dtype), torch.rand(2, 5, 4096).to(dtype)
        offsets = torch.tensor([0, 2, 3])
        assert_rms(grouped_linear(x, weight, offsets), reference.grouped_linear(x, weight, offsets), BOUNDS[dtype][0])


def test_gradients_by_differences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, offsets_of([2, 0, 4, 1])), (x, weight))


def test_n_rows_cost_n_products_whatever_the_number_of_experts():
    rows, d_in, d_out = 40, 6, 5
    for experts in (1, 4, 40):
        x = torch.randn(rows, d_in, requires_grad=True)
        weight = torch.randn(experts, d_out, d_in, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y = grouped_linear(x, weight, offsets_of([rows // experts] * experts))
            assert counter.get_total_flops() == 2 * rows * d_in * d_out
            y.sum().backward()
        assert counter.get_total_flops() == 3 * 2 * rows * d_in * d_out


def spies():
    """The torch path, and the names of the products it has been asked for."""
    called = []

    def spy(name):
        def product(*args):
            called.append(name)
            getattr(TORCH, name)(*args)

        return product

    return Backend(spy("multiply_rows"), spy("sum_outer")), called


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_only_the_gradients_asked_for_are_computed_and_only_what_they_need_is_kept(needs):
    backend, called = spies()
    x, weight, offsets, grad = data("rank 3, up", torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = _GroupedLinear.apply(x.requires_grad_(needs[0]), weight.requires_grad_(needs[1]), offsets, backend)
    wanted = [t for t, need in zip((weight, x), needs, strict=True) if need]
    assert sorted(kept) == sorted(tuple(t.shape) for t in [*wanted, offsets])
    y.backward(grad)
    assert called == ["multiply_rows"] + ["multiply_rows"] * needs[0] + ["sum_outer"] * needs[1]
    assert ((x.grad is not None), (weight.grad is not None)) == needs


def test_strides_do_not_matter():
    x, weight, offsets, grad = data("several tiles each", torch.float32)
    expected = grouped_linear(x, weight, offsets)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    spread = x.repeat_interleave(2, 1)[:, ::2].requires_grad_()
    found = grouped_linear(spread, turned, offsets)
    assert_rms(found, expected, 1e-6)
    found.backward(grad[:1].expand_as(grad))
    grads = reference.gradients(x, weight, offsets, grad[:1].expand_as(grad))
    assert_rms(spread.grad, grads[0], 1e-5)
    assert_rms(turned.grad, grads[1], 1e-5)


def test_autocast_leaves_the_dtype_alone():
    x, weight, offsets, grad = data("several tiles each", torch.float32)

    def step():
        y = grouped_linear(x.requires_grad_(), weight.requires_grad_(), offsets)
        return y, *torch.autograd.grad(y, (x, weight), grad)

    with torch.autocast("cpu", torch.bfloat16):
        found = step()
    for one, expected in zip(found, step(), strict=True):
        assert torch.equal(one, expected)


# -- what is refused ---------------------------------------------------------------------------------------------------

X, W, AT = torch.zeros(4, 3), torch.zeros(2, 5, 3), torch.tensor([0, 1, 4])
REFUSED = {
    "x is a list": ([[0.0]], W, AT),
    r"x has the shape \(4,\); it must be \(N, d_in\)": (X[:, 0], W, AT),
    r"weight has the shape \(5, 3\); it must be \(E, d_out, d_in\)": (X, W[0], AT),
    r"offsets has the shape \(\); it must be \(E \+ 1,\)": (X, W, AT[0]),
    "x is torch.int64; it must be one of torch.float32, torch.bfloat16": (X.long(), W, AT),
    "weight is torch.bfloat16; it must be torch.float32": (X, W.bfloat16(), AT),
    "offsets is torch.int32; it must be torch.int64": (X, W, AT.int()),
    "weight is on meta; it must be on cpu": (X, W.to("meta"), AT),
    "offsets is on meta; it must be on cpu": (X, W, AT.to("meta")),
    "at least one expert": (X, W[:0], AT[:1]),
    r"x has the shape \(4, 2\); its rows must have 3 elements": (X[:, :2], W, AT),
    "offsets has 2 elements; weight has 2 experts, so there must be 3": (X, W, AT[:2]),
    "offsets goes from 1 to 4; it must go from 0 to 4": (X, W, torch.tensor([1, 1, 4])),
    "offsets goes from 0 to 5; it must go from 0 to 4": (X, W, torch.tensor([0, 1, 5])),
    r"offsets\[2\] is 4, less than offsets\[1\] = 6": (X, W, torch.tensor([0, 6, 4])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_named(message):
    with pytest.raises(ConfigError, match=message):
        grouped_linear(*REFUSED[message])


# -- the kernels in the interpreter ------------------------------------------------------------------------------------


def interpreted_results():
    """Runs in the interpreter; one process, as starting it takes longer than all the rest."""
    found = {(case, dtype): results(triton_backend(), case, dtype) for case in CASES for dtype in BOUNDS}
    return {
        **found,
        "strides": interpreted_strides(),
        "wrong offsets": interpreted_wrong_offsets(),
        "nobody": interpreted_rows_of_nobody(),
        "left over": interpreted_programs_left_over(),
    }


def interpreted_strides():
    """Runs in the interpreter: inputs that are not contiguous, and a gradient without memory of its own."""
    x, weight, offsets, grad = data("empty groups", torch.float32)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    spread = x.repeat_interleave(2, 1)[:, ::2].requires_grad_()
    y = _GroupedLinear.apply(spread, turned, offsets, triton_backend())
    y.backward(grad[:1, :1].expand_as(grad))
    return y.detach(), spread.grad, turned.grad


def interpreted_wrong_offsets():
    """Runs in the interpreter: outputs between fences, after offsets that nobody validated.

    Each once with inputs between fences (a read outside gives NaN), once with inputs among ones (a write outside is no NaN).
    """
    found = []
    for bounds in ([0, 90, 140], [0, 10, 60], [-30, 5, 24], [0, 24, 3], [24, 0, 24], [0, -70, 200]):
        for among_ones in (False, True):
            x, weight, grad = (fenced(torch.ones(s), MARGIN) for s in ((24, 20), (2, 6, 20), (24, 6)))
            out, outer = fenced(grad, MARGIN), fenced(weight, MARGIN)
            if among_ones:
                for held in (x, weight, grad):
                    torch.as_strided(held, (2 * MARGIN + held.numel(),), (1,), 0).fill_(1.0)
            triton_backend().multiply_rows(x, weight.transpose(1, 2), torch.tensor(bounds), out)
            triton_backend().sum_outer(x, grad, torch.tensor(bounds), outer)
            found += [out, outer]
    return found


def interpreted_rows_of_nobody():
    """Runs in the interpreter: the last expert ends within a tile of the rows, which go on."""
    x, weight, _, grad = data("rank 3, down", torch.float32)
    out = torch.full_like(grad, float("nan"))
    triton_backend().multiply_rows(x, weight.transpose(1, 2), torch.tensor([0, 5, 12, 19]), out)
    return out


def interpreted_programs_left_over():
    """Runs in the interpreter: one expert, with the stride of a second one that would lie in no memory at all."""
    x, weight, offsets, grad = data("one group", torch.float32)
    far = weight.transpose(1, 2).as_strided((1, 16, 16), (1 << 50, 1, 16))
    out = torch.empty_like(grad)
    triton_backend().multiply_rows(x, far, offsets, out)
    return out


@pytest.fixture(scope="module")
def interpreted():
    return interpret(interpreted_results)


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_b60_the_kernels_agree_with_the_reference_in_the_interpreter(interpreted, case, dtype):
    check(*interpreted[case, dtype], case, dtype)


def test_b60_strides_do_not_matter_to_the_kernels(interpreted):
    y, grad_x, grad_weight = interpreted["strides"]
    x, weight, offsets, grad = data("empty groups", torch.float32)
    expected = reference.gradients(x, weight, offsets, grad[:1, :1].expand_as(grad))
    assert_rms(y, reference.grouped_linear(x, weight, offsets), 1e-6)
    assert_rms(grad_x, expected[0], 1e-5)
    assert_rms(grad_weight, expected[1], 1e-5)


def test_b60_wrong_offsets_reach_no_memory_outside_the_tensors(interpreted):
    for out in interpreted["wrong offsets"]:
        assert_written(out)  # NaN would have come from the margins of the inputs
        assert_fence(out)


def test_b60_a_tile_ends_where_its_expert_does(interpreted):
    # The interpreter runs one program after the other: what a tile writes over the next expert's rows is overwritten there.
    # On a GPU it would be a race. Rows of nobody show it.
    x, weight, _, _ = data("rank 3, down", torch.float32)
    out = interpreted["nobody"]
    assert_rms(out[:19], reference.grouped_linear(x[:19], weight, torch.tensor([0, 5, 12, 19])), 1e-6)
    assert out[19:].isnan().all()


def test_b60_programs_left_over_read_nothing(interpreted):
    # One that went on would read the weight of an expert that does not exist, which ends the interpreter's process.
    x, weight, offsets, _ = data("one group", torch.float32)
    assert_rms(interpreted["left over"], reference.grouped_linear(x, weight, offsets), 1e-6)


# -- which path --------------------------------------------------------------------------------------------------------


def test_b60_without_a_gpu_the_torch_path_runs_and_the_log_says_so_once(caplog, monkeypatch):
    grouped._say.cache_clear()
    used = []
    monkeypatch.setattr(grouped, "TORCH", Backend(lambda *a: used.append(1) or TORCH.multiply_rows(*a), TORCH.sum_outer))
    x, weight, offsets, _ = data("empty groups", torch.float32)
    with caplog.at_level(logging.INFO, logger=grouped.__name__):
        for _ in range(3):
            assert_rms(grouped_linear(x, weight, offsets), reference.grouped_linear(x, weight, offsets), 1e-6)
    assert used == [1, 1, 1]
    assert [r.getMessage() for r in caplog.records] == [
        "MoLoRA's grouped products use the torch path (tensors are on 'cpu', and the kernels need a GPU)"
    ]


def test_b60_on_a_gpu_the_kernels_run_if_triton_is_installed(monkeypatch):
    rows = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))  # what the choice looks at
    assert grouped._backend(rows).multiply_rows.__module__ == "hfplug.tuners.molora.triton"
    assert grouped._why_torch(SimpleNamespace(is_cuda=True, dtype=torch.float64)) == "float64"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'hfplug[triton]'" in grouped._why_torch(rows)
    assert grouped._backend(rows) is TORCH


# -- the kernels on four chips -----------------------------------------------------------------------------------------


def launches(rows, experts, d_in, d_out, dtype):
    """The three launches of a step, by name; no memory is taken."""
    from hfplug.tuners.molora import triton as kernels

    def meta(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, y = meta(rows, d_in), meta(experts, d_out, d_in), meta(rows, d_out)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device="meta")
    return {
        "product": kernels.rows_launch(x, weight.transpose(1, 2), offsets, y),
        "grad_x": kernels.rows_launch(y, weight, offsets, x),
        "grad_weight": kernels.weight_launch(x, y, offsets, weight),
    }


def compiled(launch, chip):
    return compile_only(launch.kernel, launch.arguments, chip, **launch.options)


# What the launches of a rank-16 expert of a 2048-wide module take: registers per thread, bytes of shared memory per block.
# Measured with Triton 3.9; a change that takes more than a quarter more, and so costs a block its place, is to be seen.
FIGURES = {
    ("sm_80", torch.bfloat16): {"product": (56, 20480), "grad_x": (153, 12288), "grad_weight": (46, 5120)},
    ("sm_80", torch.float32): {"product": (51, 12288), "grad_x": (48, 8192), "grad_weight": (48, 12288)},
    ("sm_90", torch.bfloat16): {"product": (38, 30720), "grad_x": (118, 18432), "grad_weight": (40, 5120)},
    ("sm_90", torch.float32): {"product": (50, 12288), "grad_x": (48, 8192), "grad_weight": (40, 12288)},
    ("sm_100", torch.bfloat16): {"product": (37, 30736), "grad_x": (96, 18448), "grad_weight": (40, 5120)},
    ("sm_100", torch.float32): {"product": (52, 12288), "grad_x": (54, 8192), "grad_weight": (40, 12288)},
    ("gfx942", torch.bfloat16): {"product": (62, 20480), "grad_x": (75, 12288), "grad_weight": (49, 6144)},
    ("gfx942", torch.float32): {"product": (58, 12288), "grad_x": (58, 8192), "grad_weight": (58, 12288)},
}


@pytest.mark.parametrize(("chip", "dtype"), FIGURES, ids=lambda v: v if isinstance(v, str) else str(v)[6:])
def test_the_kernels_fit_every_chip(chip, dtype):
    for name, launch in launches(4096, 4, 2048, 16, dtype).items():
        found, (registers, shared) = compiled(launch, chip), FIGURES[chip, dtype][name]
        assert_fits(found)
        assert found.registers <= 1.25 * registers, (name, str(found))
        assert found.shared <= 1.25 * shared, (name, str(found))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (40, 3, 64, 1), (40, 1, 1, 64)], ids=str)
def test_sizes_of_one_compile(sizes):
    # Triton makes a constant of an integer equal to 1, which then has no dtype; the interpreter does not.
    for launch in launches(*sizes, torch.bfloat16).values():
        assert_fits(compiled(launch, "sm_80"))


def test_every_chip_has_figures():
    assert {chip for chip, _ in FIGURES} == set(CHIPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
def test_no_tiles_spill_whatever_the_sizes(chip):
    seen = set()
    for dtype, (rows, experts) in itertools.product((torch.float32, torch.bfloat16), ((1, 4), (100, 4), (4096, 4), (4096, 100))):
        for wide, rank in itertools.product((2048, 30), (3, 8, 64)):
            for d_in, d_out in ((wide, rank), (rank, wide)):
                for name, launch in launches(rows, experts, d_in, d_out, dtype).items():
                    # Tiles, and which integers are 1 or divisible by 16, are all that distinguishes two compilations.
                    numbers = {k: v for k, v in launch.arguments.items() if isinstance(v, int)}
                    tiles = tuple(v if k.startswith("B") else (v == 1, v % 16 == 0) for k, v in numbers.items())
                    if (name, dtype, tiles) not in seen:
                        seen.add((name, dtype, tiles))
                        assert_fits(compiled(launch, chip))
    assert len(seen) > 50
