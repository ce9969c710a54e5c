"""Patches on models: handles, order, records, the gate, what is refused and how it is said."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from patch_toys import Right, fault, installed
from torch import nn

import hfplug
from hfplug import activation, artefacts, families
from hfplug.errors import ConfigError, HfplugError, LedgerError, MissingPluginError, UnsupportedError
from hfplug.families import decoder_of
from hfplug.modelpatch import PatchModule
from hfplug.testing.patch_models import FAMILIES
from hfplug.testing.patch_runs import portrait

IDS = torch.arange(3, 19).reshape(2, 8)
Second = fault("Second", method="toy_second", on_layer=lambda s, d, i, layer, ledger: (
    ledger.add_module(layer, "toy_second", m := s.module(d.config.hidden_size, next(layer.parameters()))),
    ledger.hook(layer, "forward", m.after),
))  # fmt: skip


@pytest.fixture(autouse=True)
def _toys() -> Any:
    with installed(Right), installed(Second):
        yield


def llama(**options: Any) -> Any:
    return FAMILIES["Llama"](**options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def stirred(*names: str) -> Any:
    model = llama()
    for name in names:
        hfplug.apply(model, name)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".toy_" in name:
                p.copy_(torch.linspace(0, 1, p.numel()))
    return model


# -- handles ---------------------------------------------------------------------------------------------------------------


def test_a_handle_is_a_context_and_applied_takes_several() -> None:
    model = llama()
    before = portrait(model)
    with hfplug.apply(model, "toy_gain", strength=2) as handle:
        assert handle.active
        assert handle.patch == Right(strength=2.0)
        assert hfplug.applied(model) == hfplug.applied(model.model) == (handle,)
    assert portrait(model) == before
    with hfplug.applied(model, "toy_gain", ("toy_second", {"strength": 3})) as handles:
        assert [h.method for h in hfplug.applied(model)] == ["toy_gain", "toy_second"]
        assert handles[1].patch.strength == 3
    assert portrait(model) == before
    with pytest.raises(ConfigError, match="toy_third"), hfplug.applied(model, "toy_gain", "toy_third"):
        pass
    assert portrait(model) == before
    assert hfplug.applied(nn.Linear(2, 2)) == ()


def test_patches_come_off_in_reverse() -> None:
    model = llama()
    before = portrait(model)
    first, second = hfplug.apply(model, "toy_gain"), hfplug.apply(model, Second())
    with pytest.raises(LedgerError, match=r"\['toy_second'\] were applied after it"):
        first.remove()
    assert first.active
    second.undo()
    first.undo()
    assert portrait(model) == before


def test_options_by_object_or_by_name() -> None:
    model = llama()
    assert hfplug.plan(model, Right(strength=0.5)).options == hfplug.plan(model, "toy_gain", strength=0.5).options
    with pytest.raises(ConfigError, match=r"options \['strength'\] beside"):
        hfplug.apply(model, Right(), strength=1)
    with pytest.raises(ConfigError, match="patch=7"):
        hfplug.apply(model, 7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'toy_gain'"):
        hfplug.apply(model, "toy_gains")
    with pytest.raises(ConfigError, match="is a tuner, not a patch"):
        hfplug.apply(model, "ulora")
    with pytest.raises(ConfigError, match="says it is the patch 'toy_gain'"):
        hfplug.apply(model, fault("Impostor")())


def test_options_must_survive_json() -> None:
    @dataclass(frozen=True)
    class Odd(Right):
        method: ClassVar[str] = "toy_odd"
        what: Any = frozenset({1})

    with installed(Odd), pytest.raises(HfplugError, match=r"cannot be kept in config\.json"):
        hfplug.apply(llama(), "toy_odd")


def test_an_object_with_a_wrong_value_is_the_users_mistake() -> None:
    from hfplug.modeling_patches import SimpleNorm

    with pytest.raises(ConfigError, match=r"patch 'simplenorm'.*affine"):
        hfplug.apply(llama(), SimpleNorm(affine="yes"))  # type: ignore[arg-type]


def test_a_plan_says_what_there_is() -> None:
    plan = hfplug.plan(llama(), "toy_gain")
    assert (plan.parameters, plan.bytes, plan.modules, plan.layers, plan.depth) == (64, 256, 4, (0, 1), 2)
    assert [s.name for s in plan.added] == ["model.layers.0.toy_gain.gain", "model.layers.1.toy_gain.gain"]
    assert plan.hooked == (("model.layers.0", "forward"), ("model.layers.1", "forward"))
    assert json.loads(json.dumps(plan.as_dict()))["bytes"] == 256
    assert "parameters: +64 -0 = +64 (float32)" in str(plan)


# -- families ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_families_is_true(family: str) -> None:
    model = FAMILIES[family]()
    decoder = decoder_of(model)
    families.check_proven(decoder)
    assert decoder.model.get_submodule(decoder.path) is decoder.stack
    assert len(decoder.layers) == decoder.config.num_hidden_layers
    assert isinstance(decoder.stack.get_submodule(decoder.family.final_norm), nn.Module)
    for index, layer in enumerate(decoder.layers):
        assert model.get_submodule(decoder.layer_path(index)) is layer
        assert decoder.layer_of(decoder.layer_path(index) + ".x") == index
        named = {path for path, *_ in decoder.projections(index)}
        linear = {n for n, m in model.named_modules() if decoder.layer_of(n) == index and getattr(m, "weight", None) is not None}
        norms = {f"{decoder.layer_path(index)}.{n}" for n in (*decoder.family.norms, *decoder.family.head_norms)}
        assert named | norms == linear, "a module with a weight that the table does not name"
        for _, module, split in decoder.projections(index):
            width = module.nf if decoder.family.conv1d else module.out_features
            assert sum(split.sizes) * (split.heads or 1) == width
    assert decoder.layer_of("lm_head") is None
    offset = [getattr(decoder.layers[0], n).weight.abs().max() == 0 for n in decoder.family.norms]
    assert all(offset) == decoder.family.unit_offset  # norms that scale by 1 + weight start at 0
    assert decoder.base is (decoder.stack if "VL" not in family and family != "LLaVA" else model.model)


def test_an_unknown_family_is_refused_with_the_list() -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(UnsupportedError, match=r"model_type 'bert'.*known: Llama, Mistral, .*Phi-3.*LLaVA"):
        hfplug.apply(transformers.BertModel(config), "toy_gain")
    with (
        installed(fault("Picky", families=("GPT-2", "OPT"))),
        pytest.raises(UnsupportedError, match=r"'llama'.*known: GPT-2, OPT"),
    ):
        hfplug.apply(llama(), "toy_gain")


def test_b16_code_that_is_not_the_proven_one_is_refused() -> None:
    model = llama()
    stock = type(model.model.norm)
    swapped = type("LigerRMSNorm", (stock,), {"__module__": "liger_kernel.transformers", "forward": lambda s, x: x})
    model.model.layers[1].input_layernorm = swapped(32)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.input_layernorm .* its code is from"):
        hfplug.apply(model, "toy_gain")
    hfplug.apply(model, "toy_gain", force=True).remove()
    model = llama()
    cls = type(model.model.layers[0])

    def forward(self: Any, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return cls.forward(self, hidden_states, attention_mask, **kwargs)

    forward.__module__ = "transformers.models.llama"
    model.model.layers[0].__class__ = type("Newer", (cls,), {"forward": forward, "__module__": "transformers.models.llama"})
    with pytest.raises(UnsupportedError, match="does not use 'self_attn'"):
        hfplug.apply(model, "toy_gain")


def test_states_in_which_no_patch_goes_on() -> None:
    with pytest.raises(ConfigError, match="model="):
        hfplug.apply(nn.Linear(2, 2), "toy_gain")
    model = llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(UnsupportedError, match="quantised"):
        hfplug.apply(model, "toy_gain")
    model = llama()
    model.model.layers[0].mlp.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="first, then compile"):
        hfplug.apply(model, "toy_gain")
    wrapped = SimpleNamespace()
    with pytest.raises(ConfigError, match="must be a transformers model"):
        hfplug.apply(wrapped, "toy_gain")
    for allowed in ("peft", "optimizer"):
        with installed(fault("Easy", works_with=frozenset({allowed}))):
            model = llama()
            kept = torch.optim.SGD(model.parameters()) if allowed == "optimizer" else None
            if allowed == "peft":
                from peft import LoraConfig, get_peft_model

                get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
            assert hfplug.apply(model, "toy_gain").active
            del kept
    model = llama()
    optimizer = torch.optim.SGD(model.parameters())
    for verb in (hfplug.apply, hfplug.plan):
        with pytest.raises(UnsupportedError, match="SGD exists already"):
            verb(model, "toy_gain")
    del optimizer
    with installed(fault("Typo", works_with=frozenset({"lora"}))), pytest.raises(HfplugError, match="'lora'"):
        hfplug.apply(llama(), "toy_gain")


def test_the_probe_forward_leaves_no_state() -> None:
    """Vision-language models keep offsets of positions from one forward to the next."""
    model = FAMILIES["Qwen2-VL"]()
    base = model.model
    base.rope_deltas = kept = torch.full((1, 1), 5)

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        base.rope_deltas, base.another = None, 1

    base.register_forward_hook(forward)
    hfplug.apply(model, "toy_gain")
    assert base.rope_deltas is kept
    assert not hasattr(base, "another")


# -- records -----------------------------------------------------------------------------------------------------------------


def test_several_patches_come_back_in_order(tmp_path: Path) -> None:
    model = stirred("toy_second", "toy_gain")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [h.method for h in hfplug.applied(again)] == ["toy_second", "toy_gain"]
    assert torch.equal(logits(again), logits(model))
    hfplug.applied(again)[1].remove()
    assert [r["plugin"] for r in artefacts.patch_records(again.config)] == ["toy_second"]
    once_more = type(model)._from_config(again.config)
    assert [h.method for h in hfplug.applied(once_more)] == ["toy_second"]


def test_another_head_on_a_patched_base_is_patched(tmp_path: Path) -> None:
    model = stirred("toy_gain")
    model.save_pretrained(tmp_path)
    other, info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    hidden = [m.model.eval()(IDS).last_hidden_state for m in (model, other)]
    assert torch.equal(*hidden)
    hfplug.applied(other)[0].remove()
    assert not torch.equal(hidden[0], other.model(IDS).last_hidden_state)


def test_removing_from_a_rebuilt_model_leaves_its_siblings_configuration_alone(tmp_path: Path) -> None:
    stirred("toy_gain").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    one, other = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    hfplug.applied(one)[0].remove()
    assert not hasattr(one.config, "hfplug")
    assert artefacts.patch_records(other.config)[0]["plugin"] == "toy_gain"
    assert one.config is one.model.config is one.model.layers[0].self_attn.config


def test_the_record_lives_beside_others_and_says_who_wrote_it() -> None:
    model = llama()
    model.config.hfplug = {"attention": {"x": 1}}
    stock = model.config
    handle = hfplug.apply(model, "toy_gain", strength=0.25)
    assert stock.hfplug == {"attention": {"x": 1}}
    assert model.config.hfplug["attention"] == {"x": 1}
    (record,) = model.config.hfplug["patches"]
    assert record == {
        "plugin": "toy_gain", "distribution": "hfplug-toy", "version": "1.0", "format": 1, "options": {"strength": 0.25},
    }  # fmt: skip
    handle.remove()
    assert model.config is stock


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plugin": "gone"}, MissingPluginError, "pip install"),
        ({"distribution": "another"}, MissingPluginError, "hfplug-toy"),
        ({"format": 99}, UnsupportedError, "format 99"),
        ({"options": {"strenght": 1}}, ConfigError, "did you mean 'strength'"),
        ({"version": None}, MissingPluginError, "damaged"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change: Any, error: Any, message: str, tmp_path: Path) -> None:
    stirred("toy_gain").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    stored["hfplug"]["patches"][0].update(change)
    path.write_text(json.dumps(stored))
    with pytest.raises(error, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    stored["hfplug"]["patches"] = "nonsense"
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="damaged"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_the_gate_says_what_to_install_and_touches_nothing_else(tmp_path: Path) -> None:
    model = stirred("toy_gain")
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    name = "needs hfplug (pip install hfplug hfplug-toy; then import hfplug before loading).safetensors"
    assert stored["transformers_weights"] == name
    assert (tmp_path / "model.safetensors").is_file()
    assert not hasattr(transformers.AutoConfig.from_pretrained(tmp_path), "transformers_weights")
    llama().save_pretrained(tmp_path / "stock")
    path = tmp_path / "stock" / "config.json"
    plain = json.loads(path.read_text())
    assert "transformers_weights" not in plain
    path.write_text(json.dumps({**plain, "transformers_weights": "other.safetensors"}))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "stock").transformers_weights == "other.safetensors"


def test_a_quantised_load_of_a_patched_folder_is_refused(tmp_path: Path) -> None:
    config = stirred("toy_gain").config
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UnsupportedError, match="quantised model"):
        transformers.LlamaForCausalLM(config)


def test_everything_in_transformers_can_be_taken_back() -> None:
    from transformers import PreTrainedConfig, PreTrainedModel

    def ours() -> list[bool]:
        changed: list[Any] = [PreTrainedModel.post_init, PreTrainedModel._initialize_weights, PreTrainedModel.save_pretrained]
        changed += [PreTrainedConfig.to_json_file, PreTrainedConfig.get_config_dict.__func__]
        return ["hfplug" in f.__code__.co_filename for f in changed]

    assert all(ours())
    seams = ("hfplug.seams.patch", "hfplug.seams.gate")
    try:
        for seam in seams:
            activation._ledgers.pop(seam).undo()
        assert not any(ours())
    finally:
        for seam in seams:
            activation.activate(seam)


# -- initialisation ---------------------------------------------------------------------------------------------------------


def test_a_model_from_its_configuration_is_initialised_last_by_the_patch() -> None:
    seen: list[tuple[str, bool]] = []

    def init_weights(self: Any, model: Any) -> None:
        seen.append((type(model).__name__, bool((model.get_input_embeddings().weight != 0).any())))
        nn.init.constant_(model.get_input_embeddings().weight, 7.0)

    with installed(fault("Init", init_weights=init_weights)):
        model = llama()
        before = model.get_input_embeddings().weight.clone()
        hfplug.apply(model, "toy_gain")
        assert seen == []  # a live model keeps its weights
        assert torch.equal(model.get_input_embeddings().weight, before)
        built = transformers.LlamaForCausalLM(copy.deepcopy(model.config))
        assert seen == [("LlamaModel", True), ("LlamaForCausalLM", True)]
        assert (built.get_input_embeddings().weight == 7.0).all()
        with torch.device("meta"):
            transformers.LlamaForCausalLM(copy.deepcopy(model.config))
        assert len(seen) == 2


def test_a_module_without_first_values_is_an_error() -> None:
    class Bare(PatchModule):
        def __init__(self, width: int, like: torch.Tensor) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(width))

        def after(self, module: nn.Module, args: Any, output: Any) -> Any:
            return output * (1 + self.gain)

    with installed(fault("Bare", module=Bare)):
        model = llama()
        hfplug.apply(model, "toy_gain")
        with pytest.raises(NotImplementedError, match="Bare has no reset_parameters"):
            transformers.LlamaForCausalLM(copy.deepcopy(model.config))


# -- on top: adapters, training, the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tuner", ["lora", "ulora"])
def test_an_adapter_knows_the_structure_it_was_trained_on(tuner: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

    def config() -> Any:
        if tuner == "lora":
            return LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return hfplug.tuners.config(type=tuner, r=2, target_modules=["q_proj"])

    base = stirred("toy_gain")
    base.save_pretrained(tmp_path / "base")
    shared = config()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(loaded, shared)
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert [r["plugin"] for r in stored["hfplug_patches"]] == ["toy_gain"]
    for load in (AutoPeftModelForCausalLM.from_pretrained, transformers.AutoModelForCausalLM.from_pretrained):
        assert torch.equal(logits(load(tmp_path / "adapter")), expected)
    needs = r"which has no patches\. It needs: hfplug\.apply\(model, 'toy_gain', strength=1\.0\)"
    with pytest.raises(UnsupportedError, match=needs):
        PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=needs):
        llama().load_adapter(tmp_path / "adapter")
    other = llama()
    hfplug.apply(other, "toy_gain", strength=2)
    with pytest.raises(UnsupportedError, match="trained on another structure"):
        PeftModel.from_pretrained(other, tmp_path / "adapter")
    live = stirred("toy_gain")
    assert torch.equal(logits(PeftModel.from_pretrained(live, tmp_path / "adapter")), expected)
    plain = get_peft_model(llama(), shared)  # the same configuration object, for a new adapter on a stock model
    plain.save_pretrained(tmp_path / "plain")
    assert "hfplug_patches" not in json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    with pytest.raises(UnsupportedError, match="a model without patches"):
        PeftModel.from_pretrained(stirred("toy_gain"), tmp_path / "plain")


def test_b52_training_resumes_from_a_checkpoint_of_a_patched_model(tmp_path: Path) -> None:
    from hfplug.testing.models import tiny_trainer

    def trained(folder: Path, resume: bool | str = False) -> Any:
        model = stirred("toy_gain")
        trainer = tiny_trainer(model, output_dir=folder, save_strategy="steps", save_steps=2, max_steps=4, optim="adamw_torch")
        trainer.train(resume_from_checkpoint=resume)
        return model

    straight = trained(tmp_path)
    resumed = trained(tmp_path / "again", resume=str(tmp_path / "checkpoint-2"))
    for (name, a), b in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(logits(again), logits(straight))


def test_the_command_plans_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from hfplug.cli import app

    model = llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "toy_gain", "--set", "strength=0.5", "--json"])
    assert done.exit_code == 0, done.output
    expected = json.loads(json.dumps(hfplug.plan(model, "toy_gain", strength=0.5).as_dict()))
    assert json.loads(done.output) == expected
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "toy_gain", "--set", "strenth=0.5"])
    assert isinstance(done.exception, ConfigError)
    assert "did you mean 'strength'" in str(done.exception)
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "no"), "toy_gain"])
    assert isinstance(done.exception, ConfigError)
    assert "'toy_gain'" not in str(done.exception)


@pytest.mark.parametrize("other", ["retoken", "mort"])
def test_patches_that_cannot_share_a_model_say_so(other):
    """TurboConn runs layers on groups of tokens; what looks up the tokens of a forward in a layer needs all of them."""
    for first, second in ((other, "turboconn"), ("turboconn", other)):
        model = FAMILIES["Llama"]()
        stock = portrait(model)
        handle = hfplug.apply(model, first)
        before = portrait(model)
        for attempt in (hfplug.plan, hfplug.apply):
            with pytest.raises(UnsupportedError, match=f"{other} and turboconn do not go on one model"):
                attempt(model, second)
            assert portrait(model) == before
        handle.remove()
        assert portrait(model) == stock
        hfplug.apply(model, second)
