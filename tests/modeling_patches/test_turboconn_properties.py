"""What TurboConn computes: the definition, its two ways, causality, depth, padding, packing, caches, adapters."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import hfplug
from hfplug import ConfigError, UnsupportedError
from hfplug.modeling_patches import TurboConn
from hfplug.modeling_patches.turboconn.reference import turboconn_reference
from hfplug.modeling_patches.turboconn.state import ROLLBACK, feedback_of, width
from hfplug.testing import models, patch_models
from hfplug.testing.runs import off

LENGTH = 14


def stock(layers: int = 4, seed: int = 0, **options: Any) -> Any:
    model = models.tiny_llama(seed=seed, num_hidden_layers=layers, initializer_range=0.2, **options)
    for parent in [m for m in model.modules() if not isinstance(m, nn.RMSNorm)]:  # transformers' own computes in fp32
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, nn.RMSNorm(32, eps=1e-6))
    return model.double().eval()


def stir(model: Any, scale: float = 0.1) -> Any:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "turboconn" in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def patched(layers: int = 4, scale: float = 0.1, **options: Any) -> Any:
    model = stock(layers)
    hfplug.apply(model, TurboConn(**options))
    return stir(model, scale)


def ids(rows: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, **arguments).logits


def weights_of(model: Any) -> dict[tuple[int, int], torch.Tensor]:
    found = {}
    for target, layer in enumerate(model.model.layers):
        if hasattr(layer, "turboconn"):
            for source in layer.turboconn.sources:
                part = dict(layer.turboconn.named_parameters())
                full = part.get(f"weight_{source}")
                found[source, target] = part[f"up_{source}"] @ part[f"down_{source}"] if full is None else full
    return found


# -- the definition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 10, 20])
@pytest.mark.parametrize(
    "options", [{}, {"pairs": "dense", "gain": 0.5}, {"pairs": "sparse"}, {"pairs": ((3, 1), (1, 0)), "rank": 3}], ids=str
)
def test_both_ways_are_the_definition(options, size):
    model, jacobi = (patched(group_size=size, prefill=way, **options) for way in ("exact", "jacobi"))
    jacobi.load_state_dict(model.state_dict())  # of low rank, one factor starts at random
    tokens = ids(length=10)
    with torch.no_grad():
        expected, _ = turboconn_reference(stock(), tokens, weights_of(model), size, options.get("gain", 1.0))
    assert off(logits(model, tokens), expected) <= 1e-9
    assert off(logits(jacobi, tokens), expected) <= 1e-9
    assert (off(expected, logits(stock(), tokens)) > 1e-3) == (size < 10)  # g >= N: the stock model


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fewer_passes_are_not_exact_and_more_come_closer(size):
    expected, enough = logits(patched(group_size=size), ids()), -(-LENGTH // size)
    found = [
        off(logits(patched(group_size=size, prefill="jacobi", passes=n), ids()), expected) for n in (1, enough - 1, enough, 99)
    ]
    assert found[0] > found[1] > 1e-6
    assert found[2] <= 1e-9
    assert found[3] == found[2]


def test_states_are_divided_by_their_root_mean_square_when_asked():
    model = patched(normalize=True, pairs="sparse")
    caught = []
    handle = model.model.layers[0].turboconn.register_forward_pre_hook(lambda module, args: caught.append(args))
    found = logits(model, ids())
    handle.remove()
    hidden, (state,) = caught[-1]
    unit = state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = hidden + unit @ model.model.layers[0].turboconn.weight_3.T
    assert off(model.model.layers[0].turboconn(hidden, [state]), expected) <= 1e-5  # norms are fp32
    assert off(found, logits(patched(pairs="sparse"), ids())) > 1e-3


@pytest.mark.parametrize(
    ("pairs", "depth", "expected"),
    [
        ("shift", 4, {0: (2,), 1: (3,)}),
        ("shift", 5, {0: (3,), 1: (4,)}),
        ("dense", 4, {0: (2, 3), 1: (2, 3)}),
        ("sparse", 4, {0: (3,)}),
        (((3, 1), (2, 1), (1, 0)), 4, {0: (1,), 1: (3, 2)}),
    ],
)
def test_pairs(pairs, depth, expected):
    assert TurboConn(pairs=pairs).connections(depth) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size=0"),
        ({"rank": 0}, "rank=0"),
        ({"gain": 0.0}, "gain=0.0"),
        ({"passes": 3}, "passes=3"),
        ({"backward_passes": 3}, "backward_passes=3"),
        ({"pairs": ((1, 1),)}, r"\(1, 1\)"),
        ({"pairs": ()}, "at least one"),
        ({"pairs": ((2, 1), (2, 1))}, "twice"),
        ({"training": "jacobbi"}, "jacobi"),
        ({"pairs": "shfit"}, "shift"),
    ],
)
def test_wrong_options_are_refused(options, message):
    model = stock()
    with pytest.raises(ConfigError, match=message):
        hfplug.apply(model, "turboconn", **options)
    assert hfplug.applied(model) == ()


def test_models_without_the_layers_are_refused():
    with pytest.raises(UnsupportedError, match="4 layers"):
        hfplug.apply(stock(), "turboconn", pairs=((4, 0),))
    with pytest.raises(UnsupportedError, match="1 layers"):
        hfplug.apply(stock(layers=1), "turboconn")


# -- what the feedback does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_depth_grows_with_the_sequence(size):
    """Without attention between tokens, feedback alone carries the first token to the last, every ``group_size`` tokens."""
    model = patched(group_size=size, scale=0.3)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    other = ids()
    other[:, 0] = (other[:, 0] - 3 + 1) % (models.VOCAB - 3) + 3
    change = (logits(model, other) - logits(model, ids())).abs().amax((0, 2))
    for token in range(LENGTH):
        assert (change[token] > 1e-9) == (token % size == 0), token


def test_each_added_parameter_and_every_earlier_token_gets_a_gradient_through_time():
    model = patched(training="exact").train()
    embedded = model.model.embed_tokens(ids()).detach().requires_grad_()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model(inputs_embeds=embedded, use_cache=False).logits[:, -1].sum().backward()
    assert (embedded.grad.abs().amax(-1) > 0).all()
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "turboconn" in n)


@pytest.mark.parametrize("size", [1, 4])
def test_gradients_of_both_ways_are_the_same(size):
    found = []
    for way in ("exact", "jacobi"):
        model = patched(group_size=size, training=way).train()
        model(input_ids=ids(), labels=ids()).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    assert all(off(found[0][n], found[1][n]) <= 1e-9 for n in found[0])


def test_gradients_go_through_the_last_passes_alone():
    """With one pass of gradient the state is a constant: a token three steps earlier gets none without attention."""

    def reach(**options: Any) -> list[bool]:
        model = patched(training="jacobi", **options).train()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
        embedded = model.model.embed_tokens(ids()).detach().requires_grad_()
        model(inputs_embeds=embedded, use_cache=False).logits[:, -1].sum().backward()
        return (embedded.grad.abs().amax((0, 2)) > 0).tolist()

    assert reach() == [True] * LENGTH
    assert reach(backward_passes=1) == [False] * (LENGTH - 1) + [True]
    assert reach(backward_passes=3) == [False] * (LENGTH - 3) + [True] * 3
    exact = logits(patched(), ids())
    assert off(patched(training="jacobi", backward_passes=1).train()(input_ids=ids()).logits, exact) <= 1e-9


def test_training_the_connections_alone_lowers_the_loss():
    model = stock()
    model.requires_grad_(False)
    hfplug.apply(model, "turboconn")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model.train()(input_ids=ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(trained) == 2
    assert losses[-1] < losses[0] - 0.1


# -- identity -----------------------------------------------------------------------------------------------------------


def test_untrained_connections_run_the_stock_forward():
    model = stock()
    hfplug.apply(model, "turboconn")
    model.requires_grad_(False)
    runs = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    assert torch.equal(model(input_ids=ids()).logits, stock()(input_ids=ids()).logits)  # with gradients on
    assert len(runs) == 1
    model.model.layers[0].turboconn.weight_2.data[0, 0] = 1e-3
    logits(model, ids())
    assert len(runs) == 1 + LENGTH


def test_of_weights_that_are_elsewhere_nothing_is_known():
    """ZeRO-3 leaves empty tensors, offloading leaves them without data: never taken for 0."""
    connections = stir(hfplug.apply(stock(), "turboconn").model, 0.0).model.layers[0].turboconn
    assert connections.silent
    weight = connections.weight_2
    for elsewhere in (torch.empty(0), torch.empty(32, 32, device="meta")):
        connections.weight_2 = nn.Parameter(elsewhere)
        assert not connections.silent
    connections.weight_2 = weight
    assert connections.silent


# -- caches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "lazy", "static"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("way", ["exact", "jacobi"])
def test_chunks_tokens_and_one_pass_agree(size, way, kind):
    model = patched(group_size=size, prefill=way)
    expected = logits(model, ids(), use_cache=False)
    for sizes in ((1,) * 14, (5, 1, 1, 7), (2, 9, 3)):
        cache: Any = {"dynamic": DynamicCache(config=model.config), "lazy": DynamicCache()}.get(kind)
        cache = StaticCache(config=model.config, max_cache_len=20) if cache is None else cache
        found, at = [], 0
        for n in sizes:
            found.append(logits(model, ids()[:, at : at + n], cache=cache))
            at += n
        assert off(torch.cat(found, 1), expected) <= 1e-9, sizes
        assert feedback_of(cache).length == LENGTH
        assert len(cache.layers) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize("size", [1, 3])
def test_batch_operations_reach_the_state(size):
    model, tokens = patched(group_size=size), ids(3)
    after = ids(3, 2, seed=5)
    order = torch.tensor([2, 0, 0])

    def run(change: Any, rows: torch.Tensor, following: torch.Tensor) -> float:
        cache = DynamicCache(config=model.config)
        logits(model, tokens, cache=cache)
        change(cache)
        return off(logits(model, following, cache=cache), logits(model, torch.cat([rows, following], 1))[:, -2:])

    assert run(lambda cache: cache.reorder_cache(order), tokens[order], after) <= 1e-9
    assert run(lambda cache: cache.batch_select_indices(order[:2]), tokens[order[:2]], after[:2]) <= 1e-9
    twice = tokens.repeat_interleave(2, 0)
    assert run(lambda cache: cache.batch_repeat_interleave(2), twice, ids(6, 2, seed=5)) <= 1e-9
    for gone in (1, 5, 13):
        assert run(lambda cache, n=gone: cache.crop(-n), tokens[:, :-gone], after) <= 1e-9
    assert run(lambda cache: cache.crop(-LENGTH), tokens[:, :0], after) <= 1e-9


def test_b42_two_questions_on_one_prefix():
    model = patched(group_size=2)
    cache = DynamicCache(config=model.config)
    logits(model, ids(), cache=cache)
    for seed in (1, 2):
        question = ids(2, 3, seed)
        found = logits(model, question, cache=copy.deepcopy(cache))
        assert off(found, logits(model, torch.cat([ids(), question], 1))[:, -3:]) <= 1e-9
    cache.reset()
    assert off(logits(model, ids(), cache=cache), logits(model, ids())) <= 1e-9


@pytest.mark.parametrize("size", [3])
def test_a_crop_further_back_than_is_kept_is_refused_unless_announced(size):
    model = patched(group_size=size)
    tokens = ids(1, 100)

    def filled(announce: bool, chunks: int) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        logits(model, tokens[:, :1], cache=cache)
        if announce:
            cache.activate_past_recording()
        for part in tokens[:, 1:].split(chunks, 1):
            logits(model, part, cache=cache)
        return cache

    expected = logits(model, tokens)[:, -1:]
    for chunks in (1, 99):
        assert feedback_of(filled(False, chunks)).kept <= 2 * (size + ROLLBACK)
        for announce, gone in ((False, ROLLBACK), (True, 90)):
            cache = filled(announce, chunks)
            cache.crop(-gone)
            place = feedback_of(cache)
            assert place.length == 100 - gone
            assert place.kept == sum(width(piece) for piece in place.pieces)
            found = logits(model, tokens[:, -gone:], cache=cache)
            assert off(found[:, -1:], expected) <= 1e-9
    with pytest.raises(UnsupportedError, match="activate_past_recording"):
        filled(False, 1).crop(-99 + size)


def test_a_cache_filled_by_others_is_refused():
    model, bare = patched(), stock()
    cache = DynamicCache(config=bare.config)
    logits(bare, ids(), cache=cache)
    with pytest.raises(UnsupportedError, match=f"{LENGTH} tokens, but states of 0"):
        logits(model, ids(), cache=cache)

    class Paged:
        def get_seq_length(self) -> int:
            return 0

    with pytest.raises(UnsupportedError, match="Paged is no transformers Cache"):
        logits(model, ids(), cache=Paged())


def test_an_assistant_that_is_patched_rolls_back():
    model, assistant = patched(), patched(scale=0.05, group_size=2)
    prompt = ids(1, 6)
    shared = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **shared)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=assistant, **shared)
    assert torch.equal(found, expected)


# -- padding and packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["exact", "jacobi"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_padding_feeds_nothing_back(size, way):
    """Whatever stands in the padding, and with a group that begins in it."""
    model, tokens = patched(group_size=size, prefill=way), ids(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    alone = logits(model, tokens[:1, 4:])[0]
    for filler in (models.PAD, 17):
        filled = tokens.masked_fill(mask == 0, filler)
        found = logits(model, filled, attention_mask=mask, position_ids=places)
        assert off(found[0, 4:], alone) <= 1e-9


@pytest.mark.parametrize("way", ["exact", "jacobi"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_b12_packed_documents_start_anew(size, way):
    model = patched(group_size=size, training=way).train()
    lengths = (5, 3, 6)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    found = model(input_ids=ids(1), position_ids=places, use_cache=False).logits
    model.eval()
    start = 0
    for n in lengths:
        assert off(found[:, start : start + n], logits(model, ids(1)[:, start : start + n])) <= 1e-9
        start += n


def test_packed_documents_take_the_passes_of_the_longest(caplog):
    model = patched()
    runs = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    places = torch.cat([torch.arange(n) for n in (5, 3, 6)])[None]
    with caplog.at_level(logging.WARNING, logger="hfplug"):
        for _ in range(2):
            logits(model, ids(1), position_ids=places, use_cache=False)
    assert len(runs) == 12
    assert len([r for r in caplog.records if "packed documents" in r.message]) == 1


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "gpt2"])
def test_prepared_masks_are_cut(family):
    """A static cache gives the model a mask for every kind of layer, as ``generate`` prepares them; a window slides in one."""
    model = models.TINY_MODELS[family](num_hidden_layers=2, initializer_range=0.2).double().eval()
    hfplug.apply(model, "turboconn", group_size=2)
    stir(model)
    prompt, mask = ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    shared = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    shared |= {"return_dict_in_generate": True, "output_logits": True}
    runs = []
    model.base_model.get_submodule("h" if family == "gpt2" else "layers")[0].register_forward_hook(lambda *_: runs.append(1))
    found = model.generate(prompt, attention_mask=mask, cache_implementation="static", disable_compile=True, **shared)
    assert len(runs) == 6 + 5  # groups of the prompt, then tokens
    expected = model.generate(prompt, attention_mask=mask, use_cache=False, **shared)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert off(a, b) <= 1e-5  # gemma's norms are fp32


def test_a_mask_of_ones_own_is_cut():
    """Any mask ``(batch, 1, tokens, tokens)``, with a cache and without; here one token is hidden from all others."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[:, :, 6:, 5] = False
    expected = logits(patched(group_size=3, prefill="jacobi"), ids(), attention_mask=mask, use_cache=False)
    assert off(expected, logits(patched(group_size=3), ids())) > 1e-3
    model, runs = patched(group_size=3), []
    model.model.layers[0].register_forward_hook(lambda module, args, output: runs.append(output.shape[1]))
    for use_cache in (True, False):
        assert off(logits(model, ids(), attention_mask=mask, use_cache=use_cache), expected) <= 1e-9
    assert runs == [3, 3, 3, 3, 2] * 2


def test_image_features_of_deeper_layers_go_to_their_tokens():
    """Qwen3-VL adds features of the vision tower to the image tokens of its first layers, row after row."""
    model = patch_models.FAMILIES["Qwen3-VL"]().double().eval()
    handle = hfplug.apply(model, "turboconn", group_size=3)
    stack = stir(model).model.language_model
    generator = torch.Generator().manual_seed(3)
    visual = torch.zeros(2, LENGTH, dtype=torch.bool)
    visual[0, 2:7] = visual[1, 4:11] = True
    given = {
        "inputs_embeds": torch.randn(2, LENGTH, 32, generator=generator).double(), "visual_pos_masks": visual,
        "deepstack_visual_embeds": [torch.randn(12, 32, generator=generator).double()],
    }  # fmt: skip
    runs: list[int] = []
    stack.layers[0].register_forward_hook(lambda module, args, output: runs.append(output.shape[1]))
    with torch.no_grad():
        found = stack(**given).last_hidden_state
        assert runs == [3, 3, 3, 3, 2]
        plain = stack(inputs_embeds=given["inputs_embeds"]).last_hidden_state
        handle.remove()
        hfplug.apply(model, "turboconn", group_size=3, prefill="jacobi")
        expected = stir(model).model.language_model(**given).last_hidden_state
    assert off(found, expected) <= 1e-5  # its norms are fp32
    assert off(found, plain) > 1e-3


def test_hidden_states_asked_for_before_the_patch_hold_the_feedback_after_it():
    """transformers' hooks for them may be older than ours."""
    model = stock()
    with torch.no_grad():
        model(input_ids=ids(), output_hidden_states=True)
        hfplug.apply(model, "turboconn")
        found = stir(model)(input_ids=ids(), output_hidden_states=True).hidden_states
        expected = patched()(input_ids=ids(), output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_attention_maps_are_whole():
    model = stock(attn="eager").float()
    hfplug.apply(model, "turboconn", group_size=3)
    stir(model)
    with torch.no_grad():
        found = model(input_ids=ids(), output_attentions=True, output_hidden_states=True)
        assert [tuple(a.shape) for a in found.attentions] == [(2, 4, LENGTH, LENGTH)] * 4
        by_groups = model(input_ids=ids(), output_hidden_states=True)
    for a, b in zip(found.hidden_states, by_groups.hidden_states, strict=True):
        assert a.shape == b.shape == (2, LENGTH, 32)
        assert off(a, b) <= 1e-4
    assert isinstance(model(input_ids=ids(), return_dict=False), tuple)


# -- adapters, records ----------------------------------------------------------------------------------------------------


def test_peft_trains_and_saves_the_connections(tmp_path):
    model = stock().float()
    hfplug.apply(model, "turboconn")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["turboconn"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert len([n for n in trained if "turboconn" in n]) == 2
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        adapted.train()(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
    expected = logits(adapted.eval(), ids())
    assert off(expected, logits(stock().float(), ids())) > 1e-3
    with adapted.disable_adapter():
        assert off(logits(adapted, ids()), logits(stock().float(), ids())) <= 1e-5
    adapted.save_pretrained(tmp_path)
    again = stock().float()
    hfplug.apply(again, "turboconn")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    assert torch.equal(logits(loaded, ids()), expected)
    assert off(logits(loaded.merge_and_unload(), ids()), expected) <= 1e-5


def test_pairs_and_rank_survive_a_folder(tmp_path):
    model = patched(pairs=((3, 1), (2, 0)), rank=2, gain=0.5, group_size=2).float()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    (handle,) = hfplug.applied(again)
    assert handle.patch == TurboConn(pairs=((3, 1), (2, 0)), rank=2, gain=0.5, group_size=2)
    assert torch.equal(logits(again, ids()), logits(model, ids()))


def test_the_plan_says_what_it_costs():
    model = stock()
    plan = hfplug.plan(model, "turboconn", pairs="dense", rank=2)
    assert plan.parameters == 4 * 2 * 2 * 32
    assert plan.layers == (0, 1, 2, 3)
    assert "256 multiplications" not in str(plan)
    assert f"{4 * 2 * 2 * 32:,} multiplications" in str(plan)
    with pytest.warns(UserWarning, match="rank="):
        hfplug.apply(model, "turboconn", pairs="dense")


def test_a_step_without_feedback_uses_every_parameter():
    """Else DDP waits for gradients that never come."""
    model = patched(group_size=20).train()
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "turboconn" in n)


def test_options_have_help():
    assert all(f.metadata.get("help") for f in dataclasses.fields(TurboConn))
