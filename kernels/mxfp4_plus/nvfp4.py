"""NVFP4, for comparison: blocks of 16 with E4M3 scales and one float32 scale for the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from hfplug.kernels.mxfp4_plus.bits import rounded
from hfplug.kernels.mxfp4_plus.formats import checked

BLOCK, LARGEST, LARGEST_SCALE, SMALLEST_SCALE = 16, 6.0, 448.0, 2.0**-6


def fake_quantize(x: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """``x`` as NVFP4 would store it, in the dtype of ``x``.

    With ``g`` the tensor's scale: a block's scale is ``s = E4M3(amax / 6 / g)``, at least 2^-6, the smallest normal number of
    E4M3 (torchao's choice: quieter blocks lose precision, then vanish); a number is ``E2M1(x (1 / g) / s) s g``.

    Args:
        x: ``(..., K)`` float32, bfloat16 or float16, finite; rows are padded with zeros to the next multiple of 16.
        tensor_scale: float32, one number; by default ``max |x| / (448 * 6)``, which takes the largest block's scale to 448.
    """
    width = checked(x).shape[-1]
    values = torch.nn.functional.pad(x.detach().float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    if not x.numel():
        return x.detach().clone()
    largest = values.abs().amax(-1, keepdim=True)
    g = largest.amax() / (LARGEST_SCALE * LARGEST) if tensor_scale is None else tensor_scale.float()
    if not bool(g > 0):  # all zeros
        g = torch.ones_like(g)
    s = (largest / LARGEST / g).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float8_e4m3fn).float()
    y = values * ((1.0 / g) / s)
    stored = rounded(y.abs().clamp_(max=LARGEST)).copysign_(values).mul_(s).mul_(g)
    return stored.flatten(-2)[..., :width].to(x.dtype)
