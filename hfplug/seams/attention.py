"""Attention methods: names for ``attn_implementation=``, each with its mask, options per model, and no argument ignored.

transformers drops padding and causality in silence when a name has no mask function, and passes arguments (learned sinks,
softcap, windows) that a function may overlook. Here function and mask are registered together, and an argument that the
method does not handle is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import _active_collector

from hfplug import artefacts
from hfplug.attention import HANDLES, AttentionCall, AttentionMethod, restarts
from hfplug.errors import ConfigError, HfplugError, UnsupportedError, nearest, one_line
from hfplug.ledger import Ledger
from hfplug.method import Kind
from hfplug.options import build
from hfplug.plugins import Entry, catalogue

logger = logging.getLogger(__name__)

# -- the mask ----------------------------------------------------------------------------------------------------------

# transformers describes packing by closures alone; these are the codes of the functions that it makes them of.
_AND = and_masks(causal_mask_function).__code__
_REMAP = remap_positions_for_packed_sequence(causal_mask_function, torch.zeros(1, 1, dtype=torch.long)).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1, dtype=torch.long)).__code__


def _cells(function: Any, code: CodeType) -> dict[str, Any] | None:
    """What the closure ``function`` holds, if it is made of ``code``."""
    if getattr(function, "__code__", None) is not code:
        return None
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


def _packing(mask_function: Any) -> Tensor | None:
    """``(batch, queries)``: the packed document of each token, if the mask is causal within documents and no more."""
    both = (_cells(mask_function, _AND) or {}).get("mask_functions", ())
    if len(both) != 2:
        return None
    remap, packed = _cells(both[0], _REMAP), _cells(both[1], _PACKED)
    if remap is None or packed is None or remap["mask_function"] is not causal_mask_function:
        return None
    return packed["packed_sequence_mask"]


def segments_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of hfplug's attention methods; called by transformers.

    Returns:
        ``None``: causal, no padding, the queries are the last of the keys. Or ``(batch, W)`` int32 segments, causal too: 0
        is padding, k >= 1 the packed document; ``W`` counts the keys up to the last query, any further ones are unwritten
        slots of a static cache. Or, for all else and while tracing, the dense mask of ``sdpa_mask``: bool
        ``(batch, 1, q_length, kv_length)``.
    """
    dense = functools.partial(
        sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device,
        **(kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}),
    )  # fmt: skip
    if is_tracing(attention_mask) or is_tracing(q_offset if isinstance(q_offset, Tensor) else None):
        return dense()  # no branches on values, and one shape for all steps of a static cache
    packed = None if mask_function is causal_mask_function else _packing(mask_function)
    if mask_function is not causal_mask_function and packed is None:
        return dense()
    width = int(q_offset) + q_length  # at once: a static cache counts on in this very tensor
    if kv_offset != 0 or width > kv_length:
        return dense()
    if packed is not None:
        return (packed + 1).to(torch.int32)
    if not allow_is_causal_skip:  # a model that goes on working with the mask; a compilable cache in decoding, where it is small
        return dense()
    if attention_mask is None:
        return None if width == kv_length else torch.ones(batch_size, width, dtype=torch.int32, device=device)
    real = nn.functional.pad(attention_mask, (0, max(0, width - attention_mask.shape[1])))[:, :width].bool()
    starts = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    whole, broken = torch.stack((real.all(), (starts > 1).any())).tolist()
    if broken:  # padding in the middle of a text: a document in pieces
        return dense()
    return None if whole and width == kv_length else real.to(torch.int32)


# -- the function ------------------------------------------------------------------------------------------------------

# Passed along with every call and of no effect on attention itself: positions are in the queries and keys already, lengths
# of packed documents in the mask. tests/drift compares this with transformers' own lists.
HARMLESS = frozenset((
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "seq_idx",
    "use_cache",
))  # fmt: skip

_INSTEAD = {
    "bidirectional": "choose it for the causal part alone: "
    "attn_implementation={{'text_config': '{name}', 'vision_config': 'sdpa'}}",
    "dropout": "train with attention_dropout=0 in the model's configuration",
    "packing": "pass use_cache=False with position_ids that restart at 0, or one document per row",
    "output_attentions": "load the model with attn_implementation='eager' to see attention weights",
}  # fmt: skip


def _refuse(name: str, module: Any, handle: str, what: str) -> None:
    layer, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
    where = f" of {type(config).__name__}" if config is not None else ""
    at = f" (layer {layer}{where})" if layer is not None else where
    instead = _INSTEAD.get(handle, "use attn_implementation='eager' for this model").format(name=name)
    raise UnsupportedError(f"{name} does not handle {what}, which {type(module).__name__}{at} calls for; {instead}")


def _told(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def attend(
    name: str,
    method: AttentionMethod,
    handles: tuple[str, ...],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Check a call of transformers' attention interface and hand it to the method.

    Raises:
        UnsupportedError: it has an argument or a mask that the method does not handle, or that nobody knows.
    """
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    given = {k: kwargs.pop(k, None) for k in ("s_aux", "softcap", "sliding_window", "position_bias")}
    # Some models do not pass the argument on: their caller would get an empty tuple without an error. What is collected counts.
    weights = kwargs.pop("output_attentions", False) or any("attentions" in key for key in _active_collector.get() or ())
    wanted = {**given, "output_attentions": weights or None, "dropout": dropout or None}
    for handle, asked in wanted.items():
        if asked is not None and handle not in handles:
            _refuse(name, module, handle, f"{handle}={_told(asked)}")
    for unknown, asked in kwargs.items():
        if asked is not None and unknown not in HARMLESS:
            _refuse(name, module, unknown, f"the unknown argument {unknown}={_told(asked)}")
    segments, mask = _split(name, module, attention_mask, handles)
    if mask is None and not causal and "bidirectional" not in handles:
        _refuse(name, module, "bidirectional", "attention in both directions (is_causal=False)")
    if attention_mask is None and causal and _told_apart_elsewhere(query, key, kwargs):
        what = "packed documents whose boundaries are not in the mask: this model does not put them there, or not with a cache"
        _refuse(name, module, "packing", what)
    if segments is not None:
        width = segments.shape[1]
        if key.shape[2] < width:
            _refuse(name, module, "mask", f"{key.shape[2]} keys under a mask of {width}, from a cache that drops keys")
        key, value = key[:, :, :width], value[:, :, :width]
    if mask is None and causal and query.shape[2] > key.shape[2]:
        _refuse(name, module, "mask", f"causal attention of {query.shape[2]} queries to {key.shape[2]} keys without a mask")
    call = AttentionCall(
        query=query, key=key, value=value, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, module=module,
        segments=segments, mask=mask, dropout=dropout, window=given["sliding_window"], softcap=given["softcap"],
        s_aux=given["s_aux"], position_bias=given["position_bias"], causal=causal,
        layer_idx=getattr(module, "layer_idx", None), config=getattr(module, "config", None), implementation=name,
        output_attentions=bool(weights),
    )  # fmt: skip
    return method.attend(call)


def _told_apart_elsewhere(query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call without a mask holds several documents, which would see each other without a word."""
    lengths, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if isinstance(lengths, Tensor) and lengths.shape[0] > 2:
        return True
    if not isinstance(positions, Tensor) or is_tracing(positions):
        return False
    return positions.shape[1:] == query.shape[2:3] == key.shape[2:3] and restarts(positions)


def _split(name: str, module: Any, mask: Any, handles: tuple[str, ...]) -> tuple[Tensor | None, Tensor | None]:
    """``(segments, four-dimensional mask)`` of what arrived as the mask."""
    if mask is None:
        return None, None
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype == torch.int32:
        return mask, None
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = f"{mask.dtype} mask of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"mask {type(mask).__name__}"
        _refuse(name, module, "mask", f"a {kind}; known are (batch, heads, queries, keys), bool or additive")
    if "dense_mask" not in handles:
        _refuse(name, module, "dense_mask", f"a dense mask {tuple(mask.shape)} (dense_mask)")
    return None, mask


# -- entering transformers ---------------------------------------------------------------------------------------------

_TAKEN = {
    "flash": "transformers loads FlashAttention for such names",
    "/": "transformers reads such names as kernels of the hub",
    "sdpa": "transformers dispatches such names to torch's sdpa",
    "flex_attention": "transformers dispatches such names to flex attention",
    "eager": "transformers keeps it for the attention of the model file",
}


def register(ledger: Ledger, name: str, method: Any, mask: Callable[..., Any] | None = None, override: bool = False) -> None:
    """Make ``attn_implementation=name`` mean an attention method or function, together with its mask.

    Args:
        ledger: takes both registrations; undoing it restores what was there, by identity.
        name: the new name.
        method: a class (or instance) that follows :class:`~hfplug.attention.AttentionMethod`; or a plain function with the
            signature of transformers' attention interface, whose arguments nobody checks.
        mask: the mask function of a plain function; ``None``: transformers' ``sdpa_mask``, which is said in the log.
        override: replace what has the name.

    Raises:
        ConfigError: a name transformers gives a meaning, a method with a ``mask``, or what is no method.
        LedgerError: the name is taken; says by whom.
    """
    if hasattr(method, "attend"):
        if mask is not None:
            raise ConfigError(f"mask={mask!r} of {name!r}: a method gets segments_mask; only plain functions take another")
        _enter(ledger, name, dispatcher(name, functools.partial(_instance, name, method)), segments_mask, override)
    elif callable(method) and not isinstance(method, type):
        _enter(ledger, name, method, mask or sdpa_mask, override)
        if mask is None:
            logger.warning("%s: registered without a mask function; it gets sdpa_mask (bool, 4-D, None where causal)", name)
    else:
        raise ConfigError(f"method={method!r} of {name!r} must be a class with attend(call), or a function")


def _enter(ledger: Ledger, name: str, function: Any, mask: Any, override: bool = False) -> None:
    reason = next((why for part, why in _TAKEN.items() if part in name), None)
    if reason is None and name.startswith("paged|"):
        reason = "transformers cuts this prefix off"
    if reason is not None or not name:
        raise ConfigError(f"{name!r} cannot name an attention implementation: {reason or 'it is empty'}")
    with ledger.transaction():  # a function without its mask would ignore padding in silence
        ledger.register(AttentionInterface._global_mapping, name, function, what="attention implementation", override=override)
        ledger.register(AttentionMaskInterface._global_mapping, name, mask, what="attention mask", override=override)


def _instance(name: str, method: Any) -> AttentionMethod:
    made = method() if isinstance(method, type) else method
    handles = getattr(made, "handles", None)
    if not isinstance(handles, (set, frozenset)):
        raise HfplugError(f"{name}: handles={handles!r} of {type(made).__name__} must be a frozenset of names from {HANDLES}")
    if unknown := sorted(set(handles) - set(HANDLES)):
        raise HfplugError(f"{name}: unknown {unknown[0]!r} in handles{nearest(unknown[0], HANDLES)}; known: {HANDLES}")
    return made


def _of_entry(entry: Entry) -> AttentionMethod:
    return _instance(entry.method.name, entry.load_target())


def dispatcher(name: str, make: Callable[[], AttentionMethod]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function to register under ``name``; ``make`` is called at its first call."""
    made: list[Any] = []

    def ready() -> bool:
        if not made:
            method = make()
            made[:] = method, tuple(method.handles)  # at once: another thread may be here as well
        return True

    ready = torch.compiler.assume_constant_result(ready)  # the import of a method is nothing to trace

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        ready()
        method, handles = made
        return attend(name, method, handles, module, query, key, value, attention_mask, **kwargs)

    attention.__qualname__ = attention.__name__ = f"hfplug attention {name!r}"
    return attention


def activate(ledger: Ledger) -> None:
    """Register every attention method of the catalogue; one that cannot be is reported and left out, the others go on."""
    for entry in list(catalogue().of_kind(Kind.ATTENTION)):
        name = entry.method.name
        try:
            if cause := entry.unmet():
                raise HfplugError(cause)
            _enter(ledger, name, dispatcher(name, functools.partial(_of_entry, entry)), segments_mask)
        except Exception as error:
            catalogue().drop(entry, one_line(error), error)


# -- options of a model ------------------------------------------------------------------------------------------------


def attention_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """``(name, module)`` of every layer that takes its attention from transformers' interface and has a configuration."""
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if "get_interface" in getattr(code, "co_names", ()) and hasattr(module, "config"):
            yield name, module


def configure(model: nn.Module, method: str, **options: Any) -> Ledger:
    """Give a model's attention layers the options of a method, in the configuration they read, which is saved with the model.

    The layers are those that use the method; if none does yet, those that could. The implementation itself is not switched:
    that is ``attn_implementation=`` at loading or ``model.set_attn_implementation``. A configuration that has options for single
    layers may define ``check_layers(modules)``, which gets the layers and raises ``ConfigError``.

    Args:
        model: a transformers model, also inside PEFT.
        method: name of an attention method.
        options: fields of its configuration; those not given get their defaults, not what an earlier call set.

    Returns:
        A ledger whose ``undo()`` restores the configuration.

    Raises:
        ConfigError: no such method, unknown or wrong option, or no layer of the model would read them.
    """
    entry = catalogue().get(method, Kind.ATTENTION)
    entry.check()
    cls = entry.load_config()
    made = build(cls, options, where=f"attention {method!r}")
    stored = {f.name: value for f in dataclasses.fields(cls) if f.init for value in [dataclasses.asdict(made)[f.name]]}
    try:
        plain = json.loads(json.dumps(stored))
        same = build(cls, plain) == made
    except (TypeError, ValueError) as error:
        raise HfplugError(f"options of {method!r} cannot be kept in config.json: {one_line(error)}") from error
    if not same:
        raise HfplugError(f"options of {method!r} do not survive config.json: {stored!r} comes back as {plain!r}")
    both_ways = "bidirectional" in getattr(entry.load_target(), "handles", ())
    readers = _readers(model, method, both_ways)
    if hasattr(made, "check_layers"):
        made.check_layers(readers)
    ledger = Ledger(f"configure({method!r})")
    with ledger.transaction():
        for config in {id(layer.config): layer.config for layer in readers}.values():
            # Tables are laid again where they are there already: whichever of two calls is undone first, the other keeps them.
            table = _table(getattr(config, artefacts.KEY, None), config)
            ledger.set_attr(config, artefacts.KEY, table)
            section = _table(table.get("attention"), config)
            ledger.set_item(table, "attention", section)
            ledger.set_item(section, method, {**artefacts.record(entry), "options": plain})
    return ledger


def _table(found: Any, config: Any) -> dict[str, Any]:
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{type(config).__name__}.{artefacts.KEY} is damaged: {found!r} is no mapping")
    return {} if found is None else found


def _readers(model: nn.Module, method: str, both_ways: bool) -> list[Any]:
    layers = [module for _, module in attention_modules(model)]
    chosen = [m for m in layers if getattr(m.config, "_attn_implementation", None) == method]
    if not chosen:
        chosen = [m for m in layers if both_ways or getattr(m, "is_causal", True)]
    if not chosen:
        raise ConfigError(f"no layer of {type(model).__name__} would read options of {method!r}: none takes (causal) attention "
                          "from transformers' AttentionInterface")  # fmt: skip
    return chosen


def options_of(config: Any, method: str) -> Any:
    """The options a layer's configuration holds for a method, as its dataclass; the defaults where there are none.

    Raises:
        MissingPluginError, UnsupportedError: the record is damaged, of another plugin or of a newer format.
        ConfigError: an option this version of the method does not know or take.
    """
    stored = getattr(config, "hfplug", None)
    section = stored.get("attention", {}) if isinstance(stored, Mapping) else stored
    kept = section.get(method) if isinstance(section, Mapping) else section
    return _built(method, None if kept is None else json.dumps(kept, sort_keys=True))


@functools.lru_cache(maxsize=256)
def _built(method: str, text: str | None) -> Any:
    cls = catalogue().get(method, Kind.ATTENTION).load_config()
    if text is None:
        return build(cls, {})
    kept, what = json.loads(text), f"the model's configuration (attention {method!r})"
    artefacts.check_record(kept, what)
    return build(cls, kept.get("options", {}), where=what)


__all__ = [
    "HANDLES", "HARMLESS", "AttentionCall", "AttentionMethod",
    "activate", "attend", "attention_modules", "configure", "dispatcher", "options_of", "register", "segments_mask",
]  # fmt: skip
