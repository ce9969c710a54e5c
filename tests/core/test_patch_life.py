"""A model that lives on with its patch: moved, loaded, adapted, saved in part, and only then taken out of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from patch_toys import Right, fault, installed
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn

import hfplug
from hfplug.errors import ConfigError, LedgerError, UnsupportedError
from hfplug.families import decoder_of
from hfplug.modelpatch import PatchModule
from hfplug.testing.patch_models import FAMILIES
from hfplug.testing.patch_runs import portrait

IDS = torch.arange(3, 19).reshape(2, 8)


class Doubled(nn.Linear, PatchModule):
    """A linear map, twice; shares the weight of the one it takes the place of."""

    merge_refused = "toy_swap doubles what comes out"

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.weight, self.bias = 32, 32, linear.weight, linear.bias

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _swap(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    ledger.swap_module(layer, "self_attn.q_proj", Doubled(layer.self_attn.q_proj))
    ledger.swap_module(layer, "input_layernorm", nn.Identity())


def _say(self: Any, decoder: Any) -> list[str]:
    return ["be careful"]


Swap = fault("Swap", method="toy_swap", identity=False, on_layer=_swap)
Loud = fault("Loud", method="toy_loud", warnings=_say)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with installed(Right), installed(Swap), installed(Loud):
        yield


def llama(*names: str) -> Any:
    model = FAMILIES["Llama"]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.copy_(torch.linspace(0.5, 1.5, 32))
    for name in names:
        hfplug.apply(model, name)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


# -- coming off ------------------------------------------------------------------------------------------------------------


def test_what_comes_back_follows_the_model() -> None:
    """Another dtype meanwhile: the norm that was out of the model has it too, and the same values."""
    expected, model = llama().bfloat16(), llama()
    handle = hfplug.apply(model, "toy_swap")
    model.bfloat16()
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(expected))


def test_a_dtype_of_its_own_is_kept() -> None:
    """A norm kept in fp32 in a bf16 model stays in fp32 when the model goes to fp64."""
    model = llama().bfloat16()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    handle = hfplug.apply(model, "toy_swap")
    model.double()
    handle.remove()
    assert model.model.layers[0].input_layernorm.weight.dtype == torch.float32
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float64


def test_weights_exchanged_meanwhile_are_kept() -> None:
    """``load_state_dict(assign=True)`` puts new parameters in: they are the model's, not those from before."""
    model = llama()
    handle = hfplug.apply(model, "toy_swap")
    model.load_state_dict({k: torch.full_like(v, 0.25) for k, v in model.state_dict().items()}, assign=True)
    handle.remove()
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert (model.model.layers[0].self_attn.q_proj.weight == 0.25).all()
    assert not (model.model.layers[0].input_layernorm.weight == 0.25).any()


def test_a_loaded_model_is_usable_without_its_patch(tmp_path: Path) -> None:
    """Built without data, filled, then taken off: the loaded weights, and first values where the files had none."""
    model = llama("toy_swap")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"2 modules that came back \(input_layernorm\).*first values"):
        hfplug.applied(again)[0].remove()
    assert not any(p.is_meta for p in again.parameters())
    assert all(layer.input_layernorm.weight.eq(1).all() for layer in again.model.layers)
    kept = model.state_dict()
    assert all(torch.equal(p, kept[n]) for n, p in again.named_parameters() if n in kept)
    assert logits(again).isfinite().all()
    live = hfplug.applied(model)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live.remove()  # a live model lost nothing, and nothing is said


def test_gemmas_norms_come_back_as_gemma_starts_them(tmp_path: Path) -> None:
    """Their first weight is 0, not 1: transformers is asked, nothing is guessed."""
    first = dict(FAMILIES["Gemma3"]().named_parameters())
    model = FAMILIES["Gemma3"]()
    handle = hfplug.apply(model, "simplenorm")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    hfplug.applied(again)[0].remove()
    for stored in handle.plan.removed:
        assert torch.equal(again.get_parameter(stored.name), first[stored.name]), stored.name


def test_an_adapter_on_top_is_not_lost_without_a_word() -> None:
    """The patch comes off after the adapter, not with it."""
    model = llama()
    stock, before = logits(model), portrait(model)
    handle = hfplug.apply(model, "toy_swap")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(model, config)
    expected = logits(adapted)
    with pytest.raises(LedgerError, match=r"'q_proj' of LlamaAttention is a peft\..*unload\(\)"):
        handle.remove()
    assert handle.active
    assert torch.equal(logits(adapted), expected)
    adapted.unload()
    handle.remove()
    assert torch.equal(logits(model), stock)
    assert portrait(model)["keys"] == before["keys"]


def test_a_model_spread_over_devices_keeps_its_patch(tmp_path: Path) -> None:
    """accelerate's hooks fetch the weights of the modules they are on; without them the model would have none."""
    model = llama("toy_swap")
    model.save_pretrained(tmp_path / "model")
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    spread = load(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    assert torch.equal(logits(spread), logits(model))
    with pytest.raises(LedgerError, match="accelerate"):
        hfplug.applied(spread)[0].remove()
    assert torch.equal(logits(spread), logits(model))
    llama().save_pretrained(tmp_path / "stock")
    spread = load(tmp_path / "stock", device_map=places, offload_folder=tmp_path / "disk2")
    with pytest.raises(UnsupportedError, match="toy_gain: layers of the model are offloaded"):
        hfplug.apply(spread, "toy_gain")
    assert hfplug.applied(spread) == ()


def test_a_warning_that_is_an_error_leaves_nothing() -> None:
    model = llama()
    before = portrait(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="be careful"):
            hfplug.apply(model, "toy_loud")
        with pytest.raises(UserWarning, match="be careful"), hfplug.applied(model, "toy_swap", "toy_loud"):
            pass
    assert hfplug.applied(model) == ()
    assert portrait(model) == before


# -- a patch on a part -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "part"), [("Llama", "model"), ("Qwen2.5-VL", "model"), ("Qwen2.5-VL", "model.language_model"), ("LLaVA", "model")]
)
def test_a_patch_on_a_part_is_saved_with_the_whole(family: str, part: str, tmp_path: Path) -> None:
    """The base model, or the text part, is patched: the folder of the whole says so, and the user's configuration does not."""
    model = FAMILIES[family]()
    handle, config = hfplug.apply(model.get_submodule(part), "toy_gain"), model.config
    with torch.no_grad():
        for layer in decoder_of(model).layers:
            layer.toy_gain.gain.fill_(0.5)
    assert hfplug.applied(model) == (handle,)
    model.save_pretrained(tmp_path)
    assert model.config is config
    assert not hasattr(config, "hfplug")
    assert saved(tmp_path)["transformers_weights"].startswith("needs hfplug")
    again = type(model).from_pretrained(tmp_path)
    assert [h.method for h in hfplug.applied(again)] == ["toy_gain"]
    assert torch.equal(logits(again), logits(model))
    handle.remove()
    model.save_pretrained(tmp_path)
    assert saved(tmp_path).keys().isdisjoint({"hfplug", "transformers_weights"})


# -- adapters --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    ],
    ids=["prompt", "prefix", "ia3"],
)
def test_every_kind_of_adapter_knows_its_structure(config: Any, tmp_path: Path) -> None:
    """Also those that PEFT injects nowhere; a second one is checked as the first."""
    model = llama("toy_gain")
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert [r["plugin"] for r in stored["hfplug_patches"]] == ["toy_gain"]
    with pytest.raises(UnsupportedError, match="trained on another structure"):
        PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    again = PeftModel.from_pretrained(llama("toy_gain"), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))
    plain = get_peft_model(llama(), config)
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(UnsupportedError, match="a model without patches"):
        again.load_adapter(tmp_path / "plain", "second")
    assert list(again.peft_config) == ["default"]


@pytest.mark.parametrize("how", ["PeftModel", "transformers"])
def test_a_patch_that_comes_after_the_adapter_is_on_its_record(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the structure it is saved with."""
    # transformers' own saving of adapters asks for a PEFT that is newer than the one here, and works with it.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    with installed(fault("Easy", works_with=frozenset({"peft"}))):
        model = get_peft_model(llama(), config)
        if how == "transformers":
            model.save_pretrained(tmp_path / "adapter")
            model = llama()
            model.load_adapter(tmp_path / "adapter")
        handle = hfplug.apply(model, "toy_gain")
        model.save_pretrained(tmp_path / "patched")
        handle.remove()
        model.save_pretrained(tmp_path / "stock")
        stored = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("patched", "stock")]
        assert [r["plugin"] for r in stored[0]["hfplug_patches"]] == ["toy_gain"]
        assert "hfplug_patches" not in stored[1]
        with pytest.raises(UnsupportedError, match="trained on another structure"):
            PeftModel.from_pretrained(llama(), tmp_path / "patched")
        PeftModel.from_pretrained(llama("toy_gain"), tmp_path / "patched")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_first_values_taken_out_of_a_weight_are_refused_where_it_is_not_linear(init: str) -> None:
    """2 (W - B A) x + B A x is not 2 W x: the model would change before its first step."""
    model = llama("toy_swap")
    before = portrait(model)
    with pytest.raises(UnsupportedError, match=f"init_lora_weights='{init}'.*toy_swap doubles"):
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init))
    assert portrait(model) == before
    stock = llama()
    get_peft_model(stock, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init))


def test_merged_adapters_of_a_patched_base_are_adapters_of_it(tmp_path: Path) -> None:
    """``hfplug merge`` takes them, keeps the records, and takes no adapter of another structure beside them."""
    from hfplug.seams.merge import merge

    def adapter(name: str, *patches: str) -> Path:
        torch.manual_seed(len(name))
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        get_peft_model(llama(*patches), config).save_pretrained(tmp_path / name)
        return tmp_path / name

    one, other, plain = adapter("a", "toy_gain"), adapter("bb", "toy_gain"), adapter("ccc")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge([one, other], output=tmp_path / "merged")
        merge([plain, adapter("dddd")], output=tmp_path / "stock")
    stored = json.loads((tmp_path / "merged" / "adapter_config.json").read_text())
    assert stored["hfplug_patches"] == json.loads((one / "adapter_config.json").read_text())["hfplug_patches"]
    assert "hfplug_patches" not in json.loads((tmp_path / "stock" / "adapter_config.json").read_text())
    PeftModel.from_pretrained(llama("toy_gain"), tmp_path / "merged")
    with pytest.raises(UnsupportedError, match="trained on another structure"):
        PeftModel.from_pretrained(llama(), tmp_path / "merged")
    with pytest.raises(ConfigError, match="patches"):
        merge([one, plain], output=tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_an_exported_adapter_of_a_patched_base_is_one_of_it(tmp_path: Path) -> None:
    from hfplug.exporting import export

    config = hfplug.tuners.config(type="bayes_lora", r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(llama("toy_gain"), config).save_pretrained(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "lora", base=llama("toy_gain"), approximate=True)
    stored = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert [r["plugin"] for r in stored["hfplug_patches"]] == ["toy_gain"]
    with pytest.raises(UnsupportedError, match="trained on another structure"):
        PeftModel.from_pretrained(llama(), tmp_path / "lora")
