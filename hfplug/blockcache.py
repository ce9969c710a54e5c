"""A layer that keeps the newest tokens exactly and older ones in blocks of a method's own form, which never change again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hfplug.caching import MethodLayer
from hfplug.errors import ConfigError
from hfplug.rotary import Rotation, rope_of


class BlockOptions(Protocol):
    """What the configuration of such a method has.

    Attributes:
        residual: tokens of a block. That many tokens are kept exactly before they are stored as a block.
        sink_tokens: the first tokens of a row that stay exact for good.
        pre_rope: store keys without their rotary embedding; ``None``: where the model has one.
    """

    @property
    def residual(self) -> int: ...
    @property
    def sink_tokens(self) -> int: ...
    @property
    def pre_rope(self) -> bool | None: ...


def check_block_options(options: BlockOptions) -> None:
    """Raise ``ConfigError`` for values that cannot be."""
    if options.residual < 1:
        raise ConfigError(f"residual={options.residual} must be at least 1 token")
    if not 0 <= options.sink_tokens <= options.residual:
        raise ConfigError(f"sink_tokens={options.sink_tokens} must be between 0 and residual={options.residual}")


class BlockLayer(MethodLayer):
    """Base of such layers: a subclass writes :meth:`encode` and :meth:`decode`.

    Blocks are columns of the batch: with padding on the left the first block of a row holds fewer of its tokens.
    """

    open = frozenset({"window_keys", "window_values", "window_real", "sink_keys", "sink_values"})

    def __init__(self, options: Any, config: Any, index: int) -> None:
        super().__init__(options, config, index)
        rope = rope_of(config, index)
        if options.pre_rope and rope is None:
            raise ConfigError(
                f"pre_rope=True: layer {index} of {type(config).__name__} has no rotary embedding in its configuration; use None"
            )
        self._rope = rope if options.pre_rope is None or options.pre_rope else None
        self.rotation: Rotation | None = None

    # -- what a method writes ---------------------------------------------------------------------------------------------

    def encode(self, keys: Tensor, values: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """Blocks in the method's form.

        Args:
            keys, values: ``(rows, heads, n * residual, dim)`` fp32, keys as they are to be stored.
            counted: ``(rows, n * residual)`` bool: tokens that count; padding and exact tokens do not, and may read as anything
                finite.

        Returns:
            Tensors by name, appended along axis 2 to those of the same name in ``state``.
        """
        raise NotImplementedError

    def decode(self) -> tuple[Tensor, Tensor]:
        """All blocks, ``(rows, heads, blocked, dim)`` fp32, keys as they were given to :meth:`encode`."""
        raise NotImplementedError

    def block_formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        """Bytes of what :meth:`encode` made of :attr:`blocked` tokens."""
        raise NotImplementedError

    # -- the window -------------------------------------------------------------------------------------------------------

    @property
    def blocked(self) -> int:
        """Tokens that are stored in blocks."""
        return self.length - self.removable()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty window, rotation of the keys."""
        super().lazy_initialization(key_states, value_states)
        if self._rope is not None:
            self.rotation = Rotation(self._rope, key_states.shape[-1])
        rows, heads = key_states.shape[:2]
        for name, states in (("keys", key_states), ("values", value_states)):
            self.state[f"window_{name}"] = states.new_zeros(rows, heads, 0, states.shape[-1])
        self.state["window_real"] = torch.zeros(rows, 0, dtype=torch.bool, device=self.device)

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Into the window; whole blocks leave it."""
        if real is None:
            real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        window = {
            "window_keys": torch.cat((self.state["window_keys"], keys), dim=2),
            "window_values": torch.cat((self.state["window_values"], values), dim=2),
            "window_real": torch.cat((self.state["window_real"], real), dim=1),
        }
        held = window["window_real"].shape[1]
        leaving = held // self.options.residual * self.options.residual
        if leaving:
            begin = self.length - self.removable()
            out = [window["window_keys"][:, :, :leaving], window["window_values"][:, :, :leaving]]
            column = torch.arange(begin, begin + leaving, device=keys.device)
            self._keep_sinks(out[0], out[1], begin)
            counted = window["window_real"][:, :leaving] & ~self._is_sink(column)
            stored = out[0].float() if self.rotation is None else self.rotation(out[0], self._positions(column), back=True)
            for name, new in self.encode(stored, out[1].float(), counted).items():
                self.state[name] = torch.cat((self.state[name], new), dim=2) if name in self.state else new.contiguous()
            window = {
                n: (t[:, leaving:] if t.dim() == 2 else t[:, :, leaving:]).clone(memory_format=torch.contiguous_format)
                for n, t in window.items()
            }
        self.state |= window

    def read(self) -> tuple[Tensor, Tensor]:
        """Blocks as they decode, exact tokens in their places, then the window."""
        window = self.state["window_keys"], self.state["window_values"]
        if not self.blocked:
            return window
        keys, values = self.decode()
        keys, values = self._turned(keys), self._with_sinks(values.to(self.dtype), "values")
        return torch.cat((keys, window[0]), dim=2), torch.cat((values, window[1]), dim=2)

    def _turned(self, keys: Tensor) -> Tensor:
        if self.rotation is not None:
            keys = self.rotation(keys, self._positions(torch.arange(self.blocked, device=keys.device)))
        return self._with_sinks(keys.to(self.dtype), "keys")

    def removable(self) -> int:
        """The window."""
        return self.state["window_real"].shape[1] if self.state else 0

    def remove(self, tokens: int) -> None:
        """From the window."""
        for name in ("window_keys", "window_values"):
            self.state[name] = self.state[name][:, :, :-tokens].clone()
        self.state["window_real"] = self.state["window_real"][:, :-tokens].clone()

    def formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        """Blocks, exact tokens, window; and per row where it begins and which tokens of the window are padding."""
        size, held = self.dtype.itemsize, self.removable()
        exact = held + (self.options.sink_tokens if self.blocked else 0)
        blocks = self.block_formula(rows, heads, key_dim, value_dim) if self.blocked else 0
        return blocks + rows * heads * (key_dim + value_dim) * exact * size + rows * held + 8 * rows

    # -- exact first tokens -----------------------------------------------------------------------------------------------

    def _positions(self, column: Tensor) -> Tensor:
        """``(rows, columns)``: counted from every row's first real token."""
        return column[None] - self.state["start"][:, None]

    def _is_sink(self, column: Tensor) -> Tensor:
        position = self._positions(column)
        return (position >= 0) & (position < self.options.sink_tokens)

    def _keep_sinks(self, keys: Tensor, values: Tensor, begin: int) -> None:
        sinks = self.options.sink_tokens
        if not sinks:
            return
        place = self.state["start"][:, None] + torch.arange(sinks, device=keys.device) - begin
        here = ((place >= 0) & (place < keys.shape[2]))[:, None, :, None]
        for name, states in (("sink_keys", keys), ("sink_values", values)):
            index = place.clamp(0, keys.shape[2] - 1)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            old = self.state.get(name)
            self.state[name] = torch.where(here, states.gather(2, index), 0 if old is None else old)

    def sink_places(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """``(column, inside, i)`` of every exact first token: ``(rows,)`` int64 among the blocks, ``(rows,)`` bool.

        Not inside is a token that is no block's yet; its column then is the last one of the blocks.
        """
        for i in range(self.options.sink_tokens):
            place = self.state["start"] + i
            yield place.clamp(max=self.blocked - 1), place < self.blocked, i

    def _with_sinks(self, states: Tensor, name: str) -> Tensor:
        for place, inside, i in self.sink_places():
            index = place[:, None, None, None].expand(-1, states.shape[1], 1, states.shape[3])
            exact = torch.where(inside[:, None, None, None], self.state[f"sink_{name}"][:, :, i : i + 1], states.gather(2, index))
            states = states.scatter(2, index, exact)
        return states


__all__ = ["BlockLayer", "BlockOptions", "check_block_options"]
