"""The base of KV caches that a method provides: whatever transformers asks of a cache, done once and right.

A method subclasses :class:`MethodCache` and :class:`MethodLayer`. The layer keeps everything it stores in ``state``, tensors
with the rows of the batch first; beams, batch operations, offloading and the count of bytes are then the base's work::

    class MyLayer(MethodLayer):
        def append(self, keys, values, real): ...     # store new tokens
        def read(self): ...                           # keys and values of all stored tokens

    class MyCache(MethodCache):
        method, config_class, layer_class = "my_cache", MyConfig, MyLayer

    model.generate(**batch, cache=MyCache(model.config))

Layers without full attention (sliding, chunked, linear, shared) stay transformers' own. Others are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.options import build

OURS = "full_attention"
STOCK = ("sliding_attention", "chunked_attention", "conv", "linear_attention", "dummy")
"""Layer types that keep transformers' own cache layer: their size does not grow with the text, or they have none."""


class MethodLayer(CacheLayerMixin):
    """One layer's keys and values, ``(rows, heads, tokens, dim)``, stored in a method's own form.

    No gradient flows through what is stored.

    Args:
        options: the method's configuration.
        config: configuration of the decoder.
        index: number of the layer in the decoder.

    Attributes:
        state: everything stored, by name. The first axis is the row of the batch, unless the name is in ``without_rows``.
        length: tokens stored.
        without_rows: names in ``state`` that all rows share; batch operations leave them alone.
        open: names in ``state`` that may still change. All others of three or more axes only grow, along axis 2.
    """

    is_sliding = False
    # A cache of which one layer says this is decoded without torch.compile. Inside a StaticCache it would make transformers drop
    # the mask, and the unwritten slots would be attended to: `update` refuses layers that no MethodCache made.
    is_compileable = False
    is_croppable = False
    supports_early_init = False
    method = ""  # set by the cache
    without_rows: ClassVar[frozenset[str]] = frozenset()
    open: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: Any, config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        self.options, self.config, self.index = options, config, index
        self.state: dict[str, Tensor] = {}
        self.length = 0
        self.owned = False  # by a MethodCache
        self._settled = False  # no row is still waiting for its first real token

    # -- what a method writes ---------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Store new tokens. An error must leave ``state`` as it was.

        Args:
            keys, values: ``(rows, heads, new, dim)``, detached.
            real: ``(rows, new)`` bool, false for padding; ``None``: all are real.
        """
        raise NotImplementedError

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all stored tokens, ``(rows, heads, length, dim)``, in the dtype they came in."""
        raise NotImplementedError

    def check(self, key_dim: int, value_dim: int) -> None:
        """Raise ``ConfigError`` where the options do not fit the size of the heads; called before anything is stored."""

    def removable(self) -> int:
        """How many of the last tokens :meth:`remove` can take back."""
        return 0

    def remove(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens, of which there are at least so many removable; ``length`` is the base's."""
        raise NotImplementedError

    def formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        """Bytes that ``length`` tokens take by the method's published count; compared with :attr:`nbytes` by the contract."""
        raise NotImplementedError

    # -- what transformers calls ------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Look at the first keys and values: sizes, dtype, device."""
        self.check(key_states.shape[-1], value_states.shape[-1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.state["start"] = torch.zeros(key_states.shape[0], dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store a chunk; return what its queries attend to: the stored past as it reads, and the chunk itself, exact.

        Raises:
            UnsupportedError: the number of rows is not that of what is stored, or the layer stands in a foreign cache.
        """
        if not self.owned:
            raise UnsupportedError(
                f"{type(self).__name__} stands in a cache that {self.method or 'its method'} did not make; in a static cache "
                "transformers would drop the attention mask because of it. Pass the method's own cache instead"
            )
        if self.length and key_states.shape[0] != self.rows:
            raise UnsupportedError(
                f"{self.method}: the cache holds {self.rows} rows and got keys of {key_states.shape[0]}; reset() it, or bring it "
                "to that number with batch_repeat_interleave or batch_select_indices"
            )
        fresh = not self.is_initialized
        if fresh:
            self.lazy_initialization(key_states, value_states)
        keys, values = key_states, value_states
        if self.length:
            past_keys, past_values = self.read()
            keys, values = torch.cat((past_keys, keys), dim=-2), torch.cat((past_values, values), dim=-2)
        real = self._real(kwargs.get("kwargs") or {}, *key_states.shape[::2])
        before, settled = dict(self.state), self._settled
        try:
            self._settle(real, key_states.shape[-2])
            self.append(key_states.detach(), value_states.detach(), real)
        except Exception:
            self.state, self._settled = before, settled
            if fresh:
                self.reset()
            raise
        self.length += key_states.shape[-2]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(keys, offset)`` that a chunk of ``query_length`` tokens will attend to."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget everything; the object stays."""
        self.state, self.length, self._settled = {}, 0, False
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become ``beam_idx`` of the rows there were."""
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, side by side."""
        self._rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        self._rows(lambda t: t[indices.to(t.device) if isinstance(indices, Tensor) else indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens.

        Raises:
            ConfigError: a positive number.
            UnsupportedError: more than are still kept exactly; nothing was changed.
        """
        self.check_crop(tokens_to_remove)
        if tokens_to_remove and self.length:
            self.remove(-tokens_to_remove)
            self.length += tokens_to_remove

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what :meth:`crop` would, without cropping."""
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): a number of tokens to take back is negative or 0")
        if self.length and -tokens_to_remove > self.removable():
            raise UnsupportedError(
                f"{self.method}: crop({tokens_to_remove}) would take back tokens that are quantised already and "
                f"could not be stored again as they were; the last {self.removable()} can go. Copy the cache before a turn that "
                "may be undone"
            )

    def offload(self) -> None:
        """Move what is stored to the CPU."""
        self.state = {name: t.to("cpu", non_blocking=True) for name, t in self.state.items()}

    def prefetch(self) -> None:
        """Move what is stored back to the device the keys came from."""
        if self.is_initialized:
            self.state = {name: t.to(self.device, non_blocking=True) for name, t in self.state.items()}

    # -- for users and tests ----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first update."""
        return self.state["start"].shape[0] if self.state else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors stored, each counted once and only as far as it is used."""
        return sum(t.numel() * t.element_size() for t in self.state.values())

    def committed(self) -> dict[str, Tensor]:
        """What never changes again, by name: along axis 2 it only grows."""
        return {name: t for name, t in self.state.items() if name not in self.open and t.dim() > 2}

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {n: t if n in self.without_rows else change(t).contiguous() for n, t in self.state.items()}

    _mask: Tensor | None = None  # what MethodCache.padding was given

    def _real(self, attention: Mapping[str, Any], rows: int, new: int) -> Tensor | None:
        """Which of the new tokens are real, ``(rows, new)`` bool; ``None``: all."""
        if self._mask is not None:
            part = self._mask[:, self.length : self.length + new]
            if part.shape[1]:
                if rows % part.shape[0]:
                    raise ConfigError(
                        f"{self.method}: padding() got a mask of {part.shape[0]} rows, the keys have {rows}, which is no multiple"
                    )
                part = part.to(self.device).repeat_interleave(rows // part.shape[0], dim=0)
                real = torch.nn.functional.pad(part, (0, new - part.shape[1]), value=True)
                return None if bool(real.all()) else real
            return None
        positions = attention.get("position_ids")
        if self._settled or not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != new:
            return None
        # generate() gives padding on the left one and the same position, and the first real token position 0: a row begins at
        # the last 0 of the leading tokens whose positions do not rise.
        rising = torch.nn.functional.pad(positions[:, 1:] > positions[:, :-1], (0, 1), value=True)
        begin = rising.int().argmax(dim=1, keepdim=True)
        at = positions.gather(1, begin)
        real = (torch.arange(new, device=positions.device) >= begin) | (at != 0)
        real = real.expand(rows, -1)
        return None if bool(real.all()) else real

    def _settle(self, real: Tensor | None, new: int) -> None:
        """Keep the column of every row's first real token."""
        if self._settled:
            return
        if real is not None:
            start = self.state["start"]
            waiting, found = start == self.length, real.any(dim=1)
            first = torch.where(found, real.int().argmax(dim=1), new)
            self.state["start"] = torch.where(waiting, self.length + first, start)
            self._settled = bool((self.state["start"] < self.length + new).all())
        else:
            self._settled = True


class MethodCache(Cache):
    """The cache of a method, for one generation or conversation; pass it as ``cache=`` (old: ``past_key_values=``).

    Args:
        config: the model's configuration.
        options: the method's configuration; or give its fields as keyword arguments.

    Raises:
        ConfigError: not a configuration, a wrong option, or options that do not fit the model's heads.
        UnsupportedError: the model has a layer type that is not known here, or no layer with full attention.
    """

    method: ClassVar[str]
    config_class: ClassVar[type[Any]]
    layer_class: ClassVar[type[MethodLayer]]

    def __init__(self, config: PreTrainedConfig, options: Any = None, **fields: Any) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"{type(self).__name__}(config={type(config).__name__}) takes a model's configuration: model.config"
            )
        if options is None:
            options = build(self.config_class, fields, where=type(self).__name__)
        elif not isinstance(options, self.config_class) or fields:
            raise ConfigError(
                f"{type(self).__name__} takes one {self.config_class.__name__}, or its fields as keyword arguments; got "
                f"{type(options).__name__}" + (f" and {sorted(fields)}" if fields else "")
            )
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError(f"{self.method}: {type(config).__name__} is an encoder-decoder; caches of decoders only")
        decoder = config.get_text_config(decoder=True)
        types, arguments = get_layer_types_and_kwargs(decoder)
        if unknown := sorted(set(types) - {OURS, *STOCK}):
            raise UnsupportedError(
                f"{self.method}: layers of type {unknown[0]!r} in {type(decoder).__name__} keep more than keys and values; known "
                f"are {[OURS, *STOCK]}"
            )
        if OURS not in types:
            raise UnsupportedError(
                f"{self.method}: {type(decoder).__name__} has no layer with full attention, only {sorted(set(types))}"
            )
        self.options = options
        layers: list[Any] = []
        for index, (kind, given) in enumerate(zip(types, arguments, strict=True)):
            layers.append(
                self.layer_class(options, decoder, index) if kind == OURS else DYNAMIC_LAYER_TYPE_MAPPING[kind](**given)
            )
        super().__init__(layers=layers)
        dim = _head_dim(decoder)
        for layer in self.own_layers:
            layer.method, layer.owned = self.method, True
            if dim is not None:  # before a sliding layer has stored anything
                layer.check(dim, dim)

    @classmethod
    def of(cls, model: Any, options: Any) -> MethodCache:
        """A new cache for a model (also inside PEFT) or its configuration; a method that needs the model itself overrides it."""
        return cls(getattr(model, "config", model), options)

    @property
    def own_layers(self) -> list[MethodLayer]:
        """The layers that are the method's."""
        return [layer for layer in self.layers if isinstance(layer, MethodLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes stored by the method's layers."""
        return sum(layer.nbytes for layer in self.own_layers)

    def bytes_per_token(self) -> float:
        """:attr:`nbytes` by token and row; 0 while empty."""
        tokens = sum(layer.length * layer.rows for layer in self.own_layers) / max(1, len(self.own_layers))
        return self.nbytes / tokens if tokens else 0.0

    def padding(self, attention_mask: Tensor) -> None:
        """Say which tokens are padding, before the tokens are seen.

        Left padding in ``generate`` is read off the positions, without this. It is needed for padding on the right or inside, and
        where the model is called without ``position_ids`` or does not hand them to its cache (GPT-2). Padding that is not known
        counts as text: it is stored, and shifts the ranges that real tokens are quantised with.

        Args:
            attention_mask: ``(rows, tokens)``, zero for padding; columns count from the first token of the cache. Rows may be a
                divisor of the rows that come: ``generate`` repeats prompts for beams.

        Raises:
            ConfigError: not two-dimensional.
        """
        if attention_mask.dim() != 2:
            raise ConfigError(f"padding(attention_mask of shape {tuple(attention_mask.shape)}) takes (rows, tokens)")
        for layer in self.own_layers:
            layer._mask = attention_mask.bool()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens of one layer; see :meth:`MethodLayer.update`.

        Raises:
            UnsupportedError: the model has more layers than its configuration said.
        """
        if layer_idx >= len(self.layers):
            raise UnsupportedError(f"{self.method}: no layer {layer_idx} in a cache made for {len(self.layers)} layers")
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of every layer, or of none.

        Raises:
            ConfigError: a positive number.
            UnsupportedError: a layer cannot; nothing was changed.
        """
        for layer in self.layers:
            if isinstance(layer, MethodLayer):
                layer.check_crop(tokens_to_remove)
            elif tokens_to_remove and _has_let_go(layer):
                raise UnsupportedError(
                    f"{self.method}: crop({tokens_to_remove}): a layer with a window of {layer.sliding_window} tokens has let "
                    "older ones go; call activate_past_recording() before the tokens that may be taken back"
                )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, the padding that was said included."""
        super().reset()
        for layer in self.own_layers:
            layer._mask = None

    def __repr__(self) -> str:
        chosen = ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in dataclasses.fields(self.options))
        return f"{type(self).__name__}({chosen}; {len(self.own_layers)} of {len(self.layers)} layers, {self.nbytes} bytes)"


def _has_let_go(layer: Any) -> bool:
    """Whether a stock layer with a window could not be cropped."""
    sliding = isinstance(layer, DynamicSlidingWindowLayer)
    return sliding and layer.get_seq_length() >= layer.sliding_window and not layer.record_past


def _head_dim(config: PreTrainedConfig) -> int | None:
    """Size of keys and values of a head; ``None`` where they differ (latent attention) or are not said."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return None
    dim = getattr(config, "head_dim", None)
    if dim is None and getattr(config, "hidden_size", None) and getattr(config, "num_attention_heads", None):
        dim = config.hidden_size // config.num_attention_heads
    return None if dim is None else int(dim)
