"""KIVI's cache: blocks of groups with a step and a minimum."""

from __future__ import annotations

import torch
from torch import Tensor

from hfplug.blockcache import BlockLayer
from hfplug.caching import MethodCache
from hfplug.errors import ConfigError
from hfplug.kernels.kivi.config import KiviConfig
from hfplug.lowbit import Groups, dequantise, pack, quantise, unpack


class KiviLayer(BlockLayer):
    """One layer: keys in groups of tokens per channel, values in groups of channels per token (KIVI, section 3)."""

    options: KiviConfig

    def check(self, key_dim: int, value_dim: int) -> None:
        """The group must divide the values of a token."""
        group = self.options.groups[1]
        if value_dim % group:
            fits = [g for g in range(1, value_dim + 1) if value_dim % g == 0]
            raise ConfigError(f"kivi: group_size={group} for values does not divide heads of {value_dim}; {fits} do")

    def encode(self, keys: Tensor, values: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """Codes packed along channels, steps and minima."""
        options, mask = self.options, counted[:, None, :, None]
        dtype = getattr(torch, options.scale_dtype)
        found: dict[str, Tensor] = {}
        for name, states, axis in (("key", keys, 2), ("value", values, 3)):
            groups = quantise(states, options.bits, axis, options.groups[axis - 2], mask, dtype)
            found[f"{name}_codes"] = pack(groups.codes, options.bits)
            found[f"{name}_step"], found[f"{name}_minimum"] = groups.step, groups.minimum
        self.dims = keys.shape[-1], values.shape[-1]
        return found

    def decode(self) -> tuple[Tensor, Tensor]:
        """All blocks."""
        keys, values = (
            dequantise(
                Groups(
                    unpack(self.state[f"{name}_codes"], self.options.bits, dim),
                    self.state[f"{name}_step"],
                    self.state[f"{name}_minimum"],
                ),
                axis,
            )
            for name, dim, axis in (("key", self.dims[0], 2), ("value", self.dims[1], 3))
        )
        return keys, values

    def block_formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        """``bits`` an element, and a step and a minimum a group."""
        o, size = self.options, getattr(torch, self.options.scale_dtype).itemsize
        codes = sum(-(-dim * o.bits // 8) for dim in (key_dim, value_dim)) * self.blocked
        scales = (self.blocked // o.groups[0] * key_dim + self.blocked * (value_dim // o.groups[1])) * 2 * size
        return rows * heads * (codes + scales)


class KiviCache(MethodCache):
    """KIVI's cache for one generation or conversation: ``model.generate(..., cache=KiviCache(model.config))``."""

    method, config_class, layer_class = "kivi", KiviConfig, KiviLayer
