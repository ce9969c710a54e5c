"""Merging adapters: all that is refused, by name, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing import models

Q = "layers.0.self_attn.q_proj"


def wrapped(seed: int, **options):
    """A new model with one LoRA whose factors are both random."""
    torch.manual_seed(seed)
    chosen = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"], **options}
    return peft.get_peft_model(models.tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **chosen))


def folder(path: Path, seed: int) -> Path:
    wrapped(seed).save_pretrained(path)
    return path


def edit(path: Path, tensors=None, **options) -> Path:
    """Change a saved adapter."""
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **options}))
    if tensors is not None:
        kept = load_file(path / "adapter_model.safetensors")
        save_file(tensors(kept), path / "adapter_model.safetensors")
    return path


def without(part):
    return lambda tensors: {k: t for k, t in tensors.items() if part not in k}


def changed(part, value):
    return lambda tensors: {k: value(t) if part in k else t for k, t in tensors.items()}


def grown(tensors):
    return {k: torch.cat([t, t]) if "q_proj.lora_B" in k else t for k, t in tensors.items()}


REFUSED = {
    "ia3": ({"peft_type": "IA3"}, None, ConfigError, r"b'.*'IA3'.*only adapters of type 'LORA'"),
    "ours": ({"peft_type": "ULORA"}, None, ConfigError, r"b'.*'ULORA'.*hfplug export"),
    "dora": ({"use_dora": True}, None, UnsupportedError, r"b'.*use_dora=True"),
    "bias": ({"bias": "all"}, None, UnsupportedError, r"bias='all'.*allowed: 'none'"),
    "lora_bias": ({"lora_bias": True}, None, UnsupportedError, "lora_bias=True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None, UnsupportedError, "modules_to_save"),
    "target_parameters": ({"target_parameters": ["w"]}, None, UnsupportedError, "target_parameters"),
    "tokens": ({"trainable_token_indices": [3]}, None, UnsupportedError, "trainable_token_indices"),
    "alora": ({"alora_invocation_tokens": [3]}, None, UnsupportedError, "alora_invocation_tokens"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, None, UnsupportedError, "pissa.*changed the weights of its base"),
    "unknown option": ({"lora_alfa": 3}, None, ConfigError, r"'lora_alfa'.*did you mean 'lora_alpha'"),
    "base": ({"base_model_name_or_path": "org/large"}, None, ConfigError, r"a'.*'org/small'.*b'.*'org/large'"),
    "task": ({"task_type": "SEQ_CLS"}, None, ConfigError, r"a'.*'CAUSAL_LM'.*b'.*'SEQ_CLS'"),
    "fan": ({"fan_in_fan_out": True}, None, ConfigError, r"a'.*fan_in_fan_out=False.*b'.*True"),
    "rank": ({"r": 5}, None, ConfigError, r"q_proj' the rank 5, but its factors have 4"),
    "shape": ({}, grown, ConfigError, r"q_proj' is \(32, 32\).*a'.*\(64, 32\).*b'"),
    "no A": ({}, without(f"{Q}.lora_A"), ConfigError, r"b'.*q_proj' lacks its lora_A"),
    "no B": ({}, without(f"{Q}.lora_B"), ConfigError, r"b'.*q_proj' lacks its lora_B"),
    "nothing": ({}, lambda t: {}, ConfigError, "holds no LoRA tensors"),
    "nan": ({}, changed(f"{Q}.lora_B", lambda t: t * float("nan")), ConfigError, r"b'.*lora_B of .*q_proj'.*not finite"),
    "infinite": ({}, changed(f"{Q}.lora_A", lambda t: t / 0), ConfigError, r"lora_A of .*not finite"),
    "conv": ({}, changed(f"{Q}.lora_A", lambda t: t[..., None, None].contiguous()), UnsupportedError, "only adapters of linear"),
    "embedding": ({}, lambda t: {**t, "base_model.model.e.lora_embedding_A": torch.ones(4, 8)}, UnsupportedError, "embedding"),
    "magnitude": ({}, lambda t: {**t, f"{Q}.lora_magnitude_vector.weight": torch.ones(4)}, UnsupportedError, "DoRA"),
    "whole weight": ({}, lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(4)}, UnsupportedError, "whole weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_before_anything_is_written(tmp_path, case):
    options, tensors, error, message = REFUSED[case]
    a = edit(folder(tmp_path / "a", 1), base_model_name_or_path="org/small")
    b = edit(folder(tmp_path / "b", 2), tensors, **options)
    with pytest.raises(error, match=message):
        hfplug.tuners.merge([a, b], output=tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


def test_b57_sharded_tensors_are_refused(tmp_path):
    a = folder(tmp_path / "a", 1)
    b = edit(folder(tmp_path / "b", 2), changed(f"{Q}.lora_A", lambda t: t.new_empty(0)))
    with pytest.raises(ConfigError, match=r"b'.*lora_A of .*q_proj' is empty.*ZeRO-3.*gather"):
        hfplug.tuners.merge([a, b], output=tmp_path / "out")
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), a, "a")
    layer = model.get_base_model().get_submodule(f"model.{Q}")
    layer.lora_B["a"].weight.data = torch.empty(0)
    with pytest.raises(ConfigError, match=r"'a'.*lora_B of .*q_proj' is empty"):
        hfplug.tuners.merge(model)
    assert list(model.peft_config) == ["a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": []}, r"adapters=\[\] is empty"),
        ({"adapters": "one"}, "must be a list"),
        ({"weights": [1]}, "1 values for 2 adapters"),
        ({"weights": [1, float("nan")]}, "nan is not a finite number"),
        ({"weights": [1, "2"]}, "'2' is not a finite number"),
        ({"rank": 0}, "rank=0 must be an integer > 0"),
        ({"rank": 2.0}, r"rank=2\.0 must be an integer"),
        ({"seed": "x"}, "seed='x' must be an integer"),
        ({"method": "ctn"}, r"'ctn'.*did you mean 'ctm'"),
        ({"method": "ulora"}, r"'ulora' is a tuner, not a merge"),
        ({"rule": "tie"}, r"rule='tie'.*did you mean 'ties'"),
        ({"bta": 0.1}, r"no option 'bta'.*did you mean 'beta'"),
        ({"beta": 2.0}, r"beta=2\.0 must be in \[0, 1\]"),
        ({"density": 0.0}, "density"),
        ({"drop": 1.0}, "drop"),
        ({"name": "x", "model": object()}, "must be a PeftModel"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, changes, message):
    arguments = {"adapters": [folder(tmp_path / "a", 1), tmp_path / "a"], **changes}
    with pytest.raises(ConfigError, match=message):
        hfplug.tuners.merge(**arguments)


def test_a_pickle_is_not_read(tmp_path):
    a = folder(tmp_path / "a", 1)
    (a / "adapter_model.safetensors").rename(a / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="pickle"):
        hfplug.tuners.merge([a])


def test_folders_that_are_none_are_named(tmp_path):
    nowhere = "neither a folder nor an adapter on the Hub"
    for path, message in ((tmp_path / "no", "no such folder"), (tmp_path, r"lacks adapter_config\.json"), ("o/n", nowhere)):
        with pytest.raises(ConfigError, match=message):
            hfplug.tuners.merge([path])


def test_an_output_that_holds_something_is_left_alone(tmp_path):
    a, out = folder(tmp_path / "a", 1), tmp_path / "out"
    out.mkdir()
    hfplug.tuners.merge([a], output=out)  # an empty folder is as good as none
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ConfigError, match=r"output=.*exists and is not an empty folder"):
        hfplug.tuners.merge([a], output=out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_the_model_route_refuses_by_name(tmp_path):
    a = folder(tmp_path / "a", 1)
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), a, "a")
    for arguments, message in (
        ({"adapters": ["b"]}, r"no adapter 'b'.*\['a'\]"),
        ({"adapters": ["a"], "name": "a"}, "already has an adapter"),
        ({"adapters": ["a"], "output": tmp_path / "out"}, "save_pretrained"),
    ):
        with pytest.raises(ConfigError, match=message):
            hfplug.tuners.merge(model=model, **arguments)
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge_adapter"):
        hfplug.tuners.merge(model)
    assert list(model.peft_config) == ["a"]


def test_embeddings_of_a_live_model_are_refused():
    model = wrapped(1, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(UnsupportedError, match=r"embed_tokens' is an embedding"):
        hfplug.tuners.merge(model)
