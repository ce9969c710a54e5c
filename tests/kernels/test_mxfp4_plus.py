"""MXFP4 with overflow-aware and macro block scaling in models: the contract in four settings, options, importance, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from quantizer_toys import TUNERS
from torch import nn

from hfplug.errors import ConfigError
from hfplug.kernels.mxfp4_plus import Mxfp4PlusConfig, calibrate, codec
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
