"""LRAgent: what is refused, by name and before anything is stored."""

from __future__ import annotations

import peft
import pytest
import torch
from lragent_kit import AGENTS, RUNS, act, own, talk, team

import hfplug.caches
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.kernels.lragent import LowRankValueCache, LRAgentConfig, tie_value_a
from hfplug.testing.models import tiny_gemma3, tiny_llama


def test_another_text_is_refused_before_anything_is_stored() -> None:
    model, ids = team(), RUNS.ids(2, 8)
    store = LowRankValueCache(model, mode="base")
    act(model, "planner", store.view("planner"), ids)
    other = ids.clone()
    other[1, 5] = 3 + (other[1, 5] + 1) % 40
    before = store.nbytes
    with pytest.raises(UnsupportedError, match=r"token 5 of row 1 is \d+ for 'actor', and was \d+"):
        act(model, "actor", store.view("actor"), other)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(UnsupportedError, match=r"token 0 of row 0 is -1 for 'actor'"):
        act(model, "actor", store.view("actor"), ids, attention_mask=mask)
    with pytest.raises(UnsupportedError, match="holds 2 rows, the call has 1"):
        act(model, "actor", store.view("actor"), ids[:1])
    assert (store.nbytes, store.seen["actor"]) == (before, 0)


def test_another_adapter_is_refused() -> None:
    model, ids = team(), RUNS.ids(1, 5)
    store = LowRankValueCache(model, mode="base")
    view = store.view("actor")
    with pytest.raises(
        UnsupportedError, match=r"view of 'actor'.*active adapter is \['planner'\]; call model.set_adapter\('actor'\)"
    ):
        act(model, "planner", view, ids)
    model.set_adapter("actor")
    with model.disable_adapter(), pytest.raises(UnsupportedError, match="active adapter is none"), torch.no_grad():
        model(input_ids=ids, cache=view)
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match=r"unmerge_adapter"), torch.no_grad():
        model(input_ids=ids, cache=view)
    model.unmerge_adapter()
    model.train()
    with pytest.raises(UnsupportedError, match="training mode"):
        model(input_ids=ids, cache=view)
    model.eval()
    with pytest.raises(UnsupportedError, match="inputs_embeds"), torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids), cache=view)
    with pytest.raises(UnsupportedError, match="pass one agent's view"):
        act(model, "actor", store, ids)
    assert store.nbytes == store.length == 0
    act(model, "actor", view, ids)
    with torch.no_grad():
        model.get_base_model().model.layers[2].self_attn.v_proj.lora_A["actor"].weight.mul_(2)
    with pytest.raises(UnsupportedError, match="weights of adapter 'actor' were changed"):
        act(model, "actor", view, ids)
    store.reset()
    act(model, "actor", view, ids)


def test_several_adapters_in_one_batch_are_refused() -> None:
    model = team()  # of its own: PEFT leaves its hooks on a model whose forward failed
    model.set_adapter("actor")
    store = LowRankValueCache(model, mode="base")
    for names in (["planner", "actor"], ["critic", "critic"], ["__base__", "__base__"]):
        with pytest.raises(UnsupportedError, match="other adapters than 'actor' alone"), torch.no_grad():
            model(input_ids=RUNS.ids(2, 5), cache=store.view("actor"), adapter_names=names)
        for module in model.modules():
            module._forward_pre_hooks.clear() if isinstance(module, peft.tuners.lora.LoraLayer) else None
    assert store.length == 0


def test_values_that_somebody_changes_are_refused() -> None:
    """On their way to the cache; and where an adapter the view knows nothing of made them."""
    model, ids = team(agents=("wide",)), RUNS.ids(2, 5)
    model.add_adapter("queries", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("queries")
    store = LowRankValueCache(model, mode="base")
    with pytest.raises(UnsupportedError, match="other adapters than 'queries' alone"), torch.no_grad():
        model(input_ids=ids, cache=store.view("queries"), adapter_names=["wide", "wide"])
    model = team(agents=("wide",))
    store = LowRankValueCache(model, mode="base")
    projection = model.get_base_model().model.layers[1].self_attn.v_proj
    handle = projection.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UnsupportedError, match=r"the values of layer 1 are not what .*v_proj' made"):
        act(model, "wide", store.view("wide"), ids)
    handle.remove()
    assert store.length == 0
    act(model, "wide", store.view("wide"), ids)


def test_what_is_adapted_outside_of_the_layers() -> None:
    """The head changes nothing that is stored; a module in front of the layers would."""
    model = team(targets=("v_proj", "lm_head"), agents=AGENTS[:2])
    store = LowRankValueCache(model, mode="exact")
    found, expected = talk(model, {a: store.view(a) for a in AGENTS[:2]}), talk(model, {a: own(model) for a in AGENTS[:2]})
    assert torch.equal(found[0], expected[0])
    assert "values" in store.own_layers[0].state
    base = tiny_llama()
    base.model.front = torch.nn.Linear(32, 32)
    front = peft.get_peft_model(base, peft.LoraConfig(target_modules=["front"]), adapter_name="one")
    with pytest.raises(UnsupportedError, match=r"adapter 'one' adapts 'model\.front', outside of the layers"):
        LowRankValueCache(front)


def test_wrong_arguments_are_named() -> None:
    model = team(agents=AGENTS[:2])
    with pytest.raises(ConfigError, match="takes a PeftModel"):
        hfplug.caches.make("lragent", tiny_llama())
    with pytest.raises(ConfigError, match=r"no adapter 'plannr'; did you mean 'planner'|no adapter 'plannr'.*planner"):
        LowRankValueCache(model, agents=["plannr"])
    with pytest.raises(ConfigError, match=r"agent='acto'.*did you mean 'actor'"):
        LowRankValueCache(model).view("acto")
    with pytest.raises(ConfigError, match="mode='bas'"):
        LowRankValueCache(model, mode="bas")
    with pytest.raises(ConfigError, match="names 'actor' twice"):
        LRAgentConfig(agents=("actor", "actor"))
    with pytest.raises(ConfigError, match=r'keys=.own. must be "shared"'):
        LRAgentConfig(mode="full", keys="own")
    with pytest.raises(ConfigError, match=r"base_lr.*different lora_A on .*layers\.0\.self_attn\.v_proj"):
        LowRankValueCache(model, mode="base_lr")
    with pytest.raises(UnsupportedError, match="use_dora"):
        LowRankValueCache(team(agents=("one",), use_dora=True))
    with pytest.raises(UnsupportedError, match=r"layers of type .sliding_attention."):
        LowRankValueCache(team(tiny_gemma3, agents=("one",)))
    with pytest.raises(UnsupportedError, match=r"padding\(\) is not needed"):
        LowRankValueCache(model).padding(torch.ones(1, 3))
    mixed = team(agents=("wide",))
    mixed.add_adapter("narrow", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    mixed.add_adapter("queries", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    for other, why in (("narrow", "has rank 2, 'wide' 4"), ("queries", "do not both adapt")):
        with pytest.raises(ConfigError, match=why):
            tie_value_a(mixed, "wide", [other])
