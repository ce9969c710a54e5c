"""Recording sink scores: any implementation, prefill and decoding, against whole attention maps; what is refused."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import transformers

from hfplug import ConfigError, UnsupportedError
from hfplug.kernels.sink_scores import record, sink_scores
from hfplug.kernels.sink_scores.reference import reference_scores
from hfplug.testing import models
from hfplug.testing.attention import AttentionContract
from hfplug.testing.attention_runs import AttentionRuns
from hfplug.testing.callback import registries, structure


class TestSinkScoresContract(AttentionContract):
    """As an attention implementation it is exact, whatever the call."""

    method = "sink_scores"


class TestRecordedContract(AttentionRuns):
    """The values with a recorder looking on, where one pass gives output and scores."""

    method = "sink_scores"
    test_b09_every_call_equals_the_reference = AttentionContract.test_b09_every_call_equals_the_reference

    def run(self, model, layout, length=14):
        with record(model) as recorded:
            super().run(model, layout, length)
        assert recorded.last.real.any()


def tiny_gpt_oss(attn="eager", **options):
    """Two layers, one with a window of 4, and learned sinks."""
    config = transformers.GptOssConfig(
        vocab_size=models.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
        max_position_embeddings=128,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=models.PAD, bos_token_id=models.BOS,
        eos_token_id=models.EOS, attn_implementation=attn, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.GptOssForCausalLM(config).float()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def tiny_gemma2(attn="eager", **options):
    """A layer with a window of 4, one with full attention, logits capped at 2."""
    config = transformers.Gemma2Config(
        vocab_size=models.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=8, sliding_window=4, attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=models.PAD, attn_implementation=attn,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.Gemma2ForCausalLM(config).float()


FAMILIES = {**models.TINY_MODELS, "gpt_oss": tiny_gpt_oss, "gemma2": tiny_gemma2}
WINDOWS = {"gemma3": 4, "gpt_oss": 4, "gemma2": 4}  # of layer 0


def batch(side="left", length=11, pads=4, seed=0):
    ids = torch.randint(3, models.VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, slice(0, pads) if side == "left" else slice(-pads, None)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def maps(name, inputs):
    with torch.no_grad():
        return FAMILIES[name](attn="eager").eval()(**inputs, output_attentions=True, use_cache=False).attentions


def by_definition(map_, real):
    """The mean over the real queries that see a key, from a whole map."""
    map_ = map_.double() * real[:, None, :, None]
    seen = (map_ > 0).sum(dim=2)
    return torch.where(seen > 0, map_.sum(dim=2) / seen.clamp(min=1), 0.0)


def run(model, inputs, **options):
    with torch.no_grad(), record(model, **options) as recorded:
        model(**inputs)
    return recorded.last


def decoded(model, inputs, steps=8, **options):
    """The recording of a greedy generation, and that of one pass over its text (the last token was never a query)."""
    with record(model) as online:
        ids = model.generate(**inputs, max_new_tokens=steps, do_sample=False, eos_token_id=None, **options)
    assert len(online) == 1
    added = torch.ones(2, steps - 1, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], added], dim=1)
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)  # as generate() counts them
    whole = {"input_ids": ids[:, :-1], "attention_mask": mask, "position_ids": places}
    return online.last, run(model, whole)


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("attn", ["sdpa", "eager", "sink_scores"])
@pytest.mark.parametrize("name", FAMILIES)
def test_b13_scores_equal_eager_maps(name, attn, side):
    if attn == "sdpa" and name in ("gpt_oss", "gemma2"):
        pytest.skip("transformers has no sdpa with learned sinks or a softcap")
    inputs = batch(side)
    found = run(FAMILIES[name](attn=attn).eval(), inputs)
    real = inputs["attention_mask"].bool()
    assert found.layers == [0, 1]
    assert found.real.equal(real)
    for layer, map_ in enumerate(maps(name, inputs)):
        assert (found.scores(layer) - by_definition(map_, real)).abs().max() <= 1e-6
        assert found.per_layer[layer].sums.shape == (2, 4, 11)  # a score per query head


@pytest.mark.parametrize("attn", ["sdpa", "eager", "sink_scores"])
def test_counts_are_the_queries_that_can_see_a_key(attn):
    inputs = batch(None)
    found = run(models.tiny_gemma3(attn=attn).eval(), inputs).per_layer
    windowed, full = (found[layer].queries[0].amax(dim=0).tolist() for layer in (0, 1))
    assert full == [11 - i for i in range(11)]
    assert windowed == [min(11 - i, 4) for i in range(11)]


def test_learned_sinks_draw_mass_away():
    found = run(tiny_gpt_oss().eval(), batch(None)).per_layer[1]
    assert (found.sums.sum(dim=2) < 11 - 0.05).all()
    plain = run(models.tiny_llama().eval(), batch(None)).per_layer[1]
    assert (plain.sums.sum(dim=2) - 11).abs().max() <= 1e-5


@pytest.mark.parametrize("attn", ["sdpa", "eager", "sink_scores"])
@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_adds_up_to_one_pass(name, attn):
    if attn == "sdpa" and name in ("gpt_oss", "gemma2"):
        pytest.skip("transformers has no sdpa with learned sinks or a softcap")
    online, whole = decoded(FAMILIES[name](attn=attn).eval(), batch("left"))
    assert online.tokens == whole.tokens == 18
    assert online.real.equal(whole.real)
    for layer in (0, 1):
        for include_self in (True, False):
            assert (online.scores(layer, include_self) - whole.scores(layer, include_self)).abs().max() <= 1e-6
        assert (online.per_layer[layer].queries - whole.per_layer[layer].queries).abs().max() == 0


@pytest.mark.parametrize("attn", ["sdpa", "sink_scores"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_static_cache_adds_up_to_one_pass(name, attn):
    online, whole = decoded(FAMILIES[name](attn=attn).eval(), batch("left"), cache_implementation="static")
    for layer in (0, 1):
        assert (online.scores(layer) - whole.scores(layer)).abs().max() <= 1e-6


def test_a_static_window_that_moved_is_refused():
    model = models.tiny_gemma3().eval()
    with record(model), pytest.raises(UnsupportedError, match="StaticSlidingWindowLayer"):
        model.generate(**batch(None), max_new_tokens=4, eos_token_id=None, cache_implementation="static")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chunked_prefill_adds_up_and_sampling_is_recorded(name):
    model, inputs = FAMILIES[name]().eval(), batch(None, length=13)
    with torch.no_grad(), record(model) as recorded:
        out = model(input_ids=inputs["input_ids"][:, :6], use_cache=True)
        model(input_ids=inputs["input_ids"][:, 6:], cache=out.cache)
    for layer in (0, 1):
        assert (recorded.scores(layer) - run(model, inputs).scores(layer)).abs().max() <= 1e-6
    with record(model) as recorded:
        model.generate(**inputs, do_sample=True, max_new_tokens=3, eos_token_id=None)
    assert (len(recorded), recorded.last.tokens) == (1, 15)


def test_every_sequence_has_a_recording_of_its_own():
    model, (one, two) = models.tiny_llama().eval(), (batch("left"), batch("right", seed=1))
    with torch.no_grad(), record(model) as recorded:
        first = model(**one, use_cache=True)
        model(**two, use_cache=False)
        model(input_ids=one["input_ids"][:, :1], attention_mask=torch.ones(2, 12), cache=first.cache)  # back to the first
    assert [r.tokens for r in recorded] == [12, 11]
    assert (recorded[1].scores(0) - run(model, two).scores(0)).abs().max() <= 1e-6


def test_packed_documents_are_scored_one_by_one():
    rows = [torch.randint(3, models.VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 4, 9)]
    ids, places = torch.cat(rows)[None], torch.cat([torch.arange(len(r)) for r in rows])[None]
    for attn in ("sdpa", "eager", "sink_scores"):
        model = models.tiny_llama(attn=attn).eval()
        packed = run(model, {"input_ids": ids, "position_ids": places, "use_cache": False})
        alone = torch.cat([run(model, {"input_ids": r[None]}).scores(1) for r in rows], dim=2)
        assert (packed.scores(1) - alone).abs().max() <= 1e-6


def test_attention_methods_of_hfplug_are_understood_from_outside(monkeypatch):
    from hfplug.kernels.sink_scores import backend

    monkeypatch.setattr(backend, "wanted", lambda module: [])  # like a method that knows nothing of recording
    stock, own = (models.tiny_qwen3(attn=attn).eval() for attn in ("sdpa", "sink_scores"))
    packed = {"input_ids": batch(None)["input_ids"][:1], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]])}
    for inputs in (batch("left"), batch("right"), batch(None), {**packed, "use_cache": False}):
        assert (run(own, inputs).scores(1) - run(stock, inputs).scores(1)).abs().max() <= 1e-6
    for cache in (None, "static"):
        online, whole = decoded(own, batch("left"), cache_implementation=cache)
        assert (online.scores(1) - whole.scores(1)).abs().max() <= 1e-6
    window = run(models.tiny_gemma3(attn="sink_scores").eval(), batch("left"))
    assert (window.scores(0) - run(models.tiny_gemma3().eval(), batch("left")).scores(0)).abs().max() <= 1e-6


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_model_computes_what_it_computes_without(attn):
    inputs = batch("left")
    model = models.tiny_llama(attn=attn, attention_dropout=0.3)
    before, known = structure(model), registries()

    def step(block):
        torch.manual_seed(3)
        model.zero_grad()
        with block:
            out = model(**inputs, labels=inputs["input_ids"])
            out.loss.backward()
        return out.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]), torch.get_rng_state()

    plain, recorded = step(contextlib.nullcontext()), step(record(model))
    for a, b in zip(plain, recorded, strict=True):
        assert a.equal(b)
    model.zero_grad(set_to_none=True)
    assert structure(model) == before
    assert registries() == known


@pytest.mark.parametrize("reentrant", [True, False])
def test_b31_checkpointing_counts_once(reentrant):
    inputs, plain = batch("left"), models.tiny_llama()
    model = models.tiny_llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record(model) as recorded:
        out = model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]).requires_grad_(), use_cache=False,
                    attention_mask=inputs["attention_mask"])  # fmt: skip
        out.logits.sum().backward()
    assert len(recorded) == 1
    assert recorded.scores(1).equal(run(plain, {**inputs, "use_cache": False}).scores(1))


def test_the_attention_method_is_exact_and_takes_part_in_training():
    inputs = batch("left")
    stock, own = models.tiny_qwen3().eval(), models.tiny_qwen3(attn="sink_scores").eval()
    real = inputs["attention_mask"].bool()
    with torch.no_grad(), record(own) as fused:
        assert (own(**inputs).logits - stock(**inputs).logits)[real].abs().max() <= 1e-6
    assert (fused.scores(1) - run(stock, inputs).scores(1)).abs().max() <= 1e-6
    grads = []
    for model in (stock, own):
        with record(model) as recorded:
            model(**inputs).logits[real].square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert (recorded.scores(0) - fused.scores(0)).abs().max() <= 1e-6
    assert (grads[0] - grads[1]).abs().max() <= 1e-6


def test_one_pass_can_be_switched_off_and_two_recorders_agree(monkeypatch):
    from hfplug.kernels.sink_scores import backend
    from hfplug.seams.attention import configure

    inputs, used, inner = batch("left"), [], backend.attend_and_score
    monkeypatch.setattr(backend, "attend_and_score", lambda *a, **k: used.append(1) or inner(*a, **k))
    model = models.tiny_llama(attn="sink_scores").eval()
    found = run(model, inputs)
    assert used == [1, 1]
    applied = configure(model, "sink_scores", fused=False)
    other = run(model, inputs)
    assert used == [1, 1]
    assert (other.scores(1) - found.scores(1)).abs().max() <= 1e-6
    applied.undo()
    with torch.no_grad(), record(model) as outer, record(model, layers=[1]) as within:
        model(**inputs)
    assert within.last.layers == [1]
    assert outer.scores(1).equal(within.scores(1))
    assert used == [1, 1, 1]  # layer 0, which only one of them wants
    with torch.no_grad():
        model(**inputs)  # nobody records
    assert used == [1, 1, 1]


def test_only_counted_queries_count():
    model, inputs = models.tiny_llama().eval(), batch("left")
    counted = torch.zeros(2, 40, dtype=torch.bool)
    counted[:, 6:9] = True  # longer than the text
    found = run(model, inputs, counted=counted, log_diagonal=True, value_norms=True)
    map_ = maps("llama", inputs)[1].double()
    assert (found.per_layer[1].sums - map_[:, :, 6:9].sum(dim=2)).abs().max() <= 1e-6
    assert found.per_layer[1].queries[0, 0].tolist() == [3] * 7 + [2, 1, 0, 0]
    own = map_.diagonal(dim1=2, dim2=3)[:, :, 6:9]
    assert (found.per_layer[1].log_diagonal[:, :, 6:9].double().exp() - own).abs().max() <= 1e-6
    assert found.value_norms[0].shape == (2, 2, 11)
    with record(model, counted=counted) as online:
        model.generate(**inputs, max_new_tokens=4, eos_token_id=None)
    assert online.last.per_layer[1].queries[0, 0].tolist() == [3] * 7 + [2, 1, 0, 0, 0, 0, 0]


def test_layers_can_be_chosen():
    model = models.tiny_llama(num_hidden_layers=3).eval()
    assert run(model, batch(), layers=[-1, 0]).layers == [0, 2]
    with pytest.raises(ConfigError, match=r"layers \[3\]"), record(model, layers=[3]):
        pass
    with pytest.raises(ConfigError, match="layer=1"):
        run(model, batch(), layers=[0]).scores(1)
    with record(model) as recorded, pytest.raises(ConfigError, match="nothing is recorded"):
        recorded.last  # noqa: B018


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=["beams", "assisted"])
def test_b26_generation_the_sums_cannot_follow_is_refused(options):
    model = models.tiny_llama().eval()
    reorder = transformers.DynamicCache.reorder_cache
    inputs = {k: v[:1] for k, v in batch(None).items()}
    with record(model), pytest.raises(UnsupportedError, match=r"(reorder_cache|crop|batch_\w+)\(\)"):
        model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, **options)
    assert transformers.DynamicCache.reorder_cache is reorder
    assert model.generate(**inputs, max_new_tokens=5, eos_token_id=None, **options).shape == (1, 16)


def test_other_caches_are_left_alone_while_recording():
    one, other, inputs = models.tiny_llama().eval(), models.tiny_llama().eval(), batch(None)
    with record(one):
        one.generate(**inputs, max_new_tokens=2, eos_token_id=None)
        beams = other.generate(**inputs, max_new_tokens=4, num_beams=2, eos_token_id=None, do_sample=False)
    assert beams.equal(other.generate(**inputs, max_new_tokens=4, num_beams=2, eos_token_id=None, do_sample=False))


def test_a_prefix_that_was_not_seen_is_refused_or_handed_over():
    model, inputs = models.tiny_llama().eval(), batch(None, length=13)
    ids = inputs["input_ids"]
    with torch.no_grad():
        with record(model) as prefix:
            cache = model(input_ids=ids[:1, :6], use_cache=True).cache
        blind = copy.deepcopy(cache)
        with record(model), pytest.raises(UnsupportedError, match="6 tokens whose queries were not recorded"):
            model(input_ids=ids[:1, 6:], cache=blind)
        for _ in range(2):  # the prefix is not used up
            with record(model, prefix=prefix.last) as recorded:
                model(input_ids=ids[:1, 6:], cache=copy.deepcopy(cache))
            whole = run(model, {"input_ids": ids[:1]})
            assert (recorded.scores(1) - whole.scores(1)).abs().max() <= 1e-6
        wide = copy.deepcopy(cache)
        wide.batch_repeat_interleave(2)
        with record(model, prefix=prefix.last) as recorded:
            model(input_ids=ids[:1, 6:].repeat(2, 1), cache=wide)
        assert (recorded.scores(1) - whole.scores(1)).abs().max() <= 1e-6
        with record(model, prefix=recorded.last), pytest.raises(UnsupportedError, match="whose queries were not recorded"):
            model(input_ids=ids[:1, 6:], cache=copy.deepcopy(cache))  # another prefix


def test_a_cache_that_grew_unseen_is_refused():
    model, inputs = models.tiny_llama().eval(), batch(None)
    with torch.no_grad(), record(model) as recorded:
        cache = model(**inputs, use_cache=True).cache
        for layer in cache.layers:
            layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])
        with pytest.raises(UnsupportedError, match="12 tokens whose queries were not recorded"):
            model(input_ids=inputs["input_ids"][:, :1], cache=cache)
    assert recorded.last.tokens == 11


def test_a_failed_call_leaves_no_half_recording():
    model, inputs = models.tiny_llama().eval(), batch()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(RuntimeError("broken")))
    with torch.no_grad(), record(model) as recorded:
        with pytest.raises(RuntimeError, match="broken"):
            model(**inputs)
        assert len(recorded) == 0
        handle.remove()
        model(**inputs)
    assert recorded.last.layers == [0, 1]


def test_attention_of_its_own_is_refused():
    model = models.tiny_llama().eval()
    layer = model.model.layers[0].self_attn
    own = type(layer)

    class Own(own):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    with record(model):
        layer.__class__ = Own
        with pytest.raises(UnsupportedError, match=r"layers \[0\] were not seen"):
            model(**batch())


def test_the_op_equals_the_reference_on_a_model_sized_call():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 6, 20, 16, generator=generator), torch.randn(1, 2, 20, 16, generator=generator)
    keep = torch.ones(1, 6, 20, 20, dtype=torch.bool).tril()
    sums, _, diagonal = reference_scores(query, key, keep, torch.ones(1, 20, dtype=torch.bool), 0.25)
    found = sink_scores(query, key)
    assert (found.sums - sums).abs().max() <= 1e-6
    assert (found.diagonal - diagonal).abs().max() <= 1e-6
