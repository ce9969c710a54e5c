"""MoLoRA: what can be an expert, experts that come and go, and the router's own file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hfplug import ConfigError, UnsupportedError
from hfplug.testing import models
from hfplug.tuners import add_expert, load_router, merge_single, remove_expert, routing, save_router
from hfplug.tuners.molora.experts import pack, read_expert, unpack


def state(model):
    """Every tensor of the model."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model, before, modules):
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [type(m) for m in model.modules()] == modules
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def edited(molora, place: Path, name: str = "math", tensors=None, **options) -> str:
    """A copy of an expert's folder with other options or tensors."""
    shutil.copytree(molora.expert("llama", name), place)
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    if tensors is not None:
        save_file(tensors(load_file(place / "adapter_model.safetensors")), place / "adapter_model.safetensors")
    return str(place)


# -- reading --------------------------------------------------------------------------------------------------------------


def test_ranks_and_scalings_are_those_of_peft(molora):
    for name in molora.SETTINGS:
        lora = molora.lora(models.tiny_llama(), name)
        expected = {
            key.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
            for key, layer in lora.named_modules()
            if isinstance(layer, peft.tuners.lora.LoraLayer)
        }
        expert = read_expert(name, molora.expert("llama", name))
        assert expert.modules == expected
        assert unpack(name, json.loads(json.dumps(expert.record()))).modules == expected
    assert (
        len({setting for name in molora.SETTINGS for setting in read_expert(name, molora.expert("llama", name)).modules.values()})
        > 4
    )


def test_records_are_compact_and_exact():
    modules = {f"model.layers.{i}.mlp.up_proj": (4, 2.0 if i < 3 else 0.1) for i in range(28)} | {"head": (1, 1 / 3)}
    packed = pack(modules)
    assert len(json.dumps(packed)) < 300
    assert unpack("x", {"sha256": "0", "modules": json.loads(json.dumps(packed))}).modules == modules


ALTERED = {
    "bias": ({"bias": "lora_only"}, "bias='lora_only'"),
    "dora": ({"use_dora": True}, "use_dora=True"),
    "type": ({"peft_type": "LOHA"}, "'LOHA'.*'LORA'"),
    "head": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "pissa.*base model"),
    "rank": ({"r": 7}, "the rank 7.*have 4"),
    "arrow": ({"arrow_config": {"top_k": 1}}, "arrow_config"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_what_is_no_plain_lora_is_refused(molora, tmp_path, case):
    options, said = ALTERED[case]
    model = models.tiny_llama()
    before, modules = state(model), [type(m) for m in model.modules()]
    bad = edited(molora, tmp_path / "bad", **options)
    with pytest.raises((ConfigError, UnsupportedError), match=f"bad.*{said}"):
        peft.get_peft_model(model, molora.config(experts={"good": molora.expert("llama", "code"), "bad": bad}))
    assert_untouched(model, before, modules)


KEY = "base_model.model.model.layers.1.self_attn.k_proj.lora_{}.weight"


def without_b(tensors):
    return {k: v for k, v in tensors.items() if k != KEY.format("B")}


def wider(tensors):
    return {**tensors, KEY.format("A"): torch.zeros(4, 33)}


def stray(tensors):
    return {**tensors, "base_model.model.lm_head.lora_embedding_A": torch.zeros(2, 2)}


def elsewhere(tensors):
    return {k.replace("k_proj", "k_prj"): v for k, v in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (without_b, r"layers\.1\.self_attn\.k_proj.*lacks its lora_B"),
        (wider, r"k_proj.*33 -> 16.*32 -> 16"),
        (stray, "lora_embedding_A"),
        (elsewhere, r"k_prj.*LlamaForCausalLM does not have.*mean '.*k_proj'"),
        (lambda tensors: {}, "no (LoRA )?tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(molora, tmp_path, tensors, said):
    model = models.tiny_llama()
    before, modules = state(model), [type(m) for m in model.modules()]
    bad = edited(molora, tmp_path / "bad", tensors=tensors)
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        peft.get_peft_model(model, molora.config(experts={"bad": bad}))
    assert_untouched(model, before, modules)


def test_an_adapter_of_another_model_is_refused(molora):
    with pytest.raises(ConfigError, match=r"'code'.*\d+ -> \d+.*another model"):
        peft.get_peft_model(models.tiny_llama(hidden_size=48), molora.config())
    with pytest.raises(ConfigError, match=r"code.*GPT2LMHeadModel does not have"):
        peft.get_peft_model(models.tiny_gpt2(), molora.config())


def test_pickles_missing_folders_and_no_experts_are_refused(molora, tmp_path):
    folder = tmp_path / "pickle"
    folder.mkdir()
    shutil.copy(Path(molora.expert("llama", "math")) / "adapter_config.json", folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="pickle"):
        molora.wrap(models.tiny_llama(), experts={"math": str(folder)})
    with pytest.raises(ConfigError, match=r"'math'.*no such folder"):
        molora.wrap(models.tiny_llama(), experts={"math": str(tmp_path / "none")})
    for experts in ({}, {"a.b": "x"}, {"molora_1": "x"}):
        with pytest.raises(ConfigError, match="experts"):
            molora.config(experts=experts)
    with pytest.raises(ConfigError, match="must be the folder"):
        molora.wrap(models.tiny_llama(), experts={"math": 3})


def test_experts_of_different_bases_are_refused(molora, tmp_path):
    a = edited(molora, tmp_path / "a", base_model_name_or_path="org/small")
    b = edited(molora, tmp_path / "b", name="code", base_model_name_or_path="org/large")
    with pytest.raises(ConfigError, match=r"org/small.*org/large.*allow_other_base"):
        molora.wrap(models.tiny_llama(), experts={"a": a, "b": b})
    model = models.tiny_llama()
    model.config._name_or_path = "org/large"
    with pytest.raises(ConfigError, match=r"'a'.*org/small.*org/large"):
        molora.wrap(model, experts={"a": a})
    molora.wrap(models.tiny_llama(), experts={"a": a, "b": b}, allow_other_base=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 5}, "top_k=5 must be an integer from 1 to 4"),
        ({"top_k": 4, "null_expert": False}, "from 1 to 3"),
        ({"router": "vocabulary"}, "vocabulary=None"),
        ({"vocabulary": [[0, 3, "math"]]}, "router='vocabulary'"),
        ({"router": "vocabulary", "vocabulary": [[3, 3, "math"]]}, "lo < hi"),
        ({"router": "vocabulary", "vocabulary": [[0, 3, "maths"]]}, "mean 'math'"),
        ({"temperature": 0.0}, "temperature=0.0 must be > 0"),
        ({"router_scope": "token"}, "router_scope"),
        ({"roter": "learned"}, "mean 'router'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(molora, options, said):
    with pytest.raises(ConfigError, match=said):
        molora.config(**options)


def test_a_target_outside_the_token_stack_is_refused(molora, tmp_path):
    place = molora.make_lora(models.tiny_llama(), tmp_path / "head", r=2, target_modules=["lm_head", "q_proj"])
    with pytest.raises(UnsupportedError, match=r"lm_head.*router_scope='module'"):
        molora.wrap(models.tiny_llama(), experts={"head": str(place)})
    model = molora.wrap(models.tiny_llama(), experts={"head": str(place)}, router_scope="module", null_expert=False)
    lora = peft.PeftModel.from_pretrained(models.tiny_llama(), place)
    assert torch.equal(molora.logits(model, molora.ids()), molora.logits(lora, molora.ids()))


def test_target_modules_narrow_the_experts(molora):
    model = molora.wrap(models.tiny_llama(), target_modules=["q_proj", "down_proj"])
    assert {name.split(".")[-1] for name, m in model.named_modules() if hasattr(m, "molora_experts")} == {"q_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r"lm_head.*none of the experts"):
        molora.wrap(models.tiny_llama(), target_modules=["q_proj", "lm_head"])


def test_a_record_without_its_tensors_answers_nothing(molora):
    model = molora.wrap(models.tiny_llama())
    record = model.peft_config["default"].to_dict()["experts"]
    with pytest.raises(ConfigError, match="no tensors"):
        molora.logits(molora.wrap(models.tiny_llama(), experts=record), molora.ids())
    # The same configuration object for another adapter reads the folders again.
    model.add_adapter("b", model.peft_config["default"])
    model.set_adapter("b")
    with routing(model, expert="code"):
        expected = molora.logits(molora.lora(models.tiny_llama(), "code"), molora.ids())
        assert torch.equal(molora.logits(model, molora.ids()), expected)


# -- the order of names, and experts that come and go ---------------------------------------------------------------------


def test_the_order_experts_are_given_in_means_nothing(molora):
    folders, ids = molora.experts(), molora.ids()
    first = molora.logits(molora.wrap(models.tiny_llama(), experts=folders), ids)
    again = dict(reversed(folders.items()))
    assert list(again) != list(folders)
    assert torch.equal(molora.logits(molora.wrap(models.tiny_llama(), experts=again), ids), first)


@pytest.mark.parametrize("scope", ["layer", "module"])
@pytest.mark.parametrize("name", ["code", "talk", "zebra"])
def test_an_added_expert_changes_nothing_until_it_is_opened(molora, name, scope, tmp_path):
    """Its row is in the middle (code < math) or at an end; taken away, the model is as before."""
    held = {n: f for n, f in molora.experts().items() if n != name}
    folder, ids = molora.expert("llama", "talk" if name == "zebra" else name), molora.ids(rows=6)
    model = molora.wrap(models.tiny_llama(), experts=held, router_scope=scope)
    before, expected = state(model), molora.logits(model, ids)
    add_expert(model, name, folder)
    assert torch.equal(molora.logits(model, ids), expected)
    assert list(model.peft_config["default"].experts) == sorted([*held, name])
    with routing(model, expert=name):
        alone = molora.lora(models.tiny_llama(), "talk" if name == "zebra" else name)
        assert torch.equal(molora.logits(model, ids), molora.logits(alone, ids))
    assert not any(p.requires_grad for n, p in model.named_parameters() if "molora_experts" in n)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(models.tiny_llama(), tmp_path)
    assert torch.equal(molora.logits(again, ids), expected)
    remove_expert(model, name)
    assert torch.equal(molora.logits(model, ids), expected)
    assert {n: v.tolist() for n, v in state(model).items()} == {n: v.tolist() for n, v in before.items()}
    add_expert(model, name, folder, bias=0.5)
    assert not torch.equal(molora.logits(model, ids), expected), "an open row never wins"


def test_experts_that_cannot_come_or_go_are_refused(molora, tmp_path):
    model = molora.wrap(models.tiny_llama(), experts=molora.experts("llama", ("talk",)), router="vocabulary",
                        vocabulary=[[0, 5, "talk"]])  # fmt: skip
    before = state(model)
    with pytest.raises(UnsupportedError, match="no expert of adapter 'default' does"):
        add_expert(model, "math", molora.expert("llama", "math"))
    with pytest.raises(ConfigError, match="already"):
        add_expert(model, "talk", molora.expert("llama", "talk"))
    with pytest.raises(ConfigError, match="consist of letters"):
        add_expert(model, "a.b", molora.expert("llama", "talk"))
    with pytest.raises(ConfigError, match="last expert"):
        remove_expert(model, "talk")
    with pytest.raises(ConfigError, match=r"no expert 'tlk'.*mean 'talk'"):
        remove_expert(model, "tlk")
    add_expert(model, "walk", molora.expert("llama", "talk"))
    with pytest.raises(ConfigError, match="vocabulary sends"):
        remove_expert(model, "talk")
    remove_expert(model, "walk")
    assert {n: v.tolist() for n, v in state(model).items()} == {n: v.tolist() for n, v in before.items()}


# -- the router's own file ------------------------------------------------------------------------------------------------


def test_the_router_in_its_own_file(molora, tmp_path):
    ids, file = molora.ids(), tmp_path / "router.safetensors"
    model, other = molora.wrap(models.tiny_llama(), seed=1), molora.wrap(models.tiny_llama(), seed=2)
    expected = molora.logits(model, ids)
    assert not torch.equal(molora.logits(other, ids), expected)
    save_router(model, file)
    assert str(tmp_path).encode() not in file.read_bytes()
    load_router(other, file)
    assert torch.equal(molora.logits(other, ids), expected)
    # A file whose rows stand in another order: they go to the experts of their names.
    metadata, tensors = _open(file)
    facts = json.loads(metadata["molora"])
    order = [2, 0, 3, 1]
    facts["slots"] = [facts["slots"][i] for i in order]
    shuffled = {k: (v if k.endswith("w1") else v[order]).contiguous() for k, v in tensors.items()}
    save_file(shuffled, file, metadata={**metadata, "molora": json.dumps(facts)})
    third = molora.wrap(models.tiny_llama(), seed=3)
    load_router(third, file)
    assert torch.equal(molora.logits(third, ids), expected)


def _open(file):
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return opened.metadata(), load_file(file)


def test_a_router_of_other_experts_is_refused(molora, tmp_path):
    file = tmp_path / "router.safetensors"
    save_router(molora.wrap(models.tiny_llama()), file)
    two = molora.wrap(models.tiny_llama(), experts=molora.experts("llama", ("math", "code")))
    swapped = molora.wrap(models.tiny_llama(), experts={**molora.experts(), "code": molora.expert("llama", "math")})
    cases = [
        (two, r"\['code', 'math', 'talk'\].*\['code', 'math'\]"),
        (swapped, r"\['code'\].*sha256"),
        (molora.wrap(models.tiny_llama(), router_scope="module"), "scope"),
        (molora.wrap(models.tiny_llama(), router_hidden=8), r"w1.*\(128, 32\).*\(8, 32\)"),
        (molora.wrap(models.tiny_llama(num_hidden_layers=2), null_expert=False), "slots"),
    ]
    for model, said in cases:
        before = state(model)
        with pytest.raises(ConfigError, match=said):
            load_router(model, file)
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    with pytest.raises(ConfigError, match="no router file"):
        load_router(two, Path(molora.expert("llama", "math")) / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="has no parameters"):
        save_router(molora.wrap(models.tiny_llama(), router="none"), file)
    with pytest.raises(ConfigError, match="adapter='x'"):
        save_router(two, file, adapter="x")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merge_single(molora, family):
    ids = molora.ids()
    for name in molora.SETTINGS:
        model = molora.wrap(models.TINY_MODELS[family]())
        with pytest.raises(ConfigError, match="no expert"):
            merge_single(model, "x")
        merged = merge_single(model, name)
        assert type(merged) is type(models.TINY_MODELS[family]())
        assert not any("molora" in n for n in merged.state_dict())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in merged.modules())
        assert molora.off(molora.logits(merged, ids), molora.logits(molora.lora(models.TINY_MODELS[family](), name), ids)) <= 1e-5
