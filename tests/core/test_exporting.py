"""Export to a plain LoRA: what is written, what is refused, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hfplug
from hfplug import ConfigError, UnsupportedError
from hfplug.cli import app
from hfplug.testing import models

IDS = torch.arange(3, 15)[None]


def adapter(folder, kind="bayes_lora", **options):
    torch.manual_seed(0)
    chosen = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    model = peft.get_peft_model(models.tiny_llama(), hfplug.tuners.config(type=kind, **chosen)).eval()
    model.save_pretrained(folder)
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_heads_trained_whole_go_along(tmp_path):
    model = adapter(tmp_path / "a", modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    model.save_pretrained(tmp_path / "a")
    report = hfplug.tuners.export(tmp_path / "a", tmp_path / "b")
    assert (report.modules, report.rank, report.logit_error, report.approximation) == (4, 4, None, None)
    plain = peft.PeftModel.from_pretrained(models.tiny_llama(), tmp_path / "b")
    assert (logits(plain) - logits(model)).abs().max() <= 1e-5
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == ("LORA", 4, 4, False)
    assert "hfplug" not in config


def test_the_loaded_base_is_used_and_given_back(tmp_path):
    model, base = adapter(tmp_path / "a"), models.tiny_llama()
    before = logits(base)
    report = hfplug.tuners.export(tmp_path / "a", tmp_path / "b", base=base)
    assert report.logit_error <= 1e-5
    assert report.logit_scale > 0
    assert torch.equal(logits(base), before)
    assert not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in base.modules())
    assert "exact" in str(report)
    assert model.peft_config["default"].method in str(report)


@pytest.mark.parametrize("fault", ["nan", "empty"])
def test_b57_tensors_that_are_no_weights_are_refused(tmp_path, fault):
    adapter(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if "bayes_lora_B" in n)
    tensors[name] = torch.full_like(tensors[name], float("nan")) if fault == "nan" else tensors[name][:0]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="lora_B"):
        hfplug.tuners.export(tmp_path / "a", tmp_path / "out" / "b")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_refused(tmp_path):
    adapter(tmp_path / "a")
    out = tmp_path / "b"
    with pytest.raises(ConfigError, match="did you mean 'lora'"):
        hfplug.tuners.export(tmp_path / "a", out, to="lore")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        hfplug.tuners.export(tmp_path, out)
    adapter(tmp_path / "u", "ulora")
    with pytest.raises(UnsupportedError, match="approximate=True"):
        hfplug.tuners.export(tmp_path / "u", out)
    with pytest.raises(UnsupportedError, match="base="):
        hfplug.tuners.export(tmp_path / "u", out, approximate=True)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "adapter_config.json").write_text((tmp_path / "a" / "adapter_config.json").read_text())
    with pytest.raises(ConfigError, match="pickles are not read"):
        hfplug.tuners.export(tmp_path / "p", out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        hfplug.tuners.export(tmp_path / "a", tmp_path / "full")
    assert (tmp_path / "full" / "keep.txt").read_text() == "mine"
    assert not out.exists()


def test_the_command(tmp_path):
    models.tiny_llama().save_pretrained(tmp_path / "base")
    adapter(tmp_path / "u", "ulora")
    words = ["export", str(tmp_path / "u"), "-o", str(tmp_path / "b"), "--json"]
    words += ["--approximate", "--base", str(tmp_path / "base")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["method"] == "ulora"
    assert found["logit_error"] >= 0
    assert found["approximation"]
    assert (tmp_path / "b" / "adapter_model.safetensors").is_file()
    with pytest.raises(ConfigError, match="exists"):
        CliRunner().invoke(app, words, catch_exceptions=False)
