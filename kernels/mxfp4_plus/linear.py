"""The linear layer: packed tensors, and :func:`hfplug.kernels.mxfp4_plus.ops.linear` on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfplug.kernels.mxfp4_plus import codec, ops
from hfplug.kernels.mxfp4_plus.config import Mxfp4PlusConfig
from hfplug.kernels.mxfp4_plus.formats import Packed
from hfplug.packed import Layout, PackedLinear


class Mxfp4PlusLinear(PackedLinear):
    """``y = Q(x)·Ŵᵀ + b``, ``Ŵ`` in 4 bits and ``Q`` the identity, or rounding to 4 bits where ``activations=4``.

    ``weight`` uint8 ``(out, blocks, block / 2)``: two E2M1 codes a byte, the even position in the low half, as in gpt-oss;
    ``weight_scales`` uint8 ``(out, blocks)``: E8M0; ``weight_mbs`` uint8 ``(out, macro blocks)``: ``f = 1 + byte / 256``, where
    ``mbs`` is on. Inputs are padded with zeros to whole blocks.
    """

    method = "mxfp4_plus"
    config: Mxfp4PlusConfig

    @classmethod
    def layout(cls, out_features: int, in_features: int, config: Mxfp4PlusConfig) -> Layout:
        fmt = config.format
        blocks = fmt.padded(in_features) // fmt.block
        shapes = {"weight": (out_features, blocks, fmt.block // 2), "weight_scales": (out_features, blocks)}
        if fmt.mbs != "none":
            shapes["weight_mbs"] = (out_features, fmt.macros(in_features))
        return {name: (shape, torch.uint8) for name, shape in shapes.items()}

    @classmethod
    def pack(cls, weight: Tensor, config: Mxfp4PlusConfig, importance: Tensor | None = None) -> dict[str, Tensor]:
        """As the base class's, with the weight of each input in the error that dynamic factors minimise, ``(in_features,)``."""
        if weight.dtype == torch.float64:
            weight = weight.float()
        packed = codec.quantize(weight, config.format, importance=importance)
        made = {"weight": packed.codes.unflatten(-1, (-1, config.block // 2)), "weight_scales": packed.scales}
        return made if packed.factors is None else {**made, "weight_mbs": packed.factors}

    @property
    def packed(self) -> Packed:
        """The weight as the codec and the kernels take it."""
        codes, factors = self.weight.detach().flatten(1), getattr(self, "weight_mbs", None)
        shape = (self.out_features, self.in_features)
        return Packed(codes, self.weight_scales.detach(), factors, shape, self.config.format.weights)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return codec.dequantize(self.packed, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype == torch.float64:  # to check gradients in; no kernel takes it
            return super().forward(x)
        return ops.linear(x, self.packed, self.bias, act_format=self.config.act_format)

    def product(self, x: Tensor) -> Tensor:
        act_format = self.config.act_format
        return super().product(x if act_format is None else codec.fake_quantize(x.float(), act_format).to(x.dtype))

    @classmethod
    def execution(cls, config: Any) -> str:
        inputs = "" if config.activations == 16 else ", inputs are rounded to 4 bits at every call"
        return (
            f"emulated: weights are unpacked in every forward, in the kernel on a GPU{inputs}; products are in the input's dtype"
        )
