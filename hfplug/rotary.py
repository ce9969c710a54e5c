"""Taking the rotary embedding off keys that a cache is given, and putting it on again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig


def rope_of(config: PreTrainedConfig, index: int) -> dict[str, Any] | None:
    """The rotary parameters of a layer; ``None`` where the model has none."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict) or not found:
        return None
    types = getattr(config, "layer_types", None)
    if "rope_theta" not in found and types is not None:  # by layer type
        found = found.get(types[index])
    return found if isinstance(found, dict) and "rope_theta" in found else None


class Rotation:
    """The rotation of a layer's keys by position, as its configuration declares it: pairs ``(i, i + size / 2)``.

    It serves to store keys in a frame where they move little from token to token. Whatever the model really does, turning back
    and forth is lossless; where the model rotates differently (interleaved pairs, frequencies that depend on the length), only
    the benefit is less.

    Args:
        rope: from :func:`rope_of`.
        dim: size of a head.
    """

    def __init__(self, rope: dict[str, Any], dim: int) -> None:
        self.size = int(dim * float(rope.get("partial_rotary_factor", 1.0))) // 2 * 2
        steps = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        self.frequencies = (float(rope["rope_theta"]) ** -steps).float()
        kind = rope.get("rope_type", "default")
        if kind == "linear":
            self.frequencies = self.frequencies / float(rope["factor"])
        elif kind == "llama3":
            self.frequencies = _llama3(self.frequencies, rope)

    def __call__(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotate ``x``.

        Args:
            x: ``(rows, heads, tokens, dim)``.
            positions: ``(rows, tokens)``.
            back: take the rotation off.

        Returns:
            fp32, the shape of ``x``.
        """
        angle = positions[:, None, :, None].float() * self.frequencies.to(x.device)
        cos, sin = angle.cos(), -angle.sin() if back else angle.sin()
        x = x.float()
        half = self.size // 2
        first, second, rest = x[..., :half], x[..., half : self.size], x[..., self.size :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's slowing of the low frequencies, smooth in between."""
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(rope["original_max_position_embeddings"]) * frequencies / (2 * torch.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / factor)


__all__ = ["Rotation", "rope_of"]
