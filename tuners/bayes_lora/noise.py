"""Standard normal noise that is a function of names and numbers: nothing to store, nothing to keep in step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def noise(identity: Sequence[object], like: torch.Tensor) -> torch.Tensor:
    """Noise of the shape and device of ``like``, float32 (float64 for float64), the same whenever ``identity`` is.

    Gradient checkpointing recomputes a layer, accumulation runs it several times a step, a cache carries keys and values
    from one call to the next: all of them must meet the same weights. A generator of its own per tensor gives that without
    storing the noise, and leaves torch's global generator alone.
    """
    digest = hashlib.blake2b(repr(tuple(identity)).encode(), digest_size=8).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=dtype)
