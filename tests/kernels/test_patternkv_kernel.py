"""PatternKV's Triton kernel: in the interpreter against attention on what is read, and compiled for four chips."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfplug.kernels.patternkv import PatternKVCache, PatternKVConfig, attend, split
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
from hfplug.testing.models import tiny_llama

PLAIN = {"sink_tokens": 0, "pre_rope": False}
SMALL = {"key_group": 8, "residual": 16, "key_patterns": 3, "value_patterns": 5}
# name: (options, tokens, queries, padded)
CASES: dict[str, tuple[dict[str, Any], int, int, bool]] = {
    "default form": (SMALL, 70, 3, False),
    "padded": (SMALL, 70, 3, True),
    "rotated keys": ({**SMALL, **PLAIN}, 70, 1, True),
    "no patterns": ({**SMALL, **PLAIN, "key_patterns": 0, "value_patterns": 0}, 40, 2, False),
    "no patterns, unrotated": ({**SMALL, "key_patterns": 0}, 40, 2, False),
    "4 bits, small groups": ({**SMALL, "bits": 4, "value_group": 2, "key_group": 4}, 40, 2, True),
    "8 bits, patterns added": ({**SMALL, **PLAIN, "bits": 8, "new_patterns": True, "pattern_bits": 16}, 80, 1, False),
    "shared patterns": ({**SMALL, "share_batch": True}, 40, 2, False),
    "several stretches": ({**SMALL, "key_group": 64, "residual": 128}, 660, 1, True),
    "blocks alone": ({**SMALL, **PLAIN}, 32, 6, False),
}


def stored(name: str) -> tuple[Any, Any, Any]:
    """A layer, a query ``(2, 6, queries, 8)`` on 2 heads, and a causal mask with padding."""
    options, tokens, queries, padded = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    keys, values = torch.randn(2, 2, 2, tokens, 8, generator=generator).unbind()
    real = torch.ones(2, tokens, dtype=torch.bool)
    if padded:
        real[1, : min(20, tokens // 2)] = False
    cache = PatternKVCache(tiny_llama(max_position_embeddings=2048).config, PatternKVConfig(**options))
    cache.padding(real)
    cache.own_layers[0].update(keys, values)
    query = torch.randn(2, 6, queries, 8, generator=generator)
    allowed = real[:, None, None, :] & torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    return cache.own_layers[0], query, allowed


def grouped(query: Any) -> Any:
    return query.reshape(2, 2, -1, 8)


def interpreted_results() -> Any:
    """Runs in the interpreter; one process, as starting it takes longer than all the rest."""
    from hfplug.kernels.patternkv import triton as kernels

    found: dict[str, Any] = {}
    for name, (_, _, queries, padded) in CASES.items():
        layer, query, allowed = stored(name)
        with poisoned():
            found[name] = split.by_triton(grouped(query), layer, 0.3, allowed, queries)
        if queries == 1 and not padded:
            found[f"{name}, no mask"] = split.by_triton(grouped(query), layer, 0.3, None, 1)
    layer, query, allowed = stored("padded")
    nothing = torch.zeros_like(allowed)
    found["nothing seen"] = split.by_triton(grouped(query), layer, 0.3, nothing, 3)
    layer.state = {n: fenced(t) if t.is_floating_point() else t for n, t in layer.state.items()}
    found["fenced"] = split.by_triton(grouped(query), layer, 0.3, allowed, 3)
    outputs = {n: fenced(torch.zeros(2, 2, 1, 9), 4096) for n in ("top", "mass")}
    outputs |= {"out": fenced(torch.zeros(2, 2, 1, 9, 8), 4096), "mixed": fenced(torch.zeros(2, 2, 1, 9, 6), 4096)}
    kernels.launch(grouped(query), layer, 0.3, allowed[:, 0], 3, outputs).run()
    found["outputs"] = outputs
    return found


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return interpret(interpreted_results)


def expected(name: str) -> Any:
    """fp64, on what the layer reads."""
    layer, query, allowed = stored(name)
    keys, values = (t.double().repeat_interleave(3, dim=1) for t in layer.read())
    scores = (query.double() @ keys.transpose(2, 3) * 0.3).masked_fill(~allowed, -torch.inf)
    return grouped(scores.softmax(-1).nan_to_num(0.0) @ values)


@pytest.mark.parametrize("name", CASES)
def test_b60_the_kernel_agrees_with_what_is_read(interpreted: Any, name: str) -> None:
    """To which torch's form agrees as well, less closely: it sums codes and minima apart, and they cancel."""
    assert_written(interpreted[name])
    assert_rms(interpreted[name], expected(name), 2e-6)
    layer, query, allowed = stored(name)
    assert float((grouped(attend(query, layer, scaling=0.3, mask=allowed)) - expected(name)).abs().max()) <= 1e-5
    if f"{name}, no mask" in interpreted:
        assert_rms(interpreted[f"{name}, no mask"], expected(name), 2e-6)


def test_b60_nothing_outside_is_read_or_written_and_a_blind_query_gives_zeros(interpreted: Any) -> None:
    assert_rms(interpreted["fenced"], expected("padded"), 2e-6)
    for buffer in interpreted["outputs"].values():
        assert_written(buffer)
        assert_fence(buffer)
    assert not interpreted["nothing seen"].any()


def test_b60_which_path_is_taken_and_said_once(caplog: Any, monkeypatch: Any) -> None:
    split._say.cache_clear()
    layer, query, allowed = stored("default form")
    with caplog.at_level(logging.INFO, logger=split.__name__):
        for _ in range(2):
            attend(query, layer, scaling=0.3, mask=allowed)
    assert [r.getMessage() for r in caplog.records] == [
        "attention on PatternKV's blocks uses torch (tensors are on 'cpu', and the kernel needs a GPU)"
    ]
    gpu: Any = SimpleNamespace(is_cuda=True)
    fake = lambda blocked, size: SimpleNamespace(blocked=blocked, sizes={"key": size, "value": 64})  # noqa: E731
    assert split.why_torch(gpu, fake(128, 64)) is None
    assert split.why_torch(gpu, fake(0, 64)) == "no block is stored yet"
    assert split.why_torch(gpu, fake(128, 256)) == "heads above 128"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'hfplug[triton]'" in str(split.why_torch(gpu, fake(128, 64)))


def prepared(dim: int, **options: Any) -> Any:
    """The launch on 2048 tokens; what is stored is real and small, the queries take no memory."""
    from hfplug.kernels.patternkv import triton as kernels

    model = tiny_llama(hidden_size=4 * dim, head_dim=dim, max_position_embeddings=4096)
    cache = PatternKVCache(model.config, PatternKVConfig(**options))
    keys, values = torch.randn(2, 1, 2, 256, dim, generator=torch.Generator().manual_seed(0)).unbind()
    layer = cache.own_layers[0]
    layer.update(keys, values)
    outputs = {n: torch.empty(1, 2, 1, 4) for n in ("top", "mass")}
    outputs |= {"out": torch.empty(1, 2, 1, 4, dim), "mixed": torch.empty(1, 2, 1, 4, layer.patterns("value").shape[2])}
    return kernels.launch(torch.empty(1, 2, 4, dim), layer, 0.1, torch.ones(1, 1, 256, dtype=torch.bool), 1, outputs)


def test_the_kernel_fits_the_chip_with_the_fewest_registers_to_spare() -> None:
    one = prepared(64)
    assert_fits(compile_only(one.kernel, one.arguments, "sm_80", **one.options))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_form_fits_every_chip(chip: str) -> None:
    for dim, options in ((64, {}), (128, {}), (64, PLAIN), (128, {"bits": 4, "key_patterns": 0, "value_patterns": 0})):
        one = prepared(dim, **options)
        assert_fits(compile_only(one.kernel, one.arguments, chip, **one.options))
