"""The Triton kernels of the sink scores: in the interpreter against the definition, and compiled for four chips."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import re
from types import SimpleNamespace

import pytest
import torch

from hfplug import UnsupportedError
from hfplug import sinks as core
from hfplug.kernels.sink_scores import op
from hfplug.kernels.sink_scores.reference import reference_scores
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

# name: (batch, heads, kv heads, queries, keys, dim, arguments)
CASES = {
    "plain": (1, 2, 1, 37, 37, 16, {}),
    "odd dim": (2, 3, 3, 33, 33, 20, {"scaling": 0.3}),
    "one query": (2, 4, 2, 1, 40, 16, {}),
    "one token": (1, 1, 1, 1, 1, 8, {}),
    "a cache": (1, 2, 2, 5, 70, 16, {}),
    "not causal": (1, 2, 1, 35, 35, 16, {"causal": False}),
    "window": (1, 4, 2, 75, 75, 16, {"window": 7}),
    "window over a cache": (1, 2, 1, 9, 66, 16, {"window": 20}),
    "softcap": (1, 2, 2, 40, 40, 16, {"softcap": 1.5, "scaling": 1.0}),
    "sinks": (2, 4, 2, 34, 34, 16, {"sinks": "given"}),
    "left padding": (2, 2, 1, 36, 36, 16, {"mask": "left"}),
    "right padding": (2, 2, 1, 36, 36, 16, {"mask": "right"}),
    "documents": (2, 2, 2, 70, 70, 16, {"documents": "given"}),
    "padded documents": (2, 2, 2, 50, 50, 16, {"documents": "given", "mask": "right", "window": 9}),
    "dense": (2, 4, 2, 45, 45, 16, {"mask": "dense"}),
    "dense, by head": (2, 4, 2, 20, 33, 16, {"mask": "heads"}),
    "counted": (2, 2, 1, 41, 41, 16, {"counted": "given"}),
    "wide": (1, 2, 1, 20, 20, 130, {}),
}
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-6}  # the reference takes the rounded inputs; sums are float32 in both
GRID = list(itertools.product(CASES, BOUNDS))


def data(case, dtype):
    """``(query, key, arguments, keep (batch, heads, T, K), counted)``."""
    batch, heads, kv_heads, length, keys, dim, arguments = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    query = (2 * torch.randn(batch, heads, length, dim, generator=generator)).to(dtype)
    key = torch.randn(batch, kv_heads, keys, dim, generator=generator).to(dtype)
    arguments, offset = dict(arguments), keys - length
    u, i = torch.arange(length)[:, None] + offset, torch.arange(keys)[None]
    keep = torch.ones(batch, heads, length, keys, dtype=torch.bool)
    if arguments.get("causal", True):
        keep = keep & (i <= u)
    if "window" in arguments:
        keep = keep & (i > u - arguments["window"])
    if "documents" in arguments:
        documents = arguments["documents"] = (torch.arange(keys)[None] >= torch.tensor([[11], [23]])[:batch]).long() + 4
        keep = keep & (documents[:, None, offset:, None] == documents[:, None, None])
    real = torch.ones(batch, keys, dtype=torch.bool)
    if arguments.get("mask") in ("left", "right"):
        real[-1, slice(0, 9) if arguments["mask"] == "left" else slice(-9, None)] = False
        keep, arguments["mask"] = keep & real[:, None, None], real.long()
    elif "mask" in arguments:
        shape = (batch, heads if arguments["mask"] == "heads" else 1, length, keys)
        keep = keep & ((torch.rand(shape, generator=generator) > 0.4) | (i == u))
        arguments["mask"] = keep if arguments["mask"] == "heads" else keep[:, :1]
    if "sinks" in arguments:
        arguments["sinks"] = torch.linspace(-2, 4, heads)
    counted = real[:, offset:]
    if "counted" in arguments:
        arguments["counted"] = torch.rand(batch, length, generator=generator) > 0.5
        counted = counted & arguments["counted"]
    return query, key, arguments, keep, counted


@functools.cache
def expected(case, dtype):
    query, key, arguments, keep, counted = data(case, dtype)
    scaling = arguments.get("scaling", query.shape[-1] ** -0.5)
    return reference_scores(query, key, keep, counted, scaling, arguments.get("softcap"), arguments.get("sinks"))


def check(found, case, dtype):
    """``found``: the sums, counts, diagonal and its logarithm."""
    sums, counts, diagonal, logarithm = found
    assert_written(sums, counts, diagonal, logarithm)
    for one, other in zip((sums, diagonal), (expected(case, dtype)[0], expected(case, dtype)[2]), strict=True):
        assert_rms(one, other, BOUNDS[dtype])
    assert torch.equal(counts.expand_as(sums).double(), expected(case, dtype)[1])
    assert_rms(logarithm.double().exp() * (diagonal > 0), expected(case, dtype)[2], BOUNDS[dtype])


def figures(found):
    return found.sums, found.queries, found.diagonal, found.log_diagonal


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_the_torch_form_agrees_with_the_reference(case, dtype):
    query, key, arguments, _, _ = data(case, dtype)
    check(figures(op.sink_scores(query, key, log_diagonal=True, **arguments)), case, dtype)


# -- in the interpreter ------------------------------------------------------------------------------------------------


def interpreted_results():
    """Runs in the interpreter; one process, as starting it takes longer than all the rest."""
    from hfplug.kernels.sink_scores import triton as kernels

    out = {}
    for case, dtype in GRID:
        query, key, arguments, _, _ = data(case, dtype)
        with poisoned():
            out[case, dtype] = figures(kernels.sink_scores(query, key, log_diagonal=True, **arguments))
    # Tensors between fences, and not contiguous ones, where the last tiles reach beyond the end.
    query, key, arguments, _, _ = data("odd dim", torch.float32)
    out["fenced"] = figures(kernels.sink_scores(fenced(query), fenced(key), log_diagonal=True, **arguments))
    spread = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key)]
    spread.append(query.repeat_interleave(2, 3)[..., ::2])
    out["strides"] = [figures(kernels.sink_scores(q, spread[1], log_diagonal=True, **arguments)) for q in (spread[0], spread[2])]
    # Garbage at padding stays there.
    query, key, arguments, _, _ = data("left padding", torch.float32)
    query[1, :, :9], key[1, :, :9] = float("nan"), float("nan")
    out["garbage"] = figures(kernels.sink_scores(query, key, log_diagonal=True, **arguments))
    # Nor does it come from queries that see keys but do not count.
    query, key, arguments, _, counted = data("counted", torch.float32)
    query = query.masked_fill(~counted[:, None, :, None], float("nan"))
    out["uncounted"] = figures(kernels.sink_scores(query, key, log_diagonal=True, **arguments))
    out["outputs"] = interpreted_outputs(kernels)
    return out


def interpreted_outputs(kernels):
    """Runs in the interpreter: the buffers the kernels write, between fences."""
    query, key, _, _, counted = data("odd dim", torch.float32)
    buffers = {name: fenced(torch.zeros(2, 3, 33), 4096) for name in ("total", "diagonal", "sums")}
    buffers["counts"] = fenced(torch.zeros(2, 1, 33), 4096)
    launches = kernels.launches(query, key, None, None, None, counted.to(torch.int8), 0.3, None, True, None, buffers)
    for launch in launches:
        launch.run()
    return buffers


@pytest.fixture(scope="module")
def interpreted():
    return interpret(interpreted_results)


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_b60_the_kernels_agree_with_the_reference_in_the_interpreter(interpreted, case, dtype):
    check(interpreted[case, dtype], case, dtype)


def test_b60_nothing_outside_the_tensors_is_read_or_written(interpreted):
    check(interpreted["fenced"], "odd dim", torch.float32)
    for buffer in interpreted["outputs"].values():
        assert_written(buffer)
        assert_fence(buffer)


def test_b60_strides_do_not_matter(interpreted):
    for found in interpreted["strides"]:
        check(found, "odd dim", torch.float32)


def test_b60_garbage_at_padding_stays_there(interpreted):
    check(interpreted["garbage"], "left padding", torch.float32)
    check(interpreted["uncounted"], "counted", torch.float32)


# -- which path --------------------------------------------------------------------------------------------------------


def test_b60_without_a_gpu_the_torch_form_runs_and_the_log_says_so_once(caplog, monkeypatch):
    op._say.cache_clear()
    used = []
    plain = core.sink_scores
    monkeypatch.setattr(core, "sink_scores", lambda *a, **k: used.append(1) or plain(*a, **k))
    query, key, arguments, _, _ = data("plain", torch.float32)
    with caplog.at_level(logging.INFO, logger=op.__name__):
        for _ in range(2):
            check(figures(op.sink_scores(query, key, log_diagonal=True, **arguments)), "plain", torch.float32)
    assert used == [1, 1]
    said = [r.getMessage() for r in caplog.records]
    assert said == ["sink scores use the torch form (tensors are on 'cpu', and the kernels need a GPU)"]


def test_b60_on_a_gpu_the_kernels_run_if_they_can(monkeypatch):
    rows = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)  # what the choice looks at
    assert op._why_torch(rows, None, argmax=False) is None
    assert op._why_torch(rows, torch.ones(1, 1, 2, 2, dtype=torch.bool), argmax=False) is None
    assert op._why_torch(rows, torch.ones(1, 1, 2, 2), argmax=False) == "an additive mask"
    assert op._why_torch(rows, None, argmax=True) == "argmax"
    assert op._why_torch(SimpleNamespace(is_cuda=True, dtype=torch.float64), None, argmax=False) == "float64"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'hfplug[triton]'" in op._why_torch(rows, None, argmax=False)


def test_the_kernels_refuse_what_they_do_not_take():
    from hfplug.kernels.sink_scores import triton as kernels

    query, key, _, keep, _ = data("plain", torch.float32)
    with pytest.raises(UnsupportedError, match="argmax"):
        kernels.sink_scores(query, key, argmax=True)
    with pytest.raises(UnsupportedError, match="float32"):
        kernels.sink_scores(query, key, keep.float())


# -- four chips --------------------------------------------------------------------------------------------------------


def launches(dtype, dim=64, everything=False):
    """The two launches of a 4096-token forward; no memory is taken."""
    from hfplug.kernels.sink_scores import triton as kernels

    def meta(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    query, key = meta(2, 32, 4096, dim), meta(2, 8, 4096, dim)
    buffers = {name: meta(2, 32, 4096, dtype=torch.float32) for name in ("total", "diagonal", "sums")}
    buffers["counts"] = meta(2, 1, 4096, dtype=torch.float32)
    counted = meta(2, 4096, dtype=torch.int8)
    more = (meta(2, 4096, dtype=torch.int32), meta(32, dtype=torch.float32)) if everything else (None, None)
    rest = (30.0, True, 512) if everything else (None, True, None)
    return kernels.launches(query, key, None, *more, counted, 0.125, *rest, buffers)


def compiled(launch, chip):
    return compile_only(launch.kernel, launch.arguments, chip, **launch.options)


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernels_fit_every_chip(chip, dtype):
    for launch in launches(dtype):
        assert_fits(compiled(launch, chip))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 256])
def test_wide_heads_and_every_feature_at_once_fit(dim):
    for chip, dtype in itertools.product(("sm_80", "gfx942"), BOUNDS):
        for launch in launches(dtype, dim, everything=True):
            found = compiled(launch, chip)
            if chip == "gfx942":  # scalar registers, which go to lanes of vector registers; none of those goes to memory
                assert re.search(r"\.vgpr_spill_count:\s*0\b", found.code), str(found)
            else:
                assert_fits(found)


def test_a_dense_mask_compiles():
    from hfplug.kernels.sink_scores import triton as kernels

    first, second = launches(torch.bfloat16)
    for launch in (first, second):
        assert launch.kernel in (kernels.rows_kernel, kernels.columns_kernel)
        mask = torch.empty(2, 1, 8, 8, dtype=torch.bool, device="meta")
        arguments = {**launch.arguments, "MASK": True, "CAUSAL": False, "mask": mask}
        assert_fits(compile_only(launch.kernel, arguments, "sm_90"))
