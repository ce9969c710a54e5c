"""The sink monitor: its scores against definitions and eager maps, and its behaviour as a callback."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from hfplug import ConfigError, UnsupportedError
from hfplug.callbacks import SinkMonitorCallback, SinkMonitorConfig
from hfplug.callbacks.sink_monitor.reference import reference_scores, reference_statistics
from hfplug.callbacks.sink_monitor.scores import attention_arguments, sink_scores, value_norm_ratio
from hfplug.testing import models
from hfplug.testing.callback import CallbackContract, hfplug_warnings

ROWS = [[1, 9, 23, 5, 40, 17, 8, 33, 12], [1, 30, 11, 52, 7, 6], [1, 21, 44]]


class TestSinkMonitorContract(CallbackContract):
    method, options = "sink_monitor", {"every": 1}


class TestEveryOptionContract(CallbackContract):
    """Also with everything it can log switched on, on a model with sliding windows."""

    method = "sink_monitor"
    options: ClassVar = dict(every=1, argmax_share=True, log_per_head=True, include_self=False, chunk=5, evaluate=True)  # noqa: C408
    make_model = staticmethod(models.tiny_gemma3)
    # The rest is a matter of the base; these meet other masks and other figures.
    test_b32_memory_does_not_grow_with_the_window = None
    test_b34_an_error_in_an_event_turns_it_off = None
    test_b52_two_steps_and_two_more_are_four = None


# -- the scores ------------------------------------------------------------------------------------------------------


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
    with pytest.raises(UnsupportedError, match="'muse'"):
        take("muse", None)
    with pytest.raises(UnsupportedError, match="sinks"):
        take("sdpa", None, s_aux=torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"\(2, 11, 11\)"):
        take("sdpa", torch.ones(2, 11, 11))
    with pytest.raises(UnsupportedError, match="cache"):
        attention_arguments("sdpa", module, query[:, :, 3:], key, None, {})


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


# -- in training -----------------------------------------------------------------------------------------------------


def values_of(model, batch):
    """``(batch, kv heads, tokens, dim)`` per layer, from the projections."""
    config, found, hooks = model.config, [], []
    for name, module in model.named_modules():
        if name.endswith(("v_proj", "attn.c_attn")):
            hooks.append(module.register_forward_hook(lambda _m, _a, out: found.append(out)))
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return attentions, [v[..., -heads * size :].unflatten(-1, (heads, size)).transpose(1, 2) for v in found]


def expected_metrics(name, batch, documents, **options):
    """The monitor's metrics of one forward, from the maps of an eager copy of the model, summed in fp64.

    A copy in fp64 would not do: transformers' eager softmax runs in fp32, where the fp64 mask becomes -inf and padding NaN.
    """
    attentions, values = values_of(models.TINY_MODELS[name](attn="eager").eval(), batch)
    out = {}
    for layer, (map_, value) in enumerate(zip(attentions, values, strict=True)):
        found = reference_statistics(map_, value, documents, **options)
        for key in ("mass", "value_norm", "argmax_share"):
            out[f"sink/{key}/layer_{layer:02d}"] = found[key]
        for head, mass in enumerate(found["per_head"]):
            out[f"sink/mass/layer_{layer:02d}/head_{head:02d}"] = mass
    return out


def train_once(model, rows, collator, callback=None, **args):
    import datasets

    data = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    callback = callback or SinkMonitorCallback(argmax_share=True, log_per_head=True)
    settings = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": len(rows)} | args
    trainer = models.tiny_trainer(model, [callback], train_dataset=data, data_collator=collator, **settings)
    with hfplug_warnings() as warnings:
        trainer.train()
    assert not warnings, warnings
    return {k: v for k, v in trainer.state.log_history[0].items() if k.startswith("sink/")}, trainer


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", list(models.TINY_MODELS))
def test_b13_metrics_equal_eager_maps(name, side, attn):
    collator = models.PadTo(12, side)
    model = models.TINY_MODELS[name](attn=attn)
    found, _ = train_once(model, ROWS, collator, seed=3)
    assert model.config._attn_implementation == attn
    batch = collator([{"input_ids": row, "labels": row} for row in ROWS])
    documents = [[0 if real else -1 for real in row] for row in batch["attention_mask"].tolist()]
    expected = expected_metrics(name, {k: batch[k] for k in ("input_ids", "attention_mask")}, documents)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_documents_are_counted_one_by_one(name, include_self):
    rows = [*ROWS, [1]]  # a document of one token has no later query

    def pack(examples):
        tokens = [t for row in rows for t in row]
        positions = [i for row in rows for i in range(len(row))]
        return {k: torch.tensor([v]) for k, v in (("input_ids", tokens), ("labels", tokens), ("position_ids", positions))}

    callback = SinkMonitorCallback(argmax_share=True, log_per_head=True, include_self=include_self)
    found, _ = train_once(models.TINY_MODELS[name](), rows, pack, callback)
    batch = {k: v for k, v in pack(None).items() if k != "labels"}
    documents = [[i for i, row in enumerate(rows) for _ in row]]
    expected = expected_metrics(name, batch, documents, include_self=include_self)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


def test_sft_packing_equals_unpacked_documents():
    rows = [[1, 9, 23, 5], [1, 30, 11, 52], [1, 21, 44, 13], [1, 4, 3, 20]]
    alone, _ = train_once(models.tiny_llama(), rows, None)
    packed, trainer = train_once(
        models.tiny_llama(), rows, None, sft=True, packing=True, max_length=16, per_device_train_batch_size=1
    )
    assert len(trainer.train_dataset) == 1  # they were packed
    assert packed == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("every", [None, 3])
def test_b31_only_due_steps_are_measured_and_once(every, reentrant, monkeypatch):
    steps = []
    callback = SinkMonitorCallback(every=every)
    inner = SinkMonitorCallback._measure
    monkeypatch.setattr(
        SinkMonitorCallback, "_measure",
        lambda self, layer, *a: (steps.append((self.trainer_state.global_step + 1, layer)), inner(self, layer, *a))[1],
    )  # fmt: skip
    trainer = models.tiny_trainer(
        models.tiny_llama(), [callback], max_steps=6, logging_steps=2, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=1, logging_first_step=True, activation_checkpointing=reentrant is not None,
        activation_checkpointing_kwargs=None if reentrant is None else {"use_reentrant": reentrant},
    )  # fmt: skip
    trainer.train()
    due = [1, 2, 4, 6] if every is None else [3, 6]
    assert steps == [(step, layer) for step in due for _micro in range(2) for layer in range(2)]


def test_layers_and_rows_can_be_chosen():
    model = models.tiny_llama(num_hidden_layers=3)
    found, _ = train_once(model, ROWS, None, SinkMonitorCallback(layers=[-1, 0], value_norm=False))
    assert set(found) == {"sink/mass/layer_00", "sink/mass/layer_02"}
    one, _ = train_once(models.tiny_llama(), ROWS[:1], None, SinkMonitorCallback())
    first, _ = train_once(
        models.tiny_llama(), [ROWS[0]] * 3, None, SinkMonitorCallback(max_rows=1), dataloader_drop_last=True
    )
    assert first == pytest.approx(one, abs=1e-6)


def test_wrong_layers_are_refused_when_the_trainer_is_built():
    with pytest.raises(ConfigError, match=r"layers=\[5\].*\[0, 1\]"):
        models.tiny_trainer(models.tiny_llama(), [SinkMonitorCallback(layers=[5])])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evry": 3}, "did you mean 'every'"),
        ({"every": 0}, "every=0"),
        ({"every": "often"}, "every='often'"),
        ({"chunk": 0}, "chunk=0"),
        ({"layers": [1, 1]}, "layers"),
        ({"config": SinkMonitorConfig(), "every": 3}, "alone"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        SinkMonitorCallback(**options)


def test_generation_and_reference_forwards_are_not_measured():
    from transformers import TrainerCallback

    class Generate(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():  # as GRPO does in training mode, within a step
                model(input_ids=torch.tensor([[1, 5, 9]]))
                model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=2)

    shared = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 1, "logging_steps": 1}
    logs = []
    for others in ([], [Generate()]):
        trainer = models.tiny_trainer(models.tiny_llama(), [SinkMonitorCallback(), *others], **shared)
        trainer.train()
        logs.append({k: v for k, v in trainer.state.log_history[0].items() if k.startswith("sink/")})
    assert logs[0] == logs[1]
    assert logs[0]


def test_evaluations_are_measured_on_request_but_decoding_is_not():
    from transformers import TrainerCallback

    class Decode(TrainerCallback):
        def on_prediction_step(self, args, state, control, model=None, **kwargs):
            cache = model(input_ids=torch.tensor([[1, 5, 9]]), use_cache=True).cache
            model(input_ids=torch.tensor([[7]]), cache=cache)

    found = []
    for others in ([], [Decode()]):
        callback = SinkMonitorCallback(evaluate=True, value_norm=False)
        trainer = models.tiny_trainer(models.tiny_llama(), [callback, *others], eval_strategy="steps", eval_steps=4)
        with hfplug_warnings() as warnings:
            trainer.train()
        assert not warnings
        found.append([set(e) for e in trainer.state.log_history])
    assert found[0] == found[1]
    names = {"sink/mass/layer_00", "sink/mass/layer_01"}
    assert names <= found[0][0]
    assert {f"eval_{name}" for name in names} <= found[0][2]


def test_another_model_with_the_same_configuration_object_is_not_measured():
    from transformers import LlamaForCausalLM

    model = models.tiny_llama()
    other = LlamaForCausalLM(model.config).train()
    # It runs inside the measured forward: a teacher, or a part of the same pipeline.
    model.model.layers[1].register_forward_pre_hook(lambda *_: other(input_ids=torch.tensor([[1, 5, 9]])) and None)
    found, _ = train_once(model, ROWS, None)
    alone, _ = train_once(models.tiny_llama(), ROWS, None)
    assert found == alone


def test_two_monitors_on_one_model_and_either_order_of_leaving():
    before = models.tiny_llama()
    both = [SinkMonitorCallback(layers=[0], value_norm=False), SinkMonitorCallback(layers=[1], value_norm=False)]
    for leaves_first in (0, 1):
        trainer = models.tiny_trainer(before, both, max_steps=1, logging_steps=1)
        for callback in both:
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
        both[leaves_first].detach()
        both[1 - leaves_first].detach()
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
        trainer.train()
        assert {k for k in trainer.state.log_history[0] if k.startswith("sink/")} == {
            "sink/mass/layer_00", "sink/mass/layer_01"
        }  # fmt: skip


def test_peft_model():
    from peft import LoraConfig, get_peft_model

    plain, _ = train_once(models.tiny_llama(), ROWS, None)
    model = get_peft_model(models.tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    found, trainer = train_once(model, ROWS, None)
    assert found == pytest.approx(plain, abs=1e-6)  # B starts at zero
    assert not vars(trainer.model.get_base_model().model).keys() & {"_hfplug_calls", "_hfplug_slots"}


def test_attention_that_bypasses_the_interface_is_reported():
    model = models.tiny_gpt2(attn="eager", reorder_and_upcast_attn=True)  # eager, by a function of its own
    trainer = models.tiny_trainer(model, [SinkMonitorCallback(every=1)])
    with hfplug_warnings() as warnings:
        trainer.train()
    assert len(warnings) == 2
    assert "layers [0, 1] were not seen in step 1" in warnings[0]


def test_custom_attention_is_refused_not_guessed():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("custom_for_test", sdpa_attention_forward)
    AttentionMaskInterface.register("custom_for_test", sdpa_mask)
    try:
        trainer = models.tiny_trainer(models.tiny_llama(attn="custom_for_test"), [SinkMonitorCallback(every=1)])
        with hfplug_warnings() as warnings:
            trainer.train()
    finally:
        del AttentionInterface._global_mapping["custom_for_test"]
        del AttentionMaskInterface._global_mapping["custom_for_test"]
    assert "attention implementation 'custom_for_test' is not one" in warnings[0]
    assert len(warnings) == 2


def test_prefix_tuning_is_refused():
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(models.tiny_llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    trainer = models.tiny_trainer(model, [SinkMonitorCallback(every=1)])
    with hfplug_warnings() as warnings:
        trainer.train()
    assert "attention to a cache or a prefix is not measured" in warnings[0]


def test_bf16_training_is_measured():
    found, _ = train_once(models.tiny_llama(), ROWS, None, SinkMonitorCallback(), bf16=True)
    plain, _ = train_once(models.tiny_llama(), ROWS, None, SinkMonitorCallback())
    assert found == pytest.approx(plain, rel=2e-2)
    assert found != plain


@pytest.mark.slow
def test_compiled_model_trains_and_says_that_nothing_is_seen():
    model = models.tiny_llama()
    callback = SinkMonitorCallback(every=1)
    plain = models.tiny_trainer(models.tiny_llama(), [], torch_compile=True, torch_compile_backend="eager")
    plain.train()
    trainer = models.tiny_trainer(model, [callback], torch_compile=True, torch_compile_backend="eager")
    with hfplug_warnings() as warnings:
        trainer.train()
    assert [e["loss"] for e in trainer.state.log_history[:2]] == [e["loss"] for e in plain.state.log_history[:2]]
    assert (callback.disabled is None) == bool(any(k.startswith("sink/") for k in trainer.state.log_history[0]))
    assert (callback.disabled is None) == (not warnings)


def test_options_are_documented():
    assert all(f.metadata.get("help") for f in dataclasses.fields(SinkMonitorConfig))


@pytest.mark.slow
def test_two_ranks_log_what_one_process_logs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent("""
        import json, sys, torch
        torch.set_num_threads(1)
        import hfplug
        from hfplug.callbacks import SinkMonitorCallback
        from hfplug.testing import models
        trainer = models.tiny_trainer(models.tiny_llama(), [SinkMonitorCallback(every=1)],
            per_device_train_batch_size=int(sys.argv[2]), ddp_backend=sys.argv[3] if len(sys.argv) > 3 else None)
        trainer.train()
        if trainer.is_world_process_zero():
            json.dump(trainer.state.log_history, open(sys.argv[1], "w"))
    """))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = []
    for name, launcher, args in (
        ("one", [sys.executable], ["4"]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29731"], ["2", "gloo"]),
    ):
        out = tmp_path / f"{name}.json"
        subprocess.run([*launcher, str(script), str(out), *args], check=True, env=env, timeout=170, cwd=tmp_path)
        import json

        logs.append([{k: v for k, v in e.items() if k.startswith("sink/")} for e in json.loads(out.read_text())])
    assert logs[0][0]
    for one, two in zip(*logs, strict=True):
        assert two == pytest.approx(one, abs=1e-6)
