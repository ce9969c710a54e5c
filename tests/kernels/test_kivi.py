"""KIVI: the contract, and what its definition says of every number."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.kernels.kivi import KiviCache, KiviConfig
from hfplug.testing.cache import CacheContract
from hfplug.testing.models import tiny_gpt2, tiny_llama


class TestKivi(CacheContract):
    method, window, long = "kivi", 16, 40
    options: ClassVar[dict[str, Any]] = {"group_size": 8, "residual": 16}


class TestKiviExtended(CacheContract):
    """Sinks and unrotated keys."""

    method, window, long = "kivi", 16, 40
    options: ClassVar[dict[str, Any]] = {
        "bits": 4,
        "group_size": 4,
        "value_group": 8,
        "residual": 16,
        "sink_tokens": 3,
        "pre_rope": None,
    }


def _fed(keys: Any, values: Any, **options: Any) -> Any:
    cache = KiviCache(tiny_llama().config, **options)
    cache.own_layers[0].update(keys, values)
    return cache.own_layers[0]


def _states(tokens: int = 64, seed: int = 0) -> Any:
    return torch.randn(2, 2, 2, tokens, 8, generator=torch.Generator().manual_seed(seed)).unbind()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_number_is_what_the_definition_says(bits: int) -> None:
    """Keys: groups of tokens of one channel. Values: groups of channels of one token. By plain loops, on the stored scales."""
    keys, values = _states(32)
    layer = _fed(keys, values, bits=bits, group_size=4, residual=16)
    found, levels = layer.read(), 2**bits - 1
    for states, read, axis in ((keys, found[0], 2), (values, found[1], 3)):
        for group, ours in zip(states.split(4, axis), read.split(4, axis), strict=True):
            least = group.amin(axis, keepdim=True).half().float()
            step = ((group.amax(axis, keepdim=True) - least).clamp(min=0) / levels).half().float()
            expected = least + ((group - least) / step).round().clamp(0, levels) * step
            assert torch.equal(ours, expected)
            slack = (group.abs().amax() + 1) * 2**-10  # rounding of the minimum and the step in half precision
            assert bool(((ours - group).abs() <= step / 2 + slack).all())


def test_a_constant_group_is_exact() -> None:
    keys, values = torch.full((1, 2, 32, 8), 0.5), torch.full((1, 2, 32, 8), -3.0)
    assert all(
        torch.equal(a, b) for a, b in zip(_fed(keys, values, group_size=8, residual=32).read(), (keys, values), strict=True)
    )


def test_a_prefill_and_steps_give_the_same_blocks() -> None:
    """300 tokens at once and 84 one by one are the same 3 blocks as 384 at once."""
    keys, values = _states(384)
    whole, steps = (KiviCache(tiny_llama().config, group_size=8, residual=128).own_layers[0] for _ in range(2))
    whole.update(keys, values)
    steps.update(keys[:, :, :300], values[:, :, :300])
    assert (steps.blocked, steps.removable()) == (256, 44)
    for i in range(300, 384):
        steps.update(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert (steps.blocked, steps.removable()) == (384, 0)
    assert all(torch.equal(whole.state[n], steps.state[n]) for n in whole.state)


def test_sinks_are_exact_where_a_row_begins() -> None:
    """Also behind padding that is longer than a block, and across two blocks."""
    keys, values = _states(64)
    mask = torch.ones(2, 64, dtype=torch.bool)
    mask[0, :14], mask[1, :17] = False, False
    for chunk in (64, 1):
        cache = KiviCache(tiny_llama().config, group_size=8, residual=16, sink_tokens=4)
        cache.padding(mask)
        layer = cache.own_layers[0]
        for part in range(0, 64, chunk):
            layer.update(keys[:, :, part : part + chunk], values[:, :, part : part + chunk])
        for row, begin in enumerate((14, 17)):
            for read, states in zip(layer.read(), (keys, values), strict=True):
                assert torch.equal(read[row, :, begin : begin + 4], states[row, :, begin : begin + 4])
                assert not torch.equal(read[row, :, begin + 4 : begin + 8], states[row, :, begin + 4 : begin + 8])


def test_an_outlier_in_the_sinks_spoils_nothing() -> None:
    keys, values = _states(32)
    plain = _fed(keys, values, group_size=8, residual=32, sink_tokens=2).read()
    far = [t.clone() for t in (keys, values)]
    for t in far:
        t[:, :, :2] *= 1000
    spoilt = _fed(*far, group_size=8, residual=32, sink_tokens=2).read()
    assert all(torch.equal(a[:, :, 2:], b[:, :, 2:]) for a, b in zip(plain, spoilt, strict=True))


def test_unrotated_keys_are_stored_better() -> None:
    """Keys that are one vector, rotated by their positions, are constant without the rotation."""
    model = tiny_llama(hidden_size=64, num_key_value_heads=2)
    rotate = model.model.rotary_emb
    vector = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(0)).expand(1, 2, 128, 16)
    cos, sin = rotate(vector, torch.arange(128)[None])
    turned = vector * cos[:, None] + torch.cat((-vector[..., 8:], vector[..., :8]), dim=-1) * sin[:, None]
    errors = []
    for pre_rope in (False, True):
        layer = KiviCache(model.config, group_size=16, residual=128, pre_rope=pre_rope).own_layers[0]
        layer.update(turned, turned)
        errors.append(float((layer.read()[0] - turned).abs().max()))
    assert errors[1] < 2e-3
    assert errors[0] > 0.05


def test_b41_one_large_channel_does_not_drown_attention() -> None:
    """One key channel 50 times the others: relative error of the attention output of each row, per channel groups."""
    generator = torch.Generator().manual_seed(0)
    keys, values = _states(256)
    keys = keys.clone()
    keys[..., 3] = keys[..., 3] * 0.5 + 50
    query = torch.randn(2, 2, 4, 8, generator=generator)
    keys_read, values_read = _fed(keys, values, bits=4, group_size=8, residual=128).read()
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    ours = torch.nn.functional.scaled_dot_product_attention(query, keys_read, values_read)
    assert float((ours - exact).norm() / exact.norm()) < 0.1
    per_token = KiviCache(tiny_llama().config, bits=4, group_size=8, residual=128).own_layers[0]
    per_token.update(values, keys)  # keys in the place of values: groups along channels, which the large one spoils
    spoilt = torch.nn.functional.scaled_dot_product_attention(query, per_token.read()[1], values)
    assert float((spoilt - exact).norm() / exact.norm()) > 0.15


def test_numbers_beyond_half_precision_are_an_error_that_names_the_way_out() -> None:
    keys, values = _states(32)
    keys = keys * 1e6
    layer = KiviCache(tiny_llama().config, group_size=8, residual=32).own_layers[0]
    with pytest.raises(UnsupportedError, match=r"float16; use a wider one"):
        layer.update(keys, values)
    assert not layer.state
    assert _fed(keys, values, group_size=8, residual=32, scale_dtype="bfloat16").read()[0].isfinite().all()


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"group_size=32 for values does not divide heads of 8; \[1, 2, 4, 8\] do"):
        KiviCache(tiny_llama().config)
    with pytest.raises(ConfigError, match="group_size=8 must divide residual=12"):
        KiviConfig(group_size=8, residual=12)
    with pytest.raises(ConfigError, match="sink_tokens=17"):
        KiviConfig(group_size=8, residual=16, sink_tokens=17)
    with pytest.raises(ConfigError, match=r"bits=3 \(int\) is not one of 2, 4, 8"):
        KiviCache(tiny_llama().config, bits=3)
    with pytest.raises(ConfigError, match="layer 0 of GPT2Config has no rotary embedding"):
        KiviCache(tiny_gpt2().config, group_size=8, pre_rope=True)
    assert KiviCache(tiny_gpt2().config, group_size=8, pre_rope=None).own_layers[0]._rope is None


def test_what_does_not_count_has_code_0() -> None:
    from hfplug.lowbit import quantise

    counted = torch.tensor([True, True, False, True])
    groups = quantise(torch.tensor([[0.0, 3.0, 99.0, 1.0]]), 2, 1, 4, counted)
    assert groups.codes.tolist() == [[0, 3, 0, 1]]


def test_an_outlier_in_the_sinks_of_a_padded_row_spoils_nothing() -> None:
    keys, values = _states(32)
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[0, :5] = False
    found = []
    for scale in (1, 1000):
        states = [t.clone() for t in (keys, values)]
        for t in states:
            t[0, :, 5:7] *= scale
        cache = KiviCache(tiny_llama().config, group_size=8, residual=32, sink_tokens=2)
        cache.padding(mask)
        cache.own_layers[0].update(*states)
        found.append(cache.own_layers[0].read())
    assert all(torch.equal(a[0, :, 7:], b[0, :, 7:]) for a, b in zip(*found, strict=True))


def test_a_block_that_cannot_be_stored_leaves_the_layer_as_it_was() -> None:
    """Not the first: what was stored before it stays, its exact first tokens included."""
    keys, values = _states(40)
    cache = KiviCache(tiny_llama().config, group_size=8, residual=32, sink_tokens=4)
    mask = torch.ones(2, 64, dtype=torch.bool)
    mask[0, :30] = False  # the first tokens of this row stand on both sides of the end of the block
    cache.padding(mask)
    layer = cache.own_layers[0]
    layer.update(keys, values)
    before = {name: t.clone() for name, t in layer.state.items()}
    with pytest.raises(UnsupportedError, match="float16"):
        layer.update(keys[:, :, :24] * 1e6, values[:, :, :24])
    assert layer.length == 40
    assert layer.state.keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in layer.state.items())
