"""The linear layer on packed weights: Triton kernels on a GPU, dequantise and multiply elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from hfplug.errors import ConfigError
from hfplug.kernels.mxfp4_plus.codec import dequantize, fake_quantize
from hfplug.kernels.mxfp4_plus.formats import DTYPES, Format, Packed

logger = logging.getLogger(__name__)


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, act_format: Format | None = None) -> Tensor:
    """``x W^T + bias`` with ``W`` stored in 4 bits.

    The gradient of ``x`` is ``grad W``, exact for the stored ``W``; the rounding of ``x`` itself, where ``act_format`` asks for
    it, passes the gradient through unchanged. ``W`` has none. Nothing of the size of ``W`` is kept for the backward pass.

    Args:
        x: ``(..., K)`` float32, bfloat16 or float16.
        packed: of shape ``(N, K)``.
        bias: ``(N,)`` or ``None``.
        act_format: quantise ``x``, too, at every call, in this format; ``hybrid`` is static here. Macro blocks of both sides
            must be equal where both have them.

    Returns:
        ``(..., N)`` in the dtype of ``x``.

    Raises:
        ConfigError: a shape, dtype or device does not fit.
    """
    act_format = _checked(x, packed, bias, act_format)
    out: Tensor = _Linear.apply(x, packed, bias, act_format)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed, bias: Tensor | None, act_format: Format | None) -> Tensor:
        ctx.packed, ctx.dtypes = packed, (x.dtype, None if bias is None else bias.dtype)
        kernels = _kernels(x, packed, act_format)
        if kernels is not None:
            return kernels.linear(x, packed, bias, act_format)
        stored = x if act_format is None else fake_quantize(x, act_format)
        return torch.nn.functional.linear(stored, dequantize(packed, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (grad,) = grads
        to_x = grad @ dequantize(ctx.packed, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        to_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.dtypes[1]) if ctx.needs_input_grad[2] else None
        return to_x, None, to_bias, None


def _kernels(x: Tensor, packed: Packed, act_format: Format | None) -> Any:
    """The Triton form, or ``None``; the log says once which."""
    reason = _why_torch(x)
    if reason is None:
        from hfplug.kernels.mxfp4_plus import triton

        reason = triton.why_not(packed.format, act_format)
    if reason is not None:
        _say(f"dequantises weights and multiplies in torch ({reason}): emulated")
        return None
    _say("uses Triton kernels that decode to the tensor cores' 16 bits: emulated")
    return triton


def _why_torch(x: Tensor) -> str | None:
    """Why the Triton kernels cannot take tensors like this one; ``None`` if they can."""
    if not x.is_cuda:
        return f"tensors are on {x.device.type!r}, and the kernels need a GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed: pip install 'hfplug[triton]'"
    return None


@functools.cache  # once per choice and process
def _say(choice: str) -> None:
    logger.info("mxfp4_plus %s", choice)


def _checked(x: Tensor, packed: Packed, bias: Tensor | None, act_format: Format | None) -> Format | None:
    if len(packed.shape) != 2:
        raise ConfigError(f"packed is of shape {packed.shape}; it must be (N, K)")
    N, K = packed.shape
    if x.dtype not in DTYPES:
        raise ConfigError(f"x is {x.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    if x.dim() < 1 or x.shape[-1] != K:
        raise ConfigError(
            f"x has the shape {tuple(x.shape)}; its last dimension must be {K}, as that of the weight {packed.shape}"
        )
    if x.device != packed.codes.device:
        raise ConfigError(f"x is on {x.device}; it must be on {packed.codes.device}, where the weight is")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ConfigError(f"bias has the shape {tuple(bias.shape)}; it must be {(N,)}")
    if act_format is None:
        return None
    act_format, weights = act_format.activations, packed.format
    if "none" not in {act_format.mbs, weights.mbs} and act_format.macro != weights.macro:
        raise ConfigError(
            f"act_format has macro blocks of {act_format.macro}; they must be {weights.macro}, as those of the weight"
        )
    return act_format
