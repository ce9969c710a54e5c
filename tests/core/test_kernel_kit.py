"""The kernel kit: each instrument shows what is right, and fails on what is not."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
import triton
import triton.language as tl

from hfplug import ConfigError
from hfplug.testing.kernels import (
    CHIPS,
    Resources,
    assert_fence,
    assert_fits,
    assert_rms,
    assert_written,
    compile_only,
    fenced,
    interpret,
    poisoned,
    rms_ratio,
)

LENGTH, BLOCK = 37, 16


@triton.jit
def double_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, factor * tl.load(x + at, mask=at < n).to(tl.float32), mask=at < n)


@triton.jit
def unmasked_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, factor * tl.load(x + at, mask=at < n, other=0.0).to(tl.float32))


@triton.jit
def product_kernel(x, w, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + rows[:, None] * K + inner[None, :])
    b = tl.load(w + inner[:, None] * N + columns[None, :])
    tl.store(out + rows[:, None] * N + columns[None, :], tl.dot(a, b).to(out.dtype.element_ty))


# -- the interpreter ---------------------------------------------------------------------------------------------------


def doubled(x, factor=2.0, programs=None, kernel="double_kernel"):
    """Runs in the interpreter."""
    out = torch.empty_like(x)
    globals()[kernel][(programs or triton.cdiv(len(x), BLOCK),)](x, out, len(x), factor, BLOCK=BLOCK)
    return out


def states(x):
    """Runs in the interpreter: a good output, one with an end not written, one of a wrong kernel, one written beyond its end."""
    with poisoned():
        found = {"good": doubled(x), "unwritten": doubled(x, programs=2), "wrong": doubled(x, 2.001)}
    source = fenced(x, 64)
    for kernel in (double_kernel, unmasked_kernel):
        out = fenced(torch.zeros_like(x), 64)
        kernel[(3,)](source, out, len(x), 2.0, BLOCK=BLOCK)
        found[kernel.fn.__name__] = out
    found["interpreted"] = not isinstance(double_kernel, triton.JITFunction)
    found["process"] = os.getpid()
    return found


def fails():
    raise ValueError("of its own")


def sleeps():
    import time

    time.sleep(60)


@pytest.fixture(scope="module")
def found():
    return interpret(states, torch.arange(float(LENGTH)))


def test_a_function_runs_in_the_interpreter_of_another_process(found):
    assert found["interpreted"] is True
    assert found["process"] != os.getpid()
    assert isinstance(double_kernel, triton.JITFunction)  # here it stays a kernel to be compiled
    assert_written(found["good"])
    assert_rms(found["good"], 2 * torch.arange(float(LENGTH)), 1e-7)


def test_an_end_that_no_program_wrote_is_found(found):
    with pytest.raises(AssertionError, match=r"5 of 37 elements are NaN, first at \[32\]"):
        assert_written(found["good"], found["unwritten"])


def test_a_wrong_kernel_is_found(found):
    with pytest.raises(AssertionError, match=r"doubled: RMS error 5\.00e-04 of the reference, more than 1e-06"):
        assert_rms(found["wrong"], found["good"], 1e-6, "doubled")


def test_a_store_without_a_mask_is_found(found):
    assert_fence(found["double_kernel"])
    assert torch.equal(found["double_kernel"], found["unmasked_kernel"])  # inside there is nothing to see
    with pytest.raises(AssertionError, match="11 elements written outside, first 37 from the start"):
        assert_fence(found["unmasked_kernel"])


def test_an_error_arrives_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)fails failed in the interpreter .*ValueError: of its own"):
        interpret(fails)


def test_what_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        interpret(sleeps, timeout=0.5)


def test_only_functions_of_a_file_can_be_interpreted():
    def local():
        return 1

    with pytest.raises(ConfigError, match="must be defined at the top level of a file"):
        interpret(local)


# -- memory and numbers ------------------------------------------------------------------------------------------------


def test_poison_is_in_every_allocation_and_gone_afterwards():
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    like = torch.ones(3, dtype=torch.bfloat16)
    with poisoned():
        for made in (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,))):
            assert made.isnan().all()
    assert (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory) == before
    with pytest.raises(ZeroDivisionError), poisoned():
        _ = 1 // 0
    assert (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory) == before


def test_fences_hold_the_values_and_stand_on_both_sides():
    x = torch.arange(6.0).view(2, 3)
    held = fenced(x.T, 4)
    assert torch.equal(held, x.T)
    assert held.is_contiguous()
    assert_fence(held)
    for outside in (3, 10):  # the last element before, the first behind
        broken = fenced(x, 4)
        torch.as_strided(broken, (14,), (1,), 0)[outside] = 0.0
        with pytest.raises(AssertionError, match=f"1 elements written outside, first {outside - 4} from the start"):
            assert_fence(broken)
    with pytest.raises(AssertionError, match="no margins"):
        assert_fence(torch.ones(3))
    with pytest.raises(ConfigError, match=r"tensor is torch\.int64"):
        fenced(torch.arange(3))


def test_the_ratio():
    x = torch.tensor([3.0, 4.0])
    assert rms_ratio(x + torch.tensor([0.0, 0.5]), x) == pytest.approx(0.1)
    assert rms_ratio(x[:0], x[:0]) == 0
    assert rms_ratio(x, 0 * x) == float("inf")
    assert rms_ratio(0 * x, 0 * x) == 0
    with pytest.raises(AssertionError, match="RMS error nan"):
        assert_rms(torch.tensor([float("nan"), 4.0]), x, 1.0)
    with pytest.raises(AssertionError, match=r"shape \(1,\) instead of \(2,\)"):
        assert_rms(x[:1], x, 1.0)


# -- compilation -------------------------------------------------------------------------------------------------------


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def product(chip, M, N, K, **options):
    operands = {"x": meta(M, K), "w": meta(K, N), "out": meta(M, N), "M": M, "N": N, "K": K}
    return compile_only(product_kernel, operands, chip, **options)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_that_fits(chip):
    found = product(chip, 32, 32, 32)
    assert_fits(found)
    assert 16 <= found.registers <= 128
    assert 32 * 32 * 2 <= found.shared <= 8 * 32 * 32 * 2  # an operand at least passes through shared memory


@pytest.mark.parametrize(("chip", "rows", "columns"), [("sm_80", 128, 128), ("gfx942", 256, 64)])
def test_a_kernel_that_spills_is_found(chip, rows, columns):
    # One warp holds all the sums in float32: 512 registers for each thread of 32, 256 and the operands for each of 64.
    found = product(chip, rows, columns, 16, num_warps=1)
    assert found.registers >= 255
    with pytest.raises(AssertionError, match=r"[1-9]\d* bytes spilled"):
        assert_fits(found)


@pytest.mark.parametrize(("chip", "instruction"), [("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("gfx942", "v_mfma")])
def test_the_code_is_that_of_the_chip(chip, instruction):
    assert instruction in product(chip, 64, 64, 64).code


def test_a_specialisation_is_that_of_a_launch():
    def code(n, factor=2.0):
        return compile_only(double_kernel, {"x": meta(9), "out": meta(9), "n": n, "factor": factor, "BLOCK": 1024}, "sm_80").code

    assert "ld.global.v4" in code(16)  # a multiple of 16: whole vectors are inside or outside
    assert "ld.global.v4" not in code(17)
    assert code(16).count(".param .u") > 0
    assert ".param .u64 " in code(1 << 40)  # beyond 32 bits


def test_shared_memory_beyond_the_chip_is_found():
    for chip, limit in (("sm_80", 166912), ("sm_90", 232448), ("sm_100", 232448), ("gfx942", 65536)):
        assert_fits(Resources("k", chip, 8, 0, limit, ""))
        with pytest.raises(AssertionError, match=f"{limit + 1} bytes shared; the chip has {limit}"):
            assert_fits(Resources("k", chip, 8, 0, limit + 1, ""))


def test_figures_do_not_come_from_a_cache():
    first, second = product("sm_80", 32, 32, 32), product("sm_80", 32, 32, 32)
    assert first == second  # a cached kernel would have no log to read


def test_compilation_names_what_is_wrong():
    good = {"x": meta(9), "out": meta(9), "n": 9, "factor": 2.0, "BLOCK": 16}
    with pytest.raises(ConfigError, match=r"chip is 'sm_8'; it must be one of sm_80, .* \(did you mean 'sm_80'\?\)"):
        compile_only(double_kernel, good, "sm_8")
    with pytest.raises(ConfigError, match=r"missing \['n'\], unknown \['N'\]"):
        compile_only(double_kernel, {**{k: v for k, v in good.items() if k != "n"}, "N": 9}, "sm_80")
    with pytest.raises(ConfigError, match=r"arguments\['factor'\] is a str"):
        compile_only(double_kernel, {**good, "factor": "two"}, "sm_80")
    with pytest.raises(ConfigError, match=r"kernel is a function; it must be a function under @triton\.jit"):
        compile_only(doubled, good, "sm_80")
