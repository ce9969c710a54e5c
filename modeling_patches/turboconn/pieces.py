"""Cutting the arguments of a forward into groups of tokens, and putting the results together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Name of the argument -> the dimension of the tokens.
_TOKENS = {"input_ids": 1, "inputs_embeds": 1, "token_type_ids": 1, "position_ids": -1}
_DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")


class Pieces:
    """The arguments of one forward of the token stack, by groups of tokens.

    Attributes:
        obstacle: what cannot be cut into groups; ``""``: everything can.

    Args:
        arguments: by name, with the cache that the groups will fill.
        length: tokens of the call.
        config: of the stack.
    """

    def __init__(self, arguments: Mapping[str, Any], length: int, config: Any) -> None:
        self.arguments, self.cache, self.length = dict(arguments), arguments["cache"], length
        self.types: Sequence[str] = getattr(config, "layer_types", None) or ()
        mask = self.arguments.get("attention_mask")
        if isinstance(mask, Mapping) and all(m is None for m in mask.values()):
            self.arguments["attention_mask"] = None  # nothing is hidden: the groups make their own
        self.first: dict[str, int] = {}  # kind of prepared mask -> position of its first key
        self.obstacle = self._obstacle()

    def _obstacle(self) -> str:
        for name, value in self.arguments.items():
            if name in ("cache", *_DEEPSTACK) or value is None or isinstance(value, (bool, int, float, str)):
                continue
            if name == "attention_mask":
                if not self._mask_can_be_cut(value):
                    return "attention_mask"
            elif not isinstance(value, Tensor) or (value.dim() and (name not in _TOKENS or not self._is_long(name, value))):
                return name
        visual = self.arguments.get(_DEEPSTACK[0])
        return "" if visual is None or tuple(visual.shape[1:]) == (self.length,) else _DEEPSTACK[0]

    def _is_long(self, name: str, value: Tensor) -> bool:
        return value.dim() > 1 and value.shape[_TOKENS[name]] == self.length

    def _mask_can_be_cut(self, mask: Any) -> bool:
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return mask.shape[1] >= self.length
        for kind, each in (mask if isinstance(mask, Mapping) else {"": mask}).items():
            if not isinstance(each, Tensor) or each.dim() != 4 or each.shape[2] != self.length or self._layer(kind) is None:
                return False
            count, self.first[kind] = self._sizes(kind, self.length)
            if count != each.shape[3]:
                return False
        return True

    def _layer(self, kind: str) -> int | None:
        if not kind:
            return 0
        return self.types.index(kind) if kind in self.types else None

    def _sizes(self, kind: str, tokens: int) -> tuple[int, int]:
        """Number of keys, and the position of the first, that attention of this kind sees from the next ``tokens`` on."""
        count, offset = self.cache.get_mask_sizes(tokens, self._layer(kind) or 0)
        return int(count), int(offset)

    def arguments_of(self, start: int, stop: int) -> dict[str, Any]:
        """The arguments of the tokens from ``start`` to ``stop``, when the cache holds all before."""
        found = dict(self.arguments)
        for name, dim in _TOKENS.items():
            if found.get(name) is not None:
                found[name] = found[name].narrow(dim, start, stop - start)
        found["attention_mask"] = self._mask(found.get("attention_mask"), start, stop)
        visual = found.get(_DEEPSTACK[0])
        if visual is not None:
            inside = torch.zeros_like(visual)
            inside[:, start:stop] = True
            rows = inside[visual]
            found[_DEEPSTACK[0]] = visual[:, start:stop]
            embeds = found.get(_DEEPSTACK[1])
            found[_DEEPSTACK[1]] = None if embeds is None else [e[rows.to(e.device)] for e in embeds]
        return found

    def _mask(self, mask: Any, start: int, stop: int) -> Any:
        if mask is None:
            return None
        if isinstance(mask, Mapping):
            return {kind: self._prepared(kind, each, start, stop) for kind, each in mask.items()}
        if mask.dim() == 2:
            return mask[:, : mask.shape[1] - self.length + stop]
        return self._prepared("", mask, start, stop)

    def _prepared(self, kind: str, mask: Tensor, start: int, stop: int) -> Tensor:
        count, offset = self._sizes(kind, stop - start)
        first = offset - self.first[kind]
        return mask[:, :, start:stop, first : first + count]


def merged(outputs: Sequence[Any], sizes: Sequence[int], instead: Mapping[str, Any]) -> Any:
    """One output of the stack from those of its groups; what has no tokens is that of the last; some are replaced."""
    values: dict[str, Any] = {}
    for key in outputs[-1]:
        found = [output[key] for output in outputs]
        if isinstance(found[-1], tuple):
            values[key] = tuple(_joined(list(parts), sizes) for parts in zip(*found, strict=True))
        else:
            values[key] = _joined(found, sizes)
    return type(outputs[-1])(**{**values, **instead})


def _joined(parts: list[Any], sizes: Sequence[int]) -> Any:
    for part, size in zip(parts, sizes, strict=True):
        if not isinstance(part, Tensor) or part.dim() < 2 or part.shape[1] != size:
            return parts[-1]
    return torch.cat(parts, 1)


__all__ = ["Pieces", "merged"]
