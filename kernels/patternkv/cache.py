"""PatternKV's cache: what is quantised is the difference of a token from one of a few patterns of its head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfplug.blockcache import BlockLayer
from hfplug.caching import MethodCache
from hfplug.errors import ConfigError
from hfplug.kernels.patternkv.config import PatternKVConfig
from hfplug.kernels.patternkv.patterns import middle, mine, narrowest, narrows, nearest
from hfplug.lowbit import Groups, dequantise, pack, quantise, unpack

_PARTS = (("key", 2), ("value", 3))  # and the axis along which numbers are grouped
_LARGEST = 255


class PatternKVLayer(BlockLayer):
    """One layer. Index 0 stands for no pattern: it is what the gate gives to values, and it costs no mask of its own."""

    options: PatternKVConfig

    def __init__(self, options: Any, config: Any, index: int) -> None:
        super().__init__(options, config, index)
        self.sizes: dict[str, int] = {}
        if options.share_batch:
            self.without_rows = frozenset(  # type: ignore[misc]
                f"{part}_pattern{what}" for part, _ in _PARTS for what in ("s", "_codes", "_step", "_minimum")
            ) | {"mined"}

    def check(self, key_dim: int, value_dim: int) -> None:
        """The group must divide the values of a token."""
        if value_dim % self._value_group(value_dim):
            fits = [g for g in range(1, value_dim + 1) if value_dim % g == 0]
            raise ConfigError(
                f"patternkv: value_group={self.options.value_group} does not divide heads of {value_dim}; {fits} do"
            )

    def encode(self, keys: Tensor, values: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """Indices, codes, steps and minima of the differences; patterns where there are none yet, or new ones."""
        options, mask = self.options, counted[:, None, :, None]
        dtype = getattr(torch, options.scale_dtype)
        self.sizes = {"key": keys.shape[-1], "value": values.shape[-1]}
        known = self._mined_rows(counted)
        found: dict[str, Tensor] = {}
        for (part, axis), states in zip(_PARTS, (keys, values), strict=True):
            self._learn(part, states, counted, known)
            patterns = self.patterns(part)
            index = self._assign(part, states, patterns, known)
            residual = states - self._chosen(patterns, index)
            group = options.key_group if part == "key" else self._value_group(states.shape[-1])
            groups = quantise(residual, options.bits, axis, group, mask, dtype)
            found[f"{part}_codes"] = pack(groups.codes, options.bits)
            found[f"{part}_step"], found[f"{part}_minimum"] = groups.step, groups.minimum
            if self.pattern_count(part):
                found[f"{part}_index"] = self._packed_index(part, index.where(counted[:, None], 0))
        if "mined" in self.state:
            self.state["mined"] = known | (counted.any().reshape(1) if options.share_batch else counted.any(1))
        return found

    def decode(self) -> tuple[Tensor, Tensor]:
        """All blocks: differences and the patterns they are from."""
        return self._rebuilt("key", 2), self._rebuilt("value", 3)

    def _rebuilt(self, part: str, axis: int) -> Tensor:
        return dequantise(self.groups(part), axis) + self._chosen(self.patterns(part), self.indices(part))

    def block_keys(self) -> Tensor:
        """Keys of the blocks as :meth:`read` gives them."""
        return self._turned(self._rebuilt("key", 2))

    # -- what is stored, unpacked: also for kernels ------------------------------------------------------------------------

    def groups(self, part: str) -> Groups:
        """Codes ``(rows, heads, blocked, dim)`` uint8 of ``"key"`` or ``"value"``, their steps and minima."""
        codes = unpack(self.state[f"{part}_codes"], self.options.bits, self.sizes[part])
        return Groups(codes, self.state[f"{part}_step"], self.state[f"{part}_minimum"])

    def patterns(self, part: str) -> Tensor:
        """``(rows or 1, heads, 1 + patterns, dim)`` fp32, the first of them zero."""
        heads = self.state["window_keys"].shape[1]
        if not self.pattern_count(part):
            return torch.zeros(1, heads, 1, self.sizes[part], device=self.device)
        if self.options.pattern_bits == 16:
            stored = self.state[f"{part}_patterns"].float()
        else:
            codes = unpack(self.state[f"{part}_pattern_codes"], self.options.pattern_bits, self.sizes[part])
            stored = dequantise(Groups(codes, self.state[f"{part}_pattern_step"], self.state[f"{part}_pattern_minimum"]), 3)
        return torch.nn.functional.pad(stored, (0, 0, 1, 0))

    def indices(self, part: str) -> Tensor:
        """``(rows, heads, blocked)`` int64 into :meth:`patterns`."""
        rows, heads = self.state["window_keys"].shape[:2]
        if not self.pattern_count(part):
            return torch.zeros(rows, heads, self.state[f"{part}_codes"].shape[2], dtype=torch.long, device=self.device)
        return unpack(self.state[f"{part}_index"].transpose(2, 3), self.index_bits(part), self._columns(part)).squeeze(2).long()

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _value_group(self, dim: int) -> int:
        return min(dim, 128) if self.options.value_group is None else self.options.value_group

    def pattern_count(self, part: str) -> int:
        """Patterns per head that were asked for; 0: none are used."""
        return self.options.key_patterns if part == "key" else self.options.value_patterns

    def index_bits(self, part: str) -> int:
        """Bits of the index of a token's pattern."""
        most = _LARGEST if self.options.new_patterns else self.pattern_count(part)
        return next(bits for bits in (1, 2, 4, 8) if most < 2**bits)

    def _packed_index(self, part: str, index: Tensor) -> Tensor:
        return pack(index.to(torch.uint8)[:, :, None], self.index_bits(part)).transpose(2, 3)

    def _columns(self, part: str) -> int:
        return self.state[f"{part}_index"].shape[2] * 8 // self.index_bits(part)

    def _mined_rows(self, counted: Tensor) -> Tensor:
        if "mined" not in self.state:
            rows = 1 if self.options.share_batch else counted.shape[0]
            self.state["mined"] = torch.zeros(rows, dtype=torch.bool, device=counted.device)
        return self.state["mined"]

    def _learn(self, part: str, states: Tensor, counted: Tensor, known: Tensor) -> None:
        """Patterns of rows that have none yet, from this block; new ones, to be appended, of rows that have."""
        count = self.pattern_count(part)
        if not count:
            return
        if self.options.share_batch:
            weight = counted[:, None, :, None].float()
            states = (states * weight).sum(0, keepdim=True) / weight.sum(0, keepdim=True).clamp(min=1)
            counted = counted.any(0, keepdim=True)
        if not bool(known.all()) and bool((counted.any(1) & ~known).any()):
            for name, found in self._stored(part, mine(states, counted, count)).items():
                old, fresh = self.state.get(name), (~known)[:, None, None, None]
                beside = found if old is None else torch.cat((found, old[:, :, count:]), dim=2)
                self.state[name] = beside if old is None else torch.where(fresh, beside, old)
        elif f"{part}_patterns" not in self.state and f"{part}_pattern_codes" not in self.state:  # padding alone
            self.state |= self._stored(part, states.new_zeros(*states.shape[:2], count, states.shape[-1]))
        if self.options.new_patterns and bool(known.any()) and self.patterns(part).shape[2] <= _LARGEST:
            for name, new in self._stored(part, middle(states, counted)).items():
                self.state[name] = torch.cat((self.state[name], new), dim=2)

    def _stored(self, part: str, patterns: Tensor) -> dict[str, Tensor]:
        if self.options.pattern_bits == 16:
            return {f"{part}_patterns": patterns.to(getattr(torch, self.options.scale_dtype))}
        groups = quantise(
            patterns, self.options.pattern_bits, 3, patterns.shape[-1], dtype=getattr(torch, self.options.scale_dtype)
        )
        packed = pack(groups.codes, self.options.pattern_bits)
        return {f"{part}_pattern_codes": packed, f"{part}_pattern_step": groups.step, f"{part}_pattern_minimum": groups.minimum}

    def _assign(self, part: str, states: Tensor, patterns: Tensor, known: Tensor) -> Tensor:
        if not self.pattern_count(part):
            return torch.zeros(states.shape[:3], dtype=torch.long, device=states.device)
        patterns = patterns.expand(states.shape[0], -1, -1, -1)[:, :, 1:]
        index = nearest(states, patterns)
        if self.options.later_assignment == "range" and bool(known.any()):
            index = torch.where(known[:, None, None], narrowest(states, patterns), index)
        index = index + 1
        if part == "value" and self.options.gate:
            index = index.where(narrows(states, states - patterns.gather(2, self._wide(index - 1, states.shape[-1]))), 0)
        return index

    def _chosen(self, patterns: Tensor, index: Tensor) -> Tensor:
        return patterns.expand(index.shape[0], -1, -1, -1).gather(2, self._wide(index, patterns.shape[-1]))

    def _wide(self, index: Tensor, dim: int) -> Tensor:
        return index[..., None].expand(-1, -1, -1, dim)

    def block_formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        """Codes, a step and a minimum a group, an index a token, the patterns, and a flag a row."""
        o, size, blocked = self.options, getattr(torch, self.options.scale_dtype).itemsize, self.blocked
        total, shared = 0, 1 if o.share_batch else rows
        for part, dim in (("key", key_dim), ("value", value_dim)):
            groups = blocked // o.key_group * dim if part == "key" else blocked * (dim // self._value_group(dim))
            total += rows * heads * (blocked * -(-dim * o.bits // 8) + groups * 2 * size)
            if count := self.pattern_count(part):
                if o.new_patterns:
                    count = min(count + self.added, _LARGEST)
                one = dim * size if o.pattern_bits == 16 else -(-dim * o.pattern_bits // 8) + 2 * size
                total += rows * heads * -(-blocked * self.index_bits(part) // 8) + shared * heads * count * one
        return total + shared

    @property
    def added(self) -> int:
        """Patterns that were added to the first ones."""
        name = "key_patterns" if self.options.pattern_bits == 16 else "key_pattern_codes"
        return self.state[name].shape[2] - self.options.key_patterns if name in self.state else 0


class PatternKVCache(MethodCache):
    """PatternKV's cache for one generation or conversation: ``model.generate(..., cache=PatternKVCache(model.config))``."""

    method, config_class, layer_class = "patternkv", PatternKVConfig, PatternKVLayer
