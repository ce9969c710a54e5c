"""A packed model as plain OCP MXFP4, in the layout of compressed-tensors, which vLLM and stock transformers read."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hfplug import artefacts
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.kernels.mxfp4_plus import codec
from hfplug.kernels.mxfp4_plus.linear import Mxfp4PlusLinear
from hfplug.packed import packed_modules


@dataclass(frozen=True)
class OcpReport:
    """What an export wrote.

    Attributes:
        output: the folder.
        modules: packed layers.
        exact: whether every weight is the very one of the model (blocks of 32 without factors); else it was rounded again.
        weight_error: root mean square of the difference to the model's weights, relative to theirs.
    """

    output: Path
    modules: int
    exact: bool
    weight_error: float

    def __str__(self) -> str:
        how = (
            "bit for bit" if self.exact else f"quantised again, which moved the weights by {self.weight_error:.3g} of their size"
        )
        return f"{self.modules} layers as OCP MXFP4 in {self.output}, {how}"


def export_ocp(model: Any, output: str | Path) -> OcpReport:
    """Write a model that was loaded with ``Mxfp4PlusConfig`` as plain OCP MXFP4: blocks of 32, power-of-two scales, no factors.

    The folder holds ``weight_packed`` and ``weight_scale`` for each layer and a config.json of the format
    ``mxfp4-pack-quantized``; it needs no hfplug. Weights in blocks of 16 or with factors are quantised again from what is
    stored, by the model's rule for scales.

    Args:
        model: the quantised model, no adapter on it.
        output: the folder; it must not exist, or be empty.

    Raises:
        ConfigError: the model is not packed by this method, or the folder holds something.
        UnsupportedError: an adapter is on the model, or a layer's inputs are no multiple of 32, which the format needs.
    """
    folder = Path(output)
    artefacts.check_new_folder(folder, "output")
    packed = packed_modules(model)
    layers = {name: module for name, module in packed.items() if isinstance(module, Mxfp4PlusLinear)}
    if not layers or not hasattr(model, "hf_quantizer"):
        raise ConfigError(f"model={type(model).__name__} was not loaded with Mxfp4PlusConfig; it has no layer to export")
    if wrapped := [name for name in layers if name.rpartition(".")[2] == "base_layer"]:
        raise UnsupportedError(f"{wrapped[0]!r} carries an adapter; unload it before exporting the model")
    if odd := [name for name, module in layers.items() if module.in_features % 32]:
        raise UnsupportedError(f"{odd[0]!r} has {layers[odd[0]].in_features} inputs; the format needs a multiple of 32")
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    lost = size = 0.0
    for name, module in layers.items():
        for key in module.layout(module.out_features, module.in_features, module.config):
            del tensors[f"{name}.{key}"]
        plain = codec.to_ocp(module.packed)
        own, written = module.unpack(torch.float32), codec.dequantize(plain)
        lost += float((own - written).double().square().sum())
        size += float(own.double().square().sum())
        tensors[f"{name}.weight_packed"] = plain.codes.cpu().contiguous()
        tensors[f"{name}.weight_scale"] = plain.scales.cpu().contiguous()
    tensors = {name: t for name, t in tensors.items() if name not in tied}
    config = copy.deepcopy(model.config)
    skipped = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    config.quantization_config = _scheme(skipped, inputs=next(iter(layers.values())).config.activations == 4)
    with artefacts.new_folder(folder) as part:
        save_file(tensors, part / "model.safetensors", {"format": "pt"})
        config.save_pretrained(part)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(part)
        _check_plain(part)
    exact = all(m.config.format.weights == codec.Format(32, m.config.scale) for m in layers.values())
    return OcpReport(folder, len(layers), exact, (lost / size) ** 0.5 if size else 0.0)


def _scheme(ignore: list[str], inputs: bool) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "num_bits": 4, "type": "float", "strategy": "group", "symmetric": True, "group_size": 32, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**numbers, "dynamic": False}, "input_activations": None}
    if inputs:
        group["input_activations"] = {**numbers, "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}}, "ignore": ignore,
    }  # fmt: skip


def _check_plain(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "transformers_weights" in stored:
        raise ConfigError("the model is patched, and without hfplug nothing could read what would be written; remove its patches")


__all__ = ["OcpReport", "export_ocp"]
