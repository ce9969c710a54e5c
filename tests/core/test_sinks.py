"""Sink scores against their definitions, identities and whole attention maps; what an attention call means."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hfplug.sinks as sinks_module
from hfplug import ConfigError, UnsupportedError
from hfplug.callbacks.sink_monitor.reference import reference_scores, reference_statistics
from hfplug.observe import attention_arguments
from hfplug.sinks import attend_and_score, sink_scores, value_norm_ratio


def random_qk(batch=2, heads=4, kv_heads=2, length=11, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda h: torch.randn(batch, h, length, dim, generator=generator)  # noqa: E731
    return draw(heads), draw(kv_heads), draw(kv_heads)


def eager_map(query, key, keep, scaling=None, softcap=None, sinks=None):
    """The attention map in fp64, whole; masked rows all 0."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1].nan_to_num()
    return logits.softmax(dim=-1).nan_to_num()


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def harmonic(n):
    return sum(1 / i for i in range(1, n + 1))


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_uniform_causal_attention_gives_harmonic_numbers(chunk):
    length = 9
    query, key = torch.zeros(1, 2, length, 4), torch.randn(1, 1, length, 4)
    found = sink_scores(query, key, chunk=chunk)
    for i in range(length):
        expected = (harmonic(length) - harmonic(i)) / (length - i)
        assert found.scores()[0, :, i].tolist() == pytest.approx([expected] * 2, abs=1e-6)
        rest = (harmonic(length) - harmonic(i + 1)) / (length - i - 1) if i < length - 1 else 0.0
        assert found.scores(include_self=False)[0, :, i].tolist() == pytest.approx([rest] * 2, abs=1e-6)


def test_pure_sink_takes_everything():
    query, key = torch.ones(1, 1, 7, 4), torch.zeros(1, 1, 7, 4)
    key[:, :, 0] = 200.0
    found = sink_scores(query, key)
    assert found.scores()[0, 0].tolist() == [1.0, 0, 0, 0, 0, 0, 0]
    assert found.scores(include_self=False)[0, 0].tolist() == [1.0, 0, 0, 0, 0, 0, 0]


def test_identity_attention():
    query = torch.eye(6)[None, None] * 1000
    found = sink_scores(query, torch.eye(6)[None, None], scaling=1.0)
    assert found.scores()[0, 0].tolist() == pytest.approx([1 / (6 - i) for i in range(6)], abs=1e-6)
    assert found.scores(include_self=False).abs().max() < 1e-6


def test_rows_sum_to_one_and_the_laplacian_has_these_eigenvalues():
    query, key, _ = random_qk()
    found = sink_scores(query, key, chunk=5)
    length = query.shape[2]
    weights = torch.arange(length, 0, -1)
    assert (found.scores() * weights).sum(dim=-1).flatten().tolist() == pytest.approx([length] * 8, rel=1e-6)
    assert found.scores().min() >= 0 and found.scores().max() <= 1 + 1e-6  # noqa: PT018
    # LapEigvals (arXiv 2502.17598): L = diag(s) - A is lower triangular, its eigenvalues are s_i - a_ii.
    map_, scores = eager_map(query, key, causal(length)), found.scores().double()
    for b, h in np.ndindex(2, 4):
        eigenvalues = np.sort(np.linalg.eigvals((torch.diag(scores[b, h]) - map_[b, h]).numpy()).real)
        expected = (scores[b, h] - found.diagonal[b, h]).sort().values.tolist()
        assert eigenvalues.tolist() == pytest.approx(expected, abs=1e-6)


MASKS = ["none", "bool", "additive", "padding-left", "padding-right", "window", "documents", "4d-padded", "4d-packed", "heads"]


def mask_case(name, batch, heads, length):
    """``(arguments of sink_scores, keep (batch, heads or 1, T, T), documents per row with -1 for padding)``."""
    keep, ones = causal(length)[None, None].repeat(batch, 1, 1, 1), torch.ones(batch, length, dtype=torch.bool)
    documents = torch.zeros(batch, length, dtype=torch.long)
    if name == "none":
        return {}, keep, documents
    if name == "bool":
        return {"mask": keep}, keep, documents
    if name == "additive":
        return {"mask": torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)}, keep, documents
    if name in {"padding-left", "padding-right", "4d-padded"}:
        real = ones.clone()
        real[1, slice(0, 4) if name != "padding-right" else slice(-4, None)] = False
        documents[~real] = -1
        keep = keep & real[:, None, None]
        return {"mask": real.long() if name != "4d-padded" else keep}, keep, documents
    if name == "window":
        keep = keep & causal(length).tril(-4).logical_not()
        return {"window": 4}, keep, documents
    if name == "heads":  # every head its own pattern on top of a shared first column and the diagonal
        extra = torch.rand(batch, heads, length, length, generator=torch.Generator().manual_seed(1)) > 0.5
        keep = keep & (extra | torch.eye(length, dtype=torch.bool) | torch.eye(length, dtype=torch.bool).roll(-1, 1))
        keep[..., 0] = True
        return {"mask": keep}, keep, documents
    documents[:, 3:], documents[1, 7:] = 1, 2
    keep = keep & (documents[:, None, :, None] == documents[:, None, None])
    return ({"documents": documents} if name == "documents" else {"mask": keep}), keep, documents


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("name", MASKS)
def test_chunked_pass_equals_the_whole_map(name, chunk):
    query, key, value = random_qk()
    batch, heads, length, _ = query.shape
    arguments, keep, documents = mask_case(name, batch, heads, length)
    map_ = eager_map(query, key, keep, scaling=0.7)
    real = documents >= 0
    found = sink_scores(query, key, scaling=0.7, chunk=chunk, argmax=True, **arguments)
    for include_self in (True, False):
        expected = reference_scores(map_, real, include_self)
        assert (found.scores(include_self) - expected).abs().max() <= 1e-6
    assert found.real.equal(real)
    starts = [[i for i in range(length) if row[i] >= 0 and (i == 0 or row[i] != row[i - 1])] for row in documents.tolist()]
    assert [row.nonzero().flatten().tolist() for row in found.starts] == starts
    reference = reference_statistics(map_, value, documents.tolist())
    total, count = value_norm_ratio(value, found.real, found.starts)
    assert float(total / count) == pytest.approx(reference["value_norm"], abs=1e-6)
    share = (found.argmax * found.starts[:, None]).sum() / (found.real.sum() * heads)
    assert float(share) == pytest.approx(reference["argmax_share"], abs=1e-6)


def test_softcap_and_learned_sinks_are_in_the_weights():
    query, key, _ = random_qk()
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0])
    map_ = eager_map(3 * query, key, causal(11), softcap=2.0, sinks=sinks)
    found = sink_scores(3 * query, key, softcap=2.0, sinks=sinks, chunk=6)
    expected = reference_scores(map_, torch.ones(2, 11, dtype=torch.bool))
    assert (found.scores() - expected).abs().max() <= 1e-6
    assert found.sums[:, 3].sum() < found.sums[:, 0].sum()  # the larger sink draws more away


def test_garbage_at_padding_stays_there():
    query, key, value = random_qk()
    real = torch.ones(2, 11, dtype=torch.bool)
    real[:, :3] = False
    clean, clean_norm = sink_scores(query, key, real), value_norm_ratio(value, real, sink_scores(query, key, real).starts)
    for tensor in (query, key, value):
        tensor[:, :, :3] = float("nan")
    found = sink_scores(query, key, real)
    assert found.scores()[:, :, 3:].equal(clean.scores()[:, :, 3:])
    assert torch.stack(value_norm_ratio(value, real, found.starts)).equal(torch.stack(clean_norm))


def test_left_padded_row_equals_the_row_alone():
    query, key, _ = random_qk(batch=1)
    alone = sink_scores(query[:, :, 4:], key[:, :, 4:]).scores()
    real = torch.arange(11)[None] >= 4
    assert (sink_scores(query, key, real).scores()[:, :, 4:] - alone).abs().max() <= 1e-6


def test_last_queries_of_a_longer_key_sequence():
    query, key, _ = random_qk()
    part = sink_scores(query[:, :, 7:], key)
    expected = eager_map(query, key, causal(11))[:, :, 7:].sum(dim=2)
    assert (part.sums - expected).abs().max() <= 1e-6
    assert part.queries[0, 0].tolist() == [4] * 8 + [3, 2, 1]


def test_16_bit_inputs_are_scored_in_fp32_also_under_autocast():
    query, key, _ = (t.bfloat16() for t in random_qk())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sink_scores(query, key)
    assert found.scores().dtype == torch.float32
    expected = reference_scores(eager_map(query, key, causal(11)), torch.ones(2, 11, dtype=torch.bool))
    assert (found.scores() - expected).abs().max() <= 1e-6


def test_no_map_is_stored():
    query, key, _ = random_qk(batch=1, heads=2, kv_heads=1, length=600)
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        sink_scores(query, key, chunk=16, argmax=True)
    assert max(sizes) <= 2 * 16 * 600


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"chunk": 0}, ConfigError, "chunk=0"),
        ({"mask": torch.ones(2, 5)}, ConfigError, r"mask \(2, 5\)"),
        ({"mask": torch.ones(2, 1, 11, 5, dtype=torch.bool)}, ConfigError, "does not fit"),
        ({"mask": torch.ones(2, 1, 11, 11, dtype=torch.long)}, ConfigError, "int64"),
        ({"documents": torch.ones(1, 11)}, ConfigError, "documents"),
        ({"window": 3, "causal": False}, UnsupportedError, "window=3"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    query, key, _ = random_qk()
    with pytest.raises(error, match=words):
        sink_scores(query, key, **arguments)


def reference_sums(map_, counted):
    """Column sums and diagonal over the counted queries, from a whole map."""
    weighted = map_ * counted[:, None, :, None]
    return weighted.sum(dim=2), weighted.diagonal(dim1=2, dim2=3)


@pytest.mark.parametrize("tile", [1, 40, 1 << 20])
@pytest.mark.parametrize("name", MASKS)
def test_one_pass_gives_output_and_scores_whatever_the_tiles(name, tile, monkeypatch):
    monkeypatch.setattr(sinks_module, "_TILE", tile)
    monkeypatch.setattr(sinks_module, "_LEAST_ROWS", 2)
    query, key, value = random_qk()
    arguments, keep, documents = mask_case(name, *query.shape[:3])
    map_, real = eager_map(query, key, keep), documents >= 0
    counted = torch.rand(2, 11, generator=torch.Generator().manual_seed(5)) > 0.3
    out, found = attend_and_score(query, key, value, chunk=9, counted=counted, argmax=True, log_diagonal=True, **arguments)
    expected = map_ @ value.double().repeat_interleave(2, dim=1)
    assert (out - expected)[real[:, None].expand(2, 4, 11)].abs().max() <= 1e-6  # counted does not concern the output
    assert out[~keep.any(dim=-1).expand(2, 4, 11)].abs().sum() == 0  # what sees nothing
    counted &= real
    sums, diagonal = reference_sums(map_, counted)
    assert (found.sums - sums).abs().max() <= 1e-6
    assert (found.diagonal - diagonal).abs().max() <= 1e-6
    assert (found.log_diagonal.double().exp() * counted[:, None] - diagonal).abs().max() <= 1e-6
    assert (found.queries - (keep & counted[:, None, :, None]).sum(dim=2)).abs().max() == 0
    assert found.own.equal(counted.float())
    assert found.argmax.sum() == 4 * counted.sum()
    alone = sink_scores(query, key, chunk=9, counted=counted, **arguments)
    assert alone.sums.equal(found.sums)


def test_the_logarithm_of_the_diagonal_does_not_underflow():
    query = torch.zeros(1, 2, 5, 4)
    query[..., 0] = 1.0
    key = torch.zeros(1, 1, 5, 4)
    key[0, 0, 0, 0], sinks = 400.0, torch.tensor([-10.0, 500.0])
    found = sink_scores(query, key, scaling=1.0, log_diagonal=True)
    assert found.diagonal[0, 0, 1:].tolist() == [0] * 4
    assert found.log_diagonal[0, 0].tolist() == pytest.approx([0, -400, -400, -400, -400])
    with_sinks = sink_scores(query, key, scaling=1.0, log_diagonal=True, sinks=sinks)
    assert with_sinks.log_diagonal[0, :, 1].tolist() == pytest.approx([-400, -500])


def test_values_that_do_not_fit_are_named():
    query, key, value = random_qk()
    with pytest.raises(ConfigError, match=r"value \(2, 2, 5, 8\)"):
        attend_and_score(query, key, value[:, :, :5])
    with pytest.raises(ConfigError, match=r"counted \(2, 5\)"):
        sink_scores(query, key, counted=torch.ones(2, 5, dtype=torch.bool))


def test_wrong_shapes_are_named():
    query, key, _ = random_qk()
    for bad in (key[:, :, :5], key[..., :4], key[:1], torch.randn(2, 3, 11, 8)):
        with pytest.raises(ConfigError):
            sink_scores(query, bad)


# -- what an attention call means ------------------------------------------------------------------------------------


def test_attention_arguments_by_implementation():
    query, key, _ = random_qk()
    module, keep = SimpleNamespace(is_causal=True), causal(11)[None, None]
    take = lambda name, mask, **options: attention_arguments(name, module, query, key, mask, options)  # noqa: E731
    assert take("sdpa", None)["causal"] is True
    assert take("sdpa", None, is_causal=False)["causal"] is False
    assert take("eager", None)["causal"] is False  # eager without a mask masks nothing
    assert take("sdpa", keep)["mask"] is keep
    padding = torch.ones(2, 11)
    flash = take("flash_attention_2", padding, sliding_window=5, softcap=30.0)
    assert (flash["mask"] is padding, flash["window"], flash["softcap"]) == (True, 5, 30.0)
    with pytest.raises(UnsupportedError, match="position bias"):
        take("sdpa", None, position_bias=torch.zeros(1))
    with pytest.raises(UnsupportedError, match="'unheard_of'"):
        take("unheard_of", None)
    with pytest.raises(UnsupportedError, match="sinks"):
        take("sdpa", None, s_aux=torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"\(2, 11, 11\)"):
        take("sdpa", torch.ones(2, 11, 11))
    with pytest.raises(UnsupportedError, match="cache"):
        attention_arguments("sdpa", module, query[:, :, 3:], key, None, {})
    wide = torch.ones(2, 1, 8, 20, dtype=torch.bool)  # with slots of a static cache not written yet
    assert attention_arguments("sdpa", module, query[:, :, 3:], key, wide, {}, cached=True)["mask"].shape == (2, 1, 8, 11)


def test_flash_packing_from_positions_and_from_boundaries():
    query, key, _ = random_qk(batch=1)
    module, positions = SimpleNamespace(is_causal=True), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]])
    expected = [[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    for options in ({"position_ids": positions}, {"cu_seq_lens_q": torch.tensor([0, 3, 7, 11], dtype=torch.int32)}):
        found = attention_arguments("flash_attention_2", module, query, key, None, options)
        assert found["documents"].tolist() == expected
        assert sink_scores(query, key, **found).starts.nonzero()[:, 1].tolist() == [0, 3, 7]


def test_flex_block_mask_is_read():
    from torch.nn.attention.flex_attention import create_block_mask

    query, key, _ = random_qk()
    window = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 4), 2, None, 11, 11, device="cpu")
    found = attention_arguments("flex_attention", SimpleNamespace(is_causal=True), query, key, window, {})
    assert sink_scores(query, key, **found).scores().equal(sink_scores(query, key, window=4).scores())
