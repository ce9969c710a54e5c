"""Attention over values in two parts: equal to attention over their sum, for every call there is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfplug.attention import AttentionCall
from hfplug.errors import ConfigError
from hfplug.kernels.lragent import flash_lora_attention, op
from hfplug.kernels.lragent.op import FEW
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

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "sinks": {"s_aux": True},
    "softcap": {"softcap": 1.5},
    "position bias": {"position_bias": True},
    "bool mask": {"mask": "bool"},
    "additive mask": {"mask": "additive"},
    "left padding": {"segments": "left"},
    "documents": {"segments": "documents"},
    "weights": {"output_attentions": True},
}


def data(case: str, queries: int, keys: int, dtype: Any, shape: tuple[int, int, int, int, int] = (2, 4, 2, 8, 4), wide: int = 8,
         per_row: bool = False) -> tuple[AttentionCall, Any, Any]:  # fmt: skip
    """A call, ``low`` and ``up``; ``wide``: size of queries and keys."""
    batch, heads, groups, dim, rank = shape
    generator = torch.Generator().manual_seed(len(case) + queries)

    def make(*size: int) -> Any:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    given: dict[str, Any] = {"scaling": 0.4, **CASES[case]}
    if "s_aux" in given:
        given["s_aux"] = make(heads)
    if "position_bias" in given:
        given["position_bias"] = make(1, heads, queries, keys)
    if kind := given.get("mask"):
        keep = torch.rand(batch, 1, queries, keys, generator=generator) > 0.4
        keep[0, 0, 0] = False  # a query that sees nothing
        given["mask"] = keep if kind == "bool" else torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -1e9)
    if kind := given.get("segments"):
        segments = torch.ones(batch, keys, dtype=torch.int32)
        segments[1, : keys // 3] = 0 if kind == "left" else 2
        given["segments"] = segments
    call = AttentionCall(
        query=make(batch, heads, queries, wide),
        key=make(batch, groups, keys, wide),
        value=make(batch, groups, keys, dim),
        **given,
    )
    return call, make(batch, 1, keys, rank), make(*((batch,) if per_row else ()), groups, rank, dim)


def materialised(call: AttentionCall, low: Any, up: Any) -> Any:
    return dataclasses.replace(call, value=call.value + low @ up).exact()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 19), (FEW, 19), (19, 19), (12, 30)])
def test_reordered_is_materialised(case: str, queries: int, keys: int) -> None:
    """Prefill, decoding, chunks; grouped heads; masks of all kinds; fp64 to 1e-12, fp32 to 1e-5."""
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        call, low, up = data(case, queries, keys, dtype)
        out, weights = flash_lora_attention(call, low, up)
        expected, theirs = materialised(call, low, up)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert out.shape == expected.shape
        seen = torch.ones(out.shape[:2], dtype=torch.bool)
        if "mask" in case:  # torch leaves open what a query without keys gives
            assert out.isfinite().all()
            seen[0, 0] = False
        assert float((out[seen] - expected[seen]).abs().max()) < bound
        assert (weights is None) == (theirs is None)
        if weights is not None:
            assert float((weights - theirs).abs().max()) < bound


@pytest.mark.parametrize(("wide", "dim", "rank"), [(8, 16, 4), (16, 8, 4), (16, 8, 16), (8, 8, 1)])
def test_sizes_may_differ(wide: int, dim: int, rank: int) -> None:
    for queries, per_row in itertools.product((2, 20), (False, True)):
        call, low, up = data("causal", queries, 20, torch.float64, (2, 6, 3, dim, rank), wide, per_row)
        assert float((flash_lora_attention(call, low, up)[0] - materialised(call, low, up)[0]).abs().max()) < 1e-12


def test_the_parts_side_by_side_are_one_value() -> None:
    """``P [V | low]`` has both products: the identity that everything here rests on, through torch's own attention."""
    call, low, up = data("causal", 20, 20, torch.float64)
    side = torch.cat((call.value, low.expand(-1, 2, -1, -1)), dim=-1)
    both = dataclasses.replace(call, value=side).exact()[0]
    assert float((op._added(both[..., :8], both[..., 8:], up) - materialised(call, low, up)[0]).abs().max()) < 1e-12


def test_nothing_added_is_plain_attention_and_full_rank_is_the_dense_delta() -> None:
    for queries in (1, 20):
        call, low, up = data("causal", queries, 20, torch.float64, (2, 4, 2, 8, 8))
        plain = call.exact()[0]
        for none in ((low, 0 * up), (0 * low, up)):
            assert float((flash_lora_attention(call, *none)[0] - plain).abs().max()) < 1e-13
        delta = dataclasses.replace(call, value=call.value + low).exact()[0]
        eye = torch.eye(8, dtype=torch.float64).expand(2, 8, 8)
        assert float((flash_lora_attention(call, low, eye)[0] - delta).abs().max()) < 1e-12


def test_a_part_of_another_dtype_is_brought_to_that_of_the_values() -> None:
    for queries in (1, 20):
        call, low, up = data("causal", queries, 20, torch.float32)
        narrow = dataclasses.replace(call, query=call.query.bfloat16(), key=call.key.bfloat16(), value=call.value.bfloat16())
        out, _ = flash_lora_attention(narrow, low, up)
        assert out.dtype == torch.bfloat16
        assert float((out.float() - materialised(call, low, up)[0]).norm() / out.float().norm()) < 0.02


def test_gradients_are_those_of_the_sum() -> None:
    for queries in (3, 20):
        call, low, up = data("left padding", queries, 20, torch.float64)
        tensors = [t.requires_grad_() for t in (call.query, call.key, call.value, low, up)]
        probe = torch.randn(2, queries, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found, expected = (
            torch.autograd.grad((f(call, low, up)[0] * probe).sum(), tensors) for f in (flash_lora_attention, materialised)
        )
        assert all(float((a - b).abs().max()) < 1e-12 for a, b in zip(found, expected, strict=True))


def test_few_queries_copy_no_values() -> None:
    """The products are written out: what is allocated does not grow with ``dim_v``."""
    call, low, up = data("causal", 1, 4096, torch.float32, (1, 4, 2, 256, 4))
    grown = []
    for queries in (1, FEW + 1):
        one = dataclasses.replace(call, query=call.query.expand(-1, -1, queries, -1))
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            flash_lora_attention(one, low, up)
        grown.append(max(event.cpu_memory_usage for event in seen.events()))
    assert grown[0] < call.value.nbytes / 4
    assert grown[1] > call.value.nbytes


def test_wrong_shapes_are_named() -> None:
    call, low, up = data("causal", 3, 20, torch.float32)
    with pytest.raises(ConfigError, match=r"low \(2, 1, 19, 4\) must be \(batch, 1, keys, rank\) = \(2, 1, 20, rank\)"):
        flash_lora_attention(call, low[:, :, 1:], up)
    with pytest.raises(ConfigError, match=r"up \(2, 8, 4\) must be .* \(2, 4, 8\)"):
        flash_lora_attention(call, low, up.transpose(1, 2))


# -- the Triton kernel ----------------------------------------------------------------------------------------------------

# name: (case, queries, keys, (batch, heads, kv heads, dim_v, rank), size of queries and keys)
KERNEL: dict[str, tuple[str, int, int, tuple[int, int, int, int, int], int]] = {
    "prefill": ("causal", 37, 37, (1, 4, 2, 16, 8), 16),
    "decoding": ("causal", 1, 40, (2, 4, 1, 16, 4), 16),
    "a chunk": ("causal", 20, 40, (1, 2, 2, 16, 4), 16),
    "not causal": ("not causal", 35, 35, (1, 2, 1, 16, 4), 16),
    "left padding": ("left padding", 40, 40, (2, 2, 1, 16, 4), 16),
    "documents": ("documents", 40, 40, (2, 2, 2, 16, 4), 16),
    "odd sizes": ("causal", 33, 41, (2, 3, 3, 20, 3), 24),
    "wide": ("causal", 9, 20, (1, 2, 1, 33, 17), 36),
}
GRID = [(n, torch.float32) for n in KERNEL] + [(n, torch.bfloat16) for n in ("decoding", "left padding", "odd sizes")]


def kernel_case(name: str, dtype: Any) -> tuple[AttentionCall, Any, Any]:
    case, queries, keys, shape, wide = KERNEL[name]
    return data(case, queries, keys, dtype, shape, wide)


def interpreted_results() -> Any:
    """Runs in the interpreter; one process, as starting it takes longer than all the rest."""
    from hfplug.kernels.lragent import triton as kernels

    def run(call: AttentionCall, low: Any, change: Any = lambda t: t) -> Any:
        tensors = [change(t) for t in (call.query, call.key, call.value, low)]
        return kernels.attention(*tensors, call.segments, call.scaling, call.causal)

    found: dict[Any, Any] = {}
    for name, dtype in GRID:
        call, low, _ = kernel_case(name, dtype)
        with poisoned():
            found[name, dtype] = run(call, low)
    call, low, _ = kernel_case("odd sizes", torch.float32)
    found["fenced"] = run(call, low, fenced)
    found["strides"] = run(call, low, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2))
    out, mixed = (fenced(torch.zeros(2, 3, 33, n), 4096) for n in (20, 3))
    kernels.launch(call.query, call.key, call.value, low, None, call.scaling, True, out, mixed).run()
    found["outputs"] = out, mixed
    call, low, _ = kernel_case("left padding", torch.float32)
    for t in (call.query, call.key):
        t[1, :, :13] = float("nan")
    found["garbage"] = run(call, low)
    return found


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return interpret(interpreted_results)


def check(found: Any, name: str, dtype: Any) -> None:
    """The two products of the kernel, with the factor applied, against attention over the sum in fp64."""
    out, mixed = found
    assert_written(out, mixed)
    call, low, up = kernel_case(name, dtype)
    wide = dataclasses.replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    expected = materialised(wide, low.double(), up.double())[0]
    ours = op._added(out.double().transpose(1, 2), mixed.double().transpose(1, 2), up.double())
    assert_rms(ours, expected, 1e-6)


@pytest.mark.parametrize(("name", "dtype"), GRID)
def test_b60_the_kernel_agrees_with_the_definition_in_the_interpreter(interpreted: Any, name: str, dtype: Any) -> None:
    check(interpreted[name, dtype], name, dtype)


def test_b60_nothing_outside_the_tensors_is_read_or_written(interpreted: Any) -> None:
    for variant in ("fenced", "strides", "outputs"):
        check(interpreted[variant], "odd sizes", torch.float32)
    for buffer in interpreted["outputs"]:
        assert_fence(buffer)


def test_b60_garbage_at_padding_stays_there(interpreted: Any) -> None:
    check(interpreted["garbage"], "left padding", torch.float32)


def test_b60_which_path_is_taken_and_said_once(caplog: Any, monkeypatch: Any) -> None:
    op._say.cache_clear()
    call, low, up = data("causal", 3, 20, torch.float32)
    with caplog.at_level(logging.INFO, logger=op.__name__):
        for _ in range(2):
            flash_lora_attention(call, low, up)
    assert [r.getMessage() for r in caplog.records] == [
        "Flash-LoRA-Attention uses torch (tensors are on 'cpu', and the kernel needs a GPU)"
    ]

    def on_gpu(dtype: Any = torch.bfloat16, size: int = 64, **more: Any) -> Any:
        return SimpleNamespace(is_cuda=True, dtype=dtype, requires_grad=False, shape=(1, 1, 2, size), **more)

    def reason(*, size: int = 64, rank: int = 8, dtype: Any = torch.bfloat16, **given: Any) -> str | None:
        tensors = {name: on_gpu(dtype, size) for name in ("query", "key", "value")}
        fake: Any = dataclasses.replace(call, **tensors, **given)
        return op.why_torch(fake, on_gpu(dtype, rank), on_gpu())

    assert reason() is None
    assert reason(dtype=torch.float64) == "float64 or mixed dtypes"
    assert "dense mask" in str(reason(mask=torch.ones(1)))
    assert "softcap" in str(reason(softcap=2.0))
    assert "rank" in str(reason(rank=65))
    assert "heads" in str(reason(size=129))
    monkeypatch.setattr(op.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'hfplug[triton]'" in str(reason())


def prepared(dtype: Any, dim: int, rank: int, *, segments: bool) -> Any:
    """The launch of a 4096-token forward; no memory is taken."""
    from hfplug.kernels.lragent import triton as kernels

    meta = functools.partial(torch.empty, device="meta")
    states = [meta(2, heads, 4096, width, dtype=dtype) for heads, width in ((32, dim), (8, dim), (8, dim), (1, rank))]
    marks = meta(2, 4096, dtype=torch.int32) if segments else None
    outputs = [meta(2, 32, 4096, width, dtype=torch.float32) for width in (dim, rank)]
    return kernels.launch(*states, marks, 0.125, True, *outputs)


def test_the_kernel_fits_the_chip_with_the_fewest_registers_to_spare() -> None:
    chip = "sm_80"
    one = prepared(torch.bfloat16, 128, 16, segments=True)
    assert_fits(compile_only(one.kernel, one.arguments, chip, **one.options))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_size_fits_every_chip(chip: str, dtype: Any) -> None:
    for dim, rank in ((64, 8), (128, 16), (128, 64)):
        one = prepared(dtype, dim, rank, segments=True)
        assert_fits(compile_only(one.kernel, one.arguments, chip, **one.options))
