"""Looking on at a model's attention calls without touching them, whatever implementation runs, and reading what they mean."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.ledger import Ledger
from hfplug.method import Kind
from hfplug.plugins import catalogue

# Called after an attention call with (implementation, module, query, key, value, attention_mask, options).
Observer = Callable[[str, nn.Module, Tensor, Tensor, Tensor, Any, dict[str, Any]], None]


def attention_modules(stack: nn.Module) -> tuple[list[AttentionInterface], dict[int, int]]:
    """The attention interfaces that the self-attention modules of a token stack dispatch through, and their layers.

    Returns:
        The interfaces, each once, and ``id(module) -> layer index``.
    """
    interfaces: list[AttentionInterface] = []
    layers: dict[int, int] = {}
    for module in stack.modules():
        # A model file may have an interface of its own instead of the shared one: take the one this forward will use.
        forward = inspect.unwrap(type(module).forward)
        interface = getattr(forward, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS")
        if not isinstance(interface, AttentionInterface) or "get_interface" not in _names_in(forward):
            continue
        if getattr(module, "is_cross_attention", False):
            continue
        if not any(interface is known for known in interfaces):
            interfaces.append(interface)
        index = getattr(module, "layer_idx", None)
        layers[id(module)] = len(layers) if index is None else int(index)
    return interfaces, layers


def _names_in(forward: Any) -> Iterable[str]:
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def choose_layers(layers: Sequence[int] | None, present: Iterable[int]) -> frozenset[int]:
    """The layers asked for, negative ones counted from the end; ``None``: all.

    Raises:
        UnsupportedError: there are none at all.
        ConfigError: some are not there.
    """
    present = set(present)
    if not present:
        raise UnsupportedError("no module of this model dispatches its attention through transformers' AttentionInterface")
    if layers is None:
        return frozenset(present)
    count = max(present) + 1
    chosen = {index + count if index < 0 else index for index in layers}
    if wrong := sorted(chosen - present):
        raise ConfigError(f"layers={list(layers)}: no attention in layers {wrong}; this model has it in {sorted(present)}")
    return frozenset(chosen)


def observe(ledger: Ledger, interfaces: Iterable[AttentionInterface], watcher: Callable[[], Observer | None]) -> None:
    """Let ``watcher`` decide, at every attention call through the interfaces, who looks on; several may.

    Each module gets the very function of its implementation, with the observer behind it. Not while compiling.

    Args:
        ledger: undo it to stop.
        interfaces: as :func:`attention_modules` finds them.
        watcher: returns the observer of the call that begins, or ``None``. What the observer raises goes to the model's caller.
    """
    for interface in interfaces:
        ledger.set_attr(interface, "get_interface", _observing(interface.get_interface, watcher))


def _observing(get_interface: Callable[..., Any], watcher: Callable[[], Observer | None]) -> Callable[..., Any]:
    @functools.wraps(get_interface)
    def observing(attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = get_interface(attn_implementation, default)
        observer = None if torch.compiler.is_compiling() else watcher()
        if observer is None:
            return function
        return functools.partial(_attend, function, observer, attn_implementation or "eager")

    return observing


def _attend(function: Callable[..., Any], observer: Observer, implementation: str, module: Any, query: Tensor, key: Tensor,
            value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
    output = function(module, query, key, value, attention_mask, *args, **kwargs)
    observer(implementation, module, query, key, value, attention_mask, kwargs)
    return output


def attention_arguments(
    implementation: str, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any], *, cached: bool = False
) -> dict[str, Any]:
    """What ``query, key, mask, options`` of an attention function of transformers mean, as arguments of ``sink_scores``.

    Implementations read the mask differently: for ``sdpa`` a missing mask is causal, for ``eager`` it is none at all, flash
    attention takes padding as ``(batch, keys)`` and packing from the positions, flex attention a ``BlockMask``, and the
    attention methods of hfplug the numbers of the documents as ``(batch, keys)`` int32, 0 for padding. Such a method
    approximates: the scores are those of exact attention.

    Args:
        implementation: name in the ``AttentionInterface``.
        module: the attention module.
        query: ``(batch, heads, queries, dim)``.
        key: ``(batch, kv heads, keys, dim)``, without unwritten slots of a cache.
        mask: whatever the model made for this implementation.
        options: the remaining keyword arguments of the call.
        cached: whether more keys than queries are expected, the queries being the last.

    Raises:
        UnsupportedError: something in the call changes the weights in a way not known here.
    """
    if options.get("position_bias") is not None:
        raise UnsupportedError("attention with a position bias is not measured")
    length, keys = query.shape[2], key.shape[2]
    if length != keys and not cached:
        raise UnsupportedError(f"{keys} keys for {length} queries: attention to a cache or a prefix is not measured")
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    found: dict[str, Any] = {"softcap": options.get("softcap"), "sinks": options.get("s_aux"), "causal": causal}
    if implementation == "sdpa":
        if found["sinks"] is not None:
            raise UnsupportedError("sdpa ignores the learned sinks (s_aux) this model has; use eager or flex_attention")
        found["mask"] = _cut(mask, keys)
    elif implementation == "eager":
        found |= {"mask": _cut(mask, keys), "causal": False}
    elif implementation == "flex_attention":
        found |= {"mask": _dense(mask, query, keys), "causal": False}
    elif "flash" in implementation:
        found |= {"mask": _cut(mask, keys), "window": options.get("sliding_window"), "documents": _packed(query, options)}
    elif implementation in {entry.method.name for entry in catalogue().of_kind(Kind.ATTENTION)}:
        found["mask"] = _cut(mask, keys)
        if found["mask"] is not None and found["mask"].dim() == 2:
            found |= {"documents": found["mask"], "mask": found["mask"] > 0, "causal": True}
    else:
        raise UnsupportedError(
            f"attention implementation {implementation!r} is not one whose weights and mask are known: "
            "sdpa, eager, flex_attention, flash_attention_*, attention methods of hfplug"
        )
    if found["mask"] is not None and found["mask"].dim() not in (2, 4):
        raise UnsupportedError(f"an attention mask of shape {tuple(found['mask'].shape)} is not understood")
    return found


def _cut(mask: Any, keys: int) -> Any:
    """A mask without the columns of unwritten slots of a static cache."""
    return mask[..., :keys] if isinstance(mask, Tensor) and mask.shape[-1] != keys else mask


def _dense(mask: Any, query: Tensor, keys: int) -> Tensor | None:
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return mask[..., :keys]
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, query.shape[0], None, query.shape[2], keys, device=query.device)


def _packed(query: Tensor, options: dict[str, Any]) -> Tensor | None:
    # The two ways flash attention learns of packed documents; both only for a batch of one row.
    batch, _, length, _ = query.shape
    boundaries, positions = options.get("cu_seq_lens_q"), options.get("position_ids")
    if boundaries is not None:
        place = torch.arange(length, device=query.device)
        return torch.bucketize(place, boundaries.to(place)[1:], right=True)[None]
    if positions is None or batch != 1 or positions.dim() != 2 or positions.shape[1] != length:
        return None
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(dim=1)
