"""LRAgent: what agents share of one text, in every mode, and the life of the cache."""

from __future__ import annotations

import copy
import gc
from typing import Any

import peft
import pytest
import torch
from lragent_kit import AGENTS, DIM, HEADS, RANK, RUNS, act, own, talk, team

import hfplug.caches
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.kernels.lragent import LowRankValueCache, LRAgentConfig, tie_value_a
from hfplug.testing.models import tiny_gpt2, tiny_qwen3
from hfplug.testing.runs import off

# -- exact --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager", "lora_lowrank"])
@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"), ("gate_proj",), ("v_proj",)], ids=str
)
def test_exact_is_a_cache_for_each_agent(attn: str, targets: tuple[str, ...]) -> None:
    """Tokens and logits of separate caches, over turns in which every agent reads what the others wrote."""
    model = team(targets=targets, attn=attn)
    store = LowRankValueCache(model, mode="exact")
    found = talk(model, {agent: store.view(agent) for agent in AGENTS}, rounds=5)
    expected = talk(model, {agent: own(model) for agent in AGENTS}, rounds=5)
    assert torch.equal(found[0], expected[0])
    assert max(off(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < 1e-5
    assert store.tokens is not None
    assert torch.equal(store.tokens, found[0][:, : store.length])


def test_exact_where_adapters_begin_late() -> None:
    """Layers up to the first adapted one hold one set of keys and base values for all, and no more."""
    model = team(layers_to_transform=[1, 2])
    store = LowRankValueCache(model, mode="exact")
    talk(model, {agent: store.view(agent) for agent in AGENTS})
    names = [set(layer.state) for layer in store.own_layers]
    assert names[0] == {"keys", "values"}
    assert names[1] == {"keys", "values", *(f"low.{a}" for a in AGENTS)}
    assert names[2] == {f"{part}.{a}" for part in ("keys", "values") for a in AGENTS}
    assert store.nbytes == store.formula_bytes()


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_gpt2], ids=["qwen3", "gpt2"])
def test_exact_on_other_families(make: Any) -> None:
    """Norms on keys; one projection for queries, keys and values, which adapts the keys too."""
    targets = ("c_attn", "c_proj") if make is tiny_gpt2 else ("q_proj", "v_proj")
    extra = {"fan_in_fan_out": True} if make is tiny_gpt2 else {}
    model = team(make, targets, AGENTS[:2], **extra)
    store = LowRankValueCache(model, mode="exact")
    found = talk(model, {a: store.view(a) for a in AGENTS[:2]})
    expected = talk(model, {a: own(model) for a in AGENTS[:2]})
    assert torch.equal(found[0], expected[0])
    assert max(off(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < 1e-5
    assert ("keys.actor" in store.own_layers[0].state) == (make is tiny_gpt2)


def test_left_padding_is_that_of_separate_caches() -> None:
    model, batch = team(), RUNS.padded("left", 3, 10)
    del batch["position_ids"]
    for mode in ("exact", "base"):
        store = LowRankValueCache(model, mode=mode)
        for turn, agent in enumerate(AGENTS[:2] if mode == "exact" else AGENTS[:1]):
            model.set_adapter(agent)
            found = RUNS.generate(model, batch, cache=store.view(agent), max_new_tokens=4)
            expected = RUNS.generate(model, batch, max_new_tokens=4)
            if turn == 0:
                assert torch.equal(found.sequences, expected.sequences)
                assert max(off(a, b) for a, b in zip(found.logits, expected.logits, strict=True)) < 1e-5
                store.view(agent).crop(-3)  # back to the prompt, which the next agent reads
        assert store.tokens is not None
        assert torch.equal(store.tokens[:, :10] == -1, batch["attention_mask"] == 0)


# -- approximations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "lora_lowrank"])
@pytest.mark.parametrize("mode", ["base", "base_lr"])
def test_one_agent_alone_is_exact_in_every_mode(mode: str, attn: str) -> None:
    model = team(agents=("planner",), attn=attn)
    store = LowRankValueCache(model, mode=mode)
    found, expected = talk(model, {"planner": store.view("planner")}), talk(model, {"planner": own(model)})
    assert torch.equal(found[0], expected[0])
    assert max(off(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < 1e-5
    assert store.nbytes == store.formula_bytes()


@pytest.mark.parametrize("mode", ["base", "base_lr", "full"])
def test_agents_with_equal_adapters_are_exact_in_every_mode(mode: str) -> None:
    model = team(same=True)
    store = LowRankValueCache(model, mode=mode)
    found = talk(model, {agent: store.view(agent) for agent in AGENTS})
    expected = talk(model, {agent: own(model) for agent in AGENTS})
    assert torch.equal(found[0], expected[0])
    assert max(off(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < 2e-5


def test_base_is_the_definition_written_out() -> None:
    """A second agent reads the text: keys and base values of the first, low-rank part of its own, layer by layer."""
    model, ids = team(agents=AGENTS[:2]), RUNS.ids(1, 7)
    store = LowRankValueCache(model, mode="base")
    act(model, "planner", store.view("planner"), ids)
    kept = [{n: t.clone() for n, t in layer.state.items()} for layer in store.own_layers]
    separate = own(model)
    act(model, "planner", separate, ids)
    act(model, "actor", store.view("actor"), ids)
    for index, layer in enumerate(store.own_layers):
        assert all(torch.equal(layer.state[n], t) for n, t in kept[index].items())  # nothing of the first was touched
        assert off(layer.state["keys"], separate.layers[index].keys) < 1e-5
        v = model.get_base_model().model.layers[index].self_attn.v_proj
        low = layer.state["low.planner"] @ (v.lora_B["planner"].weight.t() * v.scaling["planner"])
        whole = layer.state["values"] + low.view(1, 7, HEADS, DIM).transpose(1, 2)
        assert off(whole, separate.layers[index].values) < 1e-5
    assert store.seen == {"planner": 7, "actor": 7}
    assert store.length == 7


def test_the_first_layer_has_no_error_and_later_ones_do() -> None:
    """Base values of the first layer are equal for all agents (same embeddings); from the second layer on they are not."""
    model, ids = team(), RUNS.ids(1, 7)
    store = LowRankValueCache(model, mode="base")
    for agent in AGENTS[:2]:
        act(model, agent, store.view(agent), ids)
    alone = LowRankValueCache(model, mode="base")
    act(model, "actor", alone.view("actor"), ids)
    for part in ("keys", "values", "low.actor"):
        errors = [off(a.state[part], b.state[part]) for a, b in zip(store.own_layers, alone.own_layers, strict=True)]
        assert errors[0] == 0
        assert errors[2] > 1e-3


def test_base_lr_shares_the_low_rank_part_and_each_agent_reads_it_with_its_own_factor() -> None:
    model, ids = team(agents=AGENTS[:2]), RUNS.ids(1, 7)
    assert tie_value_a(model, "planner", ["actor"]) == 3
    factors = [layer.self_attn.v_proj.lora_A["actor"].weight for layer in model.get_base_model().model.layers]
    assert not any(weight.requires_grad for weight in factors)
    store = LowRankValueCache(model, mode="base_lr")
    act(model, "planner", store.view("planner"), ids)
    view = store.view("actor")
    assert view.get_seq_length() == 7  # nothing is read again
    ours = act(model, "actor", view, RUNS.ids(1, 1, seed=5))
    assert store.seen == {"planner": 8, "actor": 8}
    by_hand = own(model)
    act(model, "planner", by_hand, ids)
    for index, layer in enumerate(by_hand.layers):
        v = model.get_base_model().model.layers[index].self_attn.v_proj
        low = store.own_layers[index].state["low"][:, :, :7]
        parts = [low @ (v.lora_B[a].weight.t() * v.scaling[a]) for a in AGENTS[:2]]
        layer.values = layer.values + (parts[1] - parts[0]).view(1, 7, HEADS, DIM).transpose(1, 2)
    assert off(ours, act(model, "actor", by_hand, RUNS.ids(1, 1, seed=5))) < 1e-5


def test_full_takes_over_everything() -> None:
    model, ids = team(agents=AGENTS[:2]), RUNS.ids(1, 7)
    store, plain = LowRankValueCache(model, mode="full"), own(model)
    act(model, "planner", store.view("planner"), ids)
    act(model, "planner", plain, ids)
    last = RUNS.ids(1, 1, seed=5)
    assert off(act(model, "actor", store.view("actor"), last), act(model, "actor", plain, last)) < 1e-6


def test_keys_of_their_own() -> None:
    """With the key projection adapted: one must choose; own keys are those of the agent."""
    targets, ids = ("k_proj", "v_proj"), RUNS.ids(1, 7)
    model = team(targets=targets, agents=AGENTS[:2])
    with pytest.raises(ConfigError, match=r'keys=None.*layer 0.*keys="own".*keys="shared"'):
        LowRankValueCache(model, mode="base")
    for keys in ("own", "shared"):
        store = LowRankValueCache(model, mode="base", keys=keys)
        for agent in AGENTS[:2]:
            act(model, agent, store.view(agent), ids)
        names = set(store.own_layers[0].state)
        assert ({"keys.planner", "keys.actor"} <= names) == (keys == "own")
        plain = own(model)
        act(model, "actor", plain, ids)
        theirs = store.own_layers[0].state["keys.actor" if keys == "own" else "keys"]
        assert (off(theirs, plain.layers[0].keys) < 1e-6) == (keys == "own")
        assert store.nbytes == store.formula_bytes()
    tie_value_a(model, "planner", ["actor"])
    with pytest.raises(ConfigError, match=r'mode base_lr.*keys="shared"'):
        LowRankValueCache(model, mode="base_lr")
    LowRankValueCache(model, mode="base_lr", keys="shared").close()


def test_bytes_are_those_of_the_card() -> None:
    """``L (2 H D + N r)`` in base, ``L (2 H D + r)`` in base_lr, ``L 2 H D`` in full, a layer and row; by whole storages."""
    model, length = team(), 40
    tie_value_a(model, "planner", AGENTS[1:])
    for mode, low in (("base", 3 * RANK), ("base_lr", RANK), ("full", 0)):
        store = LowRankValueCache(model, mode=mode)
        for agent in AGENTS if mode == "base" else AGENTS[:1]:
            act(model, agent, store.view(agent), RUNS.ids(2, length))
        assert store.nbytes == store.formula_bytes() == 3 * 2 * length * 4 * (2 * HEADS * DIM + low)
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for layer in store.own_layers
            for t in layer.state.values()
        }
        assert sum(held.values()) == store.nbytes


def test_low_rank_prefill_adds_no_keys_or_values() -> None:
    model, ids = team(), RUNS.ids(1, 12)
    store = LowRankValueCache(model, mode="base")
    act(model, "planner", store.view("planner"), ids)
    before, kept = store.nbytes, store.own_layers[0].state["keys"]
    act(model, "actor", store.view("actor"), ids[:, :5])
    assert store.seen == {"planner": 12, "actor": 5, "critic": 0}
    assert store.nbytes - before == 3 * 5 * RANK * 4
    assert store.own_layers[0].state["keys"] is kept
    act(
        model, "actor", store.view("actor"), torch.cat((ids[:, 5:], RUNS.ids(1, 2, seed=3)), dim=1)
    )  # over the end of what is there
    assert store.seen == {"planner": 12, "actor": 14, "critic": 0}
    assert [t.shape[2] for n, t in sorted(store.own_layers[0].state.items())] == [14, 14, 12, 14]


# -- life ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_give_what_one_prefill_gives(chunk: int) -> None:
    model, ids = team(), RUNS.ids(2, 10)
    stores = [LowRankValueCache(model, mode="base") for _ in range(2)]
    for agent in AGENTS[:2]:
        whole = act(model, agent, stores[0].view(agent), ids)
        pieces = torch.cat([act(model, agent, stores[1].view(agent), part) for part in ids.split(chunk, dim=1)], dim=1)
        assert off(whole, pieces) < 1e-5
    for a, b in zip(stores[0].own_layers, stores[1].own_layers, strict=True):
        assert all(off(a.state[n], b.state[n]) < 1e-5 for n in a.state)


def test_crop_takes_back_what_one_agent_has_read() -> None:
    model, ids = team(), RUNS.ids(1, 10)
    store = LowRankValueCache(model, mode="base")
    for agent in AGENTS[:2]:
        act(model, agent, store.view(agent), ids)
    store.view("planner").crop(-4)
    assert store.seen == {"planner": 6, "actor": 10, "critic": 0}
    assert store.length == 10
    store.view("actor").crop(-2)
    assert store.length == 8
    assert {n: t.shape[2] for n, t in store.own_layers[0].state.items()} == {
        "keys": 8,
        "values": 8,
        "low.planner": 6,
        "low.actor": 8,
    }
    act(model, "actor", store.view("actor"), RUNS.ids(1, 2, seed=8))  # another end of the text
    assert store.tokens is not None
    assert torch.equal(store.tokens[:, 8:], RUNS.ids(1, 2, seed=8))
    store.view("actor").reset()
    assert store.seen["actor"] == 0
    assert store.length == 6
    store.reset()
    assert (store.length, store.nbytes, store.tokens) == (0, 0, None)
    with pytest.raises(ConfigError, match=r"crop\(1\)"):
        store.view("actor").crop(1)
    with pytest.raises(ConfigError, match=r"crop\(-1\): only 0"):
        store.view("actor").crop(-1)


def test_assisted_decoding_gives_the_same_tokens() -> None:
    """Candidates are taken back out of the view."""
    model, batch = team(), {"input_ids": RUNS.ids(1, 4).repeat(1, 3)}
    model.set_adapter("actor")
    expected = RUNS.generate(model, batch, max_new_tokens=8).sequences
    view = LowRankValueCache(model, mode="base").view("actor")
    assert torch.equal(RUNS.generate(model, batch, cache=view, max_new_tokens=8, prompt_lookup_num_tokens=3).sequences, expected)


def test_b10_beams_are_for_one_agent() -> None:
    """Alone: the beams of a stock cache. With others: refused; a copy may do it, and what was copied stays."""
    model, batch = team(), {"input_ids": RUNS.ids(2, 6)}
    model.set_adapter("actor")
    expected = RUNS.generate(model, batch, num_beams=3, max_new_tokens=6).sequences
    store = LowRankValueCache(model, mode="base")
    assert torch.equal(RUNS.generate(model, batch, cache=store.view("actor"), num_beams=3, max_new_tokens=6).sequences, expected)
    store.reset()
    act(model, "planner", store.view("planner"), batch["input_ids"][:, :5])
    act(model, "actor", store.view("actor"), batch["input_ids"][:, :5])
    before = {n: t.clone() for n, t in store.own_layers[1].state.items()}
    view = store.view("actor")
    for operation in (lambda: view.reorder_cache(torch.tensor([1, 0])), lambda: view.batch_repeat_interleave(2),
                      lambda: view.batch_select_indices(torch.tensor([0]))):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"rows of \['planner'\]"):
            operation()
    copied = copy.deepcopy(view)
    assert copied.store is not store
    copied.store.reorder_cache(torch.tensor([1, 0]))
    act(model, "actor", copied, batch["input_ids"][[1, 0], 5:])
    assert all(torch.equal(store.own_layers[1].state[n], t) for n, t in before.items())
    assert copied.get_seq_length() == 6
    store.batch_repeat_interleave(2)
    assert store.tokens is not None
    assert torch.equal(store.tokens[1], batch["input_ids"][0, :5])
    store.batch_select_indices(torch.tensor([3]))
    act(model, "planner", store.view("planner"), batch["input_ids"][1:, 5:])


def test_a_forward_that_fails_leaves_nothing() -> None:
    """In any layer, also by an interrupt: lengths, later logits and bytes are as if it had not been."""
    model, ids = team(), RUNS.ids(1, 9)
    store, plain = LowRankValueCache(model, mode="base"), LowRankValueCache(model, mode="base")
    for one in (store, plain):
        act(model, "planner", one.view("planner"), ids[:, :6])
    for error in (RuntimeError, KeyboardInterrupt):

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            raise error("out of memory")

        handle = model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(fail)
        for agent in AGENTS[:2]:
            with pytest.raises(error):
                act(model, agent, store.view(agent), RUNS.ids(1, 6 if agent == "actor" else 2, seed=0 if agent == "actor" else 9))
        handle.remove()
        assert store.seen == plain.seen
        assert store.length == 6
    for agent in AGENTS[:2]:
        part = ids[:, store.seen[agent] :]
        assert torch.equal(act(model, agent, store.view(agent), part), act(model, agent, plain.view(agent), part))
    assert store.nbytes == plain.nbytes == store.formula_bytes()


def test_no_trace_is_left_on_the_model() -> None:
    """close(), and a store that is gone; the model computes as before all along."""
    model, ids = team(), RUNS.ids(1, 5)
    model.set_adapter("actor")
    names, hooks = set(vars(model.get_base_model().model)), sum(len(m._forward_hooks) for m in model.modules())
    expected = RUNS.logits(model, {"input_ids": ids})
    one, two = LowRankValueCache(model), LowRankValueCache(model, mode="base")
    assert torch.equal(RUNS.logits(model, {"input_ids": ids}), expected)
    more = sum(len(m._forward_hooks) for m in model.modules())
    assert more > hooks
    LowRankValueCache(model, mode="full")
    gc.collect()
    assert sum(len(m._forward_hooks) for m in model.modules()) == more  # one set of hooks for all
    view = one.view("actor")
    one.close()
    one.close()
    act(model, "actor", two.view("actor"), ids)
    two.close()
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    assert set(vars(model.get_base_model().model)) == names
    assert not any("_hfplug" in n for m in model.modules() for n in vars(m))
    with pytest.raises(UnsupportedError, match="after close"):
        act(model, "actor", view, ids)
    three = LowRankValueCache(model)
    del three
    gc.collect()
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks


def test_copies_of_a_model_have_caches_of_their_own() -> None:
    model, ids = team(), RUNS.ids(1, 5)
    store = LowRankValueCache(model, mode="base")
    twin = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="outside of the model"):
        act(twin, "actor", store.view("actor"), ids)
    other = LowRankValueCache(twin, mode="base")
    assert off(act(twin, "actor", other.view("actor"), ids), act(model, "actor", store.view("actor"), ids)) == 0


def test_bf16_and_by_name() -> None:
    """Through the seam; the low-rank part is kept in the type of the values, whatever type the adapter has."""
    model = team().to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_A.float()
            module.lora_B.float()
    store = hfplug.caches.make("lragent", model, mode="base", agents=["planner", "actor"])
    assert isinstance(store, LowRankValueCache)
    ids = RUNS.ids(1, 12)
    ours = act(model, "planner", store.view("planner"), ids)
    assert {t.dtype for layer in store.own_layers for t in layer.state.values()} == {torch.bfloat16}
    assert off(ours, act(model, "planner", own(model), ids)) < 0.1 * float(ours.std())
    assert hfplug.caches.make(LRAgentConfig(mode="full"), model).options.mode == "full"


def test_ranks_may_differ_and_an_agent_may_leave_values_alone() -> None:
    model = team(agents=("wide",))
    model.add_adapter("narrow", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.add_adapter("queries", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    names = ("wide", "narrow", "queries")
    store, caches = LowRankValueCache(model, mode="exact"), {a: own(model) for a in names}
    found, expected = talk(model, {a: store.view(a) for a in names}), talk(model, caches)
    assert torch.equal(found[0], expected[0])
    assert max(off(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < 1e-5
    base = LowRankValueCache(model, mode="base")
    talk(model, {a: base.view(a) for a in names})
    assert base.nbytes == base.formula_bytes()
    assert "low.queries" not in base.own_layers[0].state
