"""PatternKV: the contract, and what its definition says of every number."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from hfplug.errors import ConfigError
from hfplug.kernels.patternkv import PatternKVCache, PatternKVConfig
from hfplug.testing.cache import CacheContract
from hfplug.testing.models import tiny_llama

SMALL: dict[str, Any] = {"key_group": 8, "residual": 16, "key_patterns": 3, "value_patterns": 3}


class TestPatternKV(CacheContract):
    method, options, window, long = "patternkv", SMALL, 16, 40


class TestAuthorsForm(CacheContract):
    """Patterns shared by the batch, added to, by range."""

    method, window, long, rows_independent = "patternkv", 16, 40, False
    options: ClassVar[dict[str, Any]] = {
        **{f: getattr(PatternKVConfig.authors(), f) for f in ("pattern_bits", "new_patterns", "later_assignment", "share_batch")},
        "sink_tokens": 0,
        "pre_rope": False,
        **SMALL,
    }


def _states(tokens: int = 64, rows: int = 2, seed: int = 0) -> Any:
    keys, values = torch.randn(2, rows, 2, tokens, 8, generator=torch.Generator().manual_seed(seed)).unbind()
    return keys + 2, values - 3 * torch.arange(8)  # channels with offsets, which patterns take out


def _layer(mask: Any = None, **options: Any) -> Any:
    cache = PatternKVCache(tiny_llama().config, **{**SMALL, **options})
    if mask is not None:
        cache.padding(mask)
    return cache.own_layers[0]


def _fed(keys: Any, values: Any, mask: Any = None, chunk: int = 10**6, **options: Any) -> Any:
    layer = _layer(mask, **options)
    for part in range(0, keys.shape[2], chunk):
        layer.update(keys[:, :, part : part + chunk], values[:, :, part : part + chunk])
    return layer


PLAIN: dict[str, Any] = {"pre_rope": False, "sink_tokens": 0}


def test_without_patterns_it_is_groups_of_few_bits() -> None:
    """Bit for bit what groups with a step and a minimum give; in full precision of patterns, one of zeros is the same."""
    from hfplug.lowbit import dequantise, quantise

    keys, values = _states(32)
    found = _fed(keys, values, **PLAIN, key_patterns=0, value_patterns=0, value_group=4).read()
    assert torch.equal(found[0], dequantise(quantise(keys, 2, 2, 8), 2))
    assert torch.equal(found[1], dequantise(quantise(values, 2, 3, 4), 3))


@pytest.mark.parametrize("options", [{}, {"pattern_bits": 16}, PLAIN, {"bits": 4, "value_group": 2}], ids=str)
def test_no_element_is_off_by_more_than_half_a_step(options: dict[str, Any]) -> None:
    keys, values = _states(48)
    layer = _fed(keys, values, **options)
    stored = layer.decode()
    column = torch.arange(48)[None].expand(2, -1)
    expected = (keys if layer.rotation is None else layer.rotation(keys, column, back=True)), values
    sinks = layer.options.sink_tokens
    for part, ours, theirs, axis in zip(("key", "value"), stored, expected, (2, 3), strict=True):
        step = layer.groups(part).step.float()
        step = step.repeat_interleave(ours.shape[axis] // step.shape[axis], axis)
        slack = 2e-3 * (1 + theirs.abs())  # step and minimum in half precision
        assert bool(((ours - theirs).abs() <= step / 2 + slack)[:, :, sinks:].all())


def test_distinct_tokens_no_more_than_patterns_are_exact() -> None:
    """Every token is a pattern: the differences are zero."""
    few = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0)).half().float()
    drawn = torch.randint(0, 5, (48,), generator=torch.Generator().manual_seed(1))
    keys, values = few[:, :, drawn], few[:, :, drawn.flip(0)]
    layer = _fed(keys, values, **PLAIN, pattern_bits=16, key_patterns=8, value_patterns=8, gate=False)
    assert all(torch.equal(a, b) for a, b in zip(layer.read(), (keys, values), strict=True))


def test_a_shift_of_all_values_costs_nothing() -> None:
    """The patterns shift with them; without patterns the same shift spoils the values."""
    keys, values = _states(48)
    shift = 40 * torch.randn(8, generator=torch.Generator().manual_seed(3)).half().float()
    errors: dict[int, list[float]] = {}
    for patterns in (0, 3):
        for moved in (values, values + shift):
            read = _fed(keys, moved, **PLAIN, pattern_bits=16, value_patterns=patterns, gate=False).read()[1]
            errors.setdefault(patterns, []).append(float((read - moved).norm()))
    assert errors[3][1] < 1.1 * errors[3][0]
    assert errors[0][1] > 3 * errors[0][0]


def test_the_gate_is_the_papers() -> None:
    """Threshold .877 at 64 channels and .911 at 128; below it a token takes a pattern, above it none, and is stored plainly."""
    from hfplug.kernels.patternkv.patterns import narrows

    for dim, threshold in ((64, 0.877), (128, 0.911)):
        x = torch.linspace(-1, 1, dim)[None, None, None]
        assert bool(narrows(x, 0 * x).all())
        assert not bool(narrows(x, x).any())
        assert bool(narrows(x, (threshold - 2e-3) * x).all())
        assert not bool(narrows(x, (threshold + 2e-3) * x).any())
    keys, values = _states(32)
    values = values + 3 * torch.arange(8)  # nothing to take out
    gated = _fed(keys, values, **PLAIN)
    index = gated.indices("value")
    assert bool((index == 0).any())
    plain = _fed(keys, values, **PLAIN, value_patterns=0)
    assert torch.equal(gated.read()[1][index == 0], plain.read()[1][index == 0])
    assert bool((gated.indices("key") > 0).all())  # keys have no gate


def test_new_patterns_are_the_middle_of_a_block() -> None:
    """One more for every later block, for keys and values; the old ones and their tokens stay."""
    keys, values = _states(80)
    layer = _fed(keys[:, :, :32], values[:, :, :32], **PLAIN, new_patterns=True, later_assignment="range", pattern_bits=16)
    assert layer.patterns("key").shape[2] == 4
    for end in (48, 64, 80):
        old = layer.patterns("value")
        layer.update(keys[:, :, end - 16 : end], values[:, :, end - 16 : end])
        new = layer.patterns("value")
        assert torch.equal(new[:, :, :-1], old)
        block = values[:, :, end - 16 : end]
        assert torch.equal(new[:, :, -1], ((block.amax(2) + block.amin(2)) / 2).half().float())
    ranges = (values[:, :, 64:, None] - layer.patterns("value")[:, :, None, 1:]).amax(-1) - (
        values[:, :, 64:, None] - layer.patterns("value")[:, :, None, 1:]
    ).amin(-1)
    chosen = layer.indices("value")[:, :, 64:]
    assert torch.equal(chosen[chosen > 0], (ranges.argmin(-1) + 1)[chosen > 0])


def test_patterns_of_a_row_are_its_own_or_the_batchs() -> None:
    keys, values = _states(32)
    own, shared = (_fed(keys, values, **PLAIN, share_batch=share, pattern_bits=16) for share in (False, True))
    assert own.patterns("key").shape[0] == 2
    assert shared.patterns("key").shape[0] == 1
    alone = _fed(keys.mean(0, keepdim=True), values.mean(0, keepdim=True), **PLAIN, pattern_bits=16)
    torch.testing.assert_close(shared.patterns("key"), alone.patterns("key"), rtol=0, atol=1e-3)


def test_a_row_learns_its_patterns_when_it_has_tokens() -> None:
    """Behind a first block of padding: the patterns of the same tokens alone."""
    keys, values = _states(32)
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[1, :16] = False
    layer = _fed(keys, values, mask, chunk=16, **PLAIN)
    alone = _fed(keys[1:, :, 16:], values[1:, :, 16:], **PLAIN)
    first = _fed(keys[:1, :, :16], values[:1, :, :16], **PLAIN)
    for part in ("key", "value"):
        assert torch.equal(layer.patterns(part)[1:], alone.patterns(part))
        assert torch.equal(layer.patterns(part)[:1], first.patterns(part))
    assert all(torch.equal(a[1:, :, 16:], b) for a, b in zip(layer.read(), alone.read(), strict=True))


@pytest.mark.parametrize("options", [PLAIN, {}, {"pre_rope": False}, {**PLAIN, "value_group": 2, "new_patterns": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_split_attention_is_attention_on_what_is_read(options: dict[str, Any], padded: bool) -> None:
    """Grouped queries, several queries with a causal mask, window and blocks; padding as a first block, and as all of a row."""
    from hfplug.kernels.patternkv import attend

    keys, values = _states(70, rows=4)
    mask = torch.ones(4, 70, dtype=torch.bool)
    if padded:
        mask[0, :16], mask[1, :14], mask[2] = False, False, False
        mask[3, :62] = False  # exact first tokens on both sides of the last block's end
    layer = _fed(keys, values, mask, chunk=23, **options)
    assert 0 < layer.blocked < 70
    query = torch.randn(4, 6, 3, 8, generator=torch.Generator().manual_seed(5))
    allowed = mask[:, None, None, :] & torch.ones(3, 70, dtype=torch.bool).tril(67)
    found = attend(query, layer, scaling=0.3, mask=allowed)
    read = [t.double().repeat_interleave(3, dim=1) for t in layer.read()]
    scores = (query.double() @ read[0].transpose(2, 3) * 0.3).masked_fill(~allowed, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ read[1]
    assert float((found - expected).abs().max()) <= 1e-5
    assert bool((found[2] == 0).all()) == padded
    if not padded:
        whole = attend(query[:, :, -1:], layer, scaling=0.3)
        assert float((whole - expected[:, :, -1:]).abs().max()) <= 1e-5


def test_authors_form_and_wrong_options() -> None:
    form = PatternKVConfig.authors(bits=4)
    assert (form.bits, form.key_patterns, form.share_batch, form.sink_tokens, form.pre_rope) == (4, 32, True, 0, False)
    with pytest.raises(ConfigError, match="key_group=8 must divide residual=12"):
        PatternKVConfig(key_group=8, residual=12)
    with pytest.raises(ConfigError, match="value_patterns=256 must be between 0 and 255"):
        PatternKVConfig(value_patterns=256)
    with pytest.raises(ConfigError, match=r"value_group=3 does not divide heads of 8; \[1, 2, 4, 8\] do"):
        _layer(value_group=3)
