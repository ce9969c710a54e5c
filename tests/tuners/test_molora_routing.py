"""MoLoRA: which tokens go where, and that nothing else happens to them."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

from hfplug import ConfigError, UnsupportedError
from hfplug.testing import models
from hfplug.tuners import routing
from hfplug.tuners.molora import dispatch
from hfplug.tuners.molora.router import Decision, choose
from hfplug.tuners.molora.state import ModelState, table_lookup

NAMES = ("code", "math", "talk")  # experts stand in the order of their names
FAMILIES = ("llama", "qwen3", "gpt2", "gemma3")


@pytest.fixture
def decisions(monkeypatch):
    """Every decision a learned router makes, as it is made."""
    made, stock = [], ModelState._routed

    def routed(*args):
        made.append(stock(*args))
        return made[-1]

    monkeypatch.setattr(ModelState, "_routed", routed)
    return made


def prefer(model, slot):
    """Every router decides for one slot."""
    for layer in model.modules():
        if hasattr(layer, "molora_router"):
            for router in layer.molora_router.values():
                with torch.no_grad():
                    router.bias.fill_(0)[slot] = 1e4
    return model


# -- one expert for all tokens is that LoRA in PEFT -----------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_for_all_is_that_lora_bit_for_bit(molora, family, name, training):
    ids = molora.ids()
    expected = molora.logits(molora.lora(models.TINY_MODELS[family](), name), ids)
    base = molora.logits(models.TINY_MODELS[family](), ids)
    assert not torch.equal(expected, base)
    model = molora.wrap(models.TINY_MODELS[family]()).train(training)
    with torch.no_grad(), routing(model, expert=name):  # in training too: frozen experts have no dropout
        assert torch.equal(model(input_ids=ids).logits, expected)
    with torch.no_grad(), routing(model, expert=None):
        assert torch.equal(model(input_ids=ids).logits, base)
    slot = 1 + NAMES.index(name)
    with torch.no_grad():
        assert torch.equal(prefer(model, slot)(input_ids=ids).logits, expected), "decided by the router"
        assert torch.equal(prefer(model, 0)(input_ids=ids).logits, base), "decided by the router"


def test_one_expert_on_a_half_precision_base(molora):
    ids = molora.ids()
    for autocast in (True, False):
        lora = peft.PeftModel.from_pretrained(
            models.tiny_llama().bfloat16(), molora.expert("llama", "math"), autocast_adapter_dtype=autocast
        )
        model = peft.get_peft_model(models.tiny_llama().bfloat16(), molora.config(), autocast_adapter_dtype=autocast)
        with routing(model, expert="math"):
            assert torch.equal(molora.logits(model, ids), molora.logits(lora, ids))


def test_the_block_ends_with_its_decision(molora):
    model, ids = molora.wrap(models.tiny_llama()), molora.ids()
    before = molora.logits(model, ids)
    with routing(model, expert="math"):
        assert not torch.equal(molora.logits(model, ids), before)
        with pytest.raises(ZeroDivisionError), routing(model, expert=None):
            1 / 0  # noqa: B018
        assert not torch.equal(molora.logits(model, ids), before)
    assert torch.equal(molora.logits(model, ids), before)


# -- tokens of one call through several experts ---------------------------------------------------------------------------


def outputs_of(model, layer, ids, **kwargs):
    """What q_proj of a decoder layer returns."""
    kept = []
    module = next(m for n, m in model.named_modules() if n.endswith(f"layers.{layer}.self_attn.q_proj"))
    handle = module.register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        model.eval()(input_ids=ids, **kwargs)
    handle.remove()
    return kept[0]


def rows_of_each(molora, ids):
    """q_proj of the first layer under the base and each expert, ``(slot, batch, tokens, out)``."""
    each = [outputs_of(models.tiny_llama(), 0, ids)]
    each += [outputs_of(molora.lora(models.tiny_llama(), name), 0, ids) for name in NAMES]
    return torch.stack(each)


VOCABULARY = [[3, 20, "math"], [20, 40, "code"], [[45, 46, 47, 48, 60], "talk"], [[5], None]]


@pytest.mark.parametrize("default", [None, "code"])
def test_vocabulary_selects_rows_of_each_expert(molora, default):
    """At one layer; deeper ones differ through attention."""
    ids = molora.ids(rows=4, length=16)
    options = {"router": "vocabulary", "vocabulary": VOCABULARY, "vocabulary_default": default}
    model = molora.wrap(models.tiny_llama(), **options)

    def slot(token):
        if token == 5:
            return 0
        if token < 20:
            return 2
        if token < 40:
            return 1
        return 3 if token in (45, 46, 47, 48, 60) else (0 if default is None else 1)

    slots = torch.tensor([[slot(token) for token in row] for row in ids.tolist()])
    assert set(slots.unique().tolist()) == {0, 1, 2, 3}
    expected = rows_of_each(molora, ids).gather(0, slots[None, :, :, None].expand(1, -1, -1, 32))[0]
    assert molora.off(outputs_of(model, 0, ids), expected) <= 1e-6
    names = [[(None, *NAMES)[i] for i in row] for row in slots.tolist()]
    expected = molora.logits(model, ids)
    for given in (slots, names):
        plain = molora.wrap(models.tiny_llama(), router="none")
        with routing(plain, adapter_ids=given):
            assert torch.equal(molora.logits(plain, ids), expected)


def test_vocabulary_of_a_model_that_replaces_embeddings(molora, tmp_path):
    """The stack of a vision-language model sees embeddings only; the ids are taken before."""
    text = transformers.LlamaConfig(**models.tiny_llama().config.to_dict())
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=9, image_seq_length=4)
    model = transformers.LlavaForConditionalGeneration(config).float()
    inner = next(n for n, m in model.named_modules() if m is model.get_decoder())
    targets = rf"{inner.replace('.', '[.]')}.*[.](q_proj|up_proj)"
    folder = molora.make_lora(model, tmp_path / "vlm", r=2, target_modules=targets)
    model = transformers.LlavaForConditionalGeneration(config).float()
    options = {"experts": {"image": str(folder)}, "router": "vocabulary", "vocabulary": [[[9], "image"]]}
    adapted = peft.get_peft_model(model, molora.config(**options))
    ids = torch.tensor([[1, 9, 9, 9, 9, 5, 7]])
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = molora.logits(adapted, ids, pixel_values=pixels)
    with routing(adapted, adapter_ids=(ids == 9).long()):
        assert torch.equal(molora.logits(adapted, ids, pixel_values=pixels), found)
    with routing(adapted, expert=None):
        assert not torch.equal(molora.logits(adapted, ids, pixel_values=pixels), found)


def test_embeddings_without_ids_need_given_decisions(molora):
    model, ids = molora.wrap(models.tiny_llama(), router="vocabulary", vocabulary=VOCABULARY), molora.ids()
    embeddings = model.get_input_embeddings()(ids)
    with pytest.raises(UnsupportedError, match="adapter_ids"):
        model(inputs_embeds=embeddings)
    with routing(model, adapter_ids=["math", "code"]):
        model(inputs_embeds=embeddings)
    with pytest.raises(UnsupportedError, match="adapter_ids"):
        molora.wrap(models.tiny_llama(), router="none")(input_ids=ids)


@pytest.mark.parametrize("names", [("math", "code"), ("math", "code", "talk")])
def test_rows_through_the_experts_are_the_tokens(molora, names):
    model, ids = molora.wrap(models.tiny_llama(), experts=molora.experts("llama", names)), molora.ids()
    given = torch.randint(1, len(names) + 1, ids.shape, generator=torch.Generator().manual_seed(0))
    assert len(given.unique()) == len(names)
    with routing(model, adapter_ids=given):
        molora.logits(model, ids)
    for layer in molora.layers(model):
        missing = [1 + i for i, name in enumerate(sorted(names)) if name not in layer.molora_scaling["default"]]
        assert layer.rows == ids.numel() - torch.isin(given, torch.tensor(missing)).sum()
        layer.reset_rows()
    assert len({len(layer.molora_scaling["default"]) for layer in molora.layers(model)}) == (2 if len(names) == 3 else 1)
    molora.logits(molora_model := molora.wrap(models.tiny_llama(), null_expert=False), ids)
    shared = [layer for layer in molora.layers(molora_model) if len(layer.molora_scaling["default"]) == 3]
    assert {layer.rows for layer in shared} == {ids.numel()}


@pytest.mark.parametrize("routing_kind", ["hard", "soft"])
def test_identical_experts_are_the_single_one(molora, routing_kind):
    folder, ids = molora.expert("llama", "math"), molora.ids()
    experts = dict.fromkeys("abcd", folder)
    model = molora.wrap(models.tiny_llama(), experts=experts, null_expert=False, routing=routing_kind)
    assert molora.off(molora.logits(model, ids), molora.logits(molora.lora(models.tiny_llama(), "math"), ids)) <= 1e-5
    given = torch.randint(1, 5, ids.shape, generator=torch.Generator().manual_seed(0))
    with routing(model, adapter_ids=given):
        assert molora.off(molora.logits(model, ids), molora.logits(molora.lora(models.tiny_llama(), "math"), ids)) <= 1e-5


# -- the sum over experts against a loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("top_k", "soft"), [(1, False), (2, False), (4, True)])
def test_sum_of_deltas_against_a_loop(monkeypatch, top_k, soft, grouped):
    """Forward, and gradients of the input and the logits; ranks differ, one expert misses the module."""
    monkeypatch.setattr(dispatch, "use_grouped", lambda x: grouped)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    slots = (None, "a", "b", "missing", "c")
    factors = {name: (draw(r, 6), draw(5, r), scale) for name, r, scale in (("a", 2, 0.5), ("b", 3, 2.0), ("c", 1, 1.5))}
    x, result, logits, direction = draw(2, 7, 6), draw(2, 7, 5), draw(2, 7, 5), draw(2, 7, 5)
    grads = []
    for reference in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, result, logits)]
        decision = choose(leaves[2], slots, top_k=top_k, soft=soft, temperature=0.7, gradient="chosen")
        if reference:
            p = (leaves[2] / 0.7).softmax(-1)
            out = leaves[1].clone()
            for b in range(2):
                for t in range(7):
                    chosen = range(5) if soft else sorted(range(5), key=lambda k: -logits[b, t, k].item())[:top_k]
                    total = sum(p[b, t, k] for k in chosen)
                    for k in chosen:
                        weight = p[b, t, k] - p[b, t, k].detach() + 1 if top_k == 1 else p[b, t, k] / total
                        if slots[k] in factors:
                            a, up, scale = factors[slots[k]]
                            out[b, t] = out[b, t] + weight * scale * (up @ (a @ leaves[0][b, t]))
        else:
            out, rows = dispatch.add_deltas(leaves[1], leaves[0], decision, factors, {})
            assert rows == sum(int((decision.index == k).sum()) for k, name in enumerate(slots) if name in factors)
        (out * direction).sum().backward()
        grads.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for found, expected in zip(grads[1], grads[0], strict=True):
        assert (found - expected).abs().max() <= 1e-12


def test_gradient_of_all_is_that_of_the_soft_sum_and_moves_nothing():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    slots, factors = (None, "a", "missing", "b"), {"a": (draw(2, 6), draw(5, 2), 0.5), "b": (draw(3, 6), draw(5, 3), 2.0)}
    x, result, logits, direction = draw(2, 7, 6).requires_grad_(), draw(2, 7, 5).requires_grad_(), draw(2, 7, 4), draw(2, 7, 5)
    logits.requires_grad_()
    decision = choose(logits, slots)
    assert decision.weight is None
    found, rows = dispatch.straight_through(result, x, decision, factors)
    assert torch.equal(found, result)
    assert rows == 2 * 14
    got = torch.autograd.grad((found * direction).sum(), (logits, result, x), allow_unused=True)
    p = logits.softmax(-1)
    soft = sum(p[..., k, None] * s * (x @ a.T @ b.T) for k, (a, b, s) in ((1, factors["a"]), (3, factors["b"])))
    (expected,) = torch.autograd.grad((soft * direction).sum(), logits)
    assert (got[0] - expected).abs().max() <= 1e-12
    assert torch.equal(got[1], direction)
    assert got[2] is None, "the input has a gradient through experts its tokens were not sent to"


def test_padded_stacks_follow_the_factors():
    factors = {"a": (torch.randn(2, 6), torch.randn(5, 2), 1.0), "b": (torch.randn(3, 6), torch.randn(5, 3), 1.0)}
    kept: dict = {}
    a, b = dispatch.stacked(["a", "b"], factors, kept)
    assert a.shape == (2, 3, 6)
    assert torch.equal(b[0] @ a[0], factors["a"][1] @ factors["a"][0])
    assert dispatch.stacked(["a", "b"], factors, kept)[0] is a
    factors["a"][0].add_(1)
    assert torch.equal(dispatch.stacked(["a", "b"], factors, kept)[0][0, :2], factors["a"][0])


# -- decisions ------------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_slot_and_minus_infinity_never_wins():
    logits = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 2.0], [-torch.inf, -torch.inf, -1e30]], requires_grad=True)
    decision = choose(logits, (None, "a", "b"), gradient="chosen")
    assert decision.index.squeeze(-1).tolist() == [0, 1, 2]
    assert torch.equal(decision.weight, torch.ones(3, 1))
    (gradient,) = torch.autograd.grad(decision.weight[:2].sum(), logits)
    p = logits.detach().softmax(-1)
    expected = torch.zeros(3, 3)
    for row, k in ((0, 0), (1, 1)):
        expected[row] = p[row, k] * (torch.eye(3)[k] - p[row])
    assert torch.allclose(gradient, expected)


@pytest.mark.parametrize("gradient", ["all", "chosen"])
@pytest.mark.parametrize("scope", ["layer", "module", "model"])
def test_straight_through_changes_no_bit_and_has_a_gradient(molora, scope, gradient):
    model, ids = molora.wrap(models.tiny_llama(), router_scope=scope, router_gradient=gradient).eval(), molora.ids()
    hard = molora.logits(model, ids)
    output = model(input_ids=ids, labels=ids)
    assert torch.equal(output.logits, hard)
    output.loss.backward()
    routers = {n: p for n, p in model.named_parameters() if "molora_router" in n}
    assert len(routers) == 3 * {"layer": 2, "module": 14, "model": 1}[scope]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in routers.values())
    assert all(p.grad is None for n, p in model.named_parameters() if n not in routers)


def test_decisions_see_no_future_no_batch_mates_and_no_padding(molora, decisions):
    model, ids = molora.wrap(models.tiny_llama(), seed=4), molora.ids(rows=3)

    def decided(tokens, **kwargs):
        decisions.clear()
        molora.logits(model, tokens, **kwargs)
        return torch.stack([d.index for d in decisions])

    whole = decided(ids)
    assert len(whole.unique()) > 1
    changed = ids.clone()
    changed[:, 6:] = molora.ids(rows=3, seed=9)[:, 6:]
    assert torch.equal(decided(changed)[:, :, :6], whole[:, :, :6])
    for row in range(3):
        assert torch.equal(decided(ids[row : row + 1]), whole[:, row : row + 1])
    padded = torch.cat([torch.full((3, 4), models.PAD), ids], dim=1)
    mask = (torch.arange(14) >= 4).long().expand(3, -1)
    assert torch.equal(decided(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))[:, :, 4:], whole)
    decisions.clear()
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=models.PAD, eos_token_id=None)
    steps = [torch.stack([d.index for d in decisions[i : i + 2]]) for i in range(0, len(decisions), 2)]
    assert torch.equal(torch.cat(steps, dim=2), decided(generated[:, :-1])), "with a cache other decisions"


def test_scope_model_runs_the_base_below_its_layer(molora, decisions):
    ids = molora.ids()
    model = molora.wrap(models.tiny_llama(), router_scope="model", router_layer=1, null_expert=False)
    assert torch.equal(outputs_of(model, 0, ids), outputs_of(models.tiny_llama(), 0, ids))
    assert not torch.equal(outputs_of(model, 1, ids), outputs_of(models.tiny_llama(), 1, ids))
    assert len(decisions) == 2
    first = molora.wrap(models.tiny_llama(), router_scope="model", router_layer=0, null_expert=False)
    assert not torch.equal(outputs_of(first, 0, ids), outputs_of(models.tiny_llama(), 0, ids))
    with pytest.raises(ConfigError, match=r"router_layer=7.*\[0, 1\]"):
        molora.wrap(models.tiny_llama(), router_scope="model", router_layer=7)


@pytest.mark.parametrize("beams", [1, 2])
def test_given_decisions_in_generation(molora, beams):
    """The last column stands for the new tokens; each beam has the decisions of its row; with a cache as without."""
    model, ids = molora.wrap(models.tiny_llama()).eval(), molora.ids()
    given = torch.tensor([[1] * 5 + [2] * 5, [3] * 9 + [0]])
    settings = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams, "pad_token_id": models.PAD, "eos_token_id": None}
    with routing(model, adapter_ids=given):
        cached, plain = (model.generate(ids, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, plain)
    for row, last in ((0, "math"), (1, None)):
        names = [(None, *NAMES)[i] for i in given[row].tolist()] + [last] * 5
        with routing(model, adapter_ids=[names[: ids.shape[1] + 5]]):
            alone = model.generate(ids[row : row + 1], **settings)
        assert torch.equal(alone[0], cached[row])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either"),
        ({"expert": "math", "adapter_ids": [["math"]]}, "either"),
        ({"expert": "mth"}, "mean 'math'"),
        ({"adapter_ids": [["math", "x"], ["math", "code"]]}, "no expert 'x'"),
        ({"adapter_ids": [["math", "code"], ["math"]]}, "one length"),
        ({"adapter_ids": torch.tensor([[4]])}, r"from 4 to 4; allowed: 0 \(base\) to 3"),
        ({"adapter_ids": torch.tensor([[-1]])}, "from -1"),
        ({"adapter_ids": torch.tensor([1])}, r"\(1,\)"),
        ({"adapter_ids": torch.tensor([[1.0]])}, "float32"),
    ],
    ids=str,
)
def test_wrong_decisions_are_refused(molora, options, said):
    model = molora.wrap(models.tiny_llama())
    before = molora.logits(model, molora.ids())
    with pytest.raises(ConfigError, match=said), routing(model, **options):
        pass
    assert torch.equal(molora.logits(model, molora.ids()), before)


def test_decisions_for_another_batch_are_refused(molora):
    model = molora.wrap(models.tiny_llama())
    with routing(model, adapter_ids=["math"] * 3), pytest.raises(ConfigError, match=r"3 rows.*with 2"):
        molora.logits(model, molora.ids())
    assert Decision((None,), torch.zeros(1, 1, 1)).weight is None


def test_vocabulary_ranges_end_before_their_end(molora):
    config = molora.config(router="vocabulary", vocabulary=[[3, 20, "math"], [[7, 30], "talk"]], vocabulary_default="code")
    found = table_lookup(config, torch.tensor([[2, 3, 7, 19, 20, 30, -200]]))
    assert found.tolist() == [[1, 2, 3, 2, 1, 3, 1]]
