"""Masks of attention methods and exact attention: against transformers' own masks, and in fp64 from the definition."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import attention_toys as toys
import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)

from hfplug import attention
from hfplug.attention import AttentionCall
from hfplug.ledger import Ledger
from hfplug.seams import attention as seam
from hfplug.testing.attention_models import real_queries, reference, visible
from hfplug.testing.kernels import assert_rms

# -- the mask ----------------------------------------------------------------------------------------------------------


def call_of(mask: Any, queries: int, keys: int, batch: int = 2) -> AttentionCall:
    """A call under what the mask function returned, cut as the seam cuts it."""
    segments = mask if mask is not None and mask.ndim == 2 else None
    keys = keys if segments is None else segments.shape[1]
    return AttentionCall(
        query=torch.zeros(batch, 1, queries, 4), key=torch.zeros(batch, 1, keys, 4), value=torch.zeros(batch, 1, keys, 4),
        scaling=1.0, segments=segments, mask=mask if segments is None else None,
    )  # fmt: skip


@pytest.mark.parametrize("padding", ["none", "ones", "left", "right", "hole", "short", "all"])
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(6, 6, 0), (4, 6, 2), (1, 6, 5), (6, 9, 0), (2, 9, 3), (6, 6, torch.tensor(0))]
)
def test_what_the_mask_says_is_what_sdpa_mask_says(padding: str, queries: int, keys: int, offset: Any) -> None:
    """For every real query, key by key; keys that are cut off are keys it does not see."""
    width = int(offset) + queries
    real = torch.ones(2, width, dtype=torch.bool)
    if padding == "left":
        real[0, :2] = False
    elif padding == "right":
        real[1, -1:] = False
    elif padding == "hole":
        real[0, 1:2] = False
    elif padding == "short":
        real = real[:, : width - 1]
    elif padding == "all":
        real[0] = False
    given = None if padding == "none" else real
    arguments = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": offset, "attention_mask": given}
    mask = seam.segments_mask(**arguments)
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
    if padding == "hole" and width > 2:
        assert mask.ndim == 4
    elif padding in ("none", "ones") and width == keys:
        assert mask is None
    else:
        assert mask.dtype == torch.int32
        assert mask.shape == (2, width)
    call = call_of(mask, queries, keys)
    found = visible(call).expand(2, 1, -1, -1)
    rows = (real_queries(call) & expected.any(3)[:, 0])[:, None, :, None]
    seen = found.shape[3]
    assert torch.equal(found & rows, expected[..., :seen] & rows)
    assert not (expected[..., seen:] & rows).any()
    if padding not in ("all", "short"):
        assert rows.any()
    dense = call.dense()
    assert dense is None or torch.equal(dense & rows, found & rows)


def test_masks_other_than_causal_stay_dense() -> None:
    """Windows, chunks, overlays, sliding caches, and what a model wants to work on: exactly sdpa's, never a shortcut."""
    config = LlamaConfig(sliding_window=3, attention_chunk_size=4, num_hidden_layers=1)
    embeds, ones = torch.zeros(2, 7, 8), torch.ones(2, 7, dtype=torch.long)
    shared = {"inputs_embeds": embeds, "attention_mask": ones, "cache": None, "position_ids": None}
    with Ledger("test") as ledger:
        seam.register(ledger, "toy_mask", toys.Exact)

        def both(create: Any, **more: Any) -> tuple[Any, Any]:
            out = []
            for name in ("toy_mask", "sdpa"):
                config._attn_implementation = name
                out.append(create(config=config, **{**shared, **more}))
            return out[0], out[1]

        for create, more in (
            (create_sliding_window_causal_mask, {}),
            (create_chunked_causal_mask, {}),
            (create_causal_mask, {"or_mask_function": lambda b, h, q, k: k == 6}),
            (create_causal_mask, {"and_mask_function": lambda b, h, q, k: k != 1}),
            (create_causal_mask, {"block_sequence_ids": torch.tensor([[-1, 0, 0, -1, -1, -1, -1]] * 2)}),
            (create_causal_mask, {"allow_is_causal_skip": False}),
        ):
            found, expected = both(create, **more)
            assert found.dtype == torch.bool
            assert torch.equal(found, expected), (create, more)
        packed = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])
        found, expected = both(create_causal_mask, attention_mask=None, position_ids=packed)
        assert found.tolist() == [[1, 1, 1, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 2]]
        assert torch.equal(call_of(found, 7, 7).dense(), expected)
        found, expected = both(create_sliding_window_causal_mask, attention_mask=None, position_ids=packed)
        assert torch.equal(found, expected)
    for keys, at, first in ((4, 6, 4), (6, 2, 1), (4, 3, 0)):
        found = seam.segments_mask(batch_size=1, q_length=2, kv_length=keys, q_offset=at, kv_offset=first)
        assert torch.equal(found, sdpa_mask(1, 2, keys, at, first, allow_is_causal_skip=False))


def test_packing_is_recognised_by_what_the_functions_are_made_of() -> None:
    """Any other function, and packing over another mask, is left to sdpa_mask."""
    other = lambda b, h, q, k: k <= q  # noqa: E731
    positions = torch.arange(4)[None]
    packed = seam.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]))
    for inner, seen in ((causal_mask_function, True), (other, False)):
        both = seam.and_masks(seam.remap_positions_for_packed_sequence(inner, positions), packed)
        assert (seam._packing(both) is not None) is seen
    assert seam._packing(seam.and_masks(packed, packed)) is None
    assert seam._packing(packed) is None
    assert seam._packing(print) is None


def test_while_tracing_the_mask_is_dense() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes = []

    def made(mask: torch.Tensor) -> torch.Tensor:
        found = seam.segments_mask(batch_size=2, q_length=4, kv_length=4, attention_mask=mask)
        assert found is not None
        shapes.append(tuple(found.shape))
        return found

    make_fx(made, tracing_mode="fake")(torch.ones(2, 4, dtype=torch.bool))
    assert shapes == [(2, 1, 4, 4)]


# -- exact attention ---------------------------------------------------------------------------------------------------


SEGMENTS = {
    "none": None,
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1] * 9, [1, 1, 1, 1, 1, 1, 1, 0, 0]],
    "packed": [[1, 1, 1, 2, 2, 2, 2, 2, 3], [0, 5, 5, 5, 5, 6, 6, 0, 0]],
    "ones": [[1] * 9] * 2,
}
EXTRAS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "softcap": {"softcap": 0.7},
    "sinks": {"s_aux": torch.tensor([-1.0, 0.0, 1.0, 2.0])},
    "bias": {"position_bias": torch.linspace(-1, 1, 36).reshape(1, 4, 1, 9)},
    "all": {
        "softcap": 2.0, "s_aux": torch.tensor([-1.0, 0.0, 1.0, 2.0]),
        "position_bias": torch.linspace(-1, 1, 36).reshape(1, 4, 1, 9),
    },
}  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_exact_attention_equals_the_definition(queries: int, segments: str, extra: str) -> None:
    """Every combination, causal and not, with and without weights; padding gives zeros, and finite gradients."""
    held = SEGMENTS[segments]
    table = None if held is None else torch.tensor(held, dtype=torch.int32)
    for causal, asked in itertools.product((True, False), (False, True)):
        call = toys.random_call(queries, 9, segments=table, causal=causal, output_attentions=asked, **EXTRAS[extra])
        call.query.requires_grad_()
        out, weights = call.exact()
        real = real_queries(call)
        assert out.shape == (2, queries, 4, 6)
        assert out.is_contiguous()
        if real.any():
            assert_rms(out[real], reference(call)[real], 1e-6)
        assert (out[~real] == 0).all()
        (gradient,) = torch.autograd.grad(out.square().sum(), call.query)
        assert gradient.isfinite().all()
        assert (gradient.transpose(1, 2)[~real] == 0).all()
        assert (weights is not None) is asked
        if weights is not None and "s_aux" not in EXTRAS[extra]:
            assert weights.transpose(1, 2)[real].sum(-1).sub(1).abs().max() <= 1e-6


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("additive", [False, True])
def test_exact_attention_under_a_dense_mask(additive: bool, extra: str) -> None:
    mask = torch.ones(2, 1, 4, 9, dtype=torch.bool).tril(5)
    mask[0, :, :, 2:4] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    for asked in (False, True):
        call = toys.random_call(4, 9, mask=given, output_attentions=asked, **EXTRAS[extra])
        assert_rms(call.exact()[0], reference(call), 1e-6)


@pytest.mark.parametrize("extra", ["nothing", "softcap", "sinks"])
def test_a_row_without_keys_gives_zeros(extra: str) -> None:
    mask = torch.ones(2, 1, 4, 9, dtype=torch.bool)
    mask[1, :, 2] = False
    call = toys.random_call(4, 9, mask=mask, **EXTRAS[extra])
    call.value.requires_grad_()
    out, _ = call.exact()
    assert (out[1, 2] == 0).all()
    assert_rms(out, reference(call), 1e-6)
    (gradient,) = torch.autograd.grad(out.sum(), call.value)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9)])
def test_plain_calls_are_stock_sdpa_bit_for_bit(queries: int, keys: int) -> None:
    class Layer:
        num_key_value_groups, is_causal = 2, True

    for dtype in (torch.float32, torch.bfloat16):
        call = toys.random_call(queries, keys)
        call = dataclasses.replace(call, **{name: getattr(call, name).to(dtype) for name in ("query", "key", "value")})
        stock, _ = sdpa_attention_forward(Layer(), call.query, call.key, call.value, None, scaling=0.3)  # type: ignore[arg-type]
        assert torch.equal(call.exact()[0], stock)


def test_rows_and_uniform() -> None:
    table = torch.tensor(SEGMENTS["packed"], dtype=torch.int32)
    call = toys.random_call(4, 9, segments=table)
    assert call.rows() == [(0, 0, 3), (0, 3, 8), (0, 8, 9), (1, 1, 5), (1, 5, 7)]
    assert not call.uniform
    assert toys.random_call(4, 9).rows() == [(0, 0, 9), (1, 0, 9)]
    assert toys.random_call(4, 9).uniform
    assert toys.random_call(4, 9, segments=torch.full((2, 9), 3, dtype=torch.int32)).uniform
    assert not toys.random_call(4, 9, segments=torch.zeros(2, 9, dtype=torch.int32)).uniform
    before = len(attention._known)
    del call, table
    assert len(attention._known) < before  # what is known of a mask goes with it


def test_what_is_known_of_a_tensor_ends_when_it_is_written_into() -> None:
    table, positions = torch.ones(2, 9, dtype=torch.int32), torch.arange(9)[None].repeat(2, 1)
    call = toys.random_call(9, 9, segments=table)
    assert call.uniform
    assert not attention.restarts(positions)
    before = call.exact()[0]
    table[1, :4], positions[1, 4:] = 0, torch.arange(5)
    assert not call.uniform
    assert call.rows() == [(0, 0, 9), (1, 4, 9)]
    assert attention.restarts(positions)
    after = call.exact()[0]
    assert torch.equal(after[0], before[0])
    assert not after[1, :4].any()
    assert not torch.equal(call.dense()[:1], call.dense()[1:])
    with torch.inference_mode():
        positions = torch.arange(9)[None].repeat(2, 1)
        assert not attention.restarts(positions)
        positions[1, 4:] = torch.arange(5)
        assert attention.restarts(positions)


def test_dropout_drops_and_scales() -> None:
    torch.manual_seed(0)
    for more in ({}, {"softcap": 50.0}):
        call = toys.random_call(9, 9, dropout=0.5, **more)
        mean = torch.stack([call.exact()[0] for _ in range(400)]).mean(0)
        plain, _ = dataclasses.replace(call, dropout=0.0).exact()
        assert not torch.equal(call.exact()[0], plain)
        assert (mean - plain).abs().max() < 0.35  # a mean of 400, each with a deviation of about 1


def test_a_fallback_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    call = toys.random_call(4, 9, implementation="toy_said")
    with caplog.at_level(logging.WARNING, "hfplug"):
        found = [call.fallback(reason)[0] for reason in ("decoding", "decoding", "windows")]
    assert [record.message for record in caplog.records] == [
        "toy_said: exact attention for decoding", "toy_said: exact attention for windows",
    ]  # fmt: skip
    assert all(torch.equal(each, call.exact()[0]) for each in found)
