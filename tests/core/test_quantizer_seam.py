"""The seam of quantizers: what is refused when it registers, errors of options, and the gate it shares with patches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantizer_toys
import torch
import transformers
from quantizer_toys import ToyConfig, ToyLinear, entry, installed
from torch import nn
from transformers.quantizers import auto

from hfplug.artefacts import quantizer_record
from hfplug.errors import ConfigError, HfplugError, LedgerError, MissingPluginError, UnsupportedError
from hfplug.ledger import Ledger
from hfplug.packed import PackedLinear, packed_modules
from hfplug.seams.quantizer import register
from hfplug.testing import models


def saved(tmp_path: Path, **options: Any) -> Path:
    models.tiny_llama(**options).save_pretrained(tmp_path / "full")
    return tmp_path / "full"


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def test_a_method_is_there_and_can_be_taken_back() -> None:
    assert "toy_int8" not in auto.AUTO_QUANTIZER_MAPPING
    with installed():
        assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["toy_int8"] is ToyConfig
        assert "toy_int8" in auto.AUTO_QUANTIZER_MAPPING
    assert "toy_int8" not in auto.AUTO_QUANTIZER_MAPPING
    assert "toy_int8" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING


def test_what_is_no_quantizer_is_refused_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quantizer_toys, "Bare", type("Bare", (quantizer_toys.ToyQuantizer,), {"linear_cls": nn.Linear}), raising=False
    )
    monkeypatch.setattr(quantizer_toys, "Other", type("Other", (quantizer_toys.ToyQuantizer,), {"method": "x"}), raising=False)
    wrong = [
        (entry("quantizer_toys:ToyLinear"), "PluginQuantizer"),
        (entry(config="quantizer_toys:ToyLinear"), "QuantizerConfig"),
        (entry("quantizer_toys:Bare"), "linear_cls"),
        (entry("quantizer_toys:Other"), "method='x'"),
        (entry(name="gptq"), "must be 'gptq'"),
    ]
    before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    for own, words in wrong:
        with Ledger("test") as ledger, pytest.raises(HfplugError, match=words):
            register(ledger, own)
        assert before == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    with installed(), Ledger("second") as ledger, pytest.raises(LedgerError, match=r"'toy_int8' is already registered by"):
        register(ledger, entry())


def test_a_layout_that_could_be_full_precision_is_refused() -> None:
    class Plain(ToyLinear):
        @classmethod
        def layout(cls, out_features: int, in_features: int, config: Any) -> Any:
            return {"weight": ((out_features, in_features), torch.uint8)}

    with installed(), pytest.raises(HfplugError, match="cannot be taken for"):
        Plain(4, 4, False, ToyConfig())


def test_what_pack_makes_must_be_the_layout() -> None:
    class Short(ToyLinear):
        @classmethod
        def pack(cls, weight: torch.Tensor, config: Any) -> Any:
            return {"weight": super().pack(weight, config)["weight"]}

    with installed(), pytest.raises(HfplugError, match=r"Short\.pack made"):
        Short.from_linear(nn.Linear(4, 4), ToyConfig())


def test_options_are_strict() -> None:
    with installed():
        with pytest.raises(ConfigError, match=r"levels=0 must be in \[1, 127\]"):
            ToyConfig(levels=0)
        with pytest.raises(ConfigError, match=r"'level'.*'levels'"):
            ToyConfig.from_dict({"quant_method": "toy_int8", "level": 3})
        with pytest.raises(ConfigError, match=r"levels='many'"):
            ToyConfig.from_dict({"quant_method": "toy_int8", "levels": "many"})
        config, unused = ToyConfig.from_dict({"levels": 5}, return_unused_kwargs=True, other=1)
        assert (config.levels, unused) == (5, {"other": 1})
        assert ToyConfig.from_dict(config.to_dict()) == config
        assert "dequantize" not in config.to_dict()


def test_layers_with_a_bias_and_autocast() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(12, 5), torch.randn(2, 3, 12, requires_grad=True)
    with installed():
        packed = PackedLinear.from_linear.__func__(ToyLinear, linear, ToyConfig())  # type: ignore[attr-defined]
    packed.bias = nn.Parameter(packed.bias.detach().clone())
    weight = packed.unpack(torch.float32)
    for bias in (packed.bias, linear.bias):
        assert bias is not None
        bias.grad = None
    packed(x).square().sum().backward()
    assert x.grad is not None
    found, x.grad = x.grad, None
    nn.functional.linear(x, weight, linear.bias).square().sum().backward()
    assert torch.equal(found, x.grad)
    assert packed.bias.grad is not None
    assert linear.bias.grad is not None
    assert torch.allclose(packed.bias.grad, linear.bias.grad, rtol=1e-6, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16


def test_the_gate_names_the_distribution_and_opens_for_nothing_else(tmp_path: Path) -> None:
    with installed():
        model = load(saved(tmp_path), quantization_config=ToyConfig())
        model.save_pretrained(tmp_path / "packed")
        config = transformers.AutoConfig.from_pretrained(tmp_path / "packed")
        assert not hasattr(config, "transformers_weights")
        record = quantizer_record(config)
        assert record is not None
        assert record["plugin"] == "toy_int8"
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert stored["transformers_weights"].startswith("needs hfplug (pip install hfplug hfplug-toy")
    with pytest.raises(MissingPluginError, match="toy_int8"):
        load(tmp_path / "packed")
    assert "transformers_weights" not in json.loads((tmp_path / "full" / "config.json").read_text())


def test_a_patch_on_packed_weights_is_refused_and_the_gate_holds_for_both(tmp_path: Path) -> None:
    import hfplug

    with installed():
        model = load(saved(tmp_path), quantization_config=ToyConfig())
        with pytest.raises(UnsupportedError, match="quantised"):
            hfplug.apply(model, "simplenorm")
        model.config.hfplug = {"patches": [{"plugin": "p", "distribution": "hfplug-other", "version": "1", "format": 1}]}
        model.config.save_pretrained(tmp_path / "both")
    name = json.loads((tmp_path / "both" / "config.json").read_text())["transformers_weights"]
    assert "hfplug hfplug-other hfplug-toy" in name


def test_weights_that_are_missing_or_of_another_shape_are_errors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    with installed():
        save_file({k: v for k, v in tensors.items() if k != lost}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(HfplugError, match=r"layers\.1\.mlp\.up_proj.*modules_to_not_convert"):
            load(folder, quantization_config=ToyConfig())
        save_file({**tensors, lost: tensors[lost][:, :-1].contiguous()}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(RuntimeError):
            load(folder, quantization_config=ToyConfig())


def test_pickled_weights_are_not_read_as_packed(tmp_path: Path) -> None:
    with installed():
        model = load(saved(tmp_path), quantization_config=ToyConfig())
        model.save_pretrained(tmp_path / "packed")
        torch.save(model.state_dict(), tmp_path / "packed" / "pytorch_model.bin")
        (tmp_path / "packed" / "model.safetensors").unlink()
        with pytest.raises(UnsupportedError, match="safetensors"):
            load(tmp_path / "packed", use_safetensors=False)


def test_the_dtype_asked_for_and_a_config_that_is_reused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with installed():
        config = ToyConfig(levels=60)
        one = load(folder, quantization_config=config, dtype=torch.bfloat16)
        two = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)  # Auto classes copy it
        assert one(torch.arange(3, 9)[None]).logits.dtype == torch.bfloat16
        assert two.lm_head.weight.dtype == torch.float32
        assert config.modules_to_not_convert is None
        assert two.dequantize(torch.bfloat16).model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        two.save_pretrained(tmp_path / "plain")  # writes its dtype as a string


def test_routers_of_experts_are_left_alone(tmp_path: Path) -> None:
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, decoder_sparse_step=1,
    )  # fmt: skip
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "full")
    with installed():
        model = load(tmp_path / "full", quantization_config=ToyConfig())
        names = {name.rpartition(".")[2] for name in packed_modules(model)}
        assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert type(model.model.layers[0].mlp.shared_expert_gate) is nn.Linear
        model.save_pretrained(tmp_path / "packed")
        again = load(tmp_path / "packed")
        ids = torch.arange(3, 12)[None]
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_folder_of_one_class_is_read_by_another_whose_last_module_is_packed_there(tmp_path: Path) -> None:
    """BERT's pooler is the last module of the bare model, and is packed in a classifier's folder; a new head stays whole."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_labels=3
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "full")
    with installed():
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "full", quantization_config=ToyConfig())
        assert type(model.classifier) is nn.Linear
        assert "bert.pooler.dense" in packed_modules(model)
        model.save_pretrained(tmp_path / "packed")
        bare = transformers.BertModel.from_pretrained(tmp_path / "packed")
        assert all(torch.equal(t, bare.state_dict()[n]) for n, t in model.bert.state_dict().items())
        asked = transformers.BertForQuestionAnswering.from_pretrained(tmp_path / "packed")
        assert type(asked.qa_outputs) is nn.Linear
        assert asked.qa_outputs.weight.isfinite().all()


def test_device_maps_and_pefts_preparation(tmp_path: Path) -> None:
    import peft

    folder = saved(tmp_path)
    with installed():
        model = load(folder, quantization_config=ToyConfig(), device_map={"": "cpu"})
        ids = torch.arange(3, 12)[None]
        expected = load(folder, quantization_config=ToyConfig())(ids).logits
        assert torch.equal(model(ids).logits, expected)
        model.save_pretrained(tmp_path / "packed")
        assert torch.equal(load(tmp_path / "packed", device_map={"": "cpu"})(ids).logits, expected)
        assert torch.equal(peft.prepare_model_for_kbit_training(model)(ids).logits, expected)


def test_pefts_own_tuners_train_on_packed_layers_and_do_not_merge(tmp_path: Path) -> None:
    """VeRA asks for the backend of a quantised layer: it runs, and its merge, which would round in silence, is refused."""
    import peft

    with installed():
        model = load(saved(tmp_path), quantization_config=ToyConfig())
        ids = torch.arange(3, 12)[None]
        bare = model(ids).logits
        adapted = peft.get_peft_model(model, peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False)).eval()
        expected = adapted(ids).logits
        assert not torch.equal(expected, bare)
        with pytest.raises(UnsupportedError, match="dequantize"):
            adapted.merge_adapter()
        assert torch.equal(adapted.unload()(ids).logits, bare)
